# What the compiler sees isn't what type checkers see.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""The k best scores of each row, exactly: no list here can overflow, and a tie goes to the lower position.

    composite = key of the score << 27 | inverted position        int64; all different, the best is the largest
    for each row of n scores:                                     one program for BLOCK of them
        at = the bin that the k-th best lies in                   of the histogram that the scores came with
        bins above `at` -> chosen;  bin `at` -> candidates        in any order: what counts is the set
    the last program of a row:
        t = the least composite that still is among the k best    8 bits a pass over the candidates
        candidates >= t -> chosen;  chosen, sorted -> slots
        counters and histogram -> 0, for the next launch
"""

import triton
import triton.language as tl

from envoi.indexer.kernel_scores import BINS, FAILED, NUM_COUNTERS, PAGE, ordered, visible

CANDIDATES: tl.constexpr = tl.constexpr(1)
DONE: tl.constexpr = tl.constexpr(2)
POSITION_BITS: tl.constexpr = tl.constexpr(27)
LAST: tl.constexpr = tl.constexpr((1 << 27) - 1)
TOP: tl.constexpr = tl.constexpr(48)  # bits below a composite's bin, a whole number of digits
DIGIT: tl.constexpr = tl.constexpr(8)
DIGITS: tl.constexpr = tl.constexpr(256)
NOTHING: tl.constexpr = tl.constexpr(-(1 << 63))
BAD_LENGTH: tl.constexpr = tl.constexpr(1)
BAD_PAGE: tl.constexpr = tl.constexpr(2)


@triton.jit
def composites(logits, positions, NAN_FIRST: tl.constexpr):
    """Scores with their positions, in one number."""
    return (ordered(logits, NAN_FIRST).to(tl.int64) << POSITION_BITS) | (positions ^ LAST).to(tl.int64)


@triton.jit
def pick(histogram, wanted, SIZE: tl.constexpr):
    """The bin that the wanted-th best lies in, how many are better by their bin alone, how many are in it."""
    ids = tl.arange(0, SIZE)
    from_here = tl.cumsum(histogram, 0, reverse=True)
    at = tl.sum((from_here >= wanted).to(tl.int32), 0) - 1
    better = tl.sum(tl.where(ids > at, histogram, 0), 0)
    return at, better, tl.sum(tl.where(ids == at, histogram, 0), 0)


@triton.jit
def append(values, keep, target, counter):
    """Write the values to keep behind those that other programs have written."""
    places = tl.cumsum(keep.to(tl.int32), 0)
    first = tl.atomic_add(counter, tl.sum(keep.to(tl.int32), 0), sem="relaxed")
    tl.store(target + first + places - 1, values, mask=keep)


@triton.jit
def sift(
    logits, histogram, counters, chosen, candidates, first, n,
    K: tl.constexpr, NAN_FIRST: tl.constexpr, COPIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK scores of a row: what is surely among the k best, and what may be."""
    ids = tl.arange(0, BINS)
    histogram_of_row = tl.zeros((BINS,), tl.int32)
    for copy in tl.static_range(COPIES):
        histogram_of_row += tl.load(histogram + copy * BINS + ids)
    at, _, _ = pick(histogram_of_row, K, BINS)
    at = tl.where(n <= K, -1, at)
    positions = first + tl.arange(0, BLOCK)
    inside = positions < n
    found = composites(tl.load(logits + positions, mask=inside, other=0.0), positions, NAN_FIRST)
    bins = (found >> TOP).to(tl.int32) + BINS // 2
    append(found, inside & (bins > at), chosen, counters)
    append(found, inside & (bins == at), candidates, counters + CANDIDATES)


@triton.jit
def least_of_best(candidates, num_candidates, wanted, BLOCK: tl.constexpr):
    """A number that `wanted` of the candidates, which agree in their bin, reach."""
    prefix = tl.load(candidates) >> TOP
    shift = num_candidates * 0 + TOP
    inside = num_candidates
    while (shift > 0) & (inside > wanted):
        shift -= DIGIT
        histogram = tl.zeros((DIGITS,), tl.int32)
        for first in range(0, num_candidates, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            found = tl.load(candidates + ids, mask=ids < num_candidates, other=0)
            mine = (ids < num_candidates) & ((found >> (shift + DIGIT)) == prefix)
            histogram += tl.histogram(((found >> shift) & (DIGITS - 1)).to(tl.int32), DIGITS, mask=mine)
        at, better, inside = pick(histogram, wanted, DIGITS)
        wanted -= better
        prefix = prefix * DIGITS + at
    return prefix << shift


@triton.jit
def complete(counters, chosen, candidates, n, K: tl.constexpr, BLOCK: tl.constexpr):
    """Put the best candidates behind what was chosen for sure, until there are k."""
    num_chosen = tl.load(counters)
    num_candidates = tl.load(counters + CANDIDATES)
    if n > K:
        least = least_of_best(candidates, num_candidates, K - num_chosen, BLOCK)
        for first in range(0, num_candidates, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            found = tl.load(candidates + ids, mask=ids < num_candidates, other=NOTHING)
            keep = (ids < num_candidates) & (found >= least)
            tl.store(chosen + num_chosen + tl.cumsum(keep.to(tl.int32), 0) - 1, found, mask=keep)
            num_chosen += tl.sum(keep.to(tl.int32), 0)
    tl.debug_barrier()


@triton.jit
def write_row(chosen, table, out, n, K: tl.constexpr, SLOTS: tl.constexpr, ORDERED: tl.constexpr):
    """What was chosen, best first or by position, as slots or positions."""
    ids = tl.arange(0, K)
    best = tl.load(chosen + ids, mask=ids < n, other=NOTHING)
    positions = (best & LAST).to(tl.int32) ^ LAST
    if ORDERED:
        positions = (tl.sort(best, descending=True) & LAST).to(tl.int32) ^ LAST
    else:
        positions = tl.sort(tl.where(ids < n, positions, LAST))
    found = positions
    if SLOTS:
        page = tl.load(table + positions // PAGE, mask=ids < n, other=0)
        found = page * PAGE + positions % PAGE
    tl.store(out + ids, tl.where(ids < n, found, -1))


@triton.jit
def select_kernel(
    logits, histogram, counters, chosen, candidates, seq_lens, table, out, errors,
    first_row, num_rows, next_n, width,
    K: tl.constexpr, SLOTS: tl.constexpr, ORDERED: tl.constexpr, NAN_FIRST: tl.constexpr, COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK scores of a row; those behind its end have nothing to do."""
    own = tl.program_id(1)
    row = (first_row + own).to(tl.int64)
    counters += own * NUM_COUNTERS
    histogram += own * (BINS * COPIES)
    chosen += own * K
    candidates += own.to(tl.int64) * width * PAGE
    seen = visible(seq_lens, row, first_row + num_rows, next_n, width)
    error = tl.where(seen < 0, BAD_LENGTH, tl.where(tl.load(counters + FAILED) > 0, BAD_PAGE, 0))
    n = tl.where(error > 0, 0, seen)
    first = tl.program_id(0) * BLOCK
    if (first >= n) & (first > 0):
        return
    sift(logits + own.to(tl.int64) * width * PAGE, histogram, counters, chosen, candidates, first, n, K, NAN_FIRST,
         COPIES, BLOCK)  # fmt: skip
    tl.debug_barrier()
    if tl.atomic_add(counters + DONE, 1, sem="acq_rel") == tl.maximum(tl.cdiv(n, BLOCK), 1) - 1:
        complete(counters, chosen, candidates, n, K, BLOCK)
        write_row(chosen, table + (row // next_n) * width, out + row * K, n, K, SLOTS, ORDERED)
        tl.store(errors + row, error)
        for copy in tl.static_range(COPIES):
            tl.store(histogram + copy * BINS + tl.arange(0, BINS), tl.zeros((BINS,), tl.int32))
        tl.store(counters + tl.arange(0, NUM_COUNTERS), tl.zeros((NUM_COUNTERS,), tl.int32))
