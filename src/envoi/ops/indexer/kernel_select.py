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
from envoi.ops.indexer.room import add, fetch_add, get, put, put2

BAD_LENGTH: tl.constexpr = tl.constexpr(1)
BAD_PAGE: tl.constexpr = tl.constexpr(2)
PAGES: tl.constexpr = tl.constexpr(2048)  # pages of the table that are checked at a time
LANES: tl.constexpr = tl.constexpr(32)
BINS: tl.constexpr = tl.constexpr(2048)
BEHIND: tl.constexpr = tl.constexpr(0xFFFFFFFF)  # a radix that no score has
BIN_ROWS: tl.constexpr = tl.constexpr(32)
MOST_GROUPS: tl.constexpr = tl.constexpr(2304)
MOST: tl.constexpr = tl.constexpr(2944)
LISTED: tl.constexpr = tl.constexpr(4096)
# Shared memory by word: two sets of bins, of which one is in use, each with a word for what isn't counted; sums of rows
# of bins; bits of rows; pairs of a list. Groups, and positions that are chosen, lie over the second set of bins.
SECOND: tl.constexpr = tl.constexpr(2080)
GROUPS_AT: tl.constexpr = tl.constexpr(2080)
CHOSEN_AT: tl.constexpr = tl.constexpr(2080)
SUMS: tl.constexpr = tl.constexpr(4384)
LENGTH: tl.constexpr = tl.constexpr(4448)
COUNTS: tl.constexpr = tl.constexpr(4480)
BEFORE: tl.constexpr = tl.constexpr(4736)
PAIRS_AT: tl.constexpr = tl.constexpr(2496)  # the word of this number is twice as far
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
    """Return how many bits of r are behind its nth digit."""
    return tl.where(nth == 0, 21, tl.where(nth == 1, 10, 0)).to(tl.uint32)


@triton.jit
def count(room, base, r, low, nth):
    """Count the nth digit of those r that begin with the digits of low; others in the word behind the bins."""
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
def list_groups(room, groups, n, level, K: tl.constexpr):
    """List the groups that reach the k-th best group, in order; return the bound, and how many they are."""
    ids = grid(NUM_GROUPS // LANES)
    num = tl.cdiv(n, 1 << level)
    keys = tl.load(groups + ids, mask=ids // 4 < tl.cdiv(num, 4), other=0)
    r = tl.where(ids < num, radix_of(keys), BEHIND)
    low, _, _ = kth(room, r, n * 0 + K, 2)
    bound = low | 0x3FF
    seat = seats(room, r <= bound)
    put(room, GROUPS_AT + seat, ids, (r <= bound) & (seat < MOST_GROUPS))
    tl.debug_barrier()
    return bound, get(room, n * 0 + LENGTH)


@triton.jit
def member(room, first, num, level, PAIRS: tl.constexpr):
    """Return positions of the even ones of the listed groups' tokens, from the first on; the length if there is none."""
    members = first + 2 * grid(PAIRS // LANES)
    inside = members < num
    group = get(room, GROUPS_AT + tl.where(inside, members >> level, 0))
    return tl.where(inside, (group << level) + (members & ((1 << level) - 1)), 0x7FFFFFFE)


@triton.jit
def reaches(x, bound, NAN_FIRST: tl.constexpr):
    """Tell which scores reach a bound above -inf."""
    if NAN_FIRST:
        return (x < bound) == 0
    else:
        return x >= bound


@triton.jit
def list_members(room, logits, bound, num, level, n, NAN_FIRST: tl.constexpr, CHUNK: tl.constexpr):
    """List the radixes and positions of the listed groups' scores that reach the bound; return how many they are."""
    PAIRS: tl.constexpr = CHUNK // 2
    total = n * 0
    num = num << level
    position = member(room, 0, num, level, PAIRS)
    next_even = tl.load(logits + position, mask=position < n, other=0.0)
    next_odd = tl.load(logits + position + 1, mask=position + 1 < n, other=0.0)
    lanes = tl.arange(0, LANES)[None, :]
    rows = tl.arange(0, PAIRS // LANES)[:, None]
    for first in range(0, num, CHUNK):
        even = next_even
        odd = next_odd
        position = member(room, first + CHUNK, num, level, PAIRS)
        next_even = tl.load(logits + position, mask=position < n, other=0.0)
        next_odd = tl.load(logits + position + 1, mask=position + 1 < n, other=0.0)
        position = member(room, first, num, level, PAIRS)
        keep_even = reaches(even, bound, NAN_FIRST) & (position < n)
        keep_odd = reaches(odd, bound, NAN_FIRST) & (position + 1 < n)
        evens = tl.xor_sum(keep_even.to(tl.int32) << lanes, 1)[:, None]
        odds = tl.xor_sum(keep_odd.to(tl.int32) << lanes, 1)[:, None]
        before = total + before_rows(room, rows, popcount(evens) + popcount(odds))
        total += get(room, n * 0 + LENGTH)
        seat = before + popcount(evens & ((1 << lanes) - 1)) + popcount(odds & ((1 << lanes) - 1))
        put2(room, PAIRS_AT + seat, even, position, keep_even & (seat < MOST))
        seat += keep_even.to(tl.int32)
        put2(room, PAIRS_AT + seat, odd, position + 1, keep_odd & (seat < MOST))
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
def emit(room, seat, r, position, mask, BY_SCORE: tl.constexpr):
    """Give chosen tokens their seats in shared memory: in the list, to be ordered, or in that of positions."""
    if BY_SCORE:
        put2(room, PAIRS_AT + seat, r, position, mask)
    else:
        put(room, CHOSEN_AT + seat, position, mask)


@triton.jit
def choose(room, r, position, above, equal, threshold, left, ties, BY_SCORE: tl.constexpr):
    """Emit those of r below the threshold, and the first `left` that equal it; positions must ascend.

    above, equal: how many were chosen, and equal the threshold, before. Returns how many are, and do, here.
    ties: more than `left` equal it.
    """
    chosen = r <= threshold
    equals = above
    if ties:
        rank = seats(room, r == threshold)
        chosen = chosen & ((r < threshold) | (equal + rank < left))
        equals = get(room, above * 0 + LENGTH)
    seat = above + seats(room, chosen)
    emit(room, seat, r, position, chosen, BY_SCORE)
    return get(room, above * 0 + LENGTH), equals


@triton.jit
def load_radix(logits, ids, n, NAN_FIRST: tl.constexpr):
    """Load scores as radixes; behind all others from n on."""
    scores = tl.load(logits + ids, mask=ids // 4 < tl.cdiv(n, 4), other=0.0)  # so that 16 bytes are loaded at a time
    return tl.where(ids < n, radix_of(ordered(scores, NAN_FIRST)), BEHIND)


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
        chosen, equals = choose(room, r, ids, above, equal, low, left, inside > left, BY_SCORE)
        above += chosen
        equal += equals


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
def put_best_first(room, out, table, num, SLOTS: tl.constexpr):
    """Store the listed tokens, at most BINS, best first; they are listed by position. The second set of bins is clear.

    Each is counted against those of its bin; bins of equal width between the least and the greatest score. Equal scores
    alone are in order.
    """
    ids = tl.arange(0, BINS)
    valid = ids < num
    r = get(room, 2 * PAIRS_AT + 2 * ids).to(tl.uint32, bitcast=True)
    position = get(room, 2 * PAIRS_AT + 2 * ids + 1)
    x = 0.5 * float_of(r)  # halves, since the difference of two may not fit float32
    most = tl.max(tl.where(valid, x, -LARGEST), 0)
    least = tl.min(tl.where(valid, x, LARGEST), 0)
    below = (most - x) * ((BINS - 1) / tl.maximum(most - least, 1e-30))
    bins = tl.where(valid, tl.minimum(tl.maximum(below, 0.0), BINS - 1.0), 0.0).to(tl.int32)
    bins = tl.where(most > least, bins, ids)
    bins = tl.where(valid, bins, BINS)
    add(room, SECOND + bins)
    begins_of_bins(room)
    seat = fetch_add(room, SECOND + bins, valid)  # afterwards a bin's word is its end
    put2(room, PAIRS_AT + seat, r, ids, valid)
    tl.debug_barrier()
    begin = tl.where(valid & (bins > 0), get(room, SECOND + tl.maximum(bins - 1, 0)), 0)
    end = tl.where(valid, get(room, SECOND + bins), begin)
    rank = begin
    for nth in range(0, tl.max(end - begin, 0)):
        at = 2 * PAIRS_AT + 2 * tl.maximum(tl.minimum(begin + nth, end - 1), 0)
        other = get(room, at).to(tl.uint32, bitcast=True)
        earlier = get(room, at + 1) < ids
        ahead = (begin + nth < end) & ((other < r) | ((other == r) & earlier))
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
    threshold, left, inside = kth(room, r, zero + K, 3)
    choose(room, r, position, zero, zero, threshold, left, inside > left, BY_SCORE)


@triton.jit
def choose_from_groups(
    room, logits, groups, n, K: tl.constexpr, BY_SCORE: tl.constexpr, NAN_FIRST: tl.constexpr, CHUNK: tl.constexpr
):
    """Choose K of a long row's n tokens; return False, and have chosen none, if more than the list holds may be."""
    level = level_of(n)
    bound, num = list_groups(room, groups, n, level, K)
    bound_score = float_of(bound)
    total = n
    if (num <= MOST_GROUPS) & (bound_score > -LARGEST):
        total = list_members(room, logits, bound_score, num, level, n, NAN_FIRST, CHUNK)
    fits = total <= MOST
    if fits:
        ids = grid(LISTED // LANES)
        at = 2 * PAIRS_AT + 2 * tl.where(ids < total, ids, 0)
        x = get(room, at).to(tl.float32, bitcast=True)
        position = get(room, at + 1)
        r = tl.where(ids < total, radix_of(ordered(x, NAN_FIRST)), BEHIND)
        choose_at_once(room, r, position, n * 0, K, BY_SCORE)
    return fits


@triton.jit
def choose_some(
    room, logits, groups, n, K: tl.constexpr, BY_SCORE: tl.constexpr, NAN_FIRST: tl.constexpr, LEVELS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Choose K of a row's n tokens."""
    if n <= CHUNK:
        ids = grid(CHUNK // LANES)
        choose_at_once(room, load_radix(logits, ids, n, NAN_FIRST), ids, n * 0, K, BY_SCORE)
    else:
        done = n < 0
        if n <= (NUM_GROUPS << LEVELS):
            done = choose_from_groups(room, logits, groups, n, K, BY_SCORE, NAN_FIRST, CHUNK)
        if done == 0:
            choose_from_memory(room, logits, n, K, BY_SCORE, NAN_FIRST, CHUNK)


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
    logits += tl.multiple_of(own.to(tl.int64) * width * PAGE, PAGE)
    groups += own * NUM_GROUPS
    good = pages_are_good(table, n, num_pages)
    tl.store(errors + row, tl.where(seen < 0, BAD_LENGTH, tl.where(good, 0, BAD_PAGE)))
    n = tl.where(good, n, 0)
    bins = tl.arange(0, BINS)
    put(room, bins, bins * 0, bins >= 0)
    put(room, SECOND + bins, bins * 0, bins >= 0)
    tl.debug_barrier()
    if EARLY:
        gdc_wait()
    if n > K:
        choose_some(room, logits, groups, n, K, BY_SCORE, NAN_FIRST, LEVELS, CHUNK)
        tl.debug_barrier()
    else:
        tl.store(out + bins, -1, mask=(bins >= n) & (bins < K))
        if BY_SCORE:
            put2(room, PAIRS_AT + bins, load_radix(logits, bins, n, NAN_FIRST), bins, bins < n)
            tl.debug_barrier()
    if BY_SCORE:
        if NAN_FIRST & (n <= SHORT):
            sort_as_torch(out, logits, n, table, SLOTS)
        else:
            put_best_first(room, out, table, tl.minimum(n, K), SLOTS)
    else:
        ids = tl.arange(0, K)
        position = ids
        if n > K:
            position = get(room, CHOSEN_AT + ids)
        tl.store(out + ids, slot_of(table, position, ids < n, SLOTS), mask=ids < n)
