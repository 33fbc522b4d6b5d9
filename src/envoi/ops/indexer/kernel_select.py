# Type checkers don't know the types that the compiler gives to device code.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Selection of each row's k best scores by radix, one program a row; in the order of positions, or best first.

    r = 32 bits of a score, the best the least
    kth(r)      the k-th least r: counts of 2048 digits in shared memory, three times (11, 11 and 10 bits)

    n <= k                     all tokens; no scores needed, unless the best is to be first
    n <= CHUNK                 r of all scores in registers; kth
    n <= NUM_GROUPS << LEVELS  a bound from the best of each group of neighbours, whose kth k groups reach; the scores
                               of these groups that reach it -> a list in shared memory; its r in registers; kth
    a prefill                  the same, but a row is read once for the best of each STRIDE-th token, and once for all
                               scores that reach their bound
    longer, or a full list     r of all scores from memory, four times

A scan gives every chosen token its place: the result is in the order of positions by itself, and of equal scores the
lower positions are chosen. Best first: the chosen are divided into bins by value, and counted within their bins;
with AT_ONCE many that are equal are sorted.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from envoi.epilogues.device import INF, INTERPRETED
from envoi.ops.indexer import room as words
from envoi.ops.indexer.kernel_digits import (
    BEHIND,
    BINS,
    LANES,
    LARGEST,
    LENGTH,
    PAIRS_AT,
    SECOND,
    before_rows,
    count,
    find,
    float_of,
    grid,
    kth,
    load_radix,
    popcount,
    radix_of,
    seats,
    shift_of,
)
from envoi.ops.indexer.kernel_order import SHORT, put_best_first, slot_of, sort_as_torch
from envoi.ops.indexer.kernel_scores import INTEGERS, NUM_GROUPS, PAGE, level_of, ordered, visible
from envoi.ops.indexer.room import get, get2, put, put2

BAD_LENGTH: tl.constexpr = tl.constexpr(1)
BAD_PAGE: tl.constexpr = tl.constexpr(2)
PAGES: tl.constexpr = tl.constexpr(2048)  # pages of the table that are checked at a time
MOST_GROUPS: tl.constexpr = tl.constexpr(2304)
MOST: tl.constexpr = tl.constexpr(2944)
LISTED: tl.constexpr = tl.constexpr(4096)
RADIX_OF_MINUS_INF: tl.constexpr = tl.constexpr(0xFF800000)  # whose range of two digits ends among NaN
STRIDE: tl.constexpr = tl.constexpr(8192)  # between tokens of a group, where the groups aren't of neighbours
GROUPS_AT: tl.constexpr = tl.constexpr(2080)
CHOSEN_AT: tl.constexpr = tl.constexpr(2080)


class Threshold(NamedTuple):
    """Bound of what is chosen: all better radixes, and the first `left` of those that equal it. ties: more do."""

    radix: Any
    left: Any
    ties: Any


class Row(NamedTuple):
    """Row: pointers to its scores and to the best keys of its groups; n tokens."""

    logits: Any
    groups: Any
    n: Any


class Parts(NamedTuple):
    """Share of a row's program: pointers to the lists of all, and to the counter of those done; this one's number."""

    lists: Any
    counter: Any
    part: Any


@triton.jit
def least_of(low):
    """Return the largest radix, so the least score, whose first two digits are those of low."""
    return low | 0x3FF


@triton.jit
def list_groups(room, groups, n, level, K: tl.constexpr):
    """List the groups that reach the k-th best group, in order; return the bound, and how many they are."""
    ids = grid(NUM_GROUPS // LANES)
    num = tl.cdiv(n, 1 << level)
    keys = tl.load(groups + ids, mask=ids // 4 < tl.cdiv(num, 4), other=0)
    r = tl.where(ids < num, radix_of(keys), BEHIND)
    low, _, _ = kth(room, r, n * 0 + K, 2)
    bound = least_of(low)
    seat = seats(room, r <= bound)
    put(room, GROUPS_AT + seat, ids, (r <= bound) & (seat < MOST_GROUPS))
    tl.debug_barrier()
    return bound, get(room, n * 0 + LENGTH)


@triton.jit
def member(room, first, num, level, PAIRS: tl.constexpr):
    """Return positions of the even ones of the listed groups' tokens, from the first on; past all if there is none."""
    members = first + 2 * tl.arange(0, PAIRS)
    inside = members < num
    group = get(room, GROUPS_AT + tl.where(inside, members >> level, 0))
    return tl.where(inside, (group << level) + (members & ((1 << level) - 1)), 0x7FFFFFFE)


@triton.jit
def load_members(row, position):
    """Load a row's scores at even positions, and those after each."""
    even = tl.load(row.logits + position, mask=position < row.n, other=0.0)
    return even, tl.load(row.logits + position + 1, mask=position + 1 < row.n, other=0.0)


@triton.jit
def reaches(x, bound, NAN_FIRST: tl.constexpr):
    """Tell which scores reach a bound above -inf."""
    if NAN_FIRST:
        return (x < bound) == 0
    else:
        return x >= bound


@triton.jit
def list_members(room, row, bound, begin, end, level, NAN_FIRST: tl.constexpr, CHUNK: tl.constexpr):
    """List those scores of the groups begin to end - 1 that reach the bound, with positions; return how many they are.

    Scores are loaded as one dimension, so that neighbouring lanes load neighbouring scores.
    """
    PAIRS: tl.constexpr = CHUNK // 2
    ROWS: tl.constexpr = PAIRS // LANES
    total = end * 0
    end = end << level
    begin = begin << level
    next_even, next_odd = load_members(row, member(room, begin, end, level, PAIRS))
    lanes = tl.arange(0, LANES)[None, :]
    rows = tl.arange(0, ROWS)[:, None]
    for first in range(begin, end, CHUNK):
        even = tl.reshape(next_even, (ROWS, LANES))
        odd = tl.reshape(next_odd, (ROWS, LANES))
        next_even, next_odd = load_members(row, member(room, first + CHUNK, end, level, PAIRS))
        position = tl.reshape(member(room, first, end, level, PAIRS), (ROWS, LANES))
        keep_even = reaches(even, bound, NAN_FIRST) & (position < row.n)
        keep_odd = reaches(odd, bound, NAN_FIRST) & (position + 1 < row.n)
        evens = tl.xor_sum(keep_even.to(tl.int32) << lanes, 1)[:, None]
        odds = tl.xor_sum(keep_odd.to(tl.int32) << lanes, 1)[:, None]
        before = total + before_rows(room, rows, popcount(evens) + popcount(odds))
        total += get(room, begin * 0 + LENGTH)
        seat = before + popcount(evens & ((1 << lanes) - 1)) + popcount(odds & ((1 << lanes) - 1))
        put2(room, PAIRS_AT + seat, even, position, keep_even & (seat < MOST))
        seat += keep_even.to(tl.int32)
        put2(room, PAIRS_AT + seat, odd, position + 1, keep_odd & (seat < MOST))
    tl.debug_barrier()
    return total


@triton.jit
def emit(room, seat, r, position, mask, BY_SCORE: tl.constexpr):
    """Give chosen tokens their seats in shared memory: in the list, to be ordered, or in that of positions."""
    if BY_SCORE:
        put2(room, PAIRS_AT + seat, r, position, mask)
    else:
        put(room, CHOSEN_AT + seat, position, mask)


@triton.jit
def choose(room, r, position, above, equal, threshold, BY_SCORE: tl.constexpr):
    """Emit those of r that a Threshold chooses; positions must ascend.

    above, equal: how many were chosen, and equal the threshold, before. Returns how many are, and do, here.
    """
    chosen = r <= threshold.radix
    equals = above
    if threshold.ties:
        rank = seats(room, r == threshold.radix)
        chosen = chosen & ((r < threshold.radix) | (equal + rank < threshold.left))
        equals = get(room, above * 0 + LENGTH)
    seat = above + seats(room, chosen)
    emit(room, seat, r, position, chosen, BY_SCORE)
    return get(room, above * 0 + LENGTH), equals


@triton.jit
def choose_from_memory(
    room, logits, n, K: tl.constexpr, BY_SCORE: tl.constexpr, NAN_FIRST: tl.constexpr, CHUNK: tl.constexpr
):
    """Choose from a row of any length and any scores: each pass loads all of them."""
    low = tl.zeros((), tl.uint32)
    left = n * 0 + K
    inside = left
    for nth in range(3):
        base = (nth & 1) * SECOND
        for first in range(0, n, CHUNK):
            count(room, base, load_radix(logits, first + grid(CHUNK // LANES), n, NAN_FIRST), low, nth)
        digit, better, inside = find(room, base, left)
        left -= better
        low += digit.to(tl.uint32) << shift_of(nth)
    above = n * 0
    equal = n * 0
    for first in range(0, n, CHUNK):
        ids = first + grid(CHUNK // LANES)
        r = load_radix(logits, ids, n, NAN_FIRST)
        chosen, equals = choose(room, r, ids, above, equal, Threshold(low, left, inside > left), BY_SCORE)
        above += chosen
        equal += equals


@triton.jit
def pages_are_good(table, n, num_pages):
    """Tell whether the pages of a row's n tokens are all in the cache."""
    bad = tl.zeros((PAGES,), tl.int32)
    for first in range(0, tl.cdiv(n, PAGE), PAGES):
        columns = first + tl.arange(0, PAGES)
        pages = tl.load(table + columns, mask=columns * PAGE < n, other=0)
        bad |= ((pages < 0) | ((pages >= num_pages) & (columns * PAGE < n))).to(tl.int32)
    return tl.max(bad, 0) == 0


@triton.jit
def choose_at_once(room, r, position, zero, K: tl.constexpr, BY_SCORE: tl.constexpr):
    """Choose K of those in registers."""
    radix, left, inside = kth(room, r, zero + K, 3)
    choose(room, r, position, zero, zero, Threshold(radix, left, inside > left), BY_SCORE)


@triton.jit
def choose_listed(room, x, position, total, K: tl.constexpr, BY_SCORE: tl.constexpr, NAN_FIRST: tl.constexpr):
    """Choose K of the first `total` of LISTED scores x."""
    ids = grid(LISTED // LANES)
    r = tl.where(ids < total, radix_of(ordered(x, NAN_FIRST)), BEHIND)
    choose_at_once(room, r, position, total * 0, K, BY_SCORE)


@triton.jit
def hand_over(room, parts, total, PARTS: tl.constexpr):
    """Store this part's list for the program of the row that comes last; tell whether this is it."""
    ids = tl.arange(0, LISTED)
    mine = parts.lists + parts.part * (2 * MOST)
    at = 2 * PAIRS_AT + 2 * tl.where(ids < MOST, ids, 0)
    tl.store(mine + ids, get(room, at), mask=ids < tl.minimum(total, MOST))
    tl.store(mine + MOST + ids, get(room, at + 1), mask=ids < tl.minimum(total, MOST))
    tl.store(parts.lists + PARTS * (2 * MOST) + parts.part, total)
    tl.debug_barrier()
    last = tl.atomic_add(parts.counter, 1, sem="acq_rel") == PARTS - 1
    if last:
        tl.store(parts.counter, 0)
    return last


@triton.jit
def take_over(parts, PARTS: tl.constexpr):
    """Load the lists of all parts, one after the other: scores, positions, how many they are."""
    ids = grid(LISTED // LANES)
    at = ids
    total = parts.part * 0
    for nth in tl.static_range(PARTS):
        at = tl.where(ids >= total, nth * (2 * MOST) + ids - total, at)
        total += tl.load(parts.lists + PARTS * (2 * MOST) + nth)
    inside = ids < tl.minimum(total, MOST)
    x = tl.load(parts.lists + at, mask=inside, other=0).to(tl.float32, bitcast=True)
    return x, tl.load(parts.lists + MOST + at, mask=inside, other=0), total


@triton.jit
def better(x, y):
    """Return the larger of x and y, or y if x is NaN. y isn't."""
    if INTERPRETED:
        return tl.where(x > y, x, y)
    else:
        return tl.maximum(x, y)


@triton.jit
def best_of_groups(logits, n, NAN_FIRST: tl.constexpr):
    """Return the radix of the best of each group of a row's tokens: of every STRIDE-th."""
    ids = grid(STRIDE // LANES)
    best = tl.full((STRIDE // LANES, LANES), -INF, tl.float32)
    last = (n - 1) // STRIDE * STRIDE
    for first in range(0, last, STRIDE):
        best = better(as_number(tl.load(logits + first + ids), NAN_FIRST), best)
    x = tl.load(logits + last + ids, mask=(last + ids) // 4 < tl.cdiv(n, 4), other=0.0)
    x = tl.where(last + ids < n, as_number(x, NAN_FIRST), -INF)
    return radix_of(ordered(better(x, best), NAN_FIRST))


@triton.jit
def as_number(x, NAN_FIRST: tl.constexpr):
    """Replace NaN, if it is to be first, by infinity."""
    if NAN_FIRST:
        return tl.where(x == x, x, INF)
    else:
        return x


@triton.jit
def list_reaching(room, logits, n, bound, NAN_FIRST: tl.constexpr, CHUNK: tl.constexpr):
    """List those of a row's scores that reach the bound, with positions; return how many they are."""
    total = n * 0
    for first in range(0, n, CHUNK):
        ids = first + grid(CHUNK // LANES)
        x = tl.load(logits + ids, mask=ids // 4 < tl.cdiv(n, 4), other=0.0)
        keep = reaches(x, bound, NAN_FIRST) & (ids < n)
        seat = total + seats(room, keep)
        total += get(room, n * 0 + LENGTH)
        put2(room, PAIRS_AT + seat, x, ids, keep & (seat < MOST))
    tl.debug_barrier()
    return total


@triton.jit
def choose_reaching(
    room, logits, n, K: tl.constexpr, BY_SCORE: tl.constexpr, NAN_FIRST: tl.constexpr, CHUNK: tl.constexpr
):
    """Choose K of a row's tokens; tell whether they are chosen: no, if more may be than the list holds."""
    low, _, _ = kth(room, best_of_groups(logits, n, NAN_FIRST), n * 0 + K, 2)
    bound = float_of(least_of(low))
    total = n
    if (low < RADIX_OF_MINUS_INF) & (bound > -LARGEST):
        total = list_reaching(room, logits, n, bound, NAN_FIRST, CHUNK)
    fits = total <= MOST
    if fits:
        choose_own_list(room, total, K, BY_SCORE, NAN_FIRST)
    return fits


@triton.jit
def choose_own_list(room, total, K: tl.constexpr, BY_SCORE: tl.constexpr, NAN_FIRST: tl.constexpr):
    """Choose K of the list."""
    ids = grid(LISTED // LANES)
    x, position = get2(room, PAIRS_AT + tl.where(ids < total, ids, 0))
    choose_listed(room, x.to(tl.float32, bitcast=True), position, total, K, BY_SCORE, NAN_FIRST)


@triton.jit
def choose_from_groups(
    room, row, parts, K: tl.constexpr, BY_SCORE: tl.constexpr, NAN_FIRST: tl.constexpr, CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Choose K of a long row's tokens, each of its programs among its share of the groups, the last among what is left.

    Returns whether this is the last program, and whether it has chosen: no, if more may be chosen than the list holds.
    """
    level = level_of(row.n)
    bound, num = list_groups(room, row.groups, row.n, level, K)
    bound_score = float_of(bound)
    share = tl.cdiv(num, PARTS)
    total = row.n
    if (num <= MOST_GROUPS) & (bound_score > -LARGEST):
        begin = tl.minimum(share * parts.part, num)
        total = list_members(room, row, bound_score, begin, tl.minimum(begin + share, num), level, NAN_FIRST, CHUNK)
    last = hand_over(room, parts, total, PARTS)
    fits = row.n < 0
    if last:
        tl.debug_barrier()
        x, position, total = take_over(parts, PARTS)
        fits = total <= MOST
        if fits:
            choose_listed(room, x, position, total, K, BY_SCORE, NAN_FIRST)
    return last, fits


@triton.jit(do_not_specialize=INTEGERS)
def select_kernel(
    logits, groups, lists, counters, seq_lens, table, out, errors, room, first_row, num_rows, width, num_pages, next_n,
    K: tl.constexpr, PLACES: tl.constexpr, SLOTS: tl.constexpr, BY_SCORE: tl.constexpr, NAN_FIRST: tl.constexpr,
    LEVELS: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr, AT_ONCE: tl.constexpr,
    ABOVE: tl.constexpr,
):  # fmt: skip
    """Store a row's output and its error; if the row has more than ABOVE tokens, or ABOVE is 0.

    logits [rows, width * PAGE], groups [rows, NUM_GROUPS] int32: the best keys of groups of level_of(n), in rows longer
    than NUM_GROUPS, up to NUM_GROUPS << LEVELS; or None, with one program a row. K: 1 to BINS; PLACES: K, up to a power
    of two. BY_SCORE: best first, else by position; then rows of up to K tokens need no logits. NAN_FIRST: as torch
    does; rows of up to SHORT tokens are in the order of its sort. EARLY: launched before the scores' kernel ends.
    PARTS: programs of a long row. lists [rows, PARTS * (2 * MOST + 1)] int32: of each part scores and positions, then
    all parts' lengths. counters [rows]: zero before and after. AT_ONCE: no row is longer than CHUNK, so code for long
    rows is left out; and many equal scores are sorted.
    """
    words.declare()
    own = tl.program_id(0)
    part = tl.program_id(1)
    row = first_row + own
    if INTERPRETED:
        room += (own * PARTS + part) * words.NUM_WORDS
    seen = visible(seq_lens, row, first_row + num_rows, next_n, width)
    n = tl.maximum(seen, 0)
    if ABOVE > 0:
        if n <= ABOVE:
            if EARLY:  # what waits for this kernel's end waits for that of the kernels that store these rows
                gdc_wait()
            return
    table += (row // next_n).to(tl.int64) * width
    out += row.to(tl.int64) * K
    logits += tl.multiple_of(own.to(tl.int64) * width * PAGE, PAGE)
    good = pages_are_good(table, n, num_pages)
    tl.store(errors + row, tl.where(seen < 0, BAD_LENGTH, tl.where(good, 0, BAD_PAGE)))
    n = tl.where(good, n, 0)
    bins = tl.arange(0, BINS)
    put(room, bins, bins * 0, bins >= 0)
    put(room, SECOND + bins, bins * 0, bins >= 0)
    tl.debug_barrier()
    is_long = (n > CHUNK) & (n <= (NUM_GROUPS << LEVELS)) & (PARTS > 1)
    if (part > 0) & (is_long == 0):
        return
    if EARLY:
        gdc_wait()
        if groups is None:
            gdc_launch_dependents()  # the next rows' scores, see `kernel_prefill`
    last = part == 0
    if n > K:
        if (n <= CHUNK) | AT_ONCE:
            ids = grid(CHUNK // LANES)
            choose_at_once(room, load_radix(logits, ids, n, NAN_FIRST), ids, n * 0, K, BY_SCORE)
        elif not AT_ONCE:
            done = n < 0
            if groups is None:
                done = choose_reaching(room, logits, n, K, BY_SCORE, NAN_FIRST, CHUNK)
            elif PARTS > 1:
                if is_long:
                    parts = Parts(lists + own * (PARTS * (2 * MOST + 1)), counters + own, part)
                    last, done = choose_from_groups(
                        room, Row(logits, groups + own * NUM_GROUPS, n), parts, K, BY_SCORE, NAN_FIRST, CHUNK, PARTS
                    )
            if last & (done == 0):
                choose_from_memory(room, logits, n, K, BY_SCORE, NAN_FIRST, CHUNK)
        tl.debug_barrier()
    else:
        tl.store(out + bins, -1, mask=(bins >= n) & (bins < K))
        if BY_SCORE:
            put2(room, PAIRS_AT + bins, load_radix(logits, bins, n, NAN_FIRST), bins, bins < n)
            tl.debug_barrier()
    if last == 0:
        return
    if BY_SCORE:
        if NAN_FIRST & (n <= SHORT):
            sort_as_torch(out, logits, n, table, SLOTS)
        else:
            put_best_first(room, out, table, tl.minimum(n, K), n > K, SLOTS, AT_ONCE)
    else:
        place = tl.arange(0, PLACES)
        position = place
        if n > K:
            position = get(room, CHOSEN_AT + place)
        chosen = place < (n if PLACES == K else tl.minimum(n, K))
        tl.store(out + place, slot_of(table, position, chosen, SLOTS), mask=chosen)
