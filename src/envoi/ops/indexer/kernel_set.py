# Type checkers don't know the types that the compiler gives to device code.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Selection of each row's k best scores as a set, in decode on Hopper: a cluster of programs holds a row in registers.

Each program has a share of the row's neighbouring tokens, and counts in its shared memory:

    range      guessed from a sample of the row; bins of equal width in it are counted
    the bin    that holds the k-th best: if it holds few, they are listed, and the k-th is found among them
    otherwise  the k-th is found by three digits, as in `kernel_select`
    places     each program stores its chosen tokens, by position, after those of the programs before

What a program has to know of the others they store in its shared memory: sums of 32 rows of bins; bins of a row; the
list; how many tokens each has chosen. Nothing passes through global memory. In the interpreter a row has one program.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from envoi.epilogues.device import INF, INTERPRETED, in_order
from envoi.ops.indexer import room as words
from envoi.ops.indexer.kernel_candidates import BAD_LENGTH, BAD_PAGE
from envoi.ops.indexer.kernel_digits import (
    BEHIND,
    BIN_ROWS,
    BINS,
    LANES,
    LENGTH,
    SECOND,
    SUMS,
    count,
    find,
    grid,
    radix_of,
    seats,
    shift_of,
    sums_of_rows,
)
from envoi.ops.indexer.kernel_order import slot_of
from envoi.ops.indexer.kernel_scores import INTEGERS, PAGE, ordered, visible
from envoi.ops.indexer.kernel_select import CHOSEN_AT, pages_are_good
from envoi.ops.indexer.room import add, exchange, fetch_add, get, put, set_up_barriers
from envoi.runtime import cluster

MOST_PROGRAMS: tl.constexpr = tl.constexpr(8)
WIDTH: tl.constexpr = tl.constexpr(64)  # bins in a row
FEW: tl.constexpr = tl.constexpr(64)  # tokens that are listed
SUMS_AT: tl.constexpr = tl.constexpr(5280)  # words: sums of rows, of each count and program,
ROW_AT: tl.constexpr = tl.constexpr(6304)  # bins of a row, likewise,
NUMBERS_AT: tl.constexpr = tl.constexpr(8352)  # tokens of each program that equal the threshold; that are chosen
LIST_AT: tl.constexpr = tl.constexpr(8384)  # list of this program, of all
LISTED_AT: tl.constexpr = tl.constexpr(8512)  # length of the former
BARRIERS_AT: tl.constexpr = tl.constexpr(8514)  # of two words each: of the sums of each count
NUM_BARRIERS: tl.constexpr = tl.constexpr(11)
OF_ROW: tl.constexpr = tl.constexpr(8)  # words on: those of the row of each count,
OF_LIST: tl.constexpr = tl.constexpr(16)  # that of the list,
OF_NUMBERS: tl.constexpr = tl.constexpr(18)  # those of both numbers
STORED: tl.constexpr = tl.constexpr(512)  # tokens that are stored at a time
LIMIT: tl.constexpr = tl.constexpr(1e37)


class Row(NamedTuple):
    """A row's output, scores and pages, pointers, and how many tokens it sees."""

    out: Any
    logits: Any
    table: Any
    n: Any


class Share(NamedTuple):
    """A program's share of a row: its number in the cluster, the first token, how many."""

    rank: Any
    first: Any
    size: Any


@triton.jit
def find_in_cluster(room, rank, wanted, NTH: tl.constexpr, CLUSTER: tl.constexpr):
    """Return the bin of the wanted-th best, how many are in better bins, how many in it, and in it in programs before.

    NTH: which count it is: they are in the first set of bins and the second in turn.
    """
    base: tl.constexpr = (NTH % 2) * SECOND
    if CLUSTER == 1:
        found, better, inside = find(room, base, wanted)
        return found, better, inside, inside * 0
    else:
        sums_at: tl.constexpr = SUMS_AT + NTH * MOST_PROGRAMS * BIN_ROWS
        row_at: tl.constexpr = ROW_AT + NTH * MOST_PROGRAMS * WIDTH
        lanes = tl.arange(0, LANES)
        zero = rank * 0
        sums_of_rows(room, base)
        to = sums_at + rank * BIN_ROWS
        at = zero + BARRIERS_AT + 2 * NTH
        exchange(room, zero + SUMS, to, at, zero + BIN_ROWS, zero + CLUSTER * BIN_ROWS, BIN_ROWS, CLUSTER)
        counts = get(room, sums_at + lanes)
        for other in tl.static_range(1, CLUSTER):
            counts += get(room, sums_at + other * BIN_ROWS + lanes)
        upto = tl.cumsum(counts, 0)
        here = (upto >= wanted) & (upto - counts < wanted)
        row = tl.sum(tl.where(here, lanes, 0), 0) * WIDTH
        to = row_at + rank * WIDTH
        exchange(room, base + row, to, at + OF_ROW, zero + WIDTH, zero + CLUSTER * WIDTH, WIDTH, CLUSTER)
        even = get(room, row_at + 2 * lanes)
        odd = get(room, row_at + 2 * lanes + 1)
        for other in tl.static_range(1, CLUSTER):
            even += get(room, row_at + other * WIDTH + 2 * lanes)
            odd += get(room, row_at + other * WIDTH + 2 * lanes + 1)
        upto = tl.sum(tl.where(here, upto - counts, 0), 0) + tl.cumsum(even + odd, 0)
        middle = upto - odd
        in_even = (middle >= wanted) & (middle - even < wanted)
        in_odd = (upto >= wanted) & (middle < wanted)
        found = tl.sum(tl.where(in_even, 2 * lanes, tl.where(in_odd, 2 * lanes + 1, 0)), 0)
        better = tl.sum(tl.where(in_even, middle - even, tl.where(in_odd, middle, 0)), 0)
        inside = tl.sum(tl.where(in_even, even, tl.where(in_odd, odd, 0)), 0)
        before = zero
        for other in tl.static_range(CLUSTER - 1):
            before += tl.where(rank > other, get(room, row_at + other * WIDTH + found), 0)
        return row + found, better, inside, before


@triton.jit
def sum_before(room, rank, NTH: tl.constexpr, CLUSTER: tl.constexpr):
    """Return the sum of the words LENGTH of the programs before this one. NTH: 0 or 1, each once."""
    before = rank * 0
    if CLUSTER > 1:
        at: tl.constexpr = NUMBERS_AT + NTH * MOST_PROGRAMS
        barrier = before + BARRIERS_AT + OF_NUMBERS + 2 * NTH
        exchange(room, before + LENGTH, at + rank, barrier, before + 1, before + CLUSTER, 1, CLUSTER)
        for other in tl.static_range(CLUSTER - 1):
            before += tl.where(rank > other, get(room, rank * 0 + at + other), 0)
    return before


@triton.jit
def range_of(logits, n, NAN_FIRST: tl.constexpr):
    """Guess the range of a row's scores by 128 of them in eight places; return its upper end, and bins a unit."""
    lanes = tl.arange(0, LANES)
    first = (lanes // 4) * (n // 32 * 4) + (lanes % 4) * 4
    low = tl.full((LANES,), 0x7FFFFFFF, tl.int32)
    high = tl.full((LANES,), -0x80000000, tl.int32)
    for nth in tl.static_range(4):
        key = ordered(tl.load(logits + first + nth, mask=first + nth < n, other=0.0), NAN_FIRST)
        low = tl.minimum(low, tl.where(first + nth < n, key, low))
        high = tl.maximum(high, tl.where(first + nth < n, key, high))
    low = in_order(tl.min(low, 0)).to(tl.float32, bitcast=True)
    high = in_order(tl.max(high, 0)).to(tl.float32, bitcast=True)
    low = tl.where(low == low, tl.minimum(tl.maximum(low, -LIMIT), LIMIT), LIMIT)
    high = tl.where(high == high, tl.minimum(tl.maximum(high, -LIMIT), LIMIT), LIMIT)
    span = tl.maximum(high - low, 1e-30)
    return high + 0.5 * span, (BINS / 1.75) / span


@triton.jit
def bin_of(x, high, scale, NAN_FIRST: tl.constexpr):
    """Return the bins of scores; every step keeps their order."""
    x = tl.where(x == x, x, INF if NAN_FIRST else -INF)
    return tl.minimum(tl.maximum((high - x) * scale, 0.0), BINS - 1.0).to(tl.int32)


@triton.jit
def kth_of_list(room, inside, wanted):
    """Return the wanted-th least of the list of all programs, how many are less, and how many equal it.

    Each warp does all of it, by itself. What follows the list is greater.
    """
    lanes = tl.arange(0, LANES)
    x = get(room, LIST_AT + FEW + lanes).to(tl.uint32, bitcast=True)
    y = get(room, LIST_AT + FEW + LANES + lanes).to(tl.uint32, bitcast=True)
    below_x = lanes * 0
    below_y = lanes * 0
    for first in range(0, inside, 8):
        for nth in tl.static_range(8):
            other = get(room, lanes * 0 + LIST_AT + FEW + first + nth).to(tl.uint32, bitcast=True)
            below_x += (other < x).to(tl.int32)
            below_y += (other < y).to(tl.int32)
    least = tl.where(below_x < wanted, x, 0)
    least = tl.maximum(least, tl.where(below_y < wanted, y, 0))
    kth = tl.max(least, 0)
    less = tl.sum((x < kth).to(tl.int32) + (y < kth).to(tl.int32), 0)
    return kth, less, tl.sum((x == kth).to(tl.int32) + (y == kth).to(tl.int32), 0)


@triton.jit
def kth_of_all(room, rank, r, K: tl.constexpr, CLUSTER: tl.constexpr):
    """Return the k-th least r, how many of those that equal it are wanted, and how many do."""
    low = tl.zeros((), tl.uint32)
    left = rank * 0 + K
    inside = left
    for NTH in tl.static_range(3):
        count(room, ((NTH + 1) % 2) * SECOND, r, low, NTH)
        digit, better, inside, _ = find_in_cluster(room, rank, left, NTH + 1, CLUSTER)
        left -= better
        low += digit.to(tl.uint32) << shift_of(NTH)
    return low, left, inside


@triton.jit
def choose_share(
    room, row, share, K: tl.constexpr, SLOTS: tl.constexpr, NAN_FIRST: tl.constexpr, CHUNK: tl.constexpr,
    CLUSTER: tl.constexpr,
):  # fmt: skip
    """Store those of a share's tokens that are among the k best of the row."""
    rank = share.rank
    ids = grid(CHUNK // LANES)
    zero = rank * 0
    x = tl.load(row.logits + share.first + ids, mask=ids // 4 < tl.cdiv(share.size, 4), other=0.0)
    high, scale = range_of(row.logits, row.n, NAN_FIRST)
    if CLUSTER > 1:
        cluster.wait()  # until all barriers are set up
    bins = tl.where(ids < share.size, bin_of(x, high, scale, NAN_FIRST), BINS)
    r = tl.where(ids < share.size, radix_of(ordered(x, NAN_FIRST)), BEHIND)
    add(room, bins)
    found, better, inside, before = find_in_cluster(room, rank, zero + K, 0, CLUSTER)
    if inside <= FEW:  # the order of the list doesn't matter
        listed = bins == found
        seat = fetch_add(room, tl.where(listed, LISTED_AT, 0), listed)
        if CLUSTER > 1:
            put(room, LIST_AT + seat, r, listed)
            tl.debug_barrier()
            own = get(room, zero + LISTED_AT)
            to, barrier = LIST_AT + FEW + before, zero + BARRIERS_AT + OF_LIST
            exchange(room, zero + LIST_AT, to, barrier, own, inside, FEW, CLUSTER)
        else:
            put(room, LIST_AT + FEW + seat, r, listed)
            tl.debug_barrier()
        low, less, inside = kth_of_list(room, inside, K - better)
        left = K - better - less
    else:
        low, left, inside = kth_of_all(room, rank, r, K, CLUSTER)
    chosen = r <= low
    if inside > left:
        seat = seats(room, r == low)
        left -= sum_before(room, rank, 0, CLUSTER)
        chosen = (r < low) | ((r == low) & (seat < left))
    seat = seats(room, chosen)
    num = get(room, zero + LENGTH)
    put(room, CHOSEN_AT + seat, share.first + ids, chosen)
    before = sum_before(room, rank, 1, CLUSTER)
    tl.debug_barrier()
    for begin in range(0, num, STORED):
        place = begin + tl.arange(0, STORED)
        mask = place < num
        tl.store(row.out + before + place, slot_of(row.table, get(room, CHOSEN_AT + place), mask, SLOTS), mask=mask)


@triton.jit(do_not_specialize=INTEGERS)
def set_kernel(
    logits, seq_lens, table, out, errors, room, first_row, num_rows, width, num_pages, next_n,
    K: tl.constexpr, SLOTS: tl.constexpr, NAN_FIRST: tl.constexpr, CHUNK: tl.constexpr, CLUSTER: tl.constexpr,
):  # fmt: skip
    """Store a row's output, by position, and its error, as `select_kernel` does: CLUSTER programs a row.

    No row is longer than CLUSTER * CHUNK. Launched before the scores' kernel ends, with at least 64 * CLUSTER threads.
    """
    words.declare()
    own = tl.program_id(0) // CLUSTER
    if INTERPRETED:
        room += own * words.NUM_WORDS
    rank = tl.program_id(0) % CLUSTER
    if CLUSTER > 1:
        cluster.form(CLUSTER)
        set_up_barriers(room, rank * 0 + BARRIERS_AT, NUM_BARRIERS)
        cluster.arrive()
    row = first_row + own
    seen = visible(seq_lens, row, first_row + num_rows, next_n, width)
    n = tl.maximum(seen, 0)
    table += (row // next_n).to(tl.int64) * width
    out += row.to(tl.int64) * K
    logits += tl.multiple_of(own.to(tl.int64) * width * PAGE, PAGE)
    bins = tl.arange(0, BINS)
    put(room, bins, bins * 0, bins >= 0)
    put(room, SECOND + bins, bins * 0, bins >= 0)
    put(room, LIST_AT + bins, tl.where(bins < 2 * FEW, -1, 0), bins <= 2 * FEW)  # lists of BEHIND, and their length
    good = pages_are_good(table, n, num_pages)
    tl.store(errors + row, tl.where(seen < 0, BAD_LENGTH, tl.where(good, 0, BAD_PAGE)), mask=rank == 0)
    n = tl.where(good, n, 0)
    tl.debug_barrier()
    if n > K:
        if not INTERPRETED:
            gdc_wait()
        share = tl.multiple_of(tl.cdiv(n, CLUSTER * 4) * 4, 4)
        first = share * rank
        mine = Share(rank, first, tl.maximum(tl.minimum(n - first, share), 0))
        given = Row(out, logits, table, n)
        if (share <= CHUNK // 2) & (CLUSTER > 1):  # half the instructions
            choose_share(room, given, mine, K, SLOTS, NAN_FIRST, CHUNK // 2, CLUSTER)
        else:
            choose_share(room, given, mine, K, SLOTS, NAN_FIRST, CHUNK, CLUSTER)
    elif rank == 0:
        tl.store(out + bins, tl.where(bins < n, slot_of(table, bins, bins < n, SLOTS), -1), mask=bins < K)
