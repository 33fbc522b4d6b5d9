# What the compiler sees isn't what type checkers see.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""The k best scores of each row, exactly: no list here can overflow, and a tie goes to the lower position.

    composite = key of the score << 29 | inverted position       int64; all different, the best is the largest
    for each row of n scores:                                    threshold_kernel, one program a row
        at = the bin that the k-th best lies in                  by the histogram that the scores came with
        cursors[b] = how many scores lie in bins above b         where bin b begins in the row's list
    for each BLOCK scores:                                       sift_kernel
        those in bins above `at` -> the list, bin by bin;  those in `at`, the candidates -> behind them
        the last program, if there are many candidates:
            t = the least composite that is among the k best     8 bits a pass over the candidates
            candidates below t leave the list
    for each MINE of the list:                                   rank_kernel
        rank = how many in the list are better                   only its own bin has to be looked at
        out[rank] = its slot, if rank < k

In a bin the order of the list is that of arrival; the ranks aren't.
"""

import triton
import triton.language as tl

from envoi.indexer.kernel_scores import BINS, FAILED, KEY_SHIFT, NUM_COUNTERS, PAGE, bin_at, ordered, visible

# What threshold_kernel leaves of a row for the others.
PLAN: tl.constexpr = tl.constexpr(8)
SEEN: tl.constexpr = tl.constexpr(0)  # scores; 0 if the row is in error
AT: tl.constexpr = tl.constexpr(1)  # the bin of the k-th best, -1 if all are chosen
SURE: tl.constexpr = tl.constexpr(2)  # scores in bins above it
LISTED: tl.constexpr = tl.constexpr(3)  # how many the list will have at last
DONE: tl.constexpr = tl.constexpr(4)  # programs that are through, if candidates have to be narrowed down

POSITION_BITS: tl.constexpr = tl.constexpr(29)
LAST: tl.constexpr = tl.constexpr((1 << 29) - 1)
TOP: tl.constexpr = tl.constexpr(48)  # bits below a composite's bin, a whole number of digits
DIGIT: tl.constexpr = tl.constexpr(8)
DIGITS: tl.constexpr = tl.constexpr(256)
NOTHING: tl.constexpr = tl.constexpr(-(1 << 63))
BAD_LENGTH: tl.constexpr = tl.constexpr(1)
BAD_PAGE: tl.constexpr = tl.constexpr(2)


@triton.jit
def bin_of(composite):
    """The bin of the histogram that a composite is in."""
    return (composite >> TOP).to(tl.int32) + BINS // 2


@triton.jit
def pick(counts, wanted, SIZE: tl.constexpr):
    """The bin that the wanted-th best lies in, how many are better by their bin alone, how many are in it; and of each
    bin how many lie above it."""
    ids = tl.arange(0, SIZE)
    before = tl.sum(counts, 0) - tl.cumsum(counts, 0)
    at = tl.sum((before + counts >= wanted).to(tl.int32), 0) - 1
    better = tl.sum(tl.where(ids == at, before, 0), 0)
    return at, better, tl.sum(tl.where(ids == at, counts, 0), 0), before


@triton.jit
def threshold_kernel(
    histogram, counters, cursors, plan, seq_lens, errors, first_row, num_rows, next_n, width,
    K: tl.constexpr, MOST: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """MOST: candidates that `rank_kernel` takes. Leaves zeros in histogram and counters for the next launch."""
    own = tl.program_id(0)
    row = first_row + own
    counters += own * NUM_COUNTERS + FAILED
    histogram += own * (BINS * COPIES)
    plan += own * PLAN
    cursors += own * BINS
    ids = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for copy in tl.static_range(COPIES):
        counts += tl.load(histogram + copy * BINS + ids)
    # In the order of the bins by way of memory: shuffling registers takes a thousand instructions.
    tl.store(cursors + bin_at(ids), counts)
    seen = visible(seq_lens, row, first_row + num_rows, next_n, width)
    error = tl.where(seen < 0, BAD_LENGTH, tl.where(tl.load(counters) > 0, BAD_PAGE, 0))
    tl.store(errors + row, error)
    n = tl.where(error > 0, 0, seen)
    tl.debug_barrier()  # all have read what is cleared now, and written what is read
    tl.store(counters, 0)
    for copy in tl.static_range(COPIES):
        tl.store(histogram + copy * BINS + ids, tl.zeros((BINS,), tl.int32))
    at, sure, candidates, before = pick(tl.load(cursors + ids), K, BINS)
    tl.debug_barrier()
    tl.store(cursors + ids, before)
    whole = n <= K
    tl.store(plan + SEEN, n)
    tl.store(plan + AT, tl.where(whole, -1, at))
    tl.store(plan + SURE, tl.where(whole, n, sure))
    tl.store(plan + LISTED, tl.where(whole, n, tl.where(candidates > MOST, K, sure + candidates)))
    tl.store(plan + DONE, 0)


@triton.jit
def sift_kernel(
    logits, cursors, plan, listed, width,
    K: tl.constexpr, MOST: tl.constexpr, NAN_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """List what may be among the k best of BLOCK scores of a row; programs behind its end have nothing to do."""
    own = tl.program_id(1)
    plan += own * PLAN
    cursors += own * BINS
    logits += own.to(tl.int64) * width * PAGE
    listed += own.to(tl.int64) * width * PAGE
    first = tl.program_id(0) * BLOCK
    n = tl.load(plan + SEEN)
    at = tl.load(plan + AT)
    sure = tl.load(plan + SURE)
    will_narrow = (tl.load(plan + LISTED) == K) & (sure < K)  # or happens to have k
    if first >= n:
        return
    positions = first + tl.arange(0, BLOCK)
    inside = positions < n
    keys = ordered(tl.load(logits + positions, mask=inside, other=0.0), NAN_FIRST)
    bins = (keys >> KEY_SHIFT) + BINS // 2
    composites = (keys.to(tl.int64) << POSITION_BITS) | (positions ^ LAST).to(tl.int64)
    above = inside & (bins > at)
    tl.store(listed + tl.atomic_add(cursors + bins, 1, mask=above, sem="relaxed"), composites, mask=above)
    if at >= 0:
        here = (inside & (bins == at)).to(tl.int32)
        behind = tl.atomic_add(cursors + at, tl.sum(here, 0), sem="relaxed")
        tl.store(listed + behind + tl.cumsum(here, 0) - 1, composites, mask=here > 0)
        if will_narrow:
            tl.debug_barrier()
            if tl.atomic_add(plan + DONE, 1, sem="acq_rel") == tl.cdiv(n, BLOCK) - 1:
                end = tl.load(cursors + at, volatile=True)
                if end > sure + MOST:
                    narrow(listed + sure, end - sure, K - sure, BLOCK)


@triton.jit
def least_of_best(candidates, num_candidates, wanted, BLOCK: tl.constexpr):
    """A number that `wanted` of the candidates, which agree in their bin, reach."""
    prefix = tl.load(candidates) >> TOP
    shift = num_candidates * 0 + TOP
    inside = num_candidates
    while (shift > 0) & (inside > wanted):
        shift -= DIGIT
        counts = tl.zeros((DIGITS,), tl.int32)
        for first in range(0, num_candidates, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            found = tl.load(candidates + ids, mask=ids < num_candidates, other=0)
            mine = (ids < num_candidates) & ((found >> (shift + DIGIT)) == prefix)
            counts += tl.histogram(((found >> shift) & (DIGITS - 1)).to(tl.int32), DIGITS, mask=mine)
        at, better, inside, _ = pick(counts, wanted, DIGITS)
        wanted -= better
        prefix = prefix * DIGITS + at
    return prefix << shift


@triton.jit
def narrow(candidates, num_candidates, wanted, BLOCK: tl.constexpr):
    """Move the `wanted` best candidates to the front."""
    least = least_of_best(candidates, num_candidates, wanted, BLOCK)
    kept = num_candidates * 0
    for first in range(0, num_candidates, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        found = tl.load(candidates + ids, mask=ids < num_candidates, other=NOTHING)
        keep = (ids < num_candidates) & (found >= least)
        tl.debug_barrier()  # what lies at their new places has been read
        tl.store(candidates + kept + tl.cumsum(keep.to(tl.int32), 0) - 1, found, mask=keep)
        kept += tl.sum(keep.to(tl.int32), 0)


@triton.jit
def rank_kernel(
    listed, plan, cursors, table, out, first_row, next_n, width,
    K: tl.constexpr, SLOTS: tl.constexpr, ORDERED: tl.constexpr, MINE: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """MINE of a row's listed composites to their places in the output, and -1 to the places behind all."""
    own = tl.program_id(1)
    request = ((first_row + own) // next_n).to(tl.int64)
    listed += own.to(tl.int64) * width * PAGE
    cursors += own * BINS
    out += (first_row + own).to(tl.int64) * K
    total = tl.load(plan + own * PLAN + LISTED)
    first = tl.program_id(0) * MINE
    ids = first + tl.arange(0, MINE)
    tl.store(out + ids, -1, mask=(ids >= total) & (ids < K))
    if first >= total:
        return
    mine = tl.load(listed + ids, mask=ids < total, other=NOTHING)
    positions = (mine & LAST).to(tl.int32) ^ LAST
    found = positions
    if SLOTS:
        page = tl.load(table + request * width + positions // PAGE, mask=ids < total, other=0)
        found = page * PAGE + positions % PAGE
    begin = total * 0
    end = total
    if ORDERED:
        # A bin begins where that above it has ended.
        best = bin_of(tl.load(listed + first)) + 1
        least = bin_of(tl.load(listed + tl.minimum(first + MINE, total) - 1))
        begin = tl.load(cursors + best, mask=best < BINS, other=0)
        end = tl.minimum(tl.load(cursors + least), total)
    else:
        mine = mine & LAST  # a lower position is larger
    behind = tl.zeros((MINE, OTHERS), tl.int32)
    for i in range(begin, end, OTHERS):
        others = i + tl.arange(0, OTHERS)
        better = tl.load(listed + others, mask=others < end, other=NOTHING)
        if not ORDERED:
            better = tl.where(others < end, better & LAST, NOTHING)
        behind += (better[None, :] > mine[:, None]).to(tl.int32)
    rank = begin + tl.sum(behind, 1)
    tl.store(out + rank, found, mask=(ids < total) & (rank < K))
