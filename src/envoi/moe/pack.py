"""Packing of expert weights from checkpoints' layouts into ExpertWeights, and unpacking."""

import torch

from envoi.check import expect_choice, expect_number, expect_tensor, fits_float32
from envoi.epilogue.library import ACTIVATIONS
from envoi.quant.cast import dequantize
from envoi.quant.formats import Format, format_named
from envoi.quant.fragments import supports_fragments, to_fragments
from envoi.quant.pack import deinterleave_gate_up, interleave_gate_up, pack_weight
from envoi.runtime.devices import implementation
from envoi.types import ExpertWeights, Matrix, QuantTensor

LAYOUTS = ("concat", "interleaved")
SWIGLU_OAI_LIMIT = 7.0
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def pack(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    format: str = "bf16",
    *,
    gate_up_layout: str = "concat",
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = "swiglu",
    swiglu_limit: float | None = None,
) -> ExpertWeights:
    """Pack expert weights once, for every later call of `envoi.moe`.

    gate_up [E, 2I, H] and down [E, H, I], bf16, fp16 or fp32, as nn.Linear stores them (a checkpoint that keeps
    [E, H, 2I], as gpt-oss does, is passed transposed). gate_up_bias [E, 2I] and down_bias [E, H], both or neither.
    format: "bf16", "fp8_row", "fp8_block128", "mxfp8", "mxfp4" (4-bit weights beside bf16 activations) or "mxfp4_mxfp8"
        (the same weights beside MXFP8 activations).
    gate_up_layout: "concat" (all gate rows, then all up rows; most checkpoints) or "interleaved" (gate, up in turn;
        gpt-oss). The bias has the same order.
    activation: "swiglu" = silu(gate) * up, or "swiglu_oai" = (up + 1) * gate * sigmoid(1.702 * gate).
    A contiguous bf16 `down` is referenced, not copied.
    swiglu_limit: clamps gate at +limit and up to [-limit, limit] before the activation; "swiglu_oai" defaults to 7.

    Example: pack(gate_up [8, 512, 256], down [8, 256, 256], "fp8_block128") has gate_up.values [8, 512, 256] in
    float8_e4m3fn with gate_up.sf [8, 4, 2] in float32.

    On a Hopper GPU "mxfp4" weights are kept in the order in which its tensor cores take them (`envoi.quant.fragments`)
    where H and I are multiples of 64 and no scale factor is above 2; they take no more memory, and `unpack` reads them.

    Raises ValueError if shapes disagree, or H or I isn't a multiple of the format's group (128 for fp8_block128, 32 for
    mxfp8, mxfp4 and mxfp4_mxfp8; bf16 and fp8_row take any multiple of 8).
    """
    chosen = format_named(format)
    expect_choice("gate_up_layout", gate_up_layout, LAYOUTS)
    expect_choice("activation", activation, ACTIVATIONS)
    _check_shapes(gate_up, down, gate_up_bias, down_bias, chosen)
    if swiglu_limit is None and activation == "swiglu_oai":
        swiglu_limit = SWIGLU_OAI_LIMIT
    if swiglu_limit is not None:
        limit = expect_number("swiglu_limit", swiglu_limit)
        if not (limit > 0 and fits_float32(limit)):
            need = "None or a positive number that float32 can hold"
            raise ValueError(f"swiglu_limit: expected {need}, got {swiglu_limit!r}")
    if gate_up_layout == "concat":
        gate_up = interleave_gate_up(gate_up)
        gate_up_bias = None if gate_up_bias is None else interleave_gate_up(gate_up_bias, dim=-1)
    packed = pack_weight(gate_up, chosen.weights, "gate_up"), pack_weight(down, chosen.weights, "down")
    if chosen.activations is None:
        packed = _in_kernels_order(*packed)
    return ExpertWeights(
        gate_up=packed[0],
        down=packed[1],
        format=format,
        activation=activation,
        swiglu_limit=None if swiglu_limit is None else float(swiglu_limit),
        gate_up_bias=None if gate_up_bias is None else gate_up_bias.float().contiguous(),
        down_bias=None if down_bias is None else down_bias.float().contiguous(),
    )


def _in_kernels_order(gate_up: Matrix, down: Matrix) -> tuple[Matrix, Matrix]:
    """MXFP4 weights as the Hopper kernels for bf16 tokens read them, in place, if both can be put so."""
    if not isinstance(gate_up, QuantTensor) or not isinstance(down, QuantTensor):
        return gate_up, down
    if implementation(gate_up.device) != "hopper" or supports_fragments(gate_up) or supports_fragments(down):
        return gate_up, down
    return to_fragments(gate_up), to_fragments(down)


def unpack(
    experts: ExpertWeights, gate_up_layout: str = "concat", dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return gate_up, down, gate_up_bias, down_bias in `dtype`: the inverse of `pack`, up to the format's rounding."""
    expect_choice("gate_up_layout", gate_up_layout, LAYOUTS)
    gate_up, down = _widen(experts.gate_up, dtype), _widen(experts.down, dtype)
    gate_up_bias = None if experts.gate_up_bias is None else experts.gate_up_bias.to(dtype)
    down_bias = None if experts.down_bias is None else experts.down_bias.to(dtype)
    if gate_up_layout == "concat":
        gate_up = deinterleave_gate_up(gate_up)
        gate_up_bias = None if gate_up_bias is None else deinterleave_gate_up(gate_up_bias, dim=-1)
    return gate_up, down, gate_up_bias, down_bias


def _widen(weight: Matrix, dtype: torch.dtype) -> torch.Tensor:
    return weight.to(dtype) if isinstance(weight, torch.Tensor) else dequantize(weight, torch.float64).to(dtype)


def _check_shapes(gate_up, down, gate_up_bias, down_bias, format: Format) -> None:
    expect_tensor("gate_up", gate_up, FLOATS, ("num_experts", "2 * intermediate", "hidden"))
    num_experts, rows, hidden = gate_up.shape
    if rows % 2:
        raise ValueError(f"gate_up.shape[1]: expected 2 * intermediate, an even number, got {rows}")
    intermediate = rows // 2
    expect_tensor("down", down, FLOATS, (num_experts, hidden, intermediate), gate_up.device)
    for name, size in (("hidden", hidden), ("intermediate", intermediate)):
        need = max(8, format.group_k)
        if size % need or size == 0:
            others = "bf16 and fp8_row need a multiple of 8, mxfp8, mxfp4 and mxfp4_mxfp8 of 32, fp8_block128 of 128"
            raise ValueError(
                f"{name}: expected a positive multiple of {need} for format {format.name!r}, got {size} ({others})"
            )
    if (gate_up_bias is None) != (down_bias is None):
        raise ValueError("gate_up_bias, down_bias: expected both or neither, got one of them")
    if gate_up_bias is not None:
        expect_tensor("gate_up_bias", gate_up_bias, FLOATS, (num_experts, rows), gate_up.device)
        expect_tensor("down_bias", down_bias, FLOATS, (num_experts, hidden), gate_up.device)
