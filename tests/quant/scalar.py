"""Formats in plain Python, one number at a time: the reference for the vectorised casts."""

import math

E4M3_VALUES = sorted(
    (m / 8 if e == 0 else 1 + m / 8) * 2.0 ** (max(e, 1) - 7) for e in range(16) for m in range(8) if (e, m) != (15, 7)
)
E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def small_float_code(x: float, bias: int, mantissa_bits: int, largest: float) -> int:
    """Return the code of a finite x without its sign bit: exponent and mantissa in place, nearest even, saturating."""
    size = min(abs(x), largest)
    exponent = max(math.frexp(size)[1] - 1, 1 - bias) if size else 1 - bias
    steps = round(math.ldexp(size, mantissa_bits - exponent))  # Python rounds halves to even; ldexp is exact
    return (exponent + bias - 1 << mantissa_bits) + steps  # a carry out of the mantissa increments the exponent


def e4m3_code(x: float) -> int:
    """Return the byte of a finite x."""
    return small_float_code(x, 7, 3, 448.0) | (0x80 if math.copysign(1, x) < 0 else 0)


def e2m1_code(x: float) -> int:
    """Return the nibble of a finite x."""
    return small_float_code(x, 1, 1, 6.0) | (0x8 if math.copysign(1, x) < 0 else 0)


def e4m3_value(code: int) -> float:
    """Return the value of a byte; 0x7F and 0xFF are NaN."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 0xF, code & 7
    if (exponent, mantissa) == (15, 7):
        return math.nan
    return sign * math.ldexp(mantissa / 8 + (exponent > 0), max(exponent, 1) - 7)


def e8m0_ceil_code(x: float) -> int:
    """Return the byte of the smallest power of two that isn't below a positive float32 x, from 2^-126; 255 = NaN."""
    if not math.isfinite(x):
        return 255
    mantissa, exponent = math.frexp(x)
    return max(exponent - (mantissa == 0.5) + 127, 1) if x else 1
