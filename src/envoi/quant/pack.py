"""Weight packing: the order of gate and up rows, and the casts that are worth a search because they happen once."""

from dataclasses import replace

import torch

from envoi.check import expect_divisible
from envoi.quant.bits import e2m1_decode, e2m1_encode, e8m0_to_float, pack_nibbles
from envoi.quant.cast import quantize
from envoi.quant.formats import SCHEMES, Scheme
from envoi.types import Matrix, QuantTensor


def interleave_gate_up(concat: torch.Tensor, dim: int = -2) -> torch.Tensor:
    """Rows [gate 0 .. gate I-1, up 0 .. up I-1] -> [gate 0, up 0, gate 1, up 1, ..] along `dim`, a copy.

    So that a gate and its up value always share a tile of the GEMM, however the tiles are cut.
    """
    expect_divisible(f"gate_up.shape[{dim}]", concat.shape[dim], 2, "gate rows and as many up rows")
    gate, up = concat.chunk(2, dim=dim)
    return torch.stack((gate, up), dim=dim % concat.dim() + 1).flatten(dim % concat.dim(), dim % concat.dim() + 1)


def deinterleave_gate_up(interleaved: torch.Tensor, dim: int = -2) -> torch.Tensor:
    """The inverse of `interleave_gate_up`."""
    expect_divisible(f"gate_up.shape[{dim}]", interleaved.shape[dim], 2, "gate and up rows in turn")
    pairs = interleaved.unflatten(dim, (interleaved.shape[dim] // 2, 2))
    return torch.cat(pairs.unbind(dim % interleaved.dim() + 1), dim=dim)


def pack_weight(weight: torch.Tensor, scheme: Scheme | None, name: str) -> Matrix:
    """[.., N, K] float -> bf16 (scheme None) or a QuantTensor. Raises ValueError if K isn't a multiple of the group."""
    if scheme is None:
        return weight.to(torch.bfloat16).contiguous()
    if scheme.name == "mxfp4":
        return tamed(_mxfp4_least_squares(weight, name))
    return tamed(quantize(weight.contiguous(), scheme, name))


TAMEST = 128  # the byte of a UE8M0 scale factor of 2


def tamed(x: QuantTensor) -> QuantTensor:
    """The same with `tame` set if it is. Looks at all of it, and waits for the device."""
    if x.sf.dtype != torch.float8_e8m0fnu or x.device.type == "meta" or not x.sf.numel():
        return x
    tame = int(x.sf.view(torch.uint8).max()) <= TAMEST
    # The two NaNs of E4M3 are the largest byte but for the sign.
    tame = tame and (x.packed or int((x.values.view(torch.uint8) & 0x7F).max()) < 0x7F)
    return replace(x, tame=tame)


def _mxfp4_least_squares(weight: torch.Tensor, name: str) -> QuantTensor:
    """MXFP4 whose scale is, group by group, the better in squared error of the one that clips nothing and its half.

    With 8 magnitudes, clipping one large weight often costs less than a coarser grid for the other 31.
    """
    group = SCHEMES["mxfp4"].group
    wide = quantize(weight.contiguous(), "mxfp4", name)
    groups = weight.float().unflatten(-1, (-1, group[1]))
    exponent = wide.sf.view(torch.uint8)
    codes, error = _encode_with(groups, exponent)
    halved = torch.where(exponent == 255, exponent, (exponent - 1).clamp(min=1))
    halved_codes, halved_error = _encode_with(groups, halved)
    better = halved_error < error  # never true of a group with a NaN
    sf = torch.where(better, halved, exponent).view(torch.float8_e8m0fnu)
    codes = torch.where(better.unsqueeze(-1), halved_codes, codes)
    return QuantTensor(pack_nibbles(codes.flatten(-2)), sf, group)


def _encode_with(groups: torch.Tensor, exponent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [.., G, 32] under UE8M0 bytes [.., G] -> nibbles [.., G, 32] and squared errors [.., G]."""
    scale = e8m0_to_float(exponent.view(torch.float8_e8m0fnu)).unsqueeze(-1)
    codes = e2m1_encode(groups / scale)
    return codes, (e2m1_decode(codes) * scale - groups).square().sum(-1)
