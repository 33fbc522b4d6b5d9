"""Common epilogues, and the epilogues of the experts' two GEMMs."""

from collections.abc import Callable
from functools import cache
from typing import Any

from envoi.check import expect_choice
from envoi.epilogues.activation import computed, expect_activation, written
from envoi.epilogues.api import Epilogue, epilogue
from envoi.epilogues.trace import Col, HalfTile, Row, Scalar, Tile
from envoi.epilogues.vocabulary import (
    cast,
    clip,
    gelu,
    halves,
    minimum,
    pairs,
    quantize,
    relu,
    round_bf16,
    round_mxfp8,
    row_absmax,
    sigmoid,
    silu,
    tanh,
)
from envoi.quant.formats import Scheme
from envoi.types import has_gate

WIDEST_INSIDE = 32  # columns of a quantisation group that fits into a tile of any format


@epilogue
def store(acc):
    """Return the accumulator unchanged."""
    return acc


@epilogue
def linear(acc, c: Tile, alpha: Scalar, beta: Scalar):
    """Return alpha * acc + beta * c."""
    return alpha * acc + beta * c


@epilogue
def scale_bias_relu(acc, alpha: Scalar, bias: Col):
    """Return relu(alpha * acc + bias)."""
    return relu(alpha * acc + bias)


@epilogue
def gelu_residual(acc, bias: Col, residual: Tile):
    """Return gelu(acc + bias) + residual."""
    return gelu(acc + bias) + residual


@epilogue
def absmax(acc):
    """Return the accumulator and the largest magnitude of each row."""
    return acc, row_absmax(acc)


@epilogue
def swiglu(acc):
    """Return silu(gate) * up of interleaved columns."""
    gate, up = pairs(acc)
    return silu(gate) * up


@epilogue
def swiglu_residual(acc, residual: HalfTile):
    """Return silu(gate) * up + residual."""
    gate, up = pairs(acc)
    return silu(gate) * up + residual


@epilogue
def swiglu_fp8(acc):
    """Return silu(gate) * up, quantised to FP8 E4M3 with a float32 scale per 1x128."""
    gate, up = pairs(acc)
    return quantize(silu(gate) * up, "fp8_e4m3", group=128)


OAI_ALPHA = 1.702
SPLITS = {"interleaved": pairs, "concat": halves}  # how each `gate_up_layout` becomes gate and up

_LEAVE = {
    "fp8_row": ("fp8_e4m3", "row"),
    "fp8_1x128": ("fp8_e4m3", 128),
    "mxfp8": ("fp8_e4m3", 32),
}


def activated(activation: str, limit: float | None, *values: Any) -> Any:
    """Return an activation of gate and up, or of up alone: values of an epilogue, or float tensors [M, I].

    activation: one of `envoi.epilogues.activation.ACTIVATIONS`, or a user's as text. limit: clamps gate above and up on
    both sides.
    """
    own = ":" in activation
    if not has_gate(activation):
        (up,) = values
        if own:
            return computed(activation, up)
        return silu(up) if activation == "silu" else relu(up) * relu(up)
    gate, up = values
    if limit is not None:
        gate, up = minimum(gate, limit), clip(up, -limit, limit)
    if own:
        return computed(activation, gate, up)
    if activation == "swiglu_oai":
        return (up + 1.0) * gate * sigmoid(OAI_ALPHA * gate)
    if activation == "swiglu":
        return silu(gate) * up
    return gelu(gate, "tanh" if activation == "geglu_tanh" else "none") * up


@cache
def expert_l1(
    activation: str, limit: float | None, has_bias: bool, scheme: str | None, gate_up_layout: str = "interleaved",
    rounded: bool = False, has_scale: bool = False, in_bf16: bool = False,
) -> Epilogue:  # fmt: skip
    """Return the experts' first epilogue: activation of gate and up, times the routing weight, quantised.

    activation: one of `envoi.epilogues.activation.ACTIVATIONS`, or a user's as text; without a gate the columns are all
    up, and there is no limit and no layout.
    limit clamps gate above and up on both sides. scheme: None for bf16 output,
    else fp8_row, fp8_1x128 or mxfp8. gate_up_layout: "interleaved" (columns of gate and up in turn) or "concat" (all
    gates, then all ups). rounded: to bf16 before it is quantised, as where a kernel of its own quantises bf16.
    in_bf16: mxfp8's numbers are stored in bf16, without factors.
    Operands: weight (Row); and in the order of the columns bias (Col) if has_bias, and scale (Col), which is multiplied
    before the bias is added, if has_scale.
    Raises ValueError for another activation, scheme or layout.
    """
    expect_activation(activation)
    expect_choice("gate_up_layout", gate_up_layout, SPLITS)
    if scheme is not None:
        expect_choice("scheme", scheme, _LEAVE)
    split = SPLITS[gate_up_layout]

    def inside(acc):
        return activated(activation, limit, *(split(acc) if has_gate(activation) else (acc,)))

    def leave(h):
        if scheme is None:
            return cast(h, "bf16")
        if in_bf16:
            return cast(round_mxfp8(h), "bf16")
        return quantize(round_bf16(h) if rounded else h, *_LEAVE[scheme])

    return _of_accumulators(lambda acc, weight: leave(inside(acc) * weight), has_bias, has_scale)


def _of_accumulators(finish: Callable, has_bias: bool, has_scale: bool) -> Epilogue:
    """Return the epilogue finish(acc * scale + bias, weight), without the operands that there aren't."""

    def expert_l1(acc, weight: Row):
        return finish(acc, weight)

    def expert_l1_bias(acc, weight: Row, bias: Col):
        return finish(acc + bias, weight)

    def expert_l1_scale(acc, weight: Row, scale: Col):
        return finish(acc * scale, weight)

    def expert_l1_scale_bias(acc, weight: Row, scale: Col, bias: Col):
        return finish(acc * scale + bias, weight)

    if has_scale:
        return epilogue(expert_l1_scale_bias if has_bias else expert_l1_scale)
    return epilogue(expert_l1_bias if has_bias else expert_l1)


@cache
def swiglu_oai_with(alpha: float) -> str:
    """Return the activation (up + 1) * gate * sigmoid(alpha * gate)."""

    def swiglu_oai(gate, up):
        return (up + 1.0) * gate * sigmoid(alpha * gate)

    return "swiglu_oai" if alpha == OAI_ALPHA else written(swiglu_oai)


@cache
def swiglu_clamped_after(limit: float) -> str:
    """Return the activation min(silu(gate), limit) * clip(up, -limit, limit), which clamps after SiLU."""

    def swiglu_clamped_after(gate, up):
        return minimum(silu(gate), limit) * clip(up, -limit, limit)

    return written(swiglu_clamped_after)


@cache
def softcapped_swiglu(gate_cap: float, up_cap: float | None) -> str:
    """Return the activation gate_cap * tanh(gate / gate_cap) * sigmoid(gate) * (up_cap * tanh(up / up_cap)), the last
    factor being up without up_cap."""

    def softcapped_swiglu(gate, up):
        up = up if up_cap is None else up_cap * tanh(up / up_cap)
        return gate_cap * tanh(gate / gate_cap) * sigmoid(gate) * up

    return written(softcapped_swiglu)


def l1_output_scheme(scheme: Scheme | None) -> str | None:
    """Return the scheme that `expert_l1` quantises to for an L2 that takes `scheme`, or None if it must store bf16.

    A group wider than a tile can't be quantised within the tile: another kernel does it.
    """
    return scheme.name if scheme is not None and 0 < scheme.group[1] <= WIDEST_INSIDE else None


@cache
def expert_l2(has_bias: bool, has_scale: bool = False, scheme: str | None = None) -> Epilogue:
    """Return the experts' second epilogue. Rows already carry the routing weight; only the bias is multiplied here.

    scheme: None, or what rows are quantised to, as in `expert_l1`.
    Operands: weight (Row) and bias (Col) if has_bias; scale (Col), of the accumulator, if has_scale.
    """

    def leave(x):
        return x if scheme is None else quantize(x, *_LEAVE[scheme])

    def expert_l2(acc):
        return leave(acc)

    def expert_l2_bias(acc, weight: Row, bias: Col):
        return leave(acc + weight * bias)

    def expert_l2_scale(acc, scale: Col):
        return leave(acc * scale)

    def expert_l2_scale_bias(acc, weight: Row, scale: Col, bias: Col):
        return leave(acc * scale + weight * bias)

    if has_scale:
        return epilogue(expert_l2_scale_bias if has_bias else expert_l2_scale)
    return epilogue(expert_l2_bias if has_bias else expert_l2)
