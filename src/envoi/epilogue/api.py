"""`@envoi.epilogue`: a plain function becomes an Epilogue."""

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
from envoi.epilogue.errors import refuse
from envoi.epilogue.evaluate import evaluate
from envoi.epilogue.ir import IR, Node
from envoi.epilogue.operands import check_columns, check_names, check_operands
from envoi.epilogue.trace import Traced, inline, trace

FLOATS = (torch.bfloat16, torch.float16, torch.float32)

# torch's operators take plain values; an epilogue crosses as its key. Whoever holds the epilogue keeps its IR alive; a
# traced graph holds only the key, so what graphs were traced with stays.
_alive: WeakValueDictionary[str, IR] = WeakValueDictionary()
_in_graphs: dict[str, IR] = {}


class Epilogue:
    """What a GEMM does with its accumulator before it leaves the chip. Made by the decorator.

    ir: what was traced, once, when the epilogue was made; `print(f.ir)` shows it. Globals and closures that the
        function reads are constants from then on, in the kernels and in the reference.
    Called on torch tensors, it is the reference: acc [M, N] of any float dtype, operands by name, Row [M], Col [N],
    Tile [M, N], Scalar a number; outputs that aren't cast or quantised stay in float32 (float64 for a float64 acc).
    Called in another epilogue, on its values, it becomes a part of that.

    It is pickled as functions are, by the name of its module's attribute, or of the function that it was made of.
    A number that changes from call to call should be a Scalar operand: as a constant each value is an epilogue of its
    own, compiled anew, and Triton keeps what it has compiled until the process ends.
    """

    def __init__(self, function: Callable):
        self.function = function
        ir = trace(function)
        self.ir: IR = _alive.setdefault(ir.key, ir)
        functools.update_wrapper(self, function)

    def __call__(self, acc: torch.Tensor, /, *rest: Any, **operands: torch.Tensor | float) -> Any:
        """Compute the epilogue of acc [M, N] in torch. Raises ValueError for what `envoi.gemm` would refuse."""
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
        """Pickle by name. Raises PicklingError for what was made of a lambda or a function inside another."""
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
        """The nodes that are returned, in order."""
        return [self.ir.nodes[position] for _, position in self.ir.outputs]

    def wrap(self, outputs: list) -> Any:
        """A list of outputs in the form that the function returns: one value, a tuple or a dict."""
        if self.ir.outputs[0][0]:
            return {name: output for (name, _), output in zip(self.ir.outputs, outputs, strict=True)}
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def epilogue(function: Callable) -> Epilogue:
    """Make a function of the accumulator an epilogue: traced at once, refused at once if it can't be.

    The first parameter is the accumulator; the others are annotated Scalar, Row, Col, Tile, HalfCol or HalfTile. The
    body uses operators, the functions of `envoi.epilogue` and other epilogues, returns one value, a tuple or a dict,
    and is run once, here: numbers that it reads from outside are constants with the values of this moment.
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
    """The IR of that key. Raises ValueError if no epilogue in this process has it."""
    ir = _in_graphs.get(key) or _alive.get(key)
    if ir is None:
        raise ValueError(
            f"epilogue: no epilogue of this process has the key {key}; import the module that makes it, and keep it "
            "for as long as it is used"
        )
    return ir


def for_graph(key: str) -> IR:
    """The IR of that key, which stays from now on: a graph that is being traced will ask for it by its key."""
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
    """The inverse of pickling. Raises UnpicklingError if the function now computes something else."""
    made = epilogue(function)
    if made.ir.key != key:
        raise pickle.UnpicklingError(
            f"epilogue {made.ir.name}: expected what it computed when it was pickled ({key}), got {made.ir.key}: "
            "the function, or a constant that it reads, has changed"
        )
    return made
