"""Decorator `@envoi.epilogue`, which makes an Epilogue of a plain function."""

import functools
import importlib
import inspect
import pickle
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch

from envoi.check import expect_tensor
from envoi.epilogues.errors import refuse
from envoi.epilogues.ir import IR, Node
from envoi.epilogues.operands import check_columns, check_names, check_operands
from envoi.epilogues.reference import evaluate
from envoi.epilogues.trace import Traced, inline, trace

FLOATS = (torch.bfloat16, torch.float16, torch.float32)

# torch's operators take plain values, so an epilogue is passed by its key. An Epilogue keeps its IR alive; a traced
# graph holds only the key, so the IRs of traced graphs are kept until the process ends.
_alive: WeakValueDictionary[str, IR] = WeakValueDictionary()
_in_graphs: dict[str, IR] = {}


class Epilogue:
    """Function that a GEMM applies to its accumulator before it stores the result. Made by `@envoi.epilogue`.

    ir: the operations, traced once, when the epilogue is made; `print(f.ir)` shows them. Globals and closures that the
        function reads are constants from then on, in the kernels and in the reference.
    A call on torch tensors computes the reference: acc [M, N] of any float dtype, operands by name, Row [M], Col [N],
    Tile [M, N], Scalar a number; outputs that aren't cast or quantised are float32 (float64 for a float64 acc).
    A call on the values of another epilogue inlines the operations there.

    Pickled as functions are: by the name of its attribute in a module, or of the function that it was made from.
    A number that changes from call to call should be a Scalar operand: as a constant, each value makes another
    epilogue, which is compiled anew, and Triton keeps compiled kernels until the process ends.
    """

    def __init__(self, function: Callable):
        self.function = function
        ir = trace(function)
        self.ir: IR = _alive.setdefault(ir.key, ir)
        functools.update_wrapper(self, function)

    def __call__(self, acc: torch.Tensor, /, *rest: Any, **operands: torch.Tensor | float) -> Any:
        """Compute the epilogue of acc [M, N] in torch. Raises ValueError where `envoi.gemm` does."""
        if rest:
            names = ", ".join(operand.name for operand in self.ir.operands) or "none"
            raise ValueError(f"epilogue {self.ir.name}: expected operands by name ({names}), got {len(rest)} without")
        if isinstance(acc, Traced):
            check_names(self.ir, operands)
            return self.wrap(inline(self.ir, acc, operands))
        expect_tensor("acc", acc, (*FLOATS, torch.float64), ("M", "N"))
        check_columns(self.ir, acc.shape[1])
        dtypes = (*FLOATS, torch.float64) if acc.dtype == torch.float64 else FLOATS
        sizes = {"M": acc.shape[0], "N": acc.shape[1]}
        tensors, scalars = check_operands(self.ir, operands, sizes, acc.device, dtypes)
        return self.wrap(evaluate(self.ir, acc, {**tensors, **scalars}))

    def __repr__(self) -> str:
        return f"<epilogue {self.ir.name} {self.ir.key}>"

    def __copy__(self) -> "Epilogue":
        return self

    def __deepcopy__(self, memo: dict) -> "Epilogue":
        return self

    def __reduce__(self) -> Any:
        """Pickle by name. Raises PicklingError if the function is a lambda or defined inside another function."""
        module, name = getattr(self, "__module__", None), getattr(self, "__qualname__", "")
        found = _attribute(module, name)
        if found is self:
            return name  # pickle looks it up in __module__
        if found is self.function:
            return _from_function, (self.function, self.ir.key)
        raise pickle.PicklingError(
            f"epilogue {name}: expected it, or its function, as {module}.{name}; "
            "define it at the top of a module, not as a lambda or inside a function"
        )

    @property
    def output_nodes(self) -> list[Node]:
        """Return the nodes of the outputs, in order."""
        return [self.ir.nodes[position] for _, position in self.ir.outputs]

    def wrap(self, outputs: list) -> Any:
        """Return a list of outputs in the form that the function returns: one value, a tuple or a dict."""
        if self.ir.outputs[0][0]:
            return {name: output for (name, _), output in zip(self.ir.outputs, outputs, strict=True)}
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def epilogue(function: Callable) -> Epilogue:
    """Make an epilogue of a function of the accumulator; trace it, and check it, at once.

    The first parameter is the accumulator; the others are annotated Scalar, Row, Col, Tile, HalfCol or HalfTile, and
    have other names than the arguments of `envoi.gemm` and `envoi.grouped_gemm`, whose call takes them by name.
    The body uses operators, the functions of `envoi.epilogues` and other epilogues; it returns one value, a tuple or a
    dict. It runs once, here: numbers that it reads from outside become constants with their present values.
    Raises EpilogueError with the file, the line and the reason.
    """
    if isinstance(function, Epilogue):
        return function
    if not hasattr(function, "__code__"):
        refuse(f"epilogue: expected a Python function, got {type(function).__name__}")
    for kind, is_one in _OTHER_KINDS.items():
        if is_one(function):
            refuse(f"epilogue: expected a plain function, got {kind}")
    return Epilogue(function)


_OTHER_KINDS = {
    "one that is async": lambda f: inspect.iscoroutinefunction(f) or inspect.isasyncgenfunction(f),
    "a generator": inspect.isgeneratorfunction,
}


def with_key(key: str) -> IR:
    """Return the IR with a key. Raises ValueError if no epilogue in this process has it."""
    ir = _in_graphs.get(key) or _alive.get(key)
    if ir is None:
        raise ValueError(
            f"epilogue: no epilogue of this process has the key {key}; import the module that makes it, and keep it "
            "for as long as it is used"
        )
    return ir


def for_graph(key: str) -> IR:
    """Return the IR with a key and keep it until the process ends: the graph being traced will ask for it by key."""
    return _in_graphs.setdefault(key, with_key(key))


def _attribute(module: str | None, name: str) -> Any:
    try:
        found: Any = sys.modules.get(module or "") or importlib.import_module(module or "")
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError):
        return None
    return found


def _from_function(function: Callable, key: str) -> Epilogue:
    """Unpickle an epilogue. Raises UnpicklingError if the function now computes something else."""
    made = epilogue(function)
    if made.ir.key != key:
        raise pickle.UnpicklingError(
            f"epilogue {made.ir.name}: expected what it computed when it was pickled ({key}), got {made.ir.key}: "
            "the function, or a constant that it reads, has changed"
        )
    return made
