# Type checkers don't know the types that the compiler gives to device code.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Order of each row's k best, best first, which `kernel_set` has chosen: one program a row.

`set_kernel` does it itself where it has one program a row; where a row has a cluster, `best_kernel` follows.

    positions  ascending, and -1 from the row's end on
    bins       equally wide from the greatest score to the least, or, if those are a distribution's tail, a quarter as
               many near the greatest and three times as many near the least
    rank       how many are in the bins before, and how many in the same bin are better, or equal and before it
    otherwise  if a bin has ALIKE tokens or more, mostly of equal scores, all are sorted by digits

There are twice as many bins as tokens, so that most tokens are alone in theirs.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from envoi.epilogues.device import INTERPRETED
from envoi.ops.indexer import room as words
from envoi.ops.indexer.kernel_digits import BEHIND, LANES, LARGEST, PAIRS_AT, float_of, radix_of
from envoi.ops.indexer.kernel_digits import BINS as MOST
from envoi.ops.indexer.kernel_order import slot_of, sort_by_radix
from envoi.ops.indexer.kernel_scores import INTEGERS, PAGE, ordered, visible
from envoi.ops.indexer.room import count_less, fetch_add, get, get2, put, put2

CELLS: tl.constexpr = tl.constexpr(4096)  # bins,
COLUMNS: tl.constexpr = tl.constexpr(512)  # of which a thread sums neighbours: their words are so many apart
COUNT_AT: tl.constexpr = tl.constexpr(16)  # first bit of a count in a bin's word
ALIKE: tl.constexpr = LANES  # tokens in a bin from which all are sorted
ENDS_AT: tl.constexpr = tl.constexpr(4160)  # words: the greatest and the least score of each row of tokens
SEATS_AT: tl.constexpr = tl.constexpr(4448)  # which seats of bins are taken, the last one or those after it


@triton.jit
def ends_of(room, x, valid):
    """Return the greatest and the least of those x that are valid. Each warp does the last of it, by itself."""
    ROWS: tl.constexpr = MOST // LANES
    rows = tl.arange(0, ROWS)[:, None]
    lanes = tl.arange(0, LANES)
    most = tl.max(tl.reshape(tl.where(valid, x, -LARGEST), (ROWS, LANES)), 1)[:, None]
    least = tl.min(tl.reshape(tl.where(valid, x, LARGEST), (ROWS, LANES)), 1)[:, None]
    put(room, ENDS_AT + rows, most, rows >= 0)
    put(room, ENDS_AT + ROWS + rows, least, rows >= 0)
    tl.debug_barrier()
    most = get(room, ENDS_AT + lanes).to(tl.float32, bitcast=True)
    most = tl.maximum(most, get(room, ENDS_AT + LANES + lanes).to(tl.float32, bitcast=True))
    least = get(room, ENDS_AT + ROWS + lanes).to(tl.float32, bitcast=True)
    least = tl.minimum(least, get(room, ENDS_AT + ROWS + LANES + lanes).to(tl.float32, bitcast=True))
    return tl.max(most, 0), tl.min(least, 0)


@triton.jit
def cells_of(room, r, valid, is_tail):
    """Return the words of the bins of scores, from their radixes: bins keep their order."""
    x = 0.5 * float_of(r)  # halves, since the difference of two may not fit float32
    most, least = ends_of(room, x, valid)
    below = (most - x) * (1.0 / tl.maximum(most - least, 1e-30))
    below = tl.where(valid, tl.minimum(tl.maximum(below, 0.0), 1.0), 0.0)
    if is_tail:
        square = below * below
        below = 0.25 * below + 0.75 * (square * square)
    bins = tl.minimum((below * CELLS).to(tl.uint32), CELLS - 1)
    return (bins % (CELLS // COLUMNS) * COLUMNS + bins // (CELLS // COLUMNS)).to(tl.int32)


@triton.jit
def begins_of_cells(room):
    """Put beneath each bin's count the number of tokens in the bins before it. A barrier afterwards."""
    columns = tl.arange(0, COLUMNS)[None, :]
    cells = tl.arange(0, CELLS // COLUMNS)[:, None] * COLUMNS + columns
    counts = get(room, cells)
    upto = tl.cumsum(counts, 0)
    total = tl.sum(counts, 0)
    begin = (tl.cumsum(total, 0) - total)[None, :]
    put(room, cells, begin + upto - counts + (counts << COUNT_AT), cells >= 0)
    tl.debug_barrier()


@triton.jit
def rank_in_bins(room, r, cell, seat, valid):
    """Return how many tokens are better than each, or equal and before it."""
    ids = tl.arange(0, MOST)
    begins_of_cells(room)
    word = tl.where(valid, get(room, cell), 0)
    number = word >> COUNT_AT
    begin = word - (number << COUNT_AT)
    put2(room, PAIRS_AT + begin + seat, r, ids, valid)
    tl.debug_barrier()
    return begin + count_less(room, PAIRS_AT + begin, tl.where(number > 1, number, 0), r, ids)


@triton.jit
def clear_bins(room):
    """Clear the bins and their seats, with a barrier."""
    cells = tl.arange(0, CELLS)
    put(room, cells, cells * 0, cells >= 0)
    lanes = tl.arange(0, LANES)
    put(room, SEATS_AT + lanes, lanes * 0, lanes >= 0)
    tl.debug_barrier()


@triton.jit
def store_best_first(room, out, logits, position, slot, is_tail, K: tl.constexpr, NAN_FIRST: tl.constexpr):
    """Store what stands in `slot` for a row's tokens, best first, and -1 where positions are -1. Bins are clear.

    position [MOST]: -1 from K on, at the latest.
    """
    ids = tl.arange(0, MOST)
    valid = position >= 0
    x = tl.load(logits + position, mask=valid, other=0.0)
    r = radix_of(ordered(x, NAN_FIRST))
    cell = cells_of(room, r, valid, is_tail)
    seat = fetch_add(room, cell, valid)
    put(room, SEATS_AT + tl.minimum(seat, ALIKE - 1), seat * 0 + 1, valid)
    tl.debug_barrier()
    most = tl.sum(get(room, SEATS_AT + tl.arange(0, LANES)), 0)
    if most == ALIKE:
        sort_by_radix(room, tl.where(valid, r, BEHIND), slot)
        _, slot = get2(room, PAIRS_AT + ids)
    else:
        rank = rank_in_bins(room, r, cell, seat, valid)
        put(room, rank, slot, valid)
        tl.debug_barrier()
        slot = get(room, ids)
    tl.store(out + ids, tl.where(valid, slot, -1), mask=ids < K)


@triton.jit(do_not_specialize=INTEGERS)
def best_kernel(
    logits, seq_lens, table, out, room, first_row, num_rows, width, next_n,
    K: tl.constexpr, SLOTS: tl.constexpr, NAN_FIRST: tl.constexpr, LONGEST: tl.constexpr,
):  # fmt: skip
    """Put a row's output, K positions that ascend and then -1, in the order of their scores, best first.

    Launched before the end of the kernel that stores the positions. K: 1 to MOST. SLOTS: stores slots. Rows longer than
    LONGEST are left alone; 0: there are none.
    """
    words.declare()
    own = tl.program_id(0)
    if INTERPRETED:
        room += own * words.NUM_WORDS
    row = first_row + own
    seen = visible(seq_lens, row, first_row + num_rows, next_n, width)
    table += (row // next_n).to(tl.int64) * width
    out += row.to(tl.int64) * K
    logits += own.to(tl.int64) * width * PAGE
    clear_bins(room)
    if not INTERPRETED:
        gdc_wait()
    if LONGEST > 0:
        if seen > LONGEST:
            return
    ids = tl.arange(0, MOST)
    position = tl.load(out + ids, mask=ids < K, other=-1)
    slot = slot_of(table, position, position >= 0, SLOTS)
    store_best_first(room, out, logits, position, slot, seen > K, K, NAN_FIRST)
