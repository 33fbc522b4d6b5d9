# Type checkers don't know the types that the compiler gives to device code.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Device functions that put a row's chosen tokens in the order of their scores, best first."""

import triton
import triton.language as tl

from envoi.ops.indexer.kernel_digits import (
    BEHIND,
    BIN_ROWS,
    BINS,
    LANES,
    LARGEST,
    PAIRS_AT,
    SECOND,
    SUMS,
    before_rows,
    float_of,
    grid,
    popcount,
    sums_of_rows,
)
from envoi.ops.indexer.kernel_scores import PAGE, ordered
from envoi.ops.indexer.room import add, fetch_add, get, get2, put, put2

ALIKE: tl.constexpr = tl.constexpr(32)  # tokens in a bin; if there are more, mostly equal, a sort takes less time:
DIGIT_BITS: tl.constexpr = tl.constexpr(4)  # of its digits
DIGITS: tl.constexpr = tl.constexpr(16)
SHORT: tl.constexpr = tl.constexpr(32)  # tokens: five levels of the network, positions in six bits


@triton.jit
def slot_of(table, position, mask, SLOTS: tl.constexpr):
    """Return the slots of positions, or, unless SLOTS, the positions."""
    if SLOTS:
        page = tl.load(table + position // PAGE, mask=mask, other=0)
        return page * PAGE + position % PAGE
    else:
        return position


@triton.jit
def begins_of_bins(room):
    """Turn the counts of the second set of bins into the sums of those before each. Barriers before and after."""
    cells = tl.arange(0, BIN_ROWS)[:, None] * (BINS // BIN_ROWS) + tl.arange(0, BINS // BIN_ROWS)[None, :]
    sums_of_rows(room, SECOND)
    lanes = tl.arange(0, LANES)
    sums = get(room, SUMS + lanes)
    put(room, SUMS + LANES + lanes, tl.cumsum(sums, 0) - sums, sums >= 0)
    tl.debug_barrier()
    counts = get(room, SECOND + cells)
    before = get(room, SUMS + LANES + tl.arange(0, BIN_ROWS)[:, None])
    put(room, SECOND + cells, before + tl.cumsum(counts, 1) - counts, cells >= 0)
    tl.debug_barrier()


@triton.jit
def same_digit(digit):
    """Return masks of the lanes of each row that have the same digit [ROWS, LANES], by a word for each bit."""
    lanes = tl.arange(0, LANES)[None, :]
    same = digit * 0 - 1
    for nth in tl.static_range(DIGIT_BITS):
        bit = (digit >> nth) & 1
        word = tl.xor_sum(bit << lanes, 1)[:, None]
        same = same & (word ^ (bit - 1))
    return same


@triton.jit
def sort_by_radix(room, r, position):
    """Put the list in the order of r, ascending, of equal r as it was: a pass for each digit, from the last.

    A token's place is how many have a lesser digit, or the same in the rows before its own (a table of digits by rows,
    summed), or in its row.
    """
    ROWS: tl.constexpr = BINS // LANES
    ids = grid(ROWS)
    rows = tl.arange(0, ROWS)[:, None]
    cells = grid(DIGITS * ROWS // LANES)
    put2(room, PAIRS_AT + tl.arange(0, BINS), r, position, position == position)
    tl.debug_barrier()
    r, position = get2(room, PAIRS_AT + ids)
    differing = (r ^ get(room, ids * 0 + 2 * PAIRS_AT)).to(tl.uint32, bitcast=True)
    differing = tl.max(tl.max(differing, 1), 0)
    for shift in range(0, 32, DIGIT_BITS):
        if (differing >> shift) > 0:  # digits above are the same in all
            put(room, cells, cells * 0, cells >= 0)
            tl.debug_barrier()
            r, position = get2(room, PAIRS_AT + ids)
            digit = (r >> shift) & (DIGITS - 1)
            same = same_digit(digit)
            seat = popcount(same & ((1 << tl.arange(0, LANES)[None, :]) - 1))
            put(room, digit * ROWS + rows, popcount(same), seat == 0)
            tl.debug_barrier()
            counts = get(room, cells)
            before = before_rows(room, tl.arange(0, DIGITS * ROWS // LANES)[:, None], tl.sum(counts, 1)[:, None])
            put(room, cells, before + tl.cumsum(counts, 1) - counts, cells >= 0)
            tl.debug_barrier()
            seat += get(room, digit * ROWS + rows)
            put2(room, PAIRS_AT + seat, r, position, seat >= 0)
            tl.debug_barrier()


@triton.jit
def put_best_first(room, out, table, num, steep, SLOTS: tl.constexpr, SORTS: tl.constexpr):
    """Store the listed tokens, at most BINS, best first; they are listed by position. The second set of bins is clear.

    Each is counted against those of its bin; bins of equal width between the least and the greatest score, or, if the
    scores are a distribution's tail (steep), narrower near the least. SORTS: if a bin has more than ALIKE, all are
    sorted.
    """
    ids = tl.arange(0, BINS)
    valid = ids < num
    r, position = get2(room, PAIRS_AT + ids)
    r = r.to(tl.uint32, bitcast=True)
    x = 0.5 * float_of(r)  # halves, since the difference of two may not fit float32
    most = tl.max(tl.where(valid, x, -LARGEST), 0)
    least = tl.min(tl.where(valid, x, LARGEST), 0)
    below = (most - x) * (1.0 / tl.maximum(most - least, 1e-30))
    below = tl.where(valid, tl.minimum(tl.maximum(below, 0.0), 1.0), 0.0)
    if steep:
        below = below * below
        below = below * below
    bins = tl.minimum((below * BINS).to(tl.int32), BINS - 1)
    bins = tl.where(most > least, bins, ids)  # equal scores alone are in order
    bins = tl.where(valid, bins, BINS)
    add(room, SECOND + bins)
    if not SORTS:
        put_by_bins(room, out, table, r, position, bins, valid, SLOTS)
    else:
        tl.debug_barrier()
        if tl.max(tl.where(valid, get(room, SECOND + bins), 0), 0) > ALIKE:
            sort_by_radix(room, tl.where(valid, r, BEHIND), position)
            _, position = get2(room, PAIRS_AT + ids)
            tl.store(out + ids, slot_of(table, position, valid, SLOTS), mask=valid)
        else:
            put_by_bins(room, out, table, r, position, bins, valid, SLOTS)


@triton.jit
def put_by_bins(room, out, table, r, position, bins, valid, SLOTS: tl.constexpr):
    """Store the listed tokens by their bins, which are counted in the second set, and by the scores in a bin."""
    ids = tl.arange(0, BINS)
    begins_of_bins(room)
    seat = fetch_add(room, SECOND + bins, valid)  # afterwards a bin's word is its end
    put2(room, PAIRS_AT + seat, r, ids, valid)
    tl.debug_barrier()
    begin = tl.where(valid & (bins > 0), get(room, SECOND + tl.maximum(bins - 1, 0)), 0)
    end = tl.where(valid, get(room, SECOND + bins), begin)
    rank = begin
    for nth in range(tl.max(end - begin, 0)):
        other, other_id = get2(room, PAIRS_AT + tl.maximum(tl.minimum(begin + nth, end - 1), 0))
        other = other.to(tl.uint32, bitcast=True)
        ahead = (begin + nth < end) & ((other < r) | ((other == r) & (other_id < ids)))
        rank += ahead.to(tl.int32)
    tl.store(out + rank, slot_of(table, position, valid, SLOTS), mask=valid)


@triton.jit
def exchange(x, n, STRIDE: tl.constexpr, SIZE: tl.constexpr):
    """Run a layer of the network: sort pairs STRIDE apart, descending where position & SIZE. Places from n on sink."""
    ids = tl.arange(0, SHORT)
    other = tl.gather(x, ids ^ STRIDE, 0)
    low = tl.where((ids & STRIDE) == 0, x, other)
    high = tl.where((ids & STRIDE) == 0, other, x)
    sorted_ = (((low >> 6) > (high >> 6)) & ((low & 63) < n)) | ((high & 63) >= n)
    return tl.where(sorted_ == ((ids & SIZE) != 0), other, x)


@triton.jit
def sort_as_torch(out, logits, n, table, SLOTS: tl.constexpr):
    """Store a row of n tokens, at most SHORT, in torch's order: its network doesn't keep ties in order.

    The network's input is the scores above the least, then those that equal it, each by position.
    """
    ids = tl.arange(0, SHORT)
    keys = ordered(tl.load(logits + ids, mask=ids < n, other=0.0), True)
    above = (ids < n) & (keys > tl.min(tl.where(ids < n, keys, 0x7FFFFFFF), 0))
    least = (ids < n) & (above == 0)
    entry = tl.cumsum(above.to(tl.int32), 0) - 1
    entry = tl.where(least, tl.sum(above.to(tl.int32), 0) + tl.cumsum(least.to(tl.int32), 0) - 1, entry)
    entry = tl.where(ids < n, entry, ids)
    packed = (keys.to(tl.int64) << 6) | ids
    x = tl.sum(tl.where(entry[:, None] == ids[None, :], packed[:, None], 0), 0)
    for level in tl.static_range(1, 6):
        for step in tl.static_range(level):
            x = exchange(x, n, 1 << (level - 1 - step), (1 << level) % 32)
    found = (x & 63).to(tl.int32)
    tl.store(out + ids, slot_of(table, found, ids < n, SLOTS), mask=ids < n)
