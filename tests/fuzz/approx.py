"""Results known up to an error: how far from float64 the arithmetic of float32 may be, step by step.

    sum of n products:   n * u * (|a| @ |b|), u = 2^-24; 2^-23 on a GPU, whose tensor cores truncate
    elementwise:         4 u for an operation, (64 + 8 |x|) u for one with an exponential of x: a GPU's are approximate
    rounding to a dtype: monotone, so it maps the ends of an interval to the ends of the result's

An error of inf stands for a value that may be anything, a value of NaN or infinity for exactly that.
"""

from dataclasses import dataclass

import torch

from tests.fuzz import formats
from tests.fuzz.formats import Scheme, round_to

U = 2.0**-22
TINY = 2.0**-126  # a result below the normal numbers may become 0
LARGEST = formats.FLOATS[torch.float32][2]


@dataclass(frozen=True)
class Approx:
    """Float64 values mid, each right to within err."""

    mid: torch.Tensor
    err: torch.Tensor

    def __add__(self, other: "Approx") -> "Approx":
        mid = self.mid + other.mid
        sum = approx(mid, self.err + other.err + U * (self.mid.abs() + other.mid.abs()))
        return sum.freed(self.err.isinf() | other.err.isinf())

    def __mul__(self, other: "Approx") -> "Approx":
        mid = self.mid * other.mid
        err = self.mid.abs() * other.err + other.mid.abs() * self.err + self.err * other.err
        # Infinity times what may be 0, and may be of any sign.
        either = self.mid.isinf() & (other.mid.abs() <= other.err) & (other.err > 0)
        either = either | (other.mid.isinf() & (self.mid.abs() <= self.err) & (self.err > 0))
        # Beyond float32 it is infinite, but not if an addition after it is fused with it.
        beyond = self.mid.isfinite() & other.mid.isfinite() & (mid.abs() + err > LARGEST)
        return approx(mid, err + U * mid.abs() + TINY).freed(either | beyond | self.err.isinf() | other.err.isinf())

    def freed(self, which: torch.Tensor) -> "Approx":
        """Let some values be anything."""
        return Approx(self.mid.masked_fill(which, 0.0), self.err.masked_fill(which, torch.inf))

    def __getitem__(self, index) -> "Approx":
        return Approx(self.mid[index], self.err[index])

    def clamp(self, low: float | None, high: float | None) -> "Approx":
        """Clamp to [low, high]; NaN stays."""
        return approx(self.mid.clamp(low, high), self.err)

    def rounded(self, dtype: torch.dtype) -> "Approx":
        """Round to a dtype of `formats.FLOATS`."""
        return between(*(round_to(end, dtype) for end in self.ends()))

    def ends(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the least and the largest right value."""
        return self.mid - self.err, self.mid + self.err


def approx(mid: torch.Tensor, err: torch.Tensor) -> Approx:
    """Make an Approx: infinity beyond float32, no error beside NaN and infinity, any value where the error is NaN or
    float32 may overflow."""
    mid = torch.where(mid.abs() - err > LARGEST * (1 + U), torch.sign(mid) * torch.inf, mid)
    err = torch.where(err.isnan() | (mid.abs() + err > LARGEST), torch.inf, err)
    return Approx(mid, torch.where(mid.isfinite(), err, 0.0))


def exact(x: torch.Tensor | float) -> Approx:
    """Make an Approx without error."""
    x = torch.as_tensor(x).detach().cpu().double()
    return Approx(x, torch.zeros_like(x))


def between(low: torch.Tensor, high: torch.Tensor) -> Approx:
    """Make an Approx of two ends."""
    same = (low == high) | low.isnan() | high.isnan()
    mid = torch.where(same, low, (low + high) / 2)
    err = torch.where(same, 0.0, (high - low) / 2 + 2.0**-51 * (low.abs() + high.abs()))  # float64 rounds mid and err
    either = (low.isinf() | high.isinf()) & ~same
    return Approx(mid.masked_fill(either, 0.0), err.masked_fill(either, torch.inf))


def silu(x: Approx, scale: float = 1.0) -> Approx:
    """Return x * sigmoid(scale * x), whose derivative is within 1.1, and small for negative x; anything for -inf."""
    mid = x.mid * torch.sigmoid(scale * x.mid)
    slope = torch.sigmoid(scale * (x.mid + x.err)) * (1 + scale * (x.mid.abs() + x.err))
    slope = torch.where(x.mid + x.err < 0, slope, 1.1).clamp(max=1.1)
    # exp(-z) has an error that grows with |z|, of which a sigmoid near 1 keeps little.
    z = scale * x.mid.clamp(-1e6, 1e6)
    err = x.err * slope + mid.abs() * (16 + 2 * z.abs() * torch.sigmoid(-z)) * U
    err = err + (1 + x.mid.abs()) * TINY  # a sigmoid below the normal numbers may become 0
    return approx(mid, err).freed(x.mid == -torch.inf)


def gelu(x: Approx) -> Approx:
    """Return x times the normal distribution function of x, whose derivative is within 1.13; anything for -inf."""
    mid = x.mid * torch.special.ndtr(x.mid)
    return approx(mid, 1.13 * x.err + 8 * x.mid.abs() * U + TINY).freed(x.mid == -torch.inf)


@dataclass(frozen=True)
class Arithmetic:
    """Arithmetic of the device's products. gpu: sums truncate. coarse: FP8 tensor cores of Hopper, which align 32
    products and the sum so far to 14 bits. more: roundings of the scaling beside those of the sum."""

    gpu: bool = False
    coarse: bool = False
    more: int = 8


def matmul(a: torch.Tensor, b: torch.Tensor, arithmetic: Arithmetic, a_err: torch.Tensor | None = None) -> Approx:
    """Return a [M, K] @ b [N, K].T of float64 operands that the kernels hold exactly, a up to a_err."""
    device = a.device
    if arithmetic.gpu and torch.cuda.is_available():  # float64 there too, and much faster
        a, b = a.cuda(), b.cuda()
        a_err = None if a_err is None else a_err.cuda()
        found = _matmul(a, b, arithmetic, a_err)
        return Approx(found.mid.to(device), found.err.to(device))
    return _matmul(a, b, arithmetic, a_err)


def _matmul(a: torch.Tensor, b: torch.Tensor, arithmetic: Arithmetic, a_err: torch.Tensor | None) -> Approx:
    mid, size = a @ b.T, a.abs() @ b.abs().T
    K = a.shape[1]
    whole = bool((a == a.round()).all() and (b == b.round()).all()) and bool((size < 2.0**11).all())
    if whole and a_err is None:
        return approx(mid, torch.zeros_like(mid))
    unit = 2.0**-23 if arithmetic.gpu else 2.0**-24
    err = (K + arithmetic.more) * unit * size + K * TINY
    if arithmetic.coarse:
        err = err + _coarse_error(a, b)
    err = torch.where(size == 0, 0.0, err)  # every product is 0
    found = approx(mid, err).freed(size.isfinite() & (size > LARGEST))
    if a_err is None:
        return found
    # Infinity times what may be 0, and may be of any sign.
    either = ((a.abs() <= a_err) & (a_err > 0)).double() @ b.isinf().double().T > 0
    return approx(found.mid, found.err + a_err @ b.abs().T * (1 + K * U)).freed(either | found.err.isinf())


def _coarse_error(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the error of sums of 32 products and the sum so far, each cut to 13 bits below the largest."""
    err = torch.zeros(len(a), len(b), dtype=torch.float64, device=a.device)
    total, reached = err.clone(), err.clone()
    for part_a, part_b in zip(a.split(32, 1), b.split(32, 1), strict=True):
        largest = torch.zeros_like(err)
        together = part_a.shape[1] if a.is_cuda else 1  # all at once fits a GPU's memory, and a CPU's cache one by one
        for k in range(0, part_a.shape[1], max(1, together)):
            x, y = part_a[:, k : k + together], part_b[:, k : k + together]
            largest = torch.maximum(largest, (x[:, None] * y[None]).abs().amax(2))
        total = total + part_a @ part_b.T
        reached = torch.maximum(reached, total.abs())
        err = err + 33 * 2.0**-13 * torch.maximum(largest, 2 * reached + err)
    return err


def requantised(x: Approx, scheme: Scheme) -> Approx:
    """Quantise rows [P, C] and widen them again: all that x within its error may become."""
    group = scheme.group(x.mid.shape)
    amax, spare = (formats.group_max(part, group) for part in (x.mid.abs(), x.err))
    low, high = ((amax + sign * spare) * (1 + sign * 2.0**-22) for sign in (-1, 1))
    factors = [formats.scale_factors(end.nan_to_num(torch.nan, torch.nan, 0.0), scheme)[0] for end in (low, high)]
    small, large = (formats.spread(sf, group, x.mid.shape) for sf in factors)
    ends = [x.mid - x.err, x.mid + x.err]
    # Elements are multiplied by what float32 has of 1 / sf: exact for a power of two, and where sf is float32 itself it
    # has an error too.
    slack = 1.0 if scheme.sf == "e8m0" else 1 + 2.0**-21
    codes = [
        formats.nearest(torch.minimum(ends[0] / small * slack, ends[0] / large / slack), scheme.table),
        formats.nearest(torch.maximum(ends[1] / small * slack, ends[1] / large / slack), scheme.table),
    ]
    grow = slack if scheme.sf == "float32" else 1.0
    products = [code * sf * more for code in codes for sf in (small, large) for more in (grow, 1 / grow)]
    # A scale factor that can't be told from NaN, or an element that may be anything, frees its group.
    free = formats.spread(formats.group_max(x.err.isinf().double(), group), group, x.mid.shape) > 0
    stacked = torch.stack(products)
    return between(stacked.amin(0), stacked.amax(0)).freed(free)


def wrong(got: torch.Tensor, want: Approx, dtype: torch.dtype | None = None, name: str = "output") -> str:
    """Return how an output differs from the interval of what is right, rounded to its dtype; "" if it doesn't.

    dtype: one that `got` was rounded to; None = its own, float64 for none.
    """
    if tuple(got.shape) != tuple(want.mid.shape):
        return f"{name} has shape {list(got.shape)}, expected {list(want.mid.shape)}"
    dtype = dtype or got.dtype
    x = got.detach().cpu().double()
    low, high = want.ends()
    if dtype in formats.FLOATS:
        low, high = round_to(low, dtype), round_to(high, dtype)
    right = ((x >= low) & (x <= high)) | (x.isnan() & want.mid.isnan()) | want.err.isinf()
    if bool(right.all()):
        return ""
    unit = formats.ulp(want.mid, dtype if dtype in formats.FLOATS else torch.float32)
    off = (torch.maximum(low - x, x - high) / unit).nan_to_num(torch.inf, torch.inf).masked_fill(right, -1.0)
    place = int(off.argmax())
    where = [int(i) for i in torch.unravel_index(torch.tensor(place), off.shape)]
    said = f"expected {float(low.flatten()[place]):.9g} to {float(high.flatten()[place]):.9g}"
    return (
        f"{name}: {int((~right).sum())} of {x.numel()} wrong; at {where} {float(x.flatten()[place]):.9g}, {said}, "
        f"{float(off.flatten()[place]):.3g} ulps off"
    )
