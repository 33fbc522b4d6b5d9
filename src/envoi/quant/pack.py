"""Weight packing: the order of gate and up rows, and casts that search for the best scale, since they run once."""

from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensor

from envoi.check import describe, expect_divisible
from envoi.quant import fp8_fragments
from envoi.quant.bits import e2m1_decode, e2m1_encode, e8m0_ceil, e8m0_to_float, pack_nibbles
from envoi.quant.cast import quantize
from envoi.quant.formats import E2M1_MAX, E4M3_MAX, INT4, SCHEMES, Scheme
from envoi.quant.int4 import quantize_int4
from envoi.runtime.math import cdiv
from envoi.types import Matrix, QuantTensor


def interleave_gate_up(concat: torch.Tensor, dim: int = -2) -> torch.Tensor:
    """Copy rows [gate 0 .. gate I-1, up 0 .. up I-1] into the order [gate 0, up 0, gate 1, up 1, ..] along `dim`.

    A gate and its up value then share a tile of the GEMM, whatever its size.
    """
    expect_divisible(f"gate_up.shape[{dim}]", concat.shape[dim], 2, "gate rows and as many up rows")
    return _swapped(concat, (2, concat.shape[dim] // 2), dim)


def deinterleave_gate_up(interleaved: torch.Tensor, dim: int = -2) -> torch.Tensor:
    """Copy interleaved rows back into the order of gates, then ups; inverse of `interleave_gate_up`."""
    expect_divisible(f"gate_up.shape[{dim}]", interleaved.shape[dim], 2, "gate and up rows in turn")
    return _swapped(interleaved, (interleaved.shape[dim] // 2, 2), dim)


def _swapped(x: torch.Tensor, sizes: tuple[int, int], dim: int) -> torch.Tensor:
    """Copy x with `dim` seen as two of these sizes, and these in the other order.

    Not by torch.stack or torch.cat, which autocast refuses for a 16-bit dtype that isn't its own.
    """
    dim %= x.dim()
    swapped = x.unflatten(dim, sizes).transpose(dim, dim + 1)
    return swapped.clone(memory_format=torch.contiguous_format).flatten(dim, dim + 1)


def pack_weight(weight: torch.Tensor, scheme: Scheme | None, name: str) -> Matrix:
    """Cast a float weight [.., N, K] to bf16 (scheme None) or quantise it. Raises ValueError if the group doesn't
    divide K."""
    if scheme is None:
        return weight.to(torch.bfloat16).contiguous()
    if scheme.name == "mxfp4":
        return with_checked_scales(_mxfp4_least_squares(weight, name))
    if scheme.name == "nvfp4":
        return _nvfp4_under_scales(weight, name)
    if scheme == INT4:
        expect_divisible(f"{name}.shape[-1]", weight.shape[-1], INT4.group[1], "int4 shares a factor over 32 columns")
        return quantize_int4(weight)
    return with_checked_scales(quantize(weight.contiguous(), scheme, name))


def expect_bf16_numbers(weight: Matrix, name: str) -> None:
    """Raise ValueError for fp16 or fp32 weights [E, N, K] that bf16 can't hold exactly. Waits for the device."""
    if not isinstance(weight, torch.Tensor) or weight.dtype not in (torch.float16, torch.float32) or not weight.dim():
        return
    if weight.device.type == "meta" or isinstance(weight, FakeTensor):
        return
    experts = weight.detach().unbind()  # one at a time: less memory
    changed = sum(int(((x.bfloat16() != x) & ~x.isnan()).sum()) for x in experts)
    if changed:
        raise ValueError(
            f"{name}: expected weights that bfloat16 holds exactly, got {describe(weight)} of which it would round "
            f"{changed} of {weight.numel()}: pass format='bf16' or requantize=True to round them"
        )


LARGEST_SCALE_BYTE = 128  # UE8M0 byte of the scale factor 2


def with_checked_scales(x: QuantTensor) -> QuantTensor:
    """Return x with `scales_at_most_2` as its factors and elements allow. Reads all of x; waits for the device."""
    if x.order == fp8_fragments.ORDER:
        return fp8_fragments.in_near_shifts(x)
    readable = x.device.type != "meta" and not isinstance(x.values, FakeTensor)
    if x.sf.dtype != torch.float8_e8m0fnu or not readable or not x.sf.numel():
        return x
    bounded = int(x.sf.view(torch.uint8).max()) <= LARGEST_SCALE_BYTE
    # Without the sign bit, E4M3's NaN is the largest byte.
    bounded = bounded and (x.packed or int((x.values.view(torch.uint8) & 0x7F).max()) < 0x7F)
    return replace(x, scales_at_most_2=bounded)


def _mxfp4_least_squares(weight: torch.Tensor, name: str) -> QuantTensor:
    """Quantise to MXFP4, with each group's scale either the one that clips nothing or half of it: least squared error.

    With 8 magnitudes, clipping one large weight often costs less than a coarser grid for the other 31.
    """
    group = SCHEMES["mxfp4"].group
    wide = quantize(weight.contiguous(), "mxfp4", name)
    groups = weight.float().unflatten(-1, (-1, group[1]))
    exponent = wide.sf.view(torch.uint8)
    codes, error = _encode_with(groups, exponent)
    halved = torch.where(exponent == 255, exponent, (exponent - 1).clamp(min=1))
    halved_codes, halved_error = _encode_with(groups, halved)
    better = halved_error < error  # False for a group with a NaN
    sf = torch.where(better, halved, exponent).view(torch.float8_e8m0fnu)
    codes = torch.where(better.unsqueeze(-1), halved_codes, codes)
    return QuantTensor(pack_nibbles(codes.flatten(-2)), sf, group)


def _nvfp4_under_scales(weight: torch.Tensor, name: str) -> QuantTensor:
    """Quantise each matrix of [.., N, K] to NVFP4 under a scale of its own, which `QuantTensor.scale` has for each row.

    The scale is the smallest power of two with which no group's factor is above what E4M3 holds, so that dividing by it
    rounds nothing. A number that isn't finite spoils its own group only.
    """
    x = weight.contiguous().float()
    finite = torch.where(x.isfinite(), x.abs(), 0.0).flatten(-2)
    amax = finite.amax(-1) if finite.numel() else finite.new_zeros(finite.shape[:-1])
    largest = e8m0_to_float(e8m0_ceil(amax / (E2M1_MAX * E4M3_MAX)))
    scale = torch.where(amax == 0, 1.0, largest)
    q = quantize(x / scale[..., None, None], "nvfp4", name)
    return replace(q, scale=scale.unsqueeze(-1).expand(q.shape[:-1]).contiguous())


def _encode_with(groups: torch.Tensor, exponent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode float32 [.., G, 32] with UE8M0 bytes [.., G]; return nibbles [.., G, 32] and squared errors [.., G]."""
    scale = e8m0_to_float(exponent.view(torch.float8_e8m0fnu)).unsqueeze(-1)
    codes = e2m1_encode(groups / scale)
    squares = (e2m1_decode(codes) * scale - groups).square()
    while squares.shape[-1] > 1:  # added in one order on every device, on which the choice at a tie depends
        half = squares.shape[-1] // 2
        squares = squares[..., :half] + squares[..., half:]
    return codes, squares[..., 0]


def pad_factors(sf: torch.Tensor) -> torch.Tensor:
    """Copy scale factors [.., N, K / 32] into memory whose rows are on 16 bytes, with zeros after each row."""
    raw = sf.view(torch.uint8)
    columns = raw.shape[-1]
    padded = raw.new_zeros(*raw.shape[:-1], cdiv(columns, 16) * 16)
    padded[..., :columns] = raw
    return padded[..., :columns].view(sf.dtype)
