"""The formats again, one Python number at a time: what the vectorised casts are compared with."""

import math

E4M3_VALUES = sorted(
    (m / 8 if e == 0 else 1 + m / 8) * 2.0 ** (max(e, 1) - 7) for e in range(16) for m in range(8) if (e, m) != (15, 7)
)
E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def nearest_even(x: float, values: list[float]) -> float:
    """The closest of ascending magnitudes with the sign of x; a tie goes to the one at an even place; saturating."""
    if math.isnan(x):
        return math.nan
    size = min(abs(x), values[-1])
    place = min(range(len(values)), key=lambda i: (abs(values[i] - size), i % 2))
    return math.copysign(values[place], x)


def power_of_two_from(x: float) -> float:
    """The smallest power of two that isn't below x."""
    mantissa, exponent = math.frexp(x)
    return 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)
