"""Functions of the epilogue language: they compute on torch tensors, and record operations while a trace runs.

Tensors are [M or 1, columns], as in an epilogue. Either argument of a function of two values may be a number.
"""

from numbers import Integral
from typing import Any, TypeVar

import torch

from envoi.epilogues.errors import refuse
from envoi.epilogues.operands import is_number
from envoi.epilogues.operations import CAST_DTYPES, compute, scheme_for
from envoi.epilogues.trace import Traced

Value = TypeVar("Value")  # a Traced or a torch tensor; the result has the argument's type
MAX_TOPK = 32


def _apply(op: str, *values: Any, **attributes: Any) -> Any:
    traced = next((value for value in values if isinstance(value, Traced)), None)
    if traced is not None:
        return traced.graph.apply(op, *values, **attributes)
    if not any(isinstance(value, torch.Tensor) for value in values):
        refuse(f"{op}: expected a value of the epilogue, got {', '.join(type(value).__name__ for value in values)}")
    return compute(op, *values, **attributes)


def exp(x: Value) -> Value:
    """Return e^x; on a GPU 0 below 2^-126."""
    return _apply("exp", x)


def exp2(x: Value) -> Value:
    """Return 2^x; on a GPU 0 below 2^-126."""
    return _apply("exp2", x)


def log(x: Value) -> Value:
    """Return the natural logarithm."""
    return _apply("log", x)


def log2(x: Value) -> Value:
    """Return the logarithm to base 2."""
    return _apply("log2", x)


def sqrt(x: Value) -> Value:
    """Return the square root."""
    return _apply("sqrt", x)


def rsqrt(x: Value) -> Value:
    """Return 1 / sqrt(x)."""
    return _apply("rsqrt", x)


def tanh(x: Value) -> Value:
    """Return the hyperbolic tangent."""
    return _apply("tanh", x)


def sigmoid(x: Value) -> Value:
    """Return 1 / (1 + e^-x)."""
    return _apply("sigmoid", x)


def relu(x: Value) -> Value:
    """Return max(x, 0)."""
    return _apply("relu", x)


def silu(x: Value) -> Value:
    """Return x * sigmoid(x)."""
    return _apply("silu", x)


def gelu(x: Value, approximate: str = "none") -> Value:
    """Return x * P(normal < x), by erf ("none") or by tanh ("tanh")."""
    if approximate not in ("none", "tanh"):
        refuse(f"gelu: expected approximate='none' or 'tanh', got {approximate!r}")
    return _apply("gelu", x, approximate=approximate)


def hardswish(x: Value) -> Value:
    """Return x * clip(x + 3, 0, 6) / 6."""
    return _apply("hardswish", x)


def leaky_relu(x: Value, slope: float = 0.01) -> Value:
    """Return x where positive, slope * x elsewhere; slope is a constant."""
    if not is_number(slope):
        refuse(f"leaky_relu: expected a constant number as slope, got {type(slope).__name__}")
    return _apply("leaky_relu", x, slope=float(slope))


def softplus(x: Value) -> Value:
    """Return log(1 + e^x); x itself above 20."""
    return _apply("softplus", x)


def minimum(x: Any, y: Any) -> Any:
    """Return the smaller of x and y; NaN if either is."""
    return _apply("minimum", x, y)


def maximum(x: Any, y: Any) -> Any:
    """Return the larger of x and y; NaN if either is."""
    return _apply("maximum", x, y)


def clip(x: Any, low: Any, high: Any) -> Any:
    """Return minimum(maximum(x, low), high)."""
    return minimum(maximum(x, low), high)


def where(condition: Any, x: Any, y: Any) -> Any:
    """Return x where the condition (from < <= > >= == != & | ~) holds, y elsewhere."""
    return _apply("where", condition, x, y)


def pairs(x: Value) -> tuple[Value, Value]:
    """Split [M, N] into columns 0, 2, 4 .. and columns 1, 3, 5 .., each [M, N / 2]. Gated activations: gate first."""
    return _apply("even", x), _apply("odd", x)


def halves(x: Value) -> tuple[Value, Value]:
    """Split [M, N] into columns 0 .. N / 2 - 1 and columns N / 2 .. N - 1: `pairs` for weights with all gates first.

    Beside it a value of N columns can only take part in elementwise operations with Row, Col and Scalar: it can't be
    returned, reduced or combined with a Tile, because kernels bring the columns of both halves into one tile.
    """
    return _apply("left", x), _apply("right", x)


def row_sum(x: Value) -> Value:
    """Return the sum over a row's columns: [M, N] -> a row value [M]."""
    return _apply("row_sum", x)


def row_max(x: Value) -> Value:
    """Return the largest value of a row."""
    return _apply("row_max", x)


def row_absmax(x: Value) -> Value:
    """Return the largest magnitude of a row."""
    return _apply("row_absmax", x)


def col_sum(x: Value) -> Value:
    """Return the sum over a column's rows, for each expert in a grouped GEMM ([E, N]). Can only be returned."""
    return _apply("col_sum", x)


def col_max(x: Value) -> Value:
    """Return the largest value of a column; -inf without rows. Can only be returned."""
    return _apply("col_max", x)


def col_absmax(x: Value) -> Value:
    """Return the largest magnitude of a column; 0 without rows. Can only be returned."""
    return _apply("col_absmax", x)


def total_sum(x: Value) -> Value:
    """Return the sum of all values. Can only be returned."""
    return _apply("total_sum", x)


def total_max(x: Value) -> Value:
    """Return the largest of all values. Can only be returned."""
    return _apply("total_max", x)


def total_absmax(x: Value) -> Value:
    """Return the largest magnitude of all values. Can only be returned."""
    return _apply("total_absmax", x)


def softmax(x: Value) -> Value:
    """Return e^x / sum of e^x over a row, or over the k values of `topk`; -inf gives 0, also if all values are -inf."""
    return _apply("softmax", x)


def topk(x: Value, k: int) -> tuple[Value, Value]:
    """Return the k best of each row, best first, as values [M, k] float32 and columns [M, k] int32.

    In a tie the lower column is first. NaN and -inf are never chosen; unfilled slots have value -inf and column -1.
    """
    if isinstance(k, bool) or not isinstance(k, Integral) or not 1 <= k <= MAX_TOPK:
        refuse(f"topk: expected a constant k from 1 to {MAX_TOPK}, got {k!r}")
    return _apply("topk_values", x, k=int(k)), _apply("topk_ids", x, k=int(k))


def round_bf16(x: Value) -> Value:
    """Return x rounded to bf16, to nearest even, for more computation: what a kernel reads that is given bf16."""
    return _apply("round_bf16", x)


def round_mxfp8(x: Value) -> Value:
    """Return x rounded to numbers of MXFP8 (`quantize`, "fp8_e4m3" in groups of 32), for more computation.

    Cast to bf16 they lose nothing, so that kernels for bf16 compute what those for MXFP8 do.
    """
    return _apply("round_mxfp8", x, scheme="mxfp8")


def cast(x: Value, dtype: str) -> Value:
    """Store as "bf16", "fp16", "fp32" or "fp8_e4m3" (saturating, without a scale). Can only be returned."""
    if dtype not in CAST_DTYPES:
        refuse(f"cast: expected one of {', '.join(map(repr, CAST_DTYPES))}, got {dtype!r}")
    return _apply("cast", x, dtype=dtype)


def quantize(x: Value, values: str, group: int | str) -> Value:
    """Store as a QuantTensor, values and scale factors. Can only be returned.

    values "fp8_e4m3": group 128 (float32 scales per 1x128), 32 (UE8M0 per 1x32: mxfp8) or "row" (float32 a row).
    values "fp4_e2m1": group 32 (UE8M0: mxfp4) or 16 (E4M3: nvfp4).
    Computes `envoi.quant.quantize`. One scale for the whole tensor can't be known in one pass: divide by a Scalar that
    you pass, and `cast(x, "fp8_e4m3")`.
    """
    return _apply("quantize", x, scheme=scheme_for(values, group))
