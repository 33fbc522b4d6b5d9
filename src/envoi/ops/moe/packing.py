"""Packing of expert weights from checkpoints' layouts into ExpertWeights, and unpacking."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from envoi.check import (
    Dim,
    describe,
    expect_bool,
    expect_choice,
    expect_no_gradients,
    expect_number,
    expect_tensor,
    fits_float32,
)
from envoi.epilogues.activation import ACTIVATIONS, computed, expect_activation
from envoi.epilogues.library import swiglu_oai_with
from envoi.ops.moe.in_place import over
from envoi.quant import regroup
from envoi.quant.bits import as_bytes
from envoi.quant.cast import dequantize
from envoi.quant.formats import FORMATS, SCHEMES, Format, format_named
from envoi.quant.fp8_fragments import to_fp8_fragments, why_not_fp8_fragments
from envoi.quant.fragments import to_fragments, to_rows, why_not_fragments
from envoi.quant.pack import (
    deinterleave_gate_up,
    expect_bf16_numbers,
    interleave_gate_up,
    pack_weight,
    pad_factors,
)
from envoi.runtime.devices import implementation
from envoi.runtime.tma import is_tma_ready
from envoi.types import ExpertWeights, Matrix, QuantTensor, expect_experts, has_gate

NAMES = (
    "gate_up", "down", "gate_up_bias", "down_bias", "gate_up_sf", "down_sf", "gate_up_scale", "down_scale"
)  # fmt: skip
LAYOUTS = ("concat", "interleaved")
READ_AS_STORED = ("bf16", "fp8_row", "fp8_block128")  # formats whose kernels read both layouts
SWIGLU_OAI_LIMIT = 7.0
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
AUTO = "auto"
BLOCKS = SCHEMES["fp8_128x128"]  # the weights of "fp8_block128"


def pack(
    gate_up: Matrix, down: Matrix, format: str = AUTO, *, gate_up_sf: torch.Tensor | None = None,
    down_sf: torch.Tensor | None = None, gate_up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None, gate_up_zeros: torch.Tensor | None = None,
    down_zeros: torch.Tensor | None = None, weight_block_size: tuple[int, int] | None = None,
    gate_up_layout: str = "concat", packed_layout: str | None = None, gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None, activation: str | Callable = "swiglu", swiglu_limit: float | None = None,
    swiglu_alpha: float | None = None, requantize: bool = False, in_place: bool = False,
) -> ExpertWeights:  # fmt: skip
    """Pack expert weights once, for every later call of `envoi.moe`.

    gate_up [E, 2I, H] and down [E, H, I], bf16, fp16 or fp32, as nn.Linear stores them (a checkpoint that keeps
    [E, H, 2I], as gpt-oss in bf16 does, is passed transposed). gate_up_bias [E, 2I], down_bias [E, H], both or neither.
    format: "bf16", "fp8_row", "fp8_block128", "mxfp8", "mxfp4", "nvfp4" and "int4" (4-bit weights, bf16 activations),
        or "mxfp4_fp8" and "mxfp4_mxfp8" (FP8 ones with a scale a token, MXFP8 ones). "auto": as stored, floats bf16.
    gate_up_sf, down_sf: factors of weights that are quantised already, which are then packed as they are, number for
        number; gate_up_scale, down_scale: what NVFP4 weights are multiplied by on top, float32 [E], or [E, 2] of gate
        and up; gate_up_zeros, down_zeros: zero points of INT4 weights, of pairs for which format is "int4", or "auto".
        See `envoi.quant.regroup.as_stored`, `as_integers` for dtypes and shapes. Or gate_up and down are QuantTensors.
    weight_block_size: rows and columns that share a factor, as config.json names them; the last block of a side may be
        smaller. Blocks begin with the first row of gate, the first of up and the first column: in a shard that begins
        inside a block, zeros have to fill the block's beginning. None: groups that factors' shapes leave no doubt of.
    requantize: round numbers that the format can't hold, which is refused else; under "auto" to bf16, if no format
        holds quantised ones, or bf16 not fp16 and fp32 ones.
    gate_up_layout: of rows and bias, "concat" (all gate, then all up; most checkpoints) or "interleaved" (gpt-oss).
    activation: "swiglu" = silu(gate) * up, "swiglu_oai" = (up + 1) * gate * sigmoid(swiglu_alpha * gate), "geglu" =
        gelu(gate) * up, "geglu_tanh" (gelu by tanh); "silu" and "relu2" = relu(up)^2 without a gate, gate_up [E, I, H]
        being up; or a function in the epilogues' language, of gate and up or of up, which is kept as text.
    packed_layout: the layout in which gate_up and its bias are kept, and the kernels read them: "interleaved" suits
        every format, "concat" bf16, fp8_row and fp8_block128 (with factors for gate and for up). None: gate_up_layout
        where the kernels of the format read it, else "interleaved". Contiguous weights that have the format's numbers
        in that layout are referenced, not copied.
    swiglu_limit: clamps gate at +limit, up to [-limit, limit]; "swiglu_oai" defaults to 7. swiglu_alpha: else 1.702.
    in_place: write weights and factors whose order changes over those that are given, if they are contiguous, so that
        they are in memory once; the given tensors have no other use afterwards.
    Example: gate_up [8, 512, 256] packed in "fp8_block128" has float8_e4m3fn values [8, 512, 256] and sf [8, 4, 2]. Its
    blocks are filled with zeros at the end of gate, up and down's columns: see `ExpertWeights.padding`. On Hopper 4-bit
    weights are put in the order of tensor cores where possible, in as much memory; `unpack` reads it.
    Raises ValueError if shapes disagree, H or I isn't a multiple of the format's group (128 for fp8_block128, 32 for
    MX and int4, 16 for nvfp4; bf16 and fp8_row take any multiple of 8), or a tensor requires grad in grad mode.
    """
    _check_options(format, gate_up_layout, requantize, in_place)
    _check_gradients(gate_up, down, gate_up_bias, down_bias, gate_up_sf, down_sf, gate_up_scale, down_scale)
    activation, limit = _activation(activation, swiglu_limit, swiglu_alpha)
    gated, block = has_gate(activation), expect_block(weight_block_size)
    parts = 2 if gated and gate_up_layout == "concat" else 1
    gate_up = _stored(gate_up, gate_up_sf, gate_up_scale, gate_up_zeros, "gate_up", block, parts, format)
    given = gate_up, (down := _stored(down, down_sf, down_scale, down_zeros, "down", block, 1, format))
    _check_shapes(gate_up, down, gate_up_bias, down_bias, gated)
    chosen, padding = _choose(format, gate_up, down, block, activation, requantize)
    layout = _layout_to_keep(gate_up_layout, packed_layout, chosen)
    if padding:
        sides = (gate_up, gate_up_sf), (down, down_sf)
        gate_up, down, gate_up_bias = _in_whole_blocks(*sides, gate_up_bias, padding, parts)
    gate_up_layout, layout = (gate_up_layout, layout) if gated else ("interleaved",) * 2  # no rows to move
    rows = _for_kernels(gate_up, chosen, gate_up_layout, layout, requantize)
    down_rows = _in_scheme(down, chosen, "down", requantize)
    biases = _bias(gate_up_bias, layout, gate_up_layout), _bias(down_bias)
    experts = ExpertWeights(rows, down_rows, chosen.name, activation, limit, *biases, layout, padding)
    return over(_arranged(experts, ()), given) if in_place else _arranged(experts, (gate_up, down))


def _check_options(format: str, gate_up_layout: str, requantize: bool, in_place: bool) -> None:
    expect_choice("format", format, (*FORMATS, AUTO))
    expect_choice("gate_up_layout", gate_up_layout, LAYOUTS)
    expect_bool("requantize", requantize)
    expect_bool("in_place", in_place)


def expect_block(given: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return weight_block_size as a pair. Raises ValueError for anything but None or two positive ints."""
    if given is None:
        return None
    pair = isinstance(given, tuple | list) and len(given) == 2
    if not (pair and all(type(side) is int and side > 0 for side in given)):
        raise ValueError(f"weight_block_size: expected None or rows and columns of a block, got {given!r}")
    return given[0], given[1]


def _choose(
    format: str, gate_up: Matrix, down: Matrix, block: tuple[int, int] | None, activation: str, requantize: bool
) -> tuple[Format, int]:
    """Return the format to pack in, where "auto" is given too, and the `padding_of` that it needs.

    Raises ValueError if no format, or not this one, can have these weights' sizes and numbers.
    """
    padding = padding_of(gate_up, down, block, activation)
    chosen = format_named(format_of(gate_up, down, padding, requantize) if format == AUTO else format)
    padding = padding if chosen.weights == BLOCKS else 0
    check_sizes(down.shape[1], down.shape[2] + padding, chosen)
    return chosen, padding


def padding_of(gate_up: Matrix, down: Matrix, block: tuple[int, int] | None, activation: str) -> int:
    """Return how many zeros at the end of the intermediate size make blocks of "fp8_block128" whole, 0 if none would.

    Zeros of gate, up and the columns of down change nothing where the activation of zeros is zero; else they would take
    part in the scale factor of an activation's last group.
    """
    if block != BLOCKS.group or not (isinstance(gate_up, QuantTensor) and isinstance(down, QuantTensor)):
        return 0
    for x in (gate_up, down):
        if x.packed or x.scale is not None or x.sf.dtype == torch.float8_e4m3fn:
            return 0
    zeros = [torch.zeros(1, 1, device="cpu")] * (1 + has_gate(activation))
    vanishes = activation in ACTIVATIONS or not computed(activation, *zeros).any()
    return -down.shape[2] % BLOCKS.group[1] if vanishes and down.shape[1] % BLOCKS.group[0] == 0 else 0


def _in_whole_blocks(gate_up, down, bias: torch.Tensor | None, padding: int, parts: int):
    """Return gate_up, down, each given with its factors, and gate_up's bias with `padding_of` zeros."""
    rows = padding * (gate_up[0].shape[1] // down[0].shape[2]) // parts
    one = regroup.in_whole_blocks(gate_up[0], gate_up[1], BLOCKS.group, 1, rows, parts)
    two = regroup.in_whole_blocks(down[0], down[1], BLOCKS.group, 2, padding)
    return one, two, None if bias is None else regroup.with_zeros(bias, rows, 1, parts)


def _check_gradients(*given: Matrix | None) -> None:
    """Raise ValueError if autograd would go through weights, their factors or biases, in the order of NAMES."""
    parts = [[x.values, x.sf, x.scale] if isinstance(x, QuantTensor) else x for x in given]
    expect_no_gradients(NAMES, parts)


def _bias(bias: torch.Tensor | None, kept: str = "concat", given: str = "concat") -> torch.Tensor | None:
    return None if bias is None else _in_layout(kept, bias, given, dim=-1).float().contiguous()


def _activation(given: str | Callable, limit: float | None, alpha: float | None) -> tuple[str, float | None]:
    activation = expect_activation(given)
    return _with_alpha(activation, alpha), _limit(limit, activation)


def _limit(swiglu_limit: float | None, activation: str) -> float | None:
    if swiglu_limit is not None and not has_gate(activation):
        raise ValueError(f"swiglu_limit: expected None for {activation!r}, which has no gate, got {swiglu_limit!r}")
    if swiglu_limit is None:
        return SWIGLU_OAI_LIMIT if activation == "swiglu_oai" else None
    limit = expect_number("swiglu_limit", swiglu_limit)
    if not (limit > 0 and fits_float32(limit)):
        need = "None or a positive number that float32 can hold"
        raise ValueError(f"swiglu_limit: expected {need}, got {swiglu_limit!r}")
    return limit


def _with_alpha(activation: str, alpha: float | None) -> str:
    if alpha is None:
        return activation
    if activation != "swiglu_oai":
        raise ValueError(f"swiglu_alpha: expected None for {activation!r}; 'swiglu_oai' has it, got {alpha!r}")
    number = expect_number("swiglu_alpha", alpha)
    if not fits_float32(number) or number != number:
        raise ValueError(f"swiglu_alpha: expected a number that float32 can hold, got {alpha!r}")
    return swiglu_oai_with(number)


def _stored(
    weight: Matrix, sf: torch.Tensor | None, scale: torch.Tensor | None, zeros: torch.Tensor | None, name: str,
    block: tuple[int, int] | None, parts: int, format: str,
) -> Matrix:  # fmt: skip
    """Return weights with their factors as a QuantTensor by rows, float weights as they are.

    format: "int4" says that pairs of 4 bits are INT4 also without zero points, else they are E2M1.
    """
    if block is not None and sf is None:
        raise ValueError(f"weight_block_size: expected None without {name}_sf, got {block}")
    if isinstance(weight, QuantTensor):
        for part, given in (("sf", sf), ("scale", scale), ("zeros", zeros)):
            if given is not None:
                raise ValueError(
                    f"{name}_{part}: expected None beside a QuantTensor, which has its factors, got {describe(given)}"
                )
        groups = [-(-size // side) for size, side in zip(weight.shape[-2:], weight.group, strict=True)]
        expect_tensor(f"{name}.values", weight.values, (torch.float8_e4m3fn, torch.uint8))
        expect_tensor(f"{name}.sf", weight.sf, None, (*weight.shape[:-2], *groups), weight.values.device)
        if weight.integers and weight.order == "rows":
            regroup.as_integers(weight.values, weight.sf, weight.zeros, name)
        if weight.scale is not None:
            weight = replace(weight, scale=regroup.row_scales(weight.scale, weight.shape, name))
        return to_rows(weight)
    if sf is not None and (format == "int4" or zeros is not None):
        if scale is not None or block is not None:
            raise ValueError(f"{name}_scale, weight_block_size: expected None beside INT4 weights, got one of them")
        return regroup.as_integers(weight, sf, zeros, name)
    if zeros is not None:
        raise ValueError(f"{name}_zeros: expected None beside weights without {name}_sf, got {describe(zeros)}")
    if sf is not None:
        return regroup.as_stored(weight, sf, name, scale, block, parts)
    if scale is not None:
        raise ValueError(f"{name}_scale: expected None beside weights without {name}_sf, got {describe(scale)}")
    if isinstance(weight, torch.Tensor) and weight.dtype in regroup.VALUES and weight.dtype != torch.int8:
        raise ValueError(f"{name}_sf: expected the factors of {name} in {describe(weight)}, got None")
    return weight


def format_of(gate_up: Matrix, down: Matrix, padding: int = 0, requantize: bool = False) -> str:
    """Return the format whose weights are stored as these are, "bf16" for floats.

    padding: zeros with which "fp8_block128" holds them, see `padding_of`. requantize: "bf16" if no format holds them.
    Raises ValueError if none does; and for floats that bf16 would round, unless requantize is True.
    """
    if not (isinstance(gate_up, QuantTensor) and isinstance(down, QuantTensor)):
        for name, weight in () if requantize else (("gate_up", gate_up), ("down", down)):
            expect_bf16_numbers(weight, name)
        return "bf16"
    reasons = {}
    for format in FORMATS.values():
        if format.weights is not None:
            why = [regroup.why_not(x, format.weights) for x in (gate_up, down)]
            why.append(_unfit(down.shape[-2], down.shape[-1], format))
            if not any(why) or (padding and format.weights == BLOCKS):
                return format.name
            reasons[format.name] = next(filter(None, why))
    if requantize:
        return "bf16"
    told = "; ".join(f"{name}: {why}" for name, why in reasons.items())
    raise ValueError(
        f"format: expected one that holds these weights exactly, got 'auto', and there is none ({told}); pass "
        "requantize=True to round them"
    )


def _layout_to_keep(given: str, wanted: str | None, format: Format) -> str:
    """Return the layout in which `pack` keeps gate_up. Raises ValueError if the format's kernels don't read it."""
    both = format.name in READ_AS_STORED
    if wanted is None:
        return given if both else "interleaved"
    expect_choice("packed_layout", wanted, LAYOUTS)
    if wanted == "concat" and not both:
        raise ValueError(f"packed_layout: expected 'interleaved' for format {format.name!r}, got 'concat'")
    return wanted


def _in_layout(wanted: str, rows: torch.Tensor, given: str, dim: int = -2) -> torch.Tensor:
    """Return the rows of gate_up, or its bias, which are in the layout `given`, in the one that is wanted."""
    if wanted == given:
        return rows
    return (interleave_gate_up if wanted == "interleaved" else deinterleave_gate_up)(rows, dim=dim)


def _for_kernels(gate_up: Matrix, format: Format, given: str, kept: str, requantize: bool) -> Matrix:
    """Convert gate_up from a checkpoint's layout of rows to the one that is kept, and read by the kernels.

    The only place that moves rows of quantised weights. A view where the layout stays. Interleaved blocks of 128 rows
    have gate and up rows under one factor, so that a checkpoint's two factors have to become one.
    """

    def reorder(rows: torch.Tensor) -> torch.Tensor:
        return _in_layout(kept, rows, given)

    if isinstance(gate_up, torch.Tensor):
        return pack_weight(reorder(gate_up), format.weights, "gate_up")
    gate_up = replace(gate_up, values=gate_up.values.contiguous())  # so that what is kept has the same values
    stored = _in_scheme(gate_up, format, "gate_up", requantize, reorder)
    if kept == given or not isinstance(stored, QuantTensor) or stored.values is not gate_up.values:
        return stored  # else rounded again, in the layout to be kept
    sf = stored.sf
    if stored.group[0] == 1:
        scale = None if stored.scale is None else _in_layout(kept, stored.scale, given, dim=-1)
        zeros = None if stored.zeros is None else reorder(stored.zeros)
        values = _reordered(stored.values, reorder)
        return replace(stored, values=values, sf=_reordered(sf, reorder), scale=scale, zeros=zeros)
    if kept == "concat":
        if not requantize:
            raise ValueError(
                "packed_layout: expected 'interleaved' for blocks of gate and up rows in turn, which share factors, "
                "got 'concat'; pass requantize=True to round their numbers again"
            )
        return regroup.requantize(stored, format.weights, "gate_up", reorder)
    stored, changed = regroup.share_factors(stored, 2)
    if changed and not requantize:
        raise ValueError(
            "gate_up_sf: expected one factor for a block of gate rows and the block of up rows beside it, or two whose "
            "ratio loses nothing, since packed_layout='interleaved' has their rows in turn, under one factor; got "
            f"factors with which {changed} of {stored.values.numel()} weights would be rounded again: pass "
            "requantize=True to do so, or packed_layout='concat'"
        )
    sf = stored.sf[:, : sf.shape[1] // 2].repeat_interleave(2, dim=1)
    return replace(stored, values=_reordered(stored.values, reorder), sf=sf)


def _reordered(x: torch.Tensor, reorder: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return reorder(as_bytes(x)).view(x.dtype)


def _in_scheme(
    weight: Matrix, format: Format, name: str, requantize: bool,
    order: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
) -> Matrix:  # fmt: skip
    """Return weights in the format's scheme: float ones are quantised; the numbers of quantised ones are kept.

    Where that can't be, raises ValueError, or with requantize rounds them again, in the `order` of rows.
    """
    scheme = format.weights
    if isinstance(weight, torch.Tensor):
        return pack_weight(weight, scheme, name)
    why = "it has none, and these are quantised" if scheme is None else regroup.why_not(weight, scheme)
    if scheme is not None and not why:
        return regroup.regroup(weight, scheme)
    if not requantize:
        raise ValueError(
            f"{name}: expected numbers that the scheme of {format.name!r} holds exactly, got {weight}: {why}; pass "
            "requantize=True to round them again, or format='auto' to keep what they are stored in"
        )
    return regroup.requantize(weight, scheme, name, order)


def _arranged(experts: ExpertWeights, theirs: Sequence[Matrix] | None = None) -> ExpertWeights:
    """Put MX and NVFP4 weights into the order that the Hopper kernels read.

    4-bit weights are put into an order of the tensor cores' operands, if both can be, in place but for memory of
    `theirs`, weights that a caller owns; None: all memory is a caller's. Of the others nothing is copied but scale
    factors, where their rows don't start on 16 bytes.
    """
    gate_up, down = experts.gate_up, experts.down
    if not isinstance(gate_up, QuantTensor) or not isinstance(down, QuantTensor) or experts.order != "rows":
        return experts
    if implementation(experts.device) != "hopper" or (gate_up.group not in ((1, 32), (1, 16)) and not gate_up.integers):
        return experts
    why_not, put = why_not_fragments, to_fragments
    if format_named(experts.format).activations == SCHEMES["fp8_row"]:
        why_not, put = why_not_fp8_fragments, to_fp8_fragments
    if why_not(gate_up) or why_not(down):
        if gate_up.sf.dtype != torch.float8_e8m0fnu:
            return experts
        return replace(experts, gate_up=_with_rows_on_16_bytes(gate_up), down=_with_rows_on_16_bytes(down))
    parts = [part for x in theirs or () for part in tensors_in(x)]
    kept = None if theirs is None else {x.untyped_storage().data_ptr() for x in parts}

    def own_tensor(x: torch.Tensor) -> torch.Tensor:
        return x.clone() if kept is None or x.untyped_storage().data_ptr() in kept else x

    def own(x: QuantTensor) -> QuantTensor:
        zeros = None if x.zeros is None else own_tensor(x.zeros)
        return replace(x, values=own_tensor(x.values), sf=own_tensor(x.sf), zeros=zeros)

    return replace(experts, gate_up=put(own(gate_up)), down=put(own(down)))


def tensors_in(x: Matrix) -> list[torch.Tensor]:
    """Return the tensors that weights read by `put` consist of."""
    parts = (x.values, x.sf, x.zeros) if isinstance(x, QuantTensor) else (x,)
    return [part for part in parts if part is not None]


ExpertWeights.arrange = staticmethod(_arranged)


def _with_rows_on_16_bytes(x: QuantTensor) -> QuantTensor:
    # Else the GEMM copies the factors in each call. A word that K ends in is copied in any case: see `factor_words`.
    ready = x.sf.shape[-1] % 4 or is_tma_ready(x.sf)
    return x if ready else replace(x, sf=pad_factors(x.sf))


def unpack(
    experts: ExpertWeights, gate_up_layout: str = "concat", dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return gate_up, down, gate_up_bias, down_bias in `dtype`: the inverse of `pack`, up to the format's rounding.

    dtype: a floating-point one of 16 to 64 bits. Raises ValueError for another, or another layout.
    """
    expect_experts(experts)
    expect_choice("gate_up_layout", gate_up_layout, LAYOUTS)
    if dtype not in (*FLOATS, torch.float64):
        raise ValueError(f"dtype: expected bfloat16, float16, float32 or float64 of torch, got {dtype}")
    gate_up, down = _widen(experts.gate_up, dtype), _widen(experts.down, dtype)
    gate_up_bias = None if experts.gate_up_bias is None else experts.gate_up_bias.to(dtype)
    down_bias = None if experts.down_bias is None else experts.down_bias.to(dtype)
    kept = experts.gate_up_layout if has_gate(experts.activation) else gate_up_layout
    gate_up = _without_padding(_in_layout(gate_up_layout, gate_up, kept), experts, gate_up_layout)
    down = down[..., : down.shape[-1] - experts.padding]
    if gate_up_bias is not None:
        rows = _in_layout(gate_up_layout, gate_up_bias, kept, dim=-1)
        gate_up_bias = _without_padding(rows[..., None], experts, gate_up_layout)[..., 0]
    return gate_up, down, gate_up_bias, down_bias


def _without_padding(rows: torch.Tensor, experts: ExpertWeights, layout: str) -> torch.Tensor:
    """Return rows [E, R, C] of gate and up in a layout without those that `padding_of` has added."""
    if not experts.padding:
        return rows
    parts = 2 if has_gate(experts.activation) and layout == "concat" else 1
    kept = rows.shape[1] - experts.padding * (1 + has_gate(experts.activation))
    return rows.unflatten(1, (parts, -1))[:, :, : kept // parts].flatten(1, 2)


def _widen(weight: Matrix, dtype: torch.dtype) -> torch.Tensor:
    return weight.to(dtype) if isinstance(weight, torch.Tensor) else dequantize(weight, torch.float64).to(dtype)


def check_sizes(hidden: int, intermediate: int, format: Format) -> None:
    """Raise ValueError unless a format's groups, and the kernels' vectors of 8, divide both sizes."""
    why = _unfit(hidden, intermediate, format)
    if why:
        others = "bf16 and fp8_row need a multiple of 8, nvfp4 of 16, int4, mxfp8, mxfp4, mxfp4_fp8, mxfp4_mxfp8 of 32"
        raise ValueError(f"{why} ({others}, fp8_block128 of 128)")


def _unfit(hidden: int, intermediate: int, format: Format) -> str:
    """Return which size a format's kernels can't have, and why; "" if they can have both."""
    need = max(8, format.group_k)
    for name, size in (("hidden", hidden), ("intermediate", intermediate)):
        if size % need or size == 0:
            return f"{name}: expected a positive multiple of {need} for format {format.name!r}, got {size}"
    return ""


def _check_shapes(gate_up, down, gate_up_bias, down_bias, gated: bool) -> None:
    _expect_matrix("gate_up", gate_up, ("num_experts", "2 * intermediate" if gated else "intermediate", "hidden"))
    num_experts, rows, hidden = gate_up.shape
    if gated and rows % 2:
        raise ValueError(f"gate_up.shape[1]: expected 2 * intermediate, an even number, got {rows}")
    intermediate = rows // 2 if gated else rows
    _expect_matrix("down", down, (num_experts, hidden, intermediate), gate_up.device)
    if isinstance(gate_up, QuantTensor) != isinstance(down, QuantTensor):
        raise ValueError(f"gate_up, down: expected both quantised or neither, got {_said(gate_up)} and {_said(down)}")
    if (gate_up_bias is None) != (down_bias is None):
        raise ValueError("gate_up_bias, down_bias: expected both or neither, got one of them")
    if gate_up_bias is not None:
        expect_tensor("gate_up_bias", gate_up_bias, FLOATS, (num_experts, rows), gate_up.device)
        expect_tensor("down_bias", down_bias, FLOATS, (num_experts, hidden), gate_up.device)


def _expect_matrix(name: str, weight: Matrix, shape: Sequence[Dim], device: torch.device | None = None) -> None:
    if not isinstance(weight, QuantTensor):
        expect_tensor(name, weight, FLOATS, shape, device)
        return
    wanted = [size for size in shape if isinstance(size, int)]
    if len(weight.shape) != 3 or (wanted and list(weight.shape[-len(wanted) :]) != wanted):
        raise ValueError(f"{name}: expected [{', '.join(map(str, shape))}], got {weight}")
    expect_tensor(f"{name}.values", weight.values, None, None, device)


def _said(weight: Matrix) -> str:
    return describe(weight) if isinstance(weight, torch.Tensor) else repr(weight)
