"""Bit-level conversions: E2M1 nibbles, UE8M0 powers of two, numbers of 8 bits as bytes."""

from collections.abc import Sequence

import torch

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """View numbers of 8 bits as uint8, which all of torch takes, unlike float8; return others as they are."""
    return x.view(torch.uint8) if x.itemsize == 1 else x


def concatenate(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors of one dtype, whichever it is, along their first dimension.

    As bytes: not all of torch takes float8, and autocast refuses a 16-bit dtype that isn't its own.
    """
    return torch.cat([part.view(torch.uint8) if part.itemsize <= 2 else part for part in parts]).view(parts[0].dtype)


def e2m1_encode(x: torch.Tensor) -> torch.Tensor:
    """Round float32 [..] to E2M1 nibbles in uint8 [..]: sign in bit 3, ties to even, saturating.

    Magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6. NaN becomes 0: E2M1 has none, and its group's scale factor is NaN already.
    """
    m = x.abs()
    code = (m > 0.25).to(torch.uint8)
    # Ties round to the even code, so every second threshold includes its own value.
    for threshold, inclusive in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += (m >= threshold) if inclusive else (m > threshold)
    return code | ((torch.signbit(x) & ~x.isnan()).to(torch.uint8) << 3)


def e2m1_decode(codes: torch.Tensor) -> torch.Tensor:
    """Convert E2M1 nibbles in uint8 [..] to float32 [..], exactly."""
    table = torch.tensor([*_E2M1, *(-v for v in _E2M1)], dtype=torch.float32, device=codes.device)
    return table[codes.long()]


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Pack nibbles uint8 [.., C] into uint8 [.., C / 2], the even column in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Unpack uint8 [.., C / 2] into nibbles uint8 [.., C]; inverse of `pack_nibbles`."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def e8m0_ceil(x: torch.Tensor) -> torch.Tensor:
    """Round x > 0, float32 [..], up to a power of two >= 2^-126 in float8_e8m0fnu [..]; NaN and inf give NaN."""
    bits = x.float().contiguous().view(torch.int32) & 0x7FFFFFFF  # reductions may set the sign of a NaN
    # Adding all mantissa bits carries into the exponent unless the mantissa is zero.
    exponent = ((bits.to(torch.int64) + 0x7FFFFF) >> 23).clamp(1, 255)
    return exponent.to(torch.uint8).view(torch.float8_e8m0fnu)


def e8m0_to_float(sf: torch.Tensor) -> torch.Tensor:
    """Convert float8_e8m0fnu [..] to float32 [..], exactly; 0xFF is NaN."""
    exponent = sf.view(torch.uint8).to(torch.int32)
    power = torch.where(exponent == 0, 0x00400000, exponent << 23)  # 2^-127 is subnormal
    return torch.where(exponent == 255, 0x7FC00000, power).to(torch.int32).view(torch.float32)
