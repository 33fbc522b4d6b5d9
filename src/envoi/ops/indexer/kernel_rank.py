# Type checkers don't know the types that the compiler gives to device code.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Ranking of each row's candidates: a kernel that stores the k best at their places in the output.

    rank(x) = how many composites of the list are better than x;   out[rank(x)] = x's slot, if rank(x) < k

One program ranks a bin: after all of the better bins, and within its own list. If a bin has overflowed, each program
ranks a share of the row's list among all of it. For that, a list of more than MOST, which mostly means many equal
scores, is narrowed down to its k best by radix selection, 8 bits a pass. In the exact mode one program of a row of at
most SHORT tokens sorts it as torch does.
"""

import triton
import triton.language as tl

from envoi.ops.indexer.kernel_candidates import CAPACITY, LAST, tokens_of
from envoi.ops.indexer.kernel_order import SHORT, slot_of, sort_as_torch
from envoi.ops.indexer.kernel_scores import COUNTER_STRIDE, INTEGERS, NUM_COUNTERS, PAGE, SCORE_BINS

MOST: tl.constexpr = tl.constexpr(4096)
MINE: tl.constexpr = tl.constexpr(128)  # composites that are ranked at a time,
OTHERS: tl.constexpr = tl.constexpr(8)  # against so many
FILL: tl.constexpr = tl.constexpr(64)
CHUNK: tl.constexpr = tl.constexpr(512)  # composites that are narrowed down at a time
DIGIT: tl.constexpr = tl.constexpr(8)
DIGITS: tl.constexpr = tl.constexpr(256)
LOWEST: tl.constexpr = tl.constexpr(-(1 << 60))  # a lower bound of all composites
NOTHING: tl.constexpr = tl.constexpr(-(1 << 63))


@triton.jit
def pick(counts, wanted, SIZE: tl.constexpr):
    """Return the digit of the wanted-th best, how many have a better one, how many have it. counts: by digit."""
    ids = tl.arange(0, SIZE)
    better = tl.sum(counts, 0) - tl.cumsum(counts, 0)
    at = tl.sum((better + counts >= wanted).to(tl.int32), 0) - 1
    return at, tl.sum(tl.where(ids == at, better, 0), 0), tl.sum(tl.where(ids == at, counts, 0), 0)


@triton.jit
def least_of_best(listed, total, wanted):
    """Find a number that exactly `wanted` composites of a longer list reach, by radix selection."""
    shift = total * 0 + 64
    prefix = total.to(tl.int64) * 0
    inside = total
    left = total * 0 + wanted
    while (shift > 0) & (inside > left):
        shift -= DIGIT
        counts = tl.zeros((DIGITS,), tl.int32)
        for first in range(0, total, CHUNK):
            ids = first + tl.arange(0, CHUNK)
            found = (tl.load(listed + ids, mask=ids < total, other=LOWEST) - LOWEST) >> shift
            mine = (ids < total) & ((found >> DIGIT) == prefix)
            counts += tl.histogram((found & (DIGITS - 1)).to(tl.int32), DIGITS, mask=mine)
        at, better, inside = pick(counts, left, DIGITS)
        left -= better
        prefix = prefix * DIGITS + at
    return (prefix << shift) + LOWEST


@triton.jit
def narrow(listed, kept, total, wanted):
    """Copy the best of a list, `wanted` at most, to `kept`; return how many. A row's programs write equal values."""
    least = tl.zeros((), tl.int64) + LOWEST
    if total > wanted:
        least = least_of_best(listed, total, wanted)
    num_kept = total * 0
    for first in range(0, total, CHUNK):
        ids = first + tl.arange(0, CHUNK)
        found = tl.load(listed + ids, mask=ids < total, other=NOTHING)
        keep = found >= least
        place = kept + num_kept + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(place, found, mask=keep)
        num_kept += tl.sum(keep.to(tl.int32), 0)
    tl.debug_barrier()
    return num_kept


@triton.jit
def rank_and_put(out, listed, first, total, table, before, K: tl.constexpr, SLOTS: tl.constexpr):
    """Store MINE composites of a list at their ranks in the output. before: number of better ones outside the list."""
    ids = first + tl.arange(0, MINE)
    mine = tl.load(listed + ids, mask=ids < total, other=NOTHING)
    found = (mine & LAST).to(tl.int32) ^ LAST
    found = slot_of(table, found, ids < total, SLOTS)
    better = tl.zeros((OTHERS, MINE), tl.int32)
    for other in range(0, total, OTHERS):
        beside = other + tl.arange(0, OTHERS)
        others = tl.load(listed + beside, mask=beside < total, other=NOTHING)
        better += (others[:, None] > mine[None, :]).to(tl.int32)
    rank = before + tl.sum(better, 0)
    tl.store(out + rank, found, mask=(ids < total) & (rank < K))


@triton.jit(do_not_specialize=INTEGERS)
def rank_kernel(
    listed, classes, counters, logits, seq_lens, table, out, errors, first_row, num_rows, width, next_n,
    K: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Rank a bin of a row, or a 1 / SCORE_BINS share of its list; store the error, and -1 from the n-th place on.

    logits: the scores for short rows in torch's order; None to rank these like all others.
    """
    own = tl.program_id(1)
    part = tl.program_id(0)
    row = first_row + own
    counters += own * NUM_COUNTERS
    n, error = tokens_of(seq_lens, counters, row, first_row + num_rows, next_n, width)
    table += (row // next_n).to(tl.int64) * width
    out += row.to(tl.int64) * K
    tl.store(errors + row, error, mask=part == 0)
    for first in range(part * FILL, K, SCORE_BINS * FILL):
        ids = first + tl.arange(0, FILL)
        tl.store(out + ids, -1, mask=(ids >= n) & (ids < K))
    if n == 0:
        return
    if logits is not None:
        if n <= SHORT:
            if part == 0:
                sort_as_torch(out, logits + own.to(tl.int64) * width * PAGE, n, table, SLOTS)
            return
    ids = tl.arange(0, SCORE_BINS)
    sizes = tl.load(counters + ids * COUNTER_STRIDE)
    classes += own * (SCORE_BINS * CAPACITY)
    if tl.max(sizes, 0) <= CAPACITY:
        size = tl.sum(tl.where(ids == part, sizes, 0), 0)
        before = tl.sum(tl.where(ids < part, sizes, 0), 0)
        for first in range(0, tl.where(before < K, size, 0), MINE):
            rank_and_put(out, classes + part * CAPACITY, first, size, table, before, K, SLOTS)
    else:
        total = tl.load(counters + SCORE_BINS * COUNTER_STRIDE)
        listed += own.to(tl.int64) * width * PAGE
        if total > MOST:
            total = narrow(listed, classes, total, K)
            listed = classes
        for first in range(part * MINE, total, SCORE_BINS * MINE):
            rank_and_put(out, listed, first, total, table, 0, K, SLOTS)
