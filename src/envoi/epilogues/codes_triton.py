"""Conversions of narrow number formats as bits, in Triton, for GPUs without hardware casts and for the interpreter.

The interpreter's own casts are wrong: they truncate instead of rounding, and lose E4M3's NaN and bf16's subnormals.
"""

import triton
import triton.language as tl

from envoi.epilogues.device import INTERPRETED

E4M3_MIN_NORMAL: tl.constexpr = tl.constexpr(0.015625)


@triton.jit
def widen(x):
    """Convert any float to float32, exactly."""
    if INTERPRETED:
        if x.dtype == tl.bfloat16:
            return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
        else:
            return x.to(tl.float32)
    else:
        return x.to(tl.float32)


@triton.jit
def to_e4m3(x):
    """Round float32 to the bits of E4M3 in uint8: to nearest even, saturating."""
    bits = x.to(tl.int32, bitcast=True)
    a = tl.minimum(tl.abs(x), 448.0)
    # Below 2^-6 the codes count steps of 2^-9; adding 2^23 rounds to a whole number of them.
    small = (a * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 15
    wide = a.to(tl.int32, bitcast=True)
    normal = ((wide + 0x7FFFF + ((wide >> 20) & 1)) >> 20) - (120 << 3)
    code = tl.where(a < E4M3_MIN_NORMAL, small, normal)
    code = tl.where(x == x, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def from_e4m3(code):
    """Convert the bits of E4M3 to float32, exactly."""
    code = code.to(tl.int32)
    magnitude = code & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    x = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    x = tl.where(magnitude == 0x7F, float("nan"), x)
    return (x.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def from_e2m1(code):
    """Convert E2M1 nibbles to float32, exactly."""
    code = code.to(tl.int32)
    magnitude = code & 7
    normal = ((magnitude << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    x = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
    return (x.to(tl.int32, bitcast=True) | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def from_e8m0(code):
    """Convert the exponents of UE8M0 to float32, exactly; 255 is NaN."""
    code = code.to(tl.int32)
    bits = tl.where(code == 0, 0x00400000, code << 23)
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
