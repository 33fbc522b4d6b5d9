"""Intermediate representation of an epilogue: typed operations in order of definition, none of them twice.

>>> print(swiglu.ir)
epilogue swiglu(acc)
  %0 tile f32 = acc
  %1 tile/2 f32 = even %0
  %2 tile/2 f32 = odd %0
  %3 tile/2 f32 = silu %1
  %4 tile/2 f32 = mul %3, %2
  return %4
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property, wraps
from typing import Any


@dataclass(frozen=True)
class Shape:
    """Dimensions of the output that a value spans.

    rows: "1" (shared by all rows) or "M". columns: "1", "N", "N/2", "N/4" .. (after `pairs` or `halves`), or
        "k4" (from a top-4).
    """

    rows: str
    columns: str

    def __str__(self) -> str:
        if self.columns == "1":
            return "scalar" if self.rows == "1" else "row"
        kind = "tile" if self.rows == "M" else "col"
        return kind + self.columns.removeprefix("N") if self.spans_columns else f"row[{self.columns[1:]}]"

    @property
    def spans_columns(self) -> bool:
        """Return True for a value that is cut into tiles along N."""
        return self.columns.startswith("N")

    def num_columns(self, N: int) -> int:
        """Return the number of columns for an accumulator of N columns."""
        return N // self.divisor if self.spans_columns else int(self.columns.removeprefix("k"))

    @property
    def divisor(self) -> int:
        """Return the divisor of N: 2 for "N/2", 1 for "N"."""
        return int(self.columns.partition("/")[2] or 1)

    def halved(self) -> "Shape":
        """Return the shape of either output of `pairs` or `halves`."""
        return Shape(self.rows, f"N/{2 * self.divisor}")


SCALAR, ROW, COL, TILE = Shape("1", "1"), Shape("M", "1"), Shape("1", "N"), Shape("M", "N")
HALF_COL, HALF_TILE = Shape("1", "N/2"), Shape("M", "N/2")


@dataclass(frozen=True)
class Operand:
    """Named input beside the accumulator. kind: the annotation's name. default: a Scalar's default value, or None."""

    name: str
    kind: str
    shape: Shape
    default: float | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.kind}" + ("" if self.default is None else f" = {self.default!r}")


@dataclass(frozen=True)
class Node:
    """Single operation. args: positions of earlier nodes. attributes: (name, value) pairs. dtype: f32, i32, bool or
        quantised.

    step: what the operation has to see before its value is known.
        "load", "element"   its own element
        "pair"              the neighbouring column
        "half"              the column N / 2 further
        "group"             the columns that share a scale factor
        "row"               the whole row: begin, visit every N tile, end
        "column", "all"     every row (of the expert): known when the kernel ends, so it can only be returned
        "store"             the value in the form in which it is stored; can only be returned
    """

    op: str
    args: tuple[int, ...]
    attributes: tuple[tuple[str, Any], ...]
    shape: Shape
    dtype: str
    step: str

    @property
    def scheme(self) -> str:
        """Return the name of the scheme of a quantisation, or of what is rounded to its numbers; "" for others."""
        return dict(self.attributes).get("scheme", "")

    @property
    def final(self) -> bool:
        """Return True if the value can only be returned."""
        return self.step in ("column", "all", "store")

    def attribute(self, name: str) -> Any:
        """Return the value of an attribute."""
        return dict(self.attributes)[name]

    def __str__(self) -> str:
        parts = [f"%{arg}" for arg in self.args] + [f"{name}={value!r}" for name, value in self.attributes]
        return f"{self.shape} {self.dtype} = {self.op}" + (" " + ", ".join(parts) if parts else "")


@dataclass(frozen=True)
class IR:
    """Traced epilogue. outputs: (name, position of the node); names are "" unless the function returned a dict."""

    name: str
    operands: tuple[Operand, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        head = ", ".join(["acc", *map(str, self.operands)])
        body = [f"  %{position} {node}" for position, node in enumerate(self.nodes)]
        returned = ", ".join((f"{name}=" if name else "") + f"%{position}" for name, position in self.outputs)
        return "\n".join([f"epilogue {self.name}({head})", *body, f"  return {returned}"])

    def __hash__(self) -> int:
        return hash(self.key)  # once, not for every node at every call

    @cached_property
    def key(self) -> str:
        """Return a digest of everything that decides what is computed."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]

    @cached_property
    def kept(self) -> dict[tuple, Any]:
        """Cache of the results of functions under `kept_with_ir`."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def takes_halves(self) -> bool:
        """Return True if columns j and j + N / 2 are computed together (`halves`); kernels put both into one tile."""
        return any(node.step == "half" for node in self.nodes)

    def operand(self, name: str) -> Operand:
        """Return the operand with a name."""
        return next(operand for operand in self.operands if operand.name == name)

    @property
    def divisor(self) -> int:
        """Return the number that N must be a multiple of."""
        return max(node.shape.divisor for node in self.nodes)


def kept_with_ir(function: Callable) -> Callable:
    """Decorate a function of an IR and hashable values so that it computes once; results live as long as the IR."""

    @wraps(function)
    def call(ir: IR, *values: Any, **named: Any) -> Any:
        key = (function, *values, *named.items())
        try:
            return ir.kept[key]
        except KeyError:
            return ir.kept.setdefault(key, function(ir, *values, **named))  # two threads: the first's

    return call
