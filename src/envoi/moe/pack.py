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
PACKED_LAYOUT = "interleaved"  # of a "concat" gate_up in a format of READ_AS_STORED; "concat" shares its storage
READ_AS_STORED = ("bf16", "fp8_row", "fp8_block128")  # formats whose kernels read both layouts
SWIGLU_OAI_LIMIT = 7.0
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def pack(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    format: str = "bf16",
    *,
    gate_up_layout: str = "concat",
    packed_layout: str | None = None,
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
    packed_layout: the layout in which gate_up and its bias are kept, and the kernels read them. "interleaved" suits
        every format, "concat" bf16, fp8_row and fp8_block128 (with factors for gate and for up); None = "interleaved".
    A contiguous bf16 `down` is referenced, not copied; so is `gate_up` if its layout stays.
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
    limit = _limit(swiglu_limit, activation)
    layout = _layout_to_keep(gate_up_layout, packed_layout, format)
    gate_up, gate_up_bias = _in_layout(layout, gate_up, gate_up_bias, gate_up_layout)
    packed = pack_weight(gate_up, chosen.weights, "gate_up"), pack_weight(down, chosen.weights, "down")
    if chosen.activations is None:
        packed = _in_kernels_order(*packed)
    return ExpertWeights(
        gate_up=packed[0],
        down=packed[1],
        format=format,
        activation=activation,
        swiglu_limit=limit,
        gate_up_bias=None if gate_up_bias is None else gate_up_bias.float().contiguous(),
        down_bias=None if down_bias is None else down_bias.float().contiguous(),
        gate_up_layout=layout,
    )


def _limit(swiglu_limit: float | None, activation: str) -> float | None:
    if swiglu_limit is None:
        return SWIGLU_OAI_LIMIT if activation == "swiglu_oai" else None
    limit = expect_number("swiglu_limit", swiglu_limit)
    if not (limit > 0 and fits_float32(limit)):
        need = "None or a positive number that float32 can hold"
        raise ValueError(f"swiglu_limit: expected {need}, got {swiglu_limit!r}")
    return float(limit)


def _layout_to_keep(given: str, wanted: str | None, format: str) -> str:
    """Return the layout in which `pack` keeps gate_up. Raises ValueError if the format's kernels don't read it."""
    if wanted is None:
        return PACKED_LAYOUT if given == "concat" and format in READ_AS_STORED else "interleaved"
    expect_choice("packed_layout", wanted, LAYOUTS)
    if wanted == "concat" and format not in READ_AS_STORED:
        raise ValueError(f"packed_layout: expected 'interleaved' for format {format!r}, got 'concat'")
    return wanted


def _in_layout(
    wanted: str, gate_up: torch.Tensor, bias: torch.Tensor | None, given: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return gate_up and its bias, which are in the layout `given`, in the one that is wanted."""
    if wanted == given:
        return gate_up, bias
    reorder = interleave_gate_up if wanted == "interleaved" else deinterleave_gate_up
    return reorder(gate_up), None if bias is None else reorder(bias, dim=-1)


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
    gate_up, gate_up_bias = _in_layout(gate_up_layout, gate_up, gate_up_bias, experts.gate_up_layout)
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
