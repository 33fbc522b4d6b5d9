"""`@envoi.epilogue`: a plain function becomes an Epilogue."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from envoi.epilogue.errors import refuse
from envoi.epilogue.evaluate import as_returned, widen
from envoi.epilogue.ir import IR, Node
from envoi.epilogue.operations import compute, compute_dtype
from envoi.epilogue.trace import trace

_by_key: dict[str, "Epilogue"] = {}  # torch's operators take plain values; an epilogue crosses as its key


# The names under which torch.overrides sees the operators of Tensor; the second value: numbers come first.
_OPERATORS = {
    "add": ("add", False), "sub": ("sub", False), "mul": ("mul", False), "div": ("div", False),
    "__rsub__": ("sub", True), "__rdiv__": ("div", True), "neg": ("neg", False), "abs": ("abs", False),
    "lt": ("lt", False), "le": ("le", False), "gt": ("gt", False), "ge": ("ge", False),
    "__eq__": ("eq", False), "eq": ("eq", False), "ne": ("ne", False), "pow": ("pow", False),
    "__and__": ("logical_and", False), "__or__": ("logical_or", False), "__invert__": ("logical_not", False),
}  # fmt: skip


class _Operators(TorchFunctionMode):
    """Runs Tensor's operators as the language has them: torch's own round some numbers and powers otherwise."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op, reflected = _OPERATORS.get(func.__name__, ("", False))
        if not op:
            return func(*args, **(kwargs or {}))
        if op == "pow":
            return compute(op, args[0], exponent=args[1])
        return compute(op, *(reversed(args) if reflected else args))


class Epilogue:
    """What a GEMM does with its accumulator before it leaves the chip. Made by the decorator.

    ir: what was traced; `print(f.ir)` shows it.
    Called on torch tensors, it runs the user's own function: acc [M, N] of any float dtype, operands by name, Row
    [M], Col [N], Tile [M, N], Scalar a number; outputs that aren't cast or quantised stay in float32 (float64 for a
    float64 acc).
    """

    def __init__(self, function: Callable):
        self.function = function
        self.ir: IR = trace(function)
        functools.update_wrapper(self, function)
        _by_key.setdefault(self.ir.key, self)

    def __call__(self, acc: torch.Tensor, /, **operands: torch.Tensor | float) -> Any:
        """Run the function on tensors: the reference."""
        self.check_names(operands)
        acc = acc if acc.dtype == torch.float64 else acc.float()
        values = {o.name: widen(o, operands.get(o.name), acc) for o in self.ir.operands}
        token = compute_dtype.set(acc.dtype)
        try:
            with _Operators():
                returned = self.function(acc, **values)
        finally:
            compute_dtype.reset(token)
        outputs = list(returned.values()) if isinstance(returned, dict) else returned
        outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
        return self.wrap([as_returned(node, value) for node, value in zip(self.output_nodes, outputs, strict=True)])

    def __repr__(self) -> str:
        return f"<epilogue {self.ir.name} {self.ir.key}>"

    @property
    def output_nodes(self) -> list[Node]:
        """The nodes that are returned, in order."""
        return [self.ir.nodes[position] for _, position in self.ir.outputs]

    def wrap(self, outputs: list) -> Any:
        """A list of outputs in the form that the function returns: one value, a tuple or a dict."""
        if self.ir.outputs[0][0]:
            return {name: output for (name, _), output in zip(self.ir.outputs, outputs, strict=True)}
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def check_names(self, operands: Mapping[str, Any]) -> None:
        """Raise ValueError unless every operand without a default is there, and no other."""
        known = [operand.name for operand in self.ir.operands]
        for name in operands:
            if name not in known:
                raise ValueError(
                    f"{name}: epilogue {self.ir.name} has no such operand; it takes {', '.join(known) or 'none'}"
                )
        for operand in self.ir.operands:
            if operand.default is None and operands.get(operand.name) is None:
                raise ValueError(
                    f"{operand.name}: epilogue {self.ir.name} needs this operand ({operand.kind}), got none"
                )


def epilogue(function: Callable) -> Epilogue:
    """Make a function of the accumulator an epilogue: traced at once, refused at once if it can't be.

    The first parameter is the accumulator; the others are annotated Scalar, Row, Col, Tile, HalfCol or HalfTile. The
    body uses operators and the functions of `envoi.epilogue`, returns one value, a tuple or a dict, and is run once
    here. Raises EpilogueError with the file, the line and the reason.
    """
    if not hasattr(function, "__code__"):
        refuse(f"epilogue: expected a Python function, got {type(function).__name__}")
    return Epilogue(function)


def with_key(key: str) -> Epilogue:
    """The epilogue of that key."""
    return _by_key[key]
