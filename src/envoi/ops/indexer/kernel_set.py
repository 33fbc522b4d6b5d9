# Type checkers don't know the types that the compiler gives to device code.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Selection of each row's k best scores as a set, in decode on Hopper: a cluster of programs holds a row in registers.

Each program has a share of the row's neighbouring tokens, and counts in its shared memory; a short row has one program,
alone or as one of a cluster whose programs have a short row each.

    range      guessed from a sample of the row; bins of equal width in it are counted
    the bin    that holds the k-th best: if it holds few, they are listed, and the best of them chosen
    otherwise  the k-th is found by three digits, as in `kernel_select`
    chosen     tokens are bits of words; each program stores its slots, by position, after those of the programs before

What a program has to know of the others they store in its shared memory: sums of 32 rows of bins; bins of a row; the
list; how many tokens each has chosen. Nothing passes through global memory. In the interpreter a row has one program.

Where the best come first, a program that has all of a row puts them in order; after clusters, `best_kernel` does.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from envoi.epilogues.device import INF, INTERPRETED
from envoi.ops.indexer import room as words
from envoi.ops.indexer.kernel_best import clear_bins, store_best_first
from envoi.ops.indexer.kernel_candidates import BAD_LENGTH, BAD_PAGE
from envoi.ops.indexer.kernel_digits import (
    BEFORE,
    BEHIND,
    BIN_ROWS,
    BINS,
    COUNTS,
    LANES,
    LENGTH,
    SECOND,
    SUMS,
    count,
    find,
    grid,
    popcount,
    radix_of,
    seats,
    shift_of,
    sums_of_rows,
)
from envoi.ops.indexer.kernel_order import slot_of
from envoi.ops.indexer.kernel_range import below, bin_of, range_of, sample
from envoi.ops.indexer.kernel_scores import INTEGERS, PAGE, ordered, visible
from envoi.ops.indexer.kernel_select import CHOSEN_AT, pages_are_good
from envoi.ops.indexer.room import (
    Piece,
    add,
    append,
    exchange,
    get,
    get2,
    put,
    reserve_registers,
    set_bits,
    set_up_barriers,
)
from envoi.runtime import cluster

MOST_PROGRAMS: tl.constexpr = tl.constexpr(8)
MOST_ROWS: tl.constexpr = tl.constexpr(512)  # of a launch
WIDTH: tl.constexpr = tl.constexpr(64)  # bins in a row
FEW: tl.constexpr = tl.constexpr(64)  # tokens that are listed
SUMS_AT: tl.constexpr = tl.constexpr(5280)  # words: sums of rows, of each count and program,
ROW_AT: tl.constexpr = tl.constexpr(6304)  # bins of a row, likewise,
NUMBERS_AT: tl.constexpr = tl.constexpr(8352)  # tokens of each program that equal the threshold; that are chosen
BARRIERS_AT: tl.constexpr = tl.constexpr(8384)  # of two words each: of the sums of each count
NUM_BARRIERS: tl.constexpr = tl.constexpr(11)
OF_ROW: tl.constexpr = tl.constexpr(8)  # words on: those of the row of each count,
OF_LIST: tl.constexpr = tl.constexpr(16)  # that of the list,
OF_NUMBERS: tl.constexpr = tl.constexpr(18)  # those of both numbers
LISTED_AT: tl.constexpr = tl.constexpr(8446)  # length of this program's list
LIST_AT: tl.constexpr = tl.constexpr(8448)  # pairs of a score and its position: this program's list,
ALL_AT: tl.constexpr = tl.constexpr(8576)  # that of all
BITS_AT: tl.constexpr = tl.constexpr(8704)  # chosen tokens
SLOTS_AT: tl.constexpr = tl.constexpr(9216)  # first slots of pages
STORED: tl.constexpr = tl.constexpr(512)  # tokens that are stored at a time


class Row(NamedTuple):
    """A row's scores and pages, pointers, and how many tokens it sees."""

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
        exchange(room, Piece(zero + SUMS, to, zero + BIN_ROWS), at, zero + CLUSTER * BIN_ROWS, BIN_ROWS, CLUSTER)
        counts = get(room, sums_at + lanes)
        for other in tl.static_range(1, CLUSTER):
            counts += get(room, sums_at + other * BIN_ROWS + lanes)
        upto = tl.cumsum(counts, 0)
        here = (upto >= wanted) & (upto - counts < wanted)
        row = tl.sum(tl.where(here, lanes, 0), 0) * WIDTH
        to = row_at + rank * WIDTH
        exchange(room, Piece(base + row, to, zero + WIDTH), at + OF_ROW, zero + CLUSTER * WIDTH, WIDTH, CLUSTER)
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
        exchange(room, Piece(before + LENGTH, at + rank, before + 1), barrier, before + CLUSTER, 1, CLUSTER)
        for other in tl.static_range(CLUSTER - 1):
            before += tl.where(rank > other, get(room, rank * 0 + at + other), 0)
    return before


@triton.jit
def apart(x):
    """Return the scalar x as a value of its own: what depends on it is computed again, instead of being held."""
    if INTERPRETED:
        return x
    y = tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x.to(tl.int32, bitcast=True)], tl.int32, is_pure=False, pack=1
    )
    return y.to(x.dtype, bitcast=True)


@triton.jit
def range_again(first, SIZE: tl.constexpr):
    """Return first .. first + SIZE - 1, of which the compiler knows nothing."""
    ids = tl.arange(0, SIZE)
    if INTERPRETED:
        return first + ids
    return tl.inline_asm_elementwise(
        "add.s32 $0, $1, $2;", "=r,r,r", [ids, apart(first)], tl.int32, is_pure=True, pack=1
    )


@triton.jit
def grid_again(first, ROWS: tl.constexpr):
    """Return what `grid` does, from `first` on, computed again."""
    return range_again(first * 0, ROWS)[:, None] * LANES + range_again(first, LANES)[None, :]


@triton.jit
def mark(room, chosen):
    """Store what is chosen [ROWS, LANES] as bits of words."""
    word = tl.xor_sum(chosen.to(tl.int32) << tl.arange(0, LANES)[None, :], 1)[:, None]
    put(room, BITS_AT + tl.arange(0, chosen.shape[0])[:, None], word, word == word)


@triton.jit
def mark_listed(room, inside, wanted, share):
    """Mark those of a share's tokens that are among the `wanted` best of the list of all, the first of equal ones.

    Each warp does all of it, by itself. What follows the list is less.
    """
    lanes = tl.arange(0, LANES)
    x, x_at = get2(room, ALL_AT // 2 + lanes)
    y, y_at = get2(room, ALL_AT // 2 + LANES + lanes)
    x = x.to(tl.float32, bitcast=True)
    y = y.to(tl.float32, bitcast=True)
    above_x = lanes * 0
    above_y = lanes * 0
    for begin in range(0, inside, 8):
        for nth in tl.static_range(8):
            other, at = get2(room, ALL_AT // 2 + begin + nth + lanes * 0)
            other = other.to(tl.float32, bitcast=True)
            above_x += ((other > x) | ((other == x) & (at < x_at))).to(tl.int32)
            above_y += ((other > y) | ((other == y) & (at < y_at))).to(tl.int32)
    x_at -= share.first
    y_at -= share.first
    is_x = (lanes < inside) & (above_x < wanted) & (x_at >= 0) & (x_at < share.size)
    is_y = (lanes + LANES < inside) & (above_y < wanted) & (y_at >= 0) & (y_at < share.size)
    set_bits(room, BITS_AT + tl.where(is_x, x_at // LANES, 0), 1 << (x_at % LANES), is_x)
    set_bits(room, BITS_AT + tl.where(is_y, y_at // LANES, 0), 1 << (y_at % LANES), is_y)


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
def mark_by_radix(room, x, share, K: tl.constexpr, NAN_FIRST: tl.constexpr, CLUSTER: tl.constexpr):
    """Mark those of a share's tokens that are among the k best of the row, whatever the scores are."""
    r = tl.where(grid_again(share.rank * 0, x.shape[0]) < share.size, radix_of(ordered(x, NAN_FIRST)), BEHIND)
    low, left, inside = kth_of_all(room, share.rank, r, K, CLUSTER)
    chosen = r <= low
    if inside > left:
        seat = seats(room, r == low)
        left -= sum_before(room, share.rank, 0, CLUSTER)
        chosen = (r < low) | ((r == low) & (seat < left))
    mark(room, chosen)


@triton.jit
def put_marked(room, ROWS: tl.constexpr):
    """Put the slots of what is marked, by position, from the word CHOSEN_AT on, with a barrier. ROWS: of 256 tokens."""
    rows = tl.arange(0, ROWS)[:, None]
    lanes = tl.arange(0, LANES)[None, :]
    byte = get(room, BITS_AT + (rows * LANES + lanes) // 4) >> (lanes % 4 * 8)
    number = popcount(byte & 0xFF)
    upto = tl.cumsum(number, 1)
    put(room, COUNTS + rows + 0 * lanes, upto, lanes + 0 * rows == LANES - 1)
    tl.debug_barrier()
    pair = 2 * tl.arange(0, LANES)
    even = tl.where(pair < ROWS, get(room, COUNTS + pair), 0)
    odd = tl.where(pair < ROWS, get(room, COUNTS + pair + 1), 0)
    ends = tl.cumsum(even + odd, 0)
    put(room, BEFORE + pair, ends - odd - even, pair >= 0)
    put(room, BEFORE + pair + 1, ends - odd, pair >= 0)
    put(room, LENGTH + 0 * pair, ends, pair == 2 * LANES - 2)
    tl.debug_barrier()
    at = CHOSEN_AT + get(room, BEFORE + rows + 0 * lanes) + upto - number
    slots = get(room, SLOTS_AT + rows * 4 + lanes // 8) + lanes % 8 * 8
    for nth in tl.static_range(8):
        chosen = (byte >> nth) & 1
        put(room, at, slots + nth, chosen != 0)
        at += chosen
    tl.debug_barrier()


@triton.jit
def store_chosen(room, out, rank, CLUSTER: tl.constexpr):
    """Store what `put_marked` has put, after that of the programs before."""
    before = sum_before(room, rank, 1, CLUSTER)
    num = get(room, rank * 0 + LENGTH)
    for begin in range(0, num, STORED):
        place = begin + tl.arange(0, STORED)
        tl.store(out + before + place, get(room, CHOSEN_AT + place), mask=place < num)


@triton.jit
def wait_for_scores(BEFORE_BEST: tl.constexpr):
    """Wait for the scores' end; then let `best_kernel` start: each of its programs finds an idle SM only from then on.

    Before, SMs become idle one by one, and the first would get two or more of its programs.
    """
    if not INTERPRETED:
        gdc_wait()
        if BEFORE_BEST:
            gdc_launch_dependents()


@triton.jit
def put_slots(room, row, share, SLOTS: tl.constexpr, CHUNK: tl.constexpr):
    """Put the slots or positions of the first tokens of a share's pages."""
    pages = tl.arange(0, CHUNK // PAGE)
    if SLOTS:
        slots = tl.load(row.table + share.first // PAGE + pages, mask=pages * PAGE < share.size, other=0) * PAGE
    else:
        slots = share.first + pages * PAGE
    put(room, SLOTS_AT + pages, slots, pages >= 0)


@triton.jit
def choose_share(
    room, row, share, K: tl.constexpr, NAN_FIRST: tl.constexpr, CHUNK: tl.constexpr, CLUSTER: tl.constexpr
):
    """Choose those of a share's tokens that are among the k best of the row, and put them as `put_marked` does."""
    rank = share.rank
    zero = rank * 0
    ids = grid(CHUNK // LANES)
    x = tl.load(row.logits + share.first + ids, mask=ids // 4 < tl.cdiv(share.size, 4), other=-INF, volatile=True)
    a, b, c, d = sample(row.logits, row.n)
    tl.debug_barrier()  # until bins are clear
    end, scale = range_of(a, b, c, d, NAN_FIRST)
    if share.size % 4 != 0:
        x = tl.where(grid_again(zero, CHUNK // LANES) < share.size, x, -INF)
    if CLUSTER > 1:
        cluster.wait()  # until all barriers are set up
    add(room, bin_of(x, end, scale, NAN_FIRST))
    found, better, inside, before = find_in_cluster(room, rank, zero + K, 0, CLUSTER)
    if (inside <= FEW) & (found < BINS - 1) & ((found > 0) | (not NAN_FIRST)):  # neither NaN nor what is behind a row
        y = below(x, apart(end), apart(scale), NAN_FIRST)
        first = tl.where(found > 0, found.to(tl.float32), -INF)
        mark(room, y < first)
        listed = (y >= first) & (y < found + 1.0)
        if CLUSTER > 1:
            append(room, LISTED_AT, LIST_AT // 2, x, grid_again(share.first, CHUNK // LANES), listed)
            tl.debug_barrier()
            own = Piece(zero + LIST_AT, ALL_AT + 2 * before, get(room, zero + LISTED_AT))
            exchange(room, own, zero + BARRIERS_AT + OF_LIST, inside, FEW, CLUSTER, 2)
        else:
            append(room, LISTED_AT, ALL_AT // 2, x, grid_again(share.first, CHUNK // LANES), listed)
            tl.debug_barrier()
        mark_listed(room, inside, K - better, share)
    else:
        mark_by_radix(room, x, share, K, NAN_FIRST, CLUSTER)
    tl.debug_barrier()
    put_marked(room, CHUNK // 8 // LANES)


@triton.jit
def assigned(seq_lens, first_row, num_rows, next_n, width, program, CHUNK: tl.constexpr, CLUSTER: tl.constexpr):
    """Return the row of a program, counted from first_row, and whether it has it alone; -1 if there is none for it.

    First come the clusters of rows longer than CHUNK, one each; then those that hold a row in each of their programs.
    Rows longer than CLUSTER * CHUNK are left out.
    """
    ids = tl.arange(0, MOST_ROWS)
    seen = visible(seq_lens, first_row + ids, first_row + num_rows, next_n, width)
    is_short = (seen <= CHUNK) & (ids < num_rows)
    is_long = (seen > CHUNK) & (seen <= CLUSTER * CHUNK)
    upto = tl.cumsum(is_long.to(tl.int32) + (is_short.to(tl.int32) << 16), 0)
    longs = upto & 0xFFFF
    programs = CLUSTER * tl.max(longs, 0)  # of long rows
    at = tl.where(is_long, CLUSTER * (longs - 1), tl.where(is_short, programs + (upto >> 16) - 1, -1))
    is_alone = program >= programs
    wanted = tl.where(is_alone, program, program // CLUSTER * CLUSTER)
    return tl.max(tl.where(at == wanted, ids, -1), 0), is_alone


@triton.jit(do_not_specialize=INTEGERS)
def set_kernel(
    logits, seq_lens, table, out, errors, room, first_row, num_rows, width, num_pages, next_n,
    K: tl.constexpr, SLOTS: tl.constexpr, NAN_FIRST: tl.constexpr, CHUNK: tl.constexpr, CLUSTER: tl.constexpr,
    SHARED: tl.constexpr, LEAVES: tl.constexpr, ALONE: tl.constexpr, BEFORE_BEST: tl.constexpr, ORDERS: tl.constexpr,
):  # fmt: skip
    """Store a row's output, by position unless it ORDERS, and its error, as `select_kernel` does.

    CLUSTER programs a row of at most CLUSTER * CHUNK tokens; it LEAVES longer ones to `select_kernel`. Launched before
    the scores' kernel ends, with at least 64 * CLUSTER threads.
    SHARED: rows of at most CHUNK tokens share clusters; else each row has one.
    ALONE: there is an SM for each program; if two fitted one, the first idle SM would get two while others have none.
    BEFORE_BEST: `best_kernel` follows, launched once the scores are there; it reads those of short rows too.
    ORDERS: the best come first, which the one program of a row does.
    """
    words.declare()
    own = tl.program_id(0) // CLUSTER
    if INTERPRETED:
        room += own * words.NUM_WORDS
    rank = tl.program_id(0) % CLUSTER
    if CLUSTER > 1:
        cluster.form(CLUSTER)
    is_first = rank == 0
    if SHARED:
        program = tl.program_id(0)
        own, is_alone = assigned(seq_lens, first_row, num_rows, next_n, width, program, CHUNK, CLUSTER)
        if own < 0:
            if LEAVES:  # what waits for this kernel's end waits for the scores, if all rows are too long
                wait_for_scores(False)
            return
        is_first = is_first | is_alone
    if CLUSTER > 1:
        set_up_barriers(room, rank * 0 + BARRIERS_AT, NUM_BARRIERS)
        cluster.arrive()
    row = first_row + own
    seen = visible(seq_lens, row, first_row + num_rows, next_n, width)
    n = tl.maximum(seen, 0)
    if LEAVES and not SHARED:
        if n > CLUSTER * CHUNK:
            wait_for_scores(False)
            return
    if ALONE:
        reserve_registers(n)
    table += (row // next_n).to(tl.int64) * width
    logits += tl.multiple_of(own.to(tl.int64) * width * PAGE, PAGE)
    bins = tl.arange(0, BINS)
    put(room, bins, bins * 0, bins >= 0)
    put(room, SECOND + bins, bins * 0, bins >= 0)
    lists = tl.arange(0, 4 * FEW)
    put(room, LIST_AT + lists, tl.full((4 * FEW,), -INF, tl.float32), lists >= 0)
    put(room, LISTED_AT + lists * 0, lists * 0, lists >= 0)
    good = pages_are_good(table, n, num_pages)
    tl.store(errors + row, tl.where(seen < 0, BAD_LENGTH, tl.where(good, 0, BAD_PAGE)), mask=is_first)
    n = tl.where(good, n, 0)
    if SHARED:
        if (n > K) & is_alone:
            mine = Share(n * 0, n * 0, n)
            given = Row(logits, table, n)
            put_slots(room, given, mine, SLOTS, CHUNK)
            wait_for_scores(BEFORE_BEST)
            choose_share(room, given, mine, K, NAN_FIRST, CHUNK, 1)
            store_chosen(room, out + row.to(tl.int64) * K, n * 0, 1)
            return
    if n > K:
        share = tl.multiple_of(tl.cdiv(n, CLUSTER * PAGE) * PAGE, PAGE)
        first = share * rank
        mine = Share(rank, first, tl.maximum(tl.minimum(n - first, share), 0))
        given = Row(logits, table, n)
        if (share <= CHUNK // 2) & (CLUSTER > 1):  # half the instructions
            put_slots(room, given, mine, SLOTS, CHUNK // 2)
            wait_for_scores(BEFORE_BEST)
            choose_share(room, given, mine, K, NAN_FIRST, CHUNK // 2, CLUSTER)
            store_chosen(room, out + row.to(tl.int64) * K, rank, CLUSTER)
        else:
            put_slots(room, given, mine, SLOTS and not ORDERS, CHUNK)
            wait_for_scores(BEFORE_BEST)
            choose_share(room, given, mine, K, NAN_FIRST, CHUNK, CLUSTER)
            if not ORDERS:
                store_chosen(room, out + row.to(tl.int64) * K, rank, CLUSTER)
    else:
        if BEFORE_BEST or ORDERS:  # what waits for this kernel's end waits for the scores, whatever the lengths
            wait_for_scores(BEFORE_BEST)
        elif seen > K:  # a row with a bad page is scored too
            wait_for_scores(False)
        if is_first & (not ORDERS):
            slots = tl.where(bins < n, slot_of(table, bins, bins < n, SLOTS), -1)
            tl.store(out + row.to(tl.int64) * K + bins, slots, mask=bins < K)
    if ORDERS:
        position = tl.where(bins < tl.minimum(n, K), tl.where(n > K, get(room, CHOSEN_AT + bins), bins), -1)
        tl.debug_barrier()
        clear_bins(room)
        slots = slot_of(table, position, position >= 0, SLOTS)
        store_best_first(room, out + row.to(tl.int64) * K, logits, position, slots, n > K, K, NAN_FIRST)
