"""INT4 weights: q from 0 to 15 stands for (q - zero point) * factor, one of each for a group of columns of a row.

Zero points and factors are a checkpoint's, integers from 0 to 15 (8 if there are none), and bfloat16 or float16. So a
number has up to five significant bits times eight or eleven: float32 holds it exactly, bfloat16 doesn't.
"""

from dataclasses import replace

import torch

from envoi.quant.bits import pack_nibbles
from envoi.quant.formats import INT4
from envoi.types import QuantTensor

FACTORS = torch.bfloat16, torch.float16
MIDDLE = 8  # the zero point of weights that have none
LARGEST_ZERO = 15
MAX_LEVEL = 7.5  # that a group's largest magnitude becomes; the largest level is rounded to 7, the smallest to -8


def quantize_int4(weight: torch.Tensor) -> QuantTensor:
    """Quantise weights [.., N, K] symmetrically, a bfloat16 factor for 32 columns: the largest magnitude over 7.5.

    A NaN or an infinity makes its whole group NaN, and no other. K is a multiple of 32.
    """
    groups = weight.float().unflatten(-1, (-1, INT4.group[1]))
    amax = groups.abs().amax(-1) if groups.numel() else groups.new_zeros(groups.shape[:-1])
    amax = amax.masked_fill(amax.isinf(), float("nan"))
    sf = (amax / MAX_LEVEL).to(torch.bfloat16)
    sf = torch.where(sf == 0, torch.ones_like(sf), sf)
    levels = (groups / sf.float().unsqueeze(-1)).round().clamp(-MIDDLE, MIDDLE - 1).nan_to_num(0.0)
    codes = (levels + MIDDLE).to(torch.uint8).flatten(-2)
    return QuantTensor(pack_nibbles(codes), sf, INT4.group)


def with_columns(x: QuantTensor, columns: int) -> QuantTensor:
    """Return x with factors and zero points for so many columns, which divide its own: repeated, no number changes."""
    times = x.group[1] // columns
    if times == 1:
        return x
    sf = x.sf.repeat_interleave(times, dim=-1)
    zeros = None if x.zeros is None else x.zeros.repeat_interleave(times, dim=-1)
    return replace(x, sf=sf, zeros=zeros, group=(1, columns))


def without_needless_zeros(x: QuantTensor) -> QuantTensor:
    """Return x without zero points if all of them are 8. Reads them, and waits for the device."""
    readable = x.zeros is not None and x.zeros.device.type != "meta"
    return replace(x, zeros=None) if readable and bool((x.zeros == MIDDLE).all()) else x


def to_codes(codes: torch.Tensor) -> torch.Tensor:
    """Convert q to the codes of symmetric weights in fragments: sign in bit 0, above it n = q - 8, or -n - 1 below 0.

    An odd way to write a sign and a magnitude; kernels make an E4M3 number of it in two operations for four weights.
    """
    return torch.where(codes >= MIDDLE, (codes - MIDDLE) << 1, (MIDDLE - 1 - codes) << 1 | 1)


def from_codes(codes: torch.Tensor) -> torch.Tensor:
    """Invert `to_codes`."""
    magnitude = codes >> 1
    return torch.where(codes & 1 == 1, MIDDLE - 1 - magnitude, MIDDLE + magnitude)
