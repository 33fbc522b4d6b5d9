# Type checkers don't know the types that the compiler gives to device code.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Selection of each row's k best scores by radix, one program a row; in the order of positions, or best first.

    r = 32 bits of a score, the best the least
    kth(r)      the k-th least r: counts of 2048 digits in shared memory, three times (11, 11 and 10 bits)

    n <= k                     all tokens; no scores needed, unless the best is to be first
    n <= CHUNK                 r of all scores in registers; kth
    n <= NUM_GROUPS << LEVELS  a bound from the best of each group of neighbours, whose kth k groups reach; the scores
                               of these groups that reach it -> a list in shared memory; its r in registers; kth
    longer, or a full list     r of all scores from memory, four times

A scan gives every chosen token its place: the result is in the order of positions by itself, and of equal scores the
lower positions are chosen. Best first: the chosen are divided into bins by value, and counted within their bins.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from envoi.epilogues.device import INTERPRETED, in_order
from envoi.ops.indexer import room as words
from envoi.ops.indexer.kernel_scores import INTEGERS, NUM_GROUPS, PAGE, level_of, ordered, visible
from envoi.ops.indexer.room import add, fetch_add, get, put

BAD_LENGTH: tl.constexpr = tl.constexpr(1)
BAD_PAGE: tl.constexpr = tl.constexpr(2)
PAGES: tl.constexpr = tl.constexpr(2048)  # pages of the table that are checked at a time
LANES: tl.constexpr = tl.constexpr(32)
BINS: tl.constexpr = tl.constexpr(2048)
BIN_ROWS: tl.constexpr = tl.constexpr(32)
MOST_GROUPS: tl.constexpr = tl.constexpr(2560)
MOST: tl.constexpr = tl.constexpr(3392)
# Shared memory by word: two sets of bins, of which one is in use; sums of their rows; groups (over the second set of
# bins, which isn't in use meanwhile); bits of rows; a list's keys and positions.
GROUPS_AT: tl.constexpr = tl.constexpr(2048)
SUMS: tl.constexpr = tl.constexpr(4608)
LENGTH: tl.constexpr = tl.constexpr(4672)
COUNTS: tl.constexpr = tl.constexpr(4704)
BEFORE: tl.constexpr = tl.constexpr(4960)
KEYS_AT: tl.constexpr = tl.constexpr(5216)
POSITIONS_AT: tl.constexpr = tl.constexpr(8608)
FULL_BIN: tl.constexpr = tl.constexpr(48)  # chosen in a bin from which on a sort is faster
LARGEST: tl.constexpr = tl.constexpr(3.4e38)
SHORT: tl.constexpr = tl.constexpr(32)  # tokens: five levels of the network, positions in six bits


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
def seats(room, flags):
    """Return how many flags [ROWS, LANES] are set before each, in order; their number -> the word LENGTH.

    A row's flags are the bits of a word: two counts of bits where a scan takes five shuffles an element. Words pass
    from one layout to the other through shared memory.
    """
    ROWS: tl.constexpr = flags.shape[0]
    lanes = tl.arange(0, LANES)[None, :]
    rows = tl.arange(0, ROWS)[:, None]
    word = tl.xor_sum(flags.to(tl.int32) << lanes, 1)[:, None]
    put(room, COUNTS + rows, popcount(word), rows >= 0)
    tl.debug_barrier()
    rows_ = tl.arange(0, ROWS)
    counts = get(room, COUNTS + rows_)
    upto = tl.cumsum(counts, 0)
    put(room, BEFORE + rows_, upto - counts, upto >= 0)
    put(room, rows_ * 0 + LENGTH, upto, rows_ == ROWS - 1)
    tl.debug_barrier()
    return get(room, BEFORE + rows) + popcount(word & ((1 << lanes) - 1))


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
    put(room, BINS - base + cells, cells * 0, cells >= 0)
    put(room, BINS - base + cells + LANES, cells * 0, cells >= 0)
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
    """Return how many bits of r are behind its nth digit."""
    return tl.where(nth == 0, 21, tl.where(nth == 1, 10, 0)).to(tl.uint32)


@triton.jit
def span_of(nth):
    """Return the largest r - low, where low has r's first nth digits and zeros."""
    return tl.where(nth == 0, -1, tl.where(nth == 1, 0x1FFFFF, 0x3FF)).to(tl.uint32, bitcast=True)


@triton.jit
def count(room, base, r, valid, low, nth):
    """Count the nth digit of those r that begin with the digits of low."""
    add(room, base + ((r - low) >> shift_of(nth)).to(tl.int32), valid & ((r - low) <= span_of(nth)))


@triton.jit
def kth(room, r, valid, wanted, DIGITS: tl.constexpr):
    """Return the wanted-th least r, its first DIGITS digits and zeros; how many of those with these are wanted; all.

    The first set of bins is clear, before and, if DIGITS is 2, afterwards; if it is 3, the second is.
    """
    low = tl.zeros((), tl.uint32)
    inside = wanted
    for nth in range(DIGITS):
        base = (nth & 1) * BINS
        count(room, base, r, valid, low, nth)
        digit, better, inside = find(room, base, wanted)
        wanted -= better
        low += digit.to(tl.uint32) << shift_of(nth)
    return low, wanted, inside


@triton.jit
def list_groups(room, groups, n, level, K: tl.constexpr):
    """List the groups that reach the k-th best group, in order; return the bound, and how many they are."""
    ids = grid(NUM_GROUPS // LANES)
    valid = ids < tl.cdiv(n, 1 << level)
    r = radix_of(tl.load(groups + ids, mask=valid, other=0))
    low, _, _ = kth(room, r, valid, n * 0 + K, 2)
    bound = low | 0x3FF
    reach = valid & (r <= bound)
    seat = seats(room, reach)
    put(room, GROUPS_AT + seat, ids, reach & (seat < MOST_GROUPS))
    tl.debug_barrier()
    return bound, get(room, n * 0 + LENGTH)


@triton.jit
def member(room, first, num, level, n, CHUNK: tl.constexpr):
    """Return positions of the listed groups' tokens, and whether there is one."""
    members = first + grid(CHUNK // LANES)
    inside = members < (num << level)
    group = get(room, GROUPS_AT + tl.where(inside, members >> level, 0))
    position = (group << level) + (members & ((1 << level) - 1))
    return position, inside & (position < n)


@triton.jit
def list_members(room, logits, bound, num, level, n, NAN_FIRST: tl.constexpr, CHUNK: tl.constexpr):
    """List the radixes and positions of the listed groups' scores that reach the bound; return how many they are."""
    total = n * 0
    position, inside = member(room, 0, num, level, n, CHUNK)
    next_scores = tl.load(logits + position, mask=inside, other=0.0)
    for first in range(0, num << level, CHUNK):
        scores = next_scores
        position, inside = member(room, first + CHUNK, num, level, n, CHUNK)
        next_scores = tl.load(logits + position, mask=inside, other=0.0)
        r = radix_of(ordered(scores, NAN_FIRST))
        position, inside = member(room, first, num, level, n, CHUNK)
        keep = inside & (r <= bound)
        seat = total + seats(room, keep)
        total += get(room, n * 0 + LENGTH)
        fits = keep & (seat < MOST)
        put(room, KEYS_AT + seat, r, fits)
        put(room, POSITIONS_AT + seat, position, fits)
    tl.debug_barrier()
    return total


@triton.jit
def slot_of(table, position, mask, SLOTS: tl.constexpr):
    """Return the slots of positions, or, unless SLOTS, the positions."""
    if SLOTS:
        page = tl.load(table + position // PAGE, mask=mask, other=0)
        return page * PAGE + position % PAGE
    else:
        return position


@triton.jit
def emit(room, out, table, seat, r, position, mask, SLOTS: tl.constexpr, BY_SCORE: tl.constexpr):
    """Give chosen tokens their seats: in the output, or, if they are still to be ordered, in the list."""
    if BY_SCORE:
        put(room, KEYS_AT + seat, r, mask)
        put(room, POSITIONS_AT + seat, position, mask)
    else:
        tl.store(out + seat, slot_of(table, position, mask, SLOTS), mask=mask)


@triton.jit
def choose(
    room, out, table, r, position, valid, above, equal, threshold, left, ties, SLOTS: tl.constexpr,
    BY_SCORE: tl.constexpr,
):  # fmt: skip
    """Emit those of r below the threshold, and the first `left` that equal it; positions must ascend.

    above, equal: how many were chosen, and equal the threshold, before. Returns how many are, and do, here.
    ties: more than `left` equal it.
    """
    same = valid & (r == threshold)
    chosen = valid & (r <= threshold)
    equals = above
    if ties:
        rank = seats(room, same)
        chosen = chosen & ((r < threshold) | (equal + rank < left))
        equals = get(room, above * 0 + LENGTH)
    seat = above + seats(room, chosen)
    emit(room, out, table, seat, r, position, chosen, SLOTS, BY_SCORE)
    return get(room, above * 0 + LENGTH), equals


@triton.jit
def choose_from_memory(
    room, out, table, logits, n, K: tl.constexpr, SLOTS: tl.constexpr, BY_SCORE: tl.constexpr, NAN_FIRST: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Choose from a row of any length and any scores: each pass loads all of them."""
    low = tl.zeros((), tl.uint32)
    left = n * 0 + K
    inside = left
    for nth in range(3):
        base = (nth & 1) * BINS
        for first in range(0, n, CHUNK):
            ids = first + grid(CHUNK // LANES)
            r = radix_of(ordered(tl.load(logits + ids, mask=ids < n, other=0.0), NAN_FIRST))
            count(room, base, r, ids < n, low, nth)
        digit, better, inside = find(room, base, left)
        left -= better
        low += digit.to(tl.uint32) << shift_of(nth)
    above = n * 0
    equal = n * 0
    for first in range(0, n, CHUNK):
        ids = first + grid(CHUNK // LANES)
        r = radix_of(ordered(tl.load(logits + ids, mask=ids < n, other=0.0), NAN_FIRST))
        chosen, equals = choose(
            room, out, table, r, ids, ids < n, above, equal, low, left, inside > left, SLOTS, BY_SCORE
        )
        above += chosen
        equal += equals


@triton.jit
def begins_of_bins(room):
    """Turn the counts of the second set of bins into the sums of those before each. Barriers before and after."""
    cells = tl.arange(0, BIN_ROWS)[:, None] * (BINS // BIN_ROWS) + tl.arange(0, BINS // BIN_ROWS)[None, :]
    sums_of_rows(room, BINS)
    lanes = tl.arange(0, LANES)
    sums = get(room, SUMS + lanes)
    put(room, SUMS + LANES + lanes, tl.cumsum(sums, 0) - sums, sums >= 0)
    tl.debug_barrier()
    counts = get(room, BINS + cells)
    before = get(room, SUMS + LANES + tl.arange(0, BIN_ROWS))
    put(room, BINS + cells, before[:, None] + tl.cumsum(counts, 1) - counts, cells >= 0)
    tl.debug_barrier()


@triton.jit
def put_best_first(room, out, table, num, SLOTS: tl.constexpr):
    """Store the listed tokens, at most BINS, best first; they are listed by position. The second set of bins is clear.

    Each is counted against those of its bin; bins of equal width between the least and the greatest score. If a bin has
    more than FULL_BIN, all are sorted instead.
    """
    ids = tl.arange(0, BINS)
    valid = ids < num
    r = get(room, KEYS_AT + ids).to(tl.uint32, bitcast=True)
    position = get(room, POSITIONS_AT + ids)
    x = 0.5 * float_of(r)  # halves, since the difference of two may not fit float32
    most = tl.max(tl.where(valid, x, -LARGEST), 0)
    least = tl.min(tl.where(valid, x, LARGEST), 0)
    below = (most - x) * ((BINS - 1) / tl.maximum(most - least, 1e-30))
    bins = tl.where(valid, tl.minimum(tl.maximum(below, 0.0), BINS - 1.0), 0.0).to(tl.int32)
    add(room, BINS + bins, valid)
    begins_of_bins(room)
    seat = fetch_add(room, BINS + bins, valid)  # afterwards a bin's word is its end
    put(room, KEYS_AT + seat, r, valid)
    put(room, POSITIONS_AT + seat, ids, valid)
    tl.debug_barrier()
    begin = tl.where(bins > 0, get(room, BINS + tl.maximum(bins - 1, 0)), 0)
    end = tl.where(valid, get(room, BINS + bins), begin)
    fullest = tl.max(end - begin, 0)
    if fullest <= FULL_BIN:
        rank = begin
        for nth in range(0, fullest):
            at = tl.maximum(tl.minimum(begin + nth, end - 1), 0)
            other = get(room, KEYS_AT + at).to(tl.uint32, bitcast=True)
            earlier = get(room, POSITIONS_AT + at) < ids
            ahead = (begin + nth < end) & ((other < r) | ((other == r) & earlier))
            rank += ahead.to(tl.int32)
        tl.store(out + rank, slot_of(table, position, valid, SLOTS), mask=valid)
    else:
        packed = (r.to(tl.int64) << 29) | position.to(tl.int64)
        packed = tl.sort(tl.where(valid, packed, 0x7FFFFFFFFFFFFFFF))
        position = (packed & 0x1FFFFFFF).to(tl.int32)
        tl.store(out + ids, slot_of(table, position, valid, SLOTS), mask=valid)


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
def choose_all(
    room, out, table, logits, n, K: tl.constexpr, SLOTS: tl.constexpr, BY_SCORE: tl.constexpr, NAN_FIRST: tl.constexpr
):
    """Emit all n tokens of a row, K at most, and store -1 behind them."""
    ids = tl.arange(0, BINS)
    tl.store(out + ids, -1, mask=(ids >= n) & (ids < K))
    r = tl.zeros((BINS,), tl.uint32)
    if BY_SCORE:
        r = radix_of(ordered(tl.load(logits + ids, mask=ids < n, other=0.0), NAN_FIRST))
    emit(room, out, table, ids, r, ids, ids < n, SLOTS, BY_SCORE)


@triton.jit
def choose_some(
    room, out, table, logits, groups, n, K: tl.constexpr, SLOTS: tl.constexpr, BY_SCORE: tl.constexpr,
    NAN_FIRST: tl.constexpr, LEVELS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Choose K of a row's n tokens: by position into the output, or to be ordered into the list."""
    ids = grid(CHUNK // LANES)
    fits = n <= CHUNK
    total = n
    if (n > CHUNK) & (n <= (NUM_GROUPS << LEVELS)):
        level = level_of(n)
        bound, num = list_groups(room, groups, n, level, K)
        if num <= MOST_GROUPS:
            total = list_members(room, logits, bound, num, level, n, NAN_FIRST, CHUNK)
            fits = total <= MOST
    if fits:
        valid = ids < total
        position = ids
        if n <= CHUNK:
            r = radix_of(ordered(tl.load(logits + ids, mask=valid, other=0.0), NAN_FIRST))
        else:
            at = tl.where(valid, ids, 0)
            r = get(room, KEYS_AT + at).to(tl.uint32, bitcast=True)
            position = get(room, POSITIONS_AT + at)
        threshold, left, inside = kth(room, r, valid, n * 0 + K, 3)
        ties = inside > left
        choose(room, out, table, r, position, valid, n * 0, n * 0, threshold, left, ties, SLOTS, BY_SCORE)
    else:
        choose_from_memory(room, out, table, logits, n, K, SLOTS, BY_SCORE, NAN_FIRST, CHUNK)


@triton.jit(do_not_specialize=INTEGERS)
def select_kernel(
    logits, groups, seq_lens, table, out, errors, room, first_row, num_rows, width, num_pages,
    NEXT_N: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, BY_SCORE: tl.constexpr, NAN_FIRST: tl.constexpr,
    LEVELS: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Store a row's output and its error.

    logits [rows, width * PAGE], groups [rows, NUM_GROUPS] int32: the best keys of groups of level_of(n), in rows longer
    than NUM_GROUPS, up to NUM_GROUPS << LEVELS. BY_SCORE: best first, else by position; then rows of up to K tokens
    need no logits. NAN_FIRST: as torch does; rows of up to SHORT tokens are in the order of its sort. EARLY: launched
    before the scores' kernel ends.
    """
    words.declare()
    own = tl.program_id(0)
    row = first_row + own
    if INTERPRETED:
        room += own * words.NUM_WORDS
    seen = visible(seq_lens, row, first_row + num_rows, NEXT_N, width)
    n = tl.maximum(seen, 0)
    table += (row // NEXT_N).to(tl.int64) * width
    out += row.to(tl.int64) * K
    logits += own.to(tl.int64) * width * PAGE
    groups += own * NUM_GROUPS
    good = pages_are_good(table, n, num_pages)
    tl.store(errors + row, tl.where(seen < 0, BAD_LENGTH, tl.where(good, 0, BAD_PAGE)))
    n = tl.where(good, n, 0)
    bins = tl.arange(0, BINS)
    put(room, bins, bins * 0, bins >= 0)
    put(room, BINS + bins, bins * 0, bins >= 0)
    tl.debug_barrier()
    if EARLY:
        gdc_wait()
    if n <= K:
        choose_all(room, out, table, logits, n, K, SLOTS, BY_SCORE, NAN_FIRST)
    else:
        choose_some(room, out, table, logits, groups, n, K, SLOTS, BY_SCORE, NAN_FIRST, LEVELS, CHUNK)
    if BY_SCORE:
        if NAN_FIRST & (n <= SHORT):
            sort_as_torch(out, logits, n, table, SLOTS)
        else:
            tl.debug_barrier()
            put_best_first(room, out, table, tl.minimum(n, K), SLOTS)
