"""Operations of the epilogue language on results known up to an error, by their definitions.

Rounding: an operation is right to 4 u, one with an exponential or a logarithm of x to (64 + 8 |x|) u; see `approx`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tests.fuzz.approx import LARGEST, TINY, Approx, U, approx, between, exact, gelu, silu

Function = Callable[[torch.Tensor], torch.Tensor]


def rising(x: Approx, f: Function, units: float = 4.0, by_size: float = 0.0, at_least: float = 0.0) -> Approx:
    """Apply a function that never falls; anything stays anything.

    It is computed to `units` + by_size * |x| units of its value, the latter for x < 0 only, or of at_least where the
    value is smaller.
    """
    low, high = (f(end) for end in x.ends())
    found = between(torch.minimum(low, high), torch.maximum(low, high))
    size = found.mid.abs().clamp(min=at_least)
    grown = (units - by_size * x.mid.clamp(-1e6, 0.0)) * U * size
    beyond = x.mid.isfinite() & (found.mid.abs() + found.err > LARGEST)  # a later addition may be fused with it
    return approx(found.mid, found.err + grown + TINY).freed(x.err.isinf() | found.err.isinf() | beyond)


def limited(x: Approx, low: float | None, high: float | None) -> Approx:
    """Clamp to [low, high]; NaN stays, and anything."""
    return between(*(end.clamp(low, high) for end in x.ends())).freed(x.err.isinf())


def negative(x: Approx) -> Approx:
    """Return -x."""
    return Approx(-x.mid, x.err)


def magnitude(x: Approx) -> Approx:
    """Return |x|."""
    low, high = x.ends()
    least = torch.where((low <= 0) & (high >= 0), 0.0, torch.minimum(low.abs(), high.abs()))
    return between(least, torch.maximum(low.abs(), high.abs())).freed(x.err.isinf())


def minus(x: Approx, y: Approx) -> Approx:
    """Return x - y."""
    return x + negative(y)


def smaller(x: Approx, y: Approx) -> Approx:
    """Return the smaller of both; NaN if either is."""
    low, high = (torch.minimum(a, b) for a, b in zip(x.ends(), y.ends(), strict=True))
    return between(low, high).freed(x.err.isinf() | y.err.isinf())


def larger(x: Approx, y: Approx) -> Approx:
    """Return the larger of both; NaN if either is."""
    return negative(smaller(negative(x), negative(y)))


def inverse(x: Approx) -> Approx:
    """Return 1 / x for x that can't be negative; anything where it may be 0."""
    low, high = x.ends()
    found = between(1 / high, 1 / low)
    return approx(found.mid, found.err + 4 * U * found.mid.abs() + TINY).freed((low <= 0) | x.err.isinf())


def choice(x: Approx, y: Approx, a: Approx, b: Approx) -> Approx:
    """Return a where x > y, b elsewhere, also beside NaN; what lies between both where x may be y."""
    (x_low, x_high), (y_low, y_high) = x.ends(), y.ends()
    unknown = x.err.isinf() | y.err.isinf()
    yes, no = (x_low > y_high) & ~unknown, ~(x_high > y_low) & ~unknown
    low, high = (torch.where(yes, p, torch.where(no, q, s)) for p, q, s in zip(
        a.ends(), b.ends(), (torch.minimum(a.ends()[0], b.ends()[0]), torch.maximum(a.ends()[1], b.ends()[1])),
        strict=True,
    ))  # fmt: skip
    either = ~(yes | no)
    nan = either & (a.mid.isnan() | b.mid.isnan())
    free = torch.where(yes, a.err.isinf(), torch.where(no, b.err.isinf(), a.err.isinf() | b.err.isinf()))
    return between(low, high).freed(free | nan)


def unless_nan(x: Approx, y: float) -> Approx:
    """Return x, y where it is NaN."""
    return Approx(x.mid.masked_fill(x.mid.isnan(), y), x.err)


def unless_zero(x: Approx, y: float) -> Approx:
    """Return x, y where it is 0; what lies between both where it may be."""
    (low, high), other = x.ends(), torch.full_like(x.mid, y)
    maybe, surely = (low <= 0) & (high >= 0), (low == 0) & (high == 0)
    low = torch.where(surely, other, torch.where(maybe, torch.minimum(low, other), low))
    high = torch.where(surely, other, torch.where(maybe, torch.maximum(high, other), high))
    return between(low, high).freed(x.err.isinf())


def hardswish(x: Approx) -> Approx:
    """Return x * clip(x + 3, 0, 6) / 6, whose derivative is within 1.5; anything for -inf.

    Also where the product is infinite before it is divided.
    """
    mid = x.mid * (x.mid + 3).clamp(0, 6) / 6
    found = approx(mid, 1.5 * x.err + 8 * U * (mid.abs() + x.mid.abs()) + TINY)
    return found.freed((x.mid == -torch.inf) | (x.mid.isfinite() & (6 * (x.mid.abs() + x.err) > LARGEST)))


def gelu_tanh(x: Approx) -> Approx:
    """Return gelu by tanh, x * sigmoid(2 u), whose derivative is within 1.13; anything for -inf."""
    z = (1.5957691216057308 * (x.mid + 0.044715 * x.mid**3)).clamp(-1e6, 1e6)
    mid = x.mid * torch.sigmoid(z)
    grown = mid.abs() * (32 + 16 * z.abs() * torch.sigmoid(-z)) * U
    return approx(mid, 1.13 * x.err + grown + (1 + x.mid.abs()) * TINY).freed(x.mid == -torch.inf)


def exponential(x: Approx) -> Approx:
    """Return e^x for x that isn't far above 0."""
    return rising(x, torch.exp, 64, 8)


def one_more(x: Approx) -> Approx:
    """Return 1 + |x|."""
    return limited(magnitude(x) + exact(1.0), 1.0, None)


def root(x: Approx) -> Approx:
    """Return the square root of x, which can't be negative."""
    return rising(x, lambda v: v.clamp(min=0.0).sqrt())


def logarithm(x: Approx, f: Function) -> Approx:
    """Return a logarithm of x, which can't be below 1."""
    return rising(x, lambda v: f(v.clamp(min=1.0)), 64, at_least=1.0)


def square(x: Approx) -> Approx:
    """Return x * x."""
    return rising(magnitude(x), torch.square)


UNARY: dict[str, Callable[[Approx], Approx]] = {
    "relu({})": lambda x: limited(x, 0.0, None),
    "silu({})": silu,
    "gelu({})": gelu,
    'gelu({}, "tanh")': gelu_tanh,
    "tanh({})": lambda x: rising(x, torch.tanh, 64),
    "sigmoid({})": lambda x: rising(x, torch.sigmoid, 64, 8),
    "hardswish({})": hardswish,
    "leaky_relu({}, 0.25)": lambda x: rising(x, lambda v: torch.where(v > 0, v, 0.25 * v)),
    "softplus({})": lambda x: rising(x, torch.nn.functional.softplus, 128, 8),
    "abs({})": magnitude,
    "-{}": negative,
    "{} ** 2": square,
    "{} ** 3": lambda x: square(x) * x,
    "exp(-abs({}))": lambda x: exponential(negative(magnitude(x))),
    "exp2(-abs({}))": lambda x: rising(negative(magnitude(x)), torch.exp2, 64, 8),
    "sqrt(abs({}))": lambda x: root(magnitude(x)),
    "rsqrt(1.0 + abs({}))": lambda x: inverse(root(one_more(x))),
    "log(1.0 + abs({}))": lambda x: logarithm(one_more(x), torch.log),
    "log2(1.0 + abs({}))": lambda x: logarithm(one_more(x), torch.log2),
    "clip({}, -1.5, 2.0)": lambda x: limited(x, -1.5, 2.0),
    "where({0} == {0}, {0}, 1.0)": lambda x: unless_nan(x, 1.0),
    "where({0} != 0.0, {0}, -1.0)": lambda x: unless_zero(x, -1.0),
    "round_bf16({})": lambda x: x.rounded(torch.bfloat16).freed(x.err.isinf()),
}  # fmt: skip
BINARY: dict[str, Callable[[Approx, Approx], Approx]] = {
    "{} + {}": lambda x, y: x + y,
    "{} - {}": minus,
    "{} * {}": lambda x, y: x * y,
    "{} / (1.0 + abs({}))": lambda x, y: x * inverse(one_more(y)),
    "minimum({}, {})": smaller,
    "maximum({}, {})": larger,
    "where({0} > {1}, {0}, 0.5 * {1})": lambda x, y: choice(x, y, x, exact(0.5) * y),
    "where(~({0} < {1}), {1}, {0})": lambda x, y: choice(y, x, x, y),
    "where({0} <= {1}, {0}, {1})": lambda x, y: choice(y, x, x, y),
    "where({0} >= {1}, {0}, {1})": lambda x, y: choice(x, y, x, y),
    "where(({0} > {1}) & ({0} > 0.5), {0}, {1})": lambda x, y: choice(x, y, choice(x, exact(0.5), x, y), y),
    "where(({0} > {1}) | ({0} > 0.5), {0}, {1})": lambda x, y: choice(x, y, x, choice(x, exact(0.5), x, y)),
}


@dataclass(frozen=True)
class Sums:
    """Sum, largest value and largest magnitude over a dimension, of values of which one may be NaN or anything."""

    x: Approx
    dim: int

    def total(self) -> Approx:
        """Return the sum, in any order."""
        count, size = self.x.mid.shape[self.dim], (self.x.mid.abs() + self.x.err)
        size = torch.where(size.isfinite(), size, 0.0).sum(self.dim)
        mid = self.x.mid.sum(self.dim)
        err = self.x.err.sum(self.dim) + (count + 4) * U / 2 * size + TINY
        return approx(mid, err).freed(self.x.err.isinf().any(self.dim) | (size > LARGEST))

    def largest(self, of_none: float = -torch.inf) -> Approx:
        """Return the largest value; a NaN among them frees it."""
        if not self.x.mid.shape[self.dim]:
            return exact(torch.full_like(self.x.mid.sum(self.dim), of_none))
        low, high = (end.amax(self.dim) for end in self.x.ends())
        free = (self.x.err.isinf() | self.x.mid.isnan()).any(self.dim)
        return between(low.masked_fill(free, 0.0), high.masked_fill(free, 0.0)).freed(free)

    def magnitude(self) -> Approx:
        """Return the largest magnitude."""
        return Sums(magnitude(self.x), self.dim).largest(0.0)


def candidates(x: Approx) -> Approx:
    """Return x as `topk` chooses from it: -inf instead of NaN."""
    return unless_nan(x, -torch.inf)


def best(x: Approx, k: int) -> Approx:
    """Return the k largest of each row, -inf where there are fewer; anything in a row with a value that may be."""
    ends = [torch.nn.functional.pad(end, (0, k), value=-torch.inf).topk(k).values for end in candidates(x).ends()]
    return between(*ends).freed(x.err.isinf().any(1, keepdim=True).expand_as(ends[0]))


REDUCTIONS: dict[str, Callable[[Sums], Approx]] = {
    "sum": Sums.total, "max": Sums.largest, "absmax": Sums.magnitude,
}  # fmt: skip


def wide(x: Approx) -> Approx:
    """Return row values [M] as [M, 1]."""
    return x[:, None]


def centred(x: Approx) -> Approx:
    """Return e^(x - the row's largest value)."""
    return exponential(minus(x, wide(Sums(x, 1).largest())))


def softmax(x: Approx) -> Approx:
    """Return the softmax of each row; anything in a row with NaN or infinity."""
    free = ~x.mid.isfinite().all(1, keepdim=True) | x.err.isinf().any(1, keepdim=True)
    powers = centred(x.freed(free.expand_as(x.mid)))
    return (powers * inverse(wide(Sums(powers, 1).total()))).freed(free.expand_as(x.mid))


OVER_ROWS: dict[str, Callable[[Approx], Approx]] = {
    "softmax({})": softmax,
    "exp({0} - row_max({0}))": centred,
    "{0} / (1.0 + row_absmax({0}))": lambda x: x * inverse(one_more(wide(Sums(x, 1).magnitude()))),
    "{0} * rsqrt(1.0 + row_sum({0} * {0}))": lambda x: x * inverse(root(one_more(wide(Sums(square(x), 1).total())))),
}
