# Type checkers don't know the types that the compiler gives to device code.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Candidates for the k best of a row: a kernel that lists all scores that may be among them, and few others.

    composite = key of the score << 29 | inverted position       int64; all different, the best is the largest
    for each BLOCK scores of each row of n:                      one program
        low, high = about the k-th best of the row's groups (the least if n <= k), and the best
        the composites of scores that reach low                  -> the row's list, and the list of their bin

Lists are unordered; `kernel_rank` ranks them. The range from high to low is divided into SCORE_BINS, the first for the
best, so that a score need only be compared with those of its own bin. A bin's list holds CAPACITY; if one overflows,
the row's list is ranked instead.

Every program searches the bound itself: that takes less time than to wait for one that does.
"""

import triton
import triton.language as tl

from envoi.epilogues.device import INF, in_order
from envoi.ops.indexer.kernel_scores import (
    COUNTER_STRIDE,
    INTEGERS,
    KEY_SHIFT,
    NUM_COUNTERS,
    NUM_GROUPS,
    PAGE,
    SCORE_BINS,
    level_of,
    ordered,
    visible,
)

POSITION_BITS: tl.constexpr = tl.constexpr(29)
LAST: tl.constexpr = tl.constexpr((1 << 29) - 1)
LEAST: tl.constexpr = tl.constexpr(-(1 << 15))  # upper half of a key
OCTAVE: tl.constexpr = tl.constexpr(128)  # a factor of two between scores, in upper halves of their keys
SLACK: tl.constexpr = tl.constexpr(16)  # the bound may let k / 16 groups too many through
CAPACITY: tl.constexpr = tl.constexpr(256)
FAILED: tl.constexpr = tl.constexpr(1 << 30)  # in a list's counter: a page outside the cache
BAD_LENGTH: tl.constexpr = tl.constexpr(1)
BAD_PAGE: tl.constexpr = tl.constexpr(2)


@triton.jit
def tokens_of(seq_lens, counters, row, num_rows, next_n, width):
    """Return how many tokens a row chooses from, and its error code; 0 tokens on error. Its counters must be final."""
    seen = visible(seq_lens, row, num_rows, next_n, width)
    failed = tl.load(counters + SCORE_BINS * COUNTER_STRIDE, mask=seen > 0, other=0) >= FAILED
    error = tl.where(seen < 0, BAD_LENGTH, tl.where(failed, BAD_PAGE, 0))
    return tl.where(error > 0, 0, seen), error


@triton.jit
def reaching(best, bound):
    """Count the elements that reach a bound."""
    return tl.sum((best >= bound).to(tl.int32), 0)


@triton.jit
def bound_of(best, top, K: tl.constexpr):
    """Find a bound that K groups reach, and at most K / SLACK others, but for ties. LEAST if there are fewer than K.

    Searches from the top downwards by doubled steps, then by bisection: ten counts over registers.
    """
    high = top
    low = tl.maximum(high - OCTAVE // 2, LEAST)
    inside = reaching(best, low)
    while inside < K:
        step = 2 * (high - low)
        high = low
        low = tl.maximum(low - step, LEAST)
        inside = reaching(best, low)
    while (high - low > 1) & (inside > K + K // SLACK):
        middle = (low + high) >> 1
        found = reaching(best, middle)
        enough = found >= K
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        inside = tl.where(enough, found, inside)
    return low


@triton.jit
def limits_of(groups, n, K: tl.constexpr):
    """Return the bound of a row, and one more than its best group's key, both upper halves of keys."""
    ids = tl.arange(0, NUM_GROUPS)
    num = tl.cdiv(n, 1 << level_of(n))
    best = tl.load(groups + ids, mask=ids // 8 < tl.cdiv(num, 8), other=LEAST).to(tl.int32)
    best = tl.where(ids < num, best, LEAST)
    top = tl.max(best, 0) + 1
    if n > K:
        low = bound_of(best, top, K)
    else:
        low = tl.min(tl.where(ids < n, best, top), 0)
    return low, top


@triton.jit
def float_of(half):
    """Return the score whose key has this upper half, or the nearest finite one."""
    key = tl.minimum(tl.maximum(half << KEY_SHIFT, -0x7F800000), 0x7F7FFFFF)
    return in_order(key).to(tl.float32, bitcast=True)


@triton.jit
def class_of(scores, low, top, steep, NAN_FIRST: tl.constexpr):
    """Return the bins of scores: equally wide, or, if the scores are a distribution's tail (steep), narrower near low.

    Scores are halved, since the difference of two may not fit float32. Every step keeps the order.
    """
    x = tl.where(scores == scores, scores, INF if NAN_FIRST else -INF)
    least, most = 0.5 * float_of(low), 0.5 * float_of(top)
    above = (0.5 * x - least) * (1.0 / tl.maximum(most - least, 1e-30))
    rest = tl.minimum(tl.maximum(1.0 - above, 0.0), 1.0)
    if steep:
        rest = rest * rest
        rest = rest * rest
    return tl.minimum((rest * SCORE_BINS).to(tl.int32), SCORE_BINS - 1)


@triton.jit
def pages_are_good(table, first, n, num_pages, BLOCK: tl.constexpr):
    """Tell whether the pages of a block's tokens are all in the cache. table: the request's row of the block table."""
    columns = first // PAGE + tl.arange(0, BLOCK // PAGE)
    pages = tl.load(table + columns, mask=columns * PAGE < n, other=0)
    return tl.min(((pages >= 0) & (pages < num_pages)).to(tl.int32), 0) == 1


@triton.jit(do_not_specialize=INTEGERS)
def candidates_kernel(
    logits, groups, counters, listed, classes, seq_lens, table, first_row, num_rows, width, num_pages, next_n,
    K: tl.constexpr, NAN_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sift BLOCK scores of a row; programs past its end return at once.

    counters [rows, NUM_COUNTERS]: lengths of the lists, zero at launch (the scores' kernel resets them); FAILED is set
    in that of the row's list if a page isn't in the cache. classes [rows, SCORE_BINS, CAPACITY]: the bins' lists.
    """
    own = tl.program_id(1)
    first = tl.program_id(0) * BLOCK
    row = first_row + own
    n = visible(seq_lens, row, first_row + num_rows, next_n, width)
    if first >= n:
        return
    good = pages_are_good(table + (row // next_n).to(tl.int64) * width, first, n, num_pages, BLOCK)
    offset = own.to(tl.int64) * width * PAGE
    counters += own * NUM_COUNTERS
    positions = first + tl.arange(0, BLOCK)
    scores = tl.load(logits + offset + positions, mask=positions // 4 < tl.cdiv(n, 4), other=0.0)
    low, top = limits_of(groups + own * NUM_GROUPS, n, K)
    keys = ordered(scores, NAN_FIRST)
    keep = (positions < n) & ((keys >> KEY_SHIFT) >= low)
    kind = class_of(scores, low, top, n > K, NAN_FIRST)
    seat = tl.atomic_add(counters + kind * COUNTER_STRIDE, 1, mask=keep, sem="relaxed")
    kept = keep.to(tl.int32)
    begin = tl.atomic_add(counters + SCORE_BINS * COUNTER_STRIDE, tl.sum(kept, 0), sem="relaxed") & (FAILED - 1)
    composites = (keys.to(tl.int64) << POSITION_BITS) | (positions ^ LAST).to(tl.int64)
    tl.store(listed + offset + begin + tl.cumsum(kept, 0) - 1, composites, mask=keep)
    classes += (own * SCORE_BINS + kind) * CAPACITY
    tl.store(classes + seat, composites, mask=keep & (seat < CAPACITY))
    if not good:
        tl.atomic_or(counters + SCORE_BINS * COUNTER_STRIDE, FAILED, sem="relaxed")
