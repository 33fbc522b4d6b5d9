"""Operations of the language: the torch function that defines each one, and the shape, type and step of its result.

The torch functions take [M or 1, columns] tensors of float32 (or float64, for the oracle) and define the meaning.
minimum, maximum, clip and the reductions propagate NaN.

A row's bits depend on that row alone. On CPUs some of torch's functions round the last few elements of a tensor
differently from the rest; those are built here from functions that don't.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from envoi.epilogues.errors import refuse
from envoi.epilogues.ir import SCALAR, Node, Shape
from envoi.quant.cast import dequantize, quantize
from envoi.quant.formats import E4M3_MAX, SCHEMES

ROW_TILE_CUDA = 256  # rows of a product or of row sums that a GPU's torch is given at a time


@dataclass(frozen=True)
class Operation:
    """Rule of one operation. torch: its meaning, called with tensors and the attributes by name. takes, gives: dtypes
    of arguments and result. step: see Node."""

    torch: Callable[..., Any]
    step: str = "element"
    takes: str = "f32"
    gives: str = "f32"


OPERATIONS: dict[str, Operation] = {}


def compute(op: str, *values: Any, **attributes: Any) -> Any:
    """Compute an operation on tensors and numbers, at least one a tensor. Numbers get the dtype of the first tensor
    that isn't a mask, or float32."""
    found = [value for value in values if isinstance(value, torch.Tensor)]
    like = found[0]
    dtype = next((x.dtype for x in found if x.is_floating_point()), torch.float32)
    tensors = (v if isinstance(v, torch.Tensor) else like.new_full((1, 1), float(v), dtype=dtype) for v in values)
    with torch._C.DisableTorchFunction():  # inside, operators are torch's own
        return OPERATIONS[op].torch(*tensors, **attributes)


def _define(step: str = "element", takes: str = "f32", gives: str = "f32", **functions: Callable[..., Any]) -> None:
    for name, function in functions.items():
        OPERATIONS[name] = Operation(function, step, takes, gives)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1.0 / (1.0 + (-x).exp())


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1.0 + (-x).exp())


def _softplus(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 20.0, x, x.exp().log1p())


def _gelu(x: torch.Tensor, approximate: str) -> torch.Tensor:
    if approximate == "none":
        return 0.5 * x * torch.erfc(x * -math.sqrt(0.5))
    wide = x.double()  # (1 + tanh u) / 2 as a sigmoid of 2 u, which doesn't cancel for negative x
    return (wide * _sigmoid(math.sqrt(8 / math.pi) * (wide + 0.044715 * wide**3))).to(x.dtype)


def _exp2(x: torch.Tensor) -> torch.Tensor:
    """Return 2^x as 2^whole * e^(rest * log 2), in float64. 2^whole is built from bits, in two factors that can't
    overflow."""
    wide = x.double()
    whole = wide.round().clamp(-1100, 1100)
    half = (whole / 2).floor()
    first, second = (((part.long() + 1023) << 52).view(torch.float64) for part in (half, whole - half))
    return (((wide - whole) * math.log(2)).exp() * first * second).to(x.dtype)


def _pow(x: torch.Tensor, exponent: int) -> torch.Tensor:
    """Return x^exponent by squaring, in float64."""
    square, left = x.double(), abs(exponent)
    power = torch.ones_like(square)
    while left:
        if left % 2:
            power = power * square
        square, left = square * square, left // 2
    return (1.0 / power if exponent < 0 else power).to(x.dtype)


_define(
    add=torch.add, sub=torch.sub, mul=torch.mul, div=torch.div, neg=torch.neg, abs=torch.abs,
    minimum=torch.minimum, maximum=torch.maximum, exp=torch.exp, exp2=_exp2, log=torch.log, log2=torch.log2,
    sqrt=torch.sqrt, rsqrt=torch.rsqrt, tanh=torch.tanh, sigmoid=_sigmoid, relu=torch.relu, silu=_silu,
    hardswish=functional.hardswish, softplus=_softplus, gelu=_gelu, pow=_pow,
    leaky_relu=lambda x, slope: functional.leaky_relu(x, slope),
)  # fmt: skip
_define(gives="bool", lt=torch.lt, le=torch.le, gt=torch.gt, ge=torch.ge, eq=torch.eq, ne=torch.ne)
_define(takes="bool", gives="bool", logical_and=torch.logical_and, logical_or=torch.logical_or)
_define(takes="bool", gives="bool", logical_not=torch.logical_not)
_define(takes="where", where=torch.where)
_define(round_bf16=lambda x: x.to(torch.bfloat16).to(x.dtype))
_define(step="pair", even=lambda x: x[:, 0::2], odd=lambda x: x[:, 1::2])
_define(step="half", left=lambda x: x[:, : x.shape[1] // 2], right=lambda x: x[:, x.shape[1] // 2 :])


def _amax(x: torch.Tensor, dim: int) -> torch.Tensor:
    if x.shape[dim] == 0:
        return x.new_full((1, x.shape[1]) if dim == 0 else (x.shape[0], 1), -torch.inf)
    return x.amax(dim, keepdim=True)


def _absmax(x: torch.Tensor, dim: int) -> torch.Tensor:
    return _amax(x.abs(), dim).clamp(min=0.0)


def _over_all(reduce: Callable[[torch.Tensor, int], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: reduce(reduce(x, 1), 0)


def _sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.sum(dim, keepdim=True)


def in_row_tiles(compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return compute(x) for x [M, C], made ROW_TILE_CUDA rows at a time, the last filled up with zeros.

    A GPU's torch chooses the order of a sum by the number of rows; so it gets sums of one shape.
    """
    rows = x.shape[0]
    tiles = functional.pad(x, (0, 0, 0, -rows % ROW_TILE_CUDA)).contiguous().split(ROW_TILE_CUDA)
    return torch.cat([compute(tile) for tile in tiles])[:rows]


def _row_sum(x: torch.Tensor) -> torch.Tensor:
    """Return row sums [M, 1], whose bits don't depend on M. On CPUs torch may split a single row's sum over threads, so
    that it is doubled first."""
    if x.is_cuda:
        return in_row_tiles(lambda tile: _sum(tile, 1), x)
    return _sum(x.expand(2, -1), 1)[:1] if x.shape[0] == 1 else _sum(x, 1)


_define(step="row", row_sum=_row_sum, row_max=lambda x: _amax(x, 1), row_absmax=lambda x: _absmax(x, 1))
_define(step="column", col_sum=lambda x: _sum(x, 0), col_max=lambda x: _amax(x, 0), col_absmax=lambda x: _absmax(x, 0))
_define(step="all", total_sum=_over_all(_sum), total_max=_over_all(_amax), total_absmax=_over_all(_absmax))


def _softmax(x: torch.Tensor) -> torch.Tensor:
    """Return the softmax of each row; -inf gives 0, also in a row of nothing else."""
    top = _amax(x, 1)
    exps = (x - top.masked_fill(top == -torch.inf, 0.0)).exp()
    total = _row_sum(exps)
    return exps / total.masked_fill(total == 0, 1.0)


def _ranked(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and columns [M, k] of the k best of each row, best first, the lower column first in a tie.

    NaN and -inf are never chosen: the value is -inf and the column -1 where a row has fewer than k others.
    """
    ranked, ids = x.masked_fill(x.isnan(), -torch.inf).sort(dim=1, descending=True, stable=True)
    return ranked[:, :k], ids[:, :k].to(torch.int32).masked_fill(ranked[:, :k] == -torch.inf, -1)


_define(step="row", softmax=_softmax, topk_values=lambda x, k: _ranked(x, k)[0])
_define(step="row", gives="i32", topk_ids=lambda x, k: _ranked(x, k)[1])


def _cast(x: torch.Tensor, dtype: str) -> torch.Tensor:
    if dtype == "fp8_e4m3":
        x = x.clamp(-E4M3_MAX, E4M3_MAX)
    return x.to(CAST_DTYPES[dtype])


def _quantize(x: torch.Tensor, scheme: str):
    return quantize(x, scheme, "epilogue output")


def _rounded(x: torch.Tensor, scheme: str) -> torch.Tensor:
    return dequantize(_quantize(x, scheme), x.dtype)


CAST_DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8_e4m3": torch.float8_e4m3fn,
}  # fmt: skip
_define(step="store", cast=_cast)
_define(step="store", gives="quantised", quantize=_quantize)
_define(step="group", round_mxfp8=_rounded)


def infer(op: str, args: tuple[Node, ...], attributes: tuple[tuple[str, Any], ...]) -> Node:
    """Return the shape, type and step of an operation on these arguments, without its args. Refuses a misfit."""
    rule = OPERATIONS[op]
    for arg in args:
        if arg.final:
            why = (
                "its value is only known when the kernel ends" if arg.step != "store" else "that is how a value leaves"
            )
            refuse(f"{arg.op} can only be returned ({why}), not used by {op}")
    _check_dtypes(op, rule, args)
    shape = _shape(op, rule.step, args, dict(attributes))
    return Node(op, (), attributes, shape, rule.gives, rule.step)


def _check_dtypes(op: str, rule: Operation, args: tuple[Node, ...]) -> None:
    wanted = ("bool", "f32", "f32") if rule.takes == "where" else (rule.takes,) * len(args)
    for arg, want in zip(args, wanted, strict=True):
        stores_ids = op == "cast" and arg.dtype == "i32"
        if arg.dtype != want or stores_ids:
            refuse(f"{op}: expected {want}, got {arg.dtype}")


def _shape(op: str, step: str, args: tuple[Node, ...], attributes: dict[str, Any]) -> Shape:
    first = args[0].shape
    if step == "element":
        return _broadcast(op, [arg.shape for arg in args])
    if step == "pair":
        if not first.spans_columns:
            refuse(f"pairs: expected a value with a column for each output feature, got a {first}")
        return first.halved()
    if step == "half":
        if first.columns != "N":
            refuse(f"halves: expected a value of N columns, got a {first}")
        return first.halved()
    if step == "row":
        if first.rows != "M" or first.columns == "1":
            refuse(f"{op}: expected a tile (or the values of topk), got a {first}")
        if op.startswith("topk"):
            if not first.spans_columns:
                refuse(f"topk: expected a tile, got the values of another topk ({first}); ask it for the smaller k")
            return Shape("M", f"k{attributes['k']}")
        return first if op == "softmax" else Shape("M", "1")
    if step == "column" and not (first.rows == "M" and first.spans_columns):
        refuse(f"{op}: expected a tile, got a {first}")
    if step == "all" and first.rows != "M":
        refuse(f"{op}: expected a tile or a row, got a {first}")
    if (op == "quantize" or step == "group") and not (first.rows == "M" and first.spans_columns):
        refuse(f"{op}: expected a tile, got a {first}")
    return {"column": Shape("1", first.columns), "all": SCALAR}.get(step, first)


def _broadcast(op: str, shapes: list[Shape]) -> Shape:
    columns = {shape.columns for shape in shapes} - {"1"}
    if len(columns) > 1:
        refuse(
            f"{op}: expected values of one width, got {' and '.join(map(str, shapes))}; "
            "after pairs or halves the tile has N/2 columns: annotate its operands HalfCol or HalfTile"
        )
    rows = "M" if any(shape.rows == "M" for shape in shapes) else "1"
    return Shape(rows, columns.pop() if columns else "1")


def scheme_for(values: str, group: int | str) -> str:
    """Return the name of the scheme of `quantize(x, values, group=group)`. Refuses a pair that has none."""
    table = {
        ("fp8_e4m3", 128): "fp8_1x128", ("fp8_e4m3", 32): "mxfp8", ("fp8_e4m3", "row"): "fp8_row",
        ("fp4_e2m1", 32): "mxfp4", ("fp4_e2m1", 16): "nvfp4",
    }  # fmt: skip
    if (values, group) not in table:
        offered = ", ".join(f'("{v}", group={g!r})' for v, g in table)
        tensor = '; for one scale a tensor, divide by a Scalar and cast(x, "fp8_e4m3")' if group == "tensor" else ""
        refuse(f'quantize: expected one of {offered}, got ("{values}", group={group!r}){tensor}')
    return SCHEMES[table[values, group]].name
