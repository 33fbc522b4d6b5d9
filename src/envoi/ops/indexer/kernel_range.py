# Type checkers don't know the types that the compiler gives to device code.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Bins of equal width in the range of a row's scores, which a sample of them suggests: of `kernel_set`.

Scores outside of the range are in the first bin and in the last, so that a wrong guess costs time, not the result.
"""

import triton
import triton.language as tl

from envoi.epilogues.device import INF, INTERPRETED, in_order
from envoi.ops.indexer.kernel_digits import BINS, LANES
from envoi.ops.indexer.kernel_scores import ordered

LIMIT: tl.constexpr = tl.constexpr(1e37)


@triton.jit
def sample(logits, n):
    """Load 128 of a row's scores from eight places, four a lane."""
    lanes = tl.arange(0, LANES)
    at = logits + (lanes // 4) * (n // 32 * 4) + (lanes % 4) * 4
    inside = lanes % 4 * 4 + 28 * (n // 32) + 3 < n
    a = tl.load(at, mask=inside, other=0.0, volatile=True)
    b = tl.load(at + 1, mask=inside, other=0.0, volatile=True)
    c = tl.load(at + 2, mask=inside, other=0.0, volatile=True)
    return a, b, c, tl.load(at + 3, mask=inside, other=0.0, volatile=True)


@triton.jit
def range_of(a, b, c, d, NAN_FIRST: tl.constexpr):
    """Guess the range of a row's scores by a sample of them; return its upper end in bins, and bins a unit.

    Each warp does all of it, by itself.
    """
    low = tl.min(ordered(tl.minimum(tl.minimum(a, b), tl.minimum(c, d)), NAN_FIRST), 0)
    high = tl.max(ordered(tl.maximum(tl.maximum(a, b), tl.maximum(c, d)), NAN_FIRST), 0)
    low = in_order(low).to(tl.float32, bitcast=True)
    high = in_order(high).to(tl.float32, bitcast=True)
    low = tl.where(low == low, tl.minimum(tl.maximum(low, -LIMIT), LIMIT), LIMIT)
    high = tl.where(high == high, tl.minimum(tl.maximum(high, -LIMIT), LIMIT), LIMIT)
    span = tl.maximum(high - low, 1e-30)
    scale = (BINS / 1.75) / span
    return (high + 0.5 * span) * scale, scale


@triton.jit
def below(x, end, scale, NAN_FIRST: tl.constexpr):
    """Return how many bins scores are below the upper end; every step keeps their order. NaN stays, unless first.

    One instruction, so that each time it has the same bits.
    """
    if NAN_FIRST:
        x = tl.where(x == x, x, INF)
    return tl.fma(x, -scale, end)


@triton.jit
def bin_of(x, end, scale, NAN_FIRST: tl.constexpr):
    """Return the bins of scores; NaN, unless it is first, is in the last."""
    y = below(x, end, scale, NAN_FIRST)
    y = tl.where(y < BINS - 1.0, y, BINS - 1.0) if INTERPRETED else tl.minimum(y, BINS - 1.0)
    return tl.maximum(y, 0.0).to(tl.int32)
