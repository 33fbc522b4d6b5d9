# Type checkers don't know the types that the compiler gives to device code.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Device functions of the selection by radix: digits counted in shared memory, and places by counts of bits.

Shared memory by word: two sets of bins, of which one is in use, each with a word for what isn't counted; sums of rows
of bins; bits of rows; pairs of a list. Groups, and positions that are chosen, lie over the second set of bins.
"""

import triton
import triton.language as tl

from envoi.epilogues.device import INTERPRETED, in_order
from envoi.ops.indexer.kernel_scores import ordered
from envoi.ops.indexer.room import add, get, put

LANES: tl.constexpr = tl.constexpr(32)
BINS: tl.constexpr = tl.constexpr(2048)
BEHIND: tl.constexpr = tl.constexpr(0xFFFFFFFF)  # a radix that no score has
BIN_ROWS: tl.constexpr = tl.constexpr(32)
SECOND: tl.constexpr = tl.constexpr(2080)
SUMS: tl.constexpr = tl.constexpr(4384)
LENGTH: tl.constexpr = tl.constexpr(4448)
COUNTS: tl.constexpr = tl.constexpr(4480)
BEFORE: tl.constexpr = tl.constexpr(4736)
PAIRS_AT: tl.constexpr = tl.constexpr(2496)  # the word of this number is twice as far
LARGEST: tl.constexpr = tl.constexpr(3.4e38)


@triton.jit
def popcount(x):
    """Count the bits that are set in int32."""
    if INTERPRETED:
        x = x.to(tl.uint32, bitcast=True)
        x = x - ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        return (((x + (x >> 4)) & 0x0F0F0F0F) * 0x01010101 >> 24).to(tl.int32)
    else:
        return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [x], tl.int32, is_pure=True, pack=1)


@triton.jit
def grid(ROWS: tl.constexpr):
    """Return 0 .. ROWS * LANES - 1 as [ROWS, LANES]."""
    return tl.arange(0, ROWS)[:, None] * LANES + tl.arange(0, LANES)[None, :]


@triton.jit
def before_rows(room, rows, counts):
    """Return the sums [ROWS, 1] of the counts of rows before each; the sum of all -> the word LENGTH.

    They pass from one layout to the other through shared memory.
    """
    put(room, COUNTS + rows, counts, rows >= 0)
    tl.debug_barrier()
    ids = tl.arange(0, rows.shape[0])
    counts_ = get(room, COUNTS + ids)
    upto = tl.cumsum(counts_, 0)
    put(room, BEFORE + ids, upto - counts_, upto >= 0)
    put(room, ids * 0 + LENGTH, upto, ids == rows.shape[0] - 1)
    tl.debug_barrier()
    return get(room, BEFORE + rows)


@triton.jit
def seats(room, flags):
    """Return how many flags [ROWS, LANES] are set before each, in order; their number -> the word LENGTH.

    A row's flags are the bits of a word: two counts of bits where a scan takes five shuffles an element.
    """
    lanes = tl.arange(0, LANES)[None, :]
    word = tl.xor_sum(flags.to(tl.int32) << lanes, 1)[:, None]
    before = before_rows(room, tl.arange(0, flags.shape[0])[:, None], popcount(word))
    return before + popcount(word & ((1 << lanes) - 1))


@triton.jit
def radix_of(key):
    """Map keys, int32 in the order of scores, to uint32 in the opposite order."""
    return (key ^ 0x7FFFFFFF).to(tl.uint32, bitcast=True)


@triton.jit
def float_of(r):
    """Return the score of a radix, at most LARGEST in magnitude; NaN, wherever it ranks, stays next to infinity."""
    x = in_order(r.to(tl.int32, bitcast=True) ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)
    return tl.minimum(tl.maximum(tl.where(x == x, x, LARGEST), -LARGEST), LARGEST)


@triton.jit
def sums_of_rows(room, base):
    """Store the sums of rows of bins, after a barrier, and clear the other set of bins. base: of the set."""
    rows = tl.arange(0, BIN_ROWS)[:, None]
    cells = rows * (BINS // BIN_ROWS) + tl.arange(0, LANES)[None, :]
    tl.debug_barrier()
    sums = tl.sum(get(room, base + cells) + get(room, base + cells + LANES), 1)[:, None]
    put(room, SUMS + rows, sums, sums >= 0)
    put(room, SECOND - base + cells, cells * 0, cells >= 0)
    put(room, SECOND - base + cells + LANES, cells * 0, cells >= 0)
    tl.debug_barrier()


@triton.jit
def find(room, base, wanted):
    """Return the bin of the wanted-th best, how many are in better bins, and how many are in it.

    Each warp does all of it, by itself: the row of bins from the rows' sums, then the bin.
    """
    sums_of_rows(room, base)
    lanes = tl.arange(0, LANES)
    counts = get(room, SUMS + lanes)
    upto = tl.cumsum(counts, 0)
    here = (upto >= wanted) & (upto - counts < wanted)
    row = tl.sum(tl.where(here, lanes, 0), 0)
    pair = row * (BINS // BIN_ROWS) + 2 * lanes
    even = get(room, base + pair)
    odd = get(room, base + pair + 1)
    upto = tl.sum(tl.where(here, upto - counts, 0), 0) + tl.cumsum(even + odd, 0)
    middle = upto - odd
    in_even = (middle >= wanted) & (middle - even < wanted)
    in_odd = (upto >= wanted) & (middle < wanted)
    found = tl.sum(tl.where(in_even, pair, tl.where(in_odd, pair + 1, 0)), 0)
    better = tl.sum(tl.where(in_even, middle - even, tl.where(in_odd, middle, 0)), 0)
    return found, better, tl.sum(tl.where(in_even, even, tl.where(in_odd, odd, 0)), 0)


@triton.jit
def shift_of(nth):
    """Return how many bits of r follow its nth digit."""
    return tl.where(nth == 0, 21, tl.where(nth == 1, 10, 0)).to(tl.uint32)


@triton.jit
def count(room, base, r, low, nth):
    """Count the nth digit of those r that begin with the digits of low; others in the word after the bins."""
    digit = tl.minimum((r - low) >> shift_of(nth), BINS)
    add(room, base + digit.to(tl.int32))


@triton.jit
def kth(room, r, wanted, DIGITS: tl.constexpr):
    """Return the wanted-th least r, its first DIGITS digits and zeros; how many of those with these are wanted; all.

    The first set of bins is clear, before and, if DIGITS is 2, afterwards; if it is 3, the second is.
    """
    low = tl.zeros((), tl.uint32)
    inside = wanted
    for nth in range(DIGITS):
        base = (nth & 1) * SECOND
        count(room, base, r, low, nth)
        digit, better, inside = find(room, base, wanted)
        wanted -= better
        low += digit.to(tl.uint32) << shift_of(nth)
    return low, wanted, inside


@triton.jit
def load_radix(logits, ids, n, NAN_FIRST: tl.constexpr):
    """Load scores as radixes; from n on, larger than all others."""
    scores = tl.load(logits + ids, mask=ids // 4 < tl.cdiv(n, 4), other=0.0)  # so that 16 bytes are loaded at a time
    return tl.where(ids < n, radix_of(ordered(scores, NAN_FIRST)), BEHIND)
