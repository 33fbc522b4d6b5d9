"""Casts to and from the block-scaled formats, for any leading shape and any device.

For each group of the scheme:
    amax = max |x|, at least AMAX_FLOOR                      (NaN stays NaN)
    float32 scale:  sf = amax / max_value,  value = cast(x * (max_value / amax))
    UE8M0 scale:    sf = smallest power of two >= amax / max_value,  value = cast(x / sf)
    E4M3 scale:     sf = cast(amax / max_value), value = cast(x * (1 / sf))   (nvfp4: groups above 448 * 6 are clipped,
                    groups far below 1 vanish; divide by a scale of the whole tensor first, into QuantTensor.scale)
cast rounds to nearest even and saturates. With a float32 or UE8M0 scale no element is clipped.
"""

import torch

from envoi.check import describe, expect_divisible, expect_no_gradients, expect_tensor
from envoi.quant.bits import e2m1_decode, e2m1_encode, e8m0_ceil, e8m0_to_float, pack_nibbles, unpack_nibbles
from envoi.quant.formats import SCHEMES, Scheme, scheme_named
from envoi.quant.fragments import to_rows
from envoi.runtime.custom_op import operator
from envoi.types import QuantTensor

AMAX_FLOOR = 1e-30  # keeps max_value / amax finite for a group of zeros

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def quantize(x: torch.Tensor, scheme: str | Scheme, name: str = "x") -> QuantTensor:
    """Quantise a floating-point tensor [.., R, C].

    scheme: a name of `SCHEMES` or a Scheme. C must be a multiple of the group's columns (R need not be of its rows).
    A NaN or an infinity anywhere in a group makes that whole group NaN, and no other. x is rounded to float32 first, as
    scale factors are float32 at most: a float64 number that float32 has no finite number for (above 3.4e38) is an
    infinity here. "nvfp4" keeps its accuracy where groups' largest magnitudes are between 0.012 and 2688, the range of
    its factors times 6: larger numbers are clipped, and smaller ones lose bits and become 0. Multiply such numbers by a
    power of two before, as `envoi.experts.pack` does for weights.
    Raises ValueError for a dtype that isn't floating point, a C that the group doesn't divide, or an x that requires
    grad while grad mode is on.
    """
    scheme = scheme if isinstance(scheme, Scheme) else scheme_named(scheme)
    if not isinstance(x, torch.Tensor) or x.dtype not in _FLOATS or x.dim() < 2:
        raise ValueError(f"{name}: expected a floating-point tensor [.., R, C], got {describe(x)}")
    expect_tensor(name, x)
    expect_no_gradients((name,), (x,))
    group = scheme.group_for(x.shape)
    if x.shape[-1] % group[1]:  # a traced size can't be printed, so the reason is only formatted for an error
        expect_divisible(
            f"{name}.shape[-1]", x.shape[-1], group[1], f"{scheme.name} shares a scale over {group[1]} columns"
        )
    if torch.compiler.is_compiling() and scheme == SCHEMES.get(scheme.name):
        values, sf = _compiled_quantize(x, scheme.name)
    else:
        values, sf = _quantize(x, scheme)
    return QuantTensor(values, sf, group)


def _quantize(x: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    group = scheme.group_for(x.shape)
    amax = group_amax(x.float(), group).clamp(min=AMAX_FLOOR)
    amax = amax.masked_fill(amax.isinf(), float("nan"))
    sf, multiplier = _scale_factors(amax, scheme)
    scaled = x.float() * expand_sf(multiplier, group, x.shape)
    return _encode(scaled, scheme), sf


def _like_quantized(x: torch.Tensor, scheme: str) -> tuple[torch.Tensor, torch.Tensor]:
    kind = scheme_named(scheme)
    *lead, rows, columns = x.shape
    group = kind.group_for(x.shape)
    values = x.new_empty((*lead, rows, columns // (2 if kind.values == torch.uint8 else 1)), dtype=kind.values)
    return values, x.new_empty((*lead, -(-rows // group[0]), columns // group[1]), dtype=kind.sf)


# Operators for compiled code: the compiler may divide otherwise than torch, which decides the bits of factors, and its
# code for CPUs knows no UE8M0.
@operator("quantize", _like_quantized, lambda *_: 0)
def _compiled_quantize(x: torch.Tensor, scheme: str) -> tuple[torch.Tensor, torch.Tensor]:
    return _quantize(x.contiguous(), scheme_named(scheme))


def group_amax(x: torch.Tensor, group: tuple[int, int]) -> torch.Tensor:
    """Return each group's largest magnitude, NaN if it holds one: [.., R, C] -> [.., ceil(R / rows), C / columns]."""
    *lead, rows, columns = x.shape
    num_row_groups, num_column_groups = -(-rows // group[0]), columns // group[1]
    padded = torch.nn.functional.pad(x.abs(), (0, 0, 0, num_row_groups * group[0] - rows))
    blocks = padded.reshape(*lead, num_row_groups, group[0], num_column_groups, group[1])
    return blocks.amax(dim=(-3, -1)) if blocks.numel() else blocks.new_zeros(*lead, num_row_groups, num_column_groups)


def expand_sf(sf: torch.Tensor, group: tuple[int, int], shape: tuple[int, ...] | torch.Size) -> torch.Tensor:
    """Repeat each group's scale factor for its elements, [.., R, C]; a dimension with a single scale keeps size 1."""
    rows, columns = shape[-2:]
    if group[0] not in (1, rows):
        sf = sf.repeat_interleave(group[0], dim=-2)[..., :rows, :]
    if group[1] != columns:
        sf = sf.repeat_interleave(group[1], dim=-1)[..., :columns]
    return sf


def _scale_factors(amax: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the stored scale factors of groups with these amax, and the float32 multipliers of their elements."""
    # Tensor by tensor: with a Python number torch may multiply by a reciprocal instead, which rounds twice.
    largest = torch.full_like(amax, scheme.max_value)
    if scheme.sf == torch.float8_e8m0fnu:
        sf = e8m0_ceil(amax / largest)
        return sf, 1.0 / e8m0_to_float(sf)
    if scheme.sf == torch.float8_e4m3fn:
        sf = (amax / largest).clamp(2**-9, 448.0).to(torch.float8_e4m3fn)
        return sf, 1.0 / sf.float()
    return amax / largest, largest / amax


def _encode(scaled: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    if scheme.values == torch.uint8:
        return pack_nibbles(e2m1_encode(scaled))
    return scaled.clamp(-scheme.max_value, scheme.max_value).to(scheme.values)


def decode_values(q: QuantTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the elements without their scale factors, [.., R, C] in `dtype`, exactly."""
    q = to_rows(q)
    if q.integers:
        zeros = 8 if q.zeros is None else expand_sf(q.zeros, q.group, q.shape).to(torch.int16)
        return (unpack_nibbles(q.values).to(torch.int16) - zeros).to(dtype)
    return (e2m1_decode(unpack_nibbles(q.values)) if q.packed else q.values.float()).to(dtype)


def decode_sf(q: QuantTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the scale factors in `dtype`, exactly, without the tensor-wide scale."""
    q = to_rows(q)
    return (e8m0_to_float(q.sf) if q.sf.dtype == torch.float8_e8m0fnu else q.sf.float()).to(dtype)


def dequantize(q: QuantTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return values times scale factors, rounded once: [.., R, C] in `dtype` (float32 or float64).

    A number that rounds up to 2^128, of 2.98e38 and more in "mxfp4" and 3.3e38 and more in "mxfp8", is that in float64
    and infinite in float32, which ends just below.
    Raises ValueError for anything but a QuantTensor, parts of it that aren't tensors or don't fit, and another dtype.
    """
    if not isinstance(q, QuantTensor):
        raise ValueError(f"q: expected a QuantTensor, got {describe(q)}")
    expect_tensor("q.values", q.values, (torch.float8_e4m3fn, torch.uint8))
    for name, part in (("sf", q.sf), ("scale", q.scale), ("zeros", q.zeros)):
        if name == "sf" or part is not None:
            expect_tensor(f"q.{name}", part, device=q.values.device)
    if q.values.dim() < 2:
        raise ValueError(f"q.values: expected [.., R, C], got {describe(q.values)}")
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype: expected torch.float32 or torch.float64, got {dtype}")
    rows, columns = q.shape[-2:]
    wanted = (*q.shape[:-2], -(-rows // q.group[0]), -(-columns // q.group[1]))
    if q.order == "rows" and tuple(q.sf.shape) != wanted:
        raise ValueError(f"q.sf: expected {list(wanted)}, a factor for each group, got {describe(q.sf)}")
    if q.scale is not None and q.scale.numel() != 1:
        expect_tensor("q.scale", q.scale, None, q.shape[:-1])
    if torch.compiler.is_compiling():
        return _compiled_dequantize(q.values, q.sf, q.scale, list(q.group), q.order, dtype, q.zeros)
    return _dequantize(q, dtype)


def _dequantize(q: QuantTensor, dtype: torch.dtype) -> torch.Tensor:
    q = to_rows(q)
    x = decode_values(q, dtype) * expand_sf(decode_sf(q, dtype), q.group, q.shape)
    if q.scale is None:
        return x
    scale = q.scale.to(dtype)
    return x * (scale if scale.numel() == 1 else scale.unsqueeze(-1))


def _like_dequantized(
    values: torch.Tensor, sf: torch.Tensor, scale: torch.Tensor | None, group: list[int], order: str,
    dtype: torch.dtype, zeros: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    return values.new_empty(QuantTensor(values, sf, (group[0], group[1]), scale, order=order).shape, dtype=dtype)


@operator("dequantize", _like_dequantized, lambda *_: 0)
def _compiled_dequantize(
    values: torch.Tensor, sf: torch.Tensor, scale: torch.Tensor | None, group: list[int], order: str,
    dtype: torch.dtype, zeros: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    q = QuantTensor(values, sf, (group[0], group[1]), scale, order=order, zeros=zeros)
    return _dequantize(q, dtype).contiguous()
