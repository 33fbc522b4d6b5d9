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
from envoi.ops.indexer.room import add, fetch_add, get, put, take

BAD_LENGTH: tl.constexpr = tl.constexpr(1)
BAD_PAGE: tl.constexpr = tl.constexpr(2)
PAGES: tl.constexpr = tl.constexpr(2048)  # pages of the table that are checked at a time
BINS: tl.constexpr = tl.constexpr(2048)
MOST_GROUPS: tl.constexpr = tl.constexpr(2560)
MOST: tl.constexpr = tl.constexpr(3584)
# Shared memory by word: counts of digits; digit found, how many are better, length of a list; groups; list.
FOUND: tl.constexpr = tl.constexpr(2048)
BETTER: tl.constexpr = tl.constexpr(2049)
LENGTH: tl.constexpr = tl.constexpr(2050)
GROUPS_AT: tl.constexpr = tl.constexpr(2064)
KEYS_AT: tl.constexpr = tl.constexpr(4624)
POSITIONS_AT: tl.constexpr = tl.constexpr(8208)
FULL_BIN: tl.constexpr = tl.constexpr(48)  # chosen in a bin from which on a sort is faster
LARGEST: tl.constexpr = tl.constexpr(3.4e38)
SHORT: tl.constexpr = tl.constexpr(32)  # tokens: five levels of the network, positions in six bits


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
def find(room, wanted):
    """Return the bin of the wanted-th best that was counted, and how many are in better ones. Clears the bins."""
    tl.debug_barrier()
    ids = tl.arange(0, BINS)
    counts = take(room, ids)
    upto = tl.cumsum(counts, 0)
    here = (upto >= wanted) & (upto - counts < wanted)
    put(room, ids * 0 + FOUND, ids, here)
    put(room, ids * 0 + BETTER, upto - counts, here)
    tl.debug_barrier()
    return get(room, wanted * 0 + FOUND), get(room, wanted * 0 + BETTER)


@triton.jit
def shift_of(nth):
    """Return how many bits of r are behind its nth digit."""
    return tl.where(nth == 0, 21, tl.where(nth == 1, 10, 0)).to(tl.uint32)


@triton.jit
def span_of(nth):
    """Return the largest r - low, where low has r's first nth digits and zeros."""
    return tl.where(nth == 0, -1, tl.where(nth == 1, 0x1FFFFF, 0x3FF)).to(tl.uint32, bitcast=True)


@triton.jit
def count(room, r, valid, low, nth):
    """Count the nth digit of those r that begin with the digits of low."""
    add(room, ((r - low) >> shift_of(nth)).to(tl.int32), valid & ((r - low) <= span_of(nth)))


@triton.jit
def kth(room, r, valid, wanted, DIGITS: tl.constexpr):
    """Return the wanted-th least r, its first DIGITS digits and zeros, and the number of wanted that have these."""
    low = tl.zeros((), tl.uint32)
    for nth in range(DIGITS):
        count(room, r, valid, low, nth)
        digit, better = find(room, wanted)
        wanted -= better
        low += digit.to(tl.uint32) << shift_of(nth)
    return low, wanted


@triton.jit
def load_members(room, logits, first, num, level, n, NAN_FIRST: tl.constexpr, CHUNK: tl.constexpr):
    """Load scores of the listed groups' tokens: positions, whether there is one, radix."""
    members = first + tl.arange(0, CHUNK)
    inside = members < (num << level)
    group = get(room, GROUPS_AT + tl.where(inside, members >> level, 0))
    position = (group << level) + (members & ((1 << level) - 1))
    inside = inside & (position < n)
    scores = tl.load(logits + position, mask=inside, other=0.0)
    return position, inside, scores


@triton.jit
def list_groups(room, groups, n, level, K: tl.constexpr):
    """List the groups that reach the k-th best group, in order; return the bound, and how many they are."""
    ids = tl.arange(0, NUM_GROUPS)
    valid = ids < tl.cdiv(n, 1 << level)
    r = radix_of(tl.load(groups + ids, mask=valid, other=0))
    low, _ = kth(room, r, valid, tl.zeros((), tl.int32) + K, 2)
    bound = low | 0x3FF
    reach = valid & (r <= bound)
    upto = tl.cumsum(reach.to(tl.int32), 0)
    put(room, GROUPS_AT + upto - 1, ids, reach & (upto <= MOST_GROUPS))
    put(room, ids * 0 + LENGTH, upto, ids == NUM_GROUPS - 1)
    tl.debug_barrier()
    return bound, get(room, n * 0 + LENGTH)


@triton.jit
def list_members(room, logits, bound, num, level, n, NAN_FIRST: tl.constexpr, CHUNK: tl.constexpr):
    """List the radixes and positions of the listed groups' scores that reach the bound; return how many they are."""
    total = n * 0
    position, inside, scores = load_members(room, logits, 0, num, level, n, NAN_FIRST, CHUNK)
    for first in range(0, num << level, CHUNK):
        next_position, next_inside, next_scores = load_members(
            room, logits, first + CHUNK, num, level, n, NAN_FIRST, CHUNK
        )
        r = radix_of(ordered(scores, NAN_FIRST))
        keep = inside & (r <= bound)
        upto = total + tl.cumsum(keep.to(tl.int32), 0)
        fits = keep & (upto <= MOST)
        put(room, KEYS_AT + upto - 1, r, fits)
        put(room, POSITIONS_AT + upto - 1, position, fits)
        total = tl.max(upto, 0)
        position, inside, scores = next_position, next_inside, next_scores
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
    room, out, table, r, position, valid, above, equal, threshold, left, SLOTS: tl.constexpr, BY_SCORE: tl.constexpr
):
    """Emit those of r below the threshold, and the first `left` that equal it; positions must ascend.

    above, equal: how many came before. Returns them with these.
    """
    packed = (valid & (r < threshold)).to(tl.int32) + ((valid & (r == threshold)).to(tl.int32) << 16)
    upto = tl.cumsum(packed, 0)
    before = upto - packed
    equals = equal + (before >> 16)
    seat = above + (before & 0xFFFF) + tl.minimum(equals, left)
    chosen = valid & ((r < threshold) | ((r == threshold) & (equals < left)))
    emit(room, out, table, seat, r, position, chosen, SLOTS, BY_SCORE)
    return tl.sum(packed, 0)


@triton.jit
def choose_from_memory(
    room, out, table, logits, n, K: tl.constexpr, SLOTS: tl.constexpr, BY_SCORE: tl.constexpr, NAN_FIRST: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Choose from a row of any length and any scores: each pass loads all of them."""
    low = tl.zeros((), tl.uint32)
    left = n * 0 + K
    for nth in range(3):
        for first in range(0, n, CHUNK):
            ids = first + tl.arange(0, CHUNK)
            r = radix_of(ordered(tl.load(logits + ids, mask=ids < n, other=0.0), NAN_FIRST))
            count(room, r, ids < n, low, nth)
        digit, better = find(room, left)
        left -= better
        low += digit.to(tl.uint32) << shift_of(nth)
    above = n * 0
    equal = n * 0
    for first in range(0, n, CHUNK):
        ids = first + tl.arange(0, CHUNK)
        r = radix_of(ordered(tl.load(logits + ids, mask=ids < n, other=0.0), NAN_FIRST))
        more = choose(room, out, table, r, ids, ids < n, above, equal, low, left, SLOTS, BY_SCORE)
        above += more & 0xFFFF
        equal += more >> 16


@triton.jit
def put_best_first(room, out, table, num, SLOTS: tl.constexpr):
    """Store the listed tokens, at most BINS, best first; they are listed by position.

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
    bins = tl.where(valid, tl.minimum(tl.maximum(below, 0.0), BINS - 1.0).to(tl.int32), 0)
    add(room, bins, valid)
    tl.debug_barrier()
    counts = get(room, ids)
    tl.debug_barrier()
    put(room, ids, tl.cumsum(counts, 0) - counts, ids >= 0)
    tl.debug_barrier()
    seat = fetch_add(room, bins, valid)  # afterwards a bin's word is its end
    put(room, KEYS_AT + seat, r, valid)
    put(room, POSITIONS_AT + seat, ids, valid)
    tl.debug_barrier()
    begin = tl.where(bins > 0, get(room, tl.maximum(bins - 1, 0)), 0)
    end = tl.where(valid, get(room, bins), begin)
    fullest = tl.max(end - begin, 0)
    if fullest <= FULL_BIN:
        rank = begin
        for nth in range(0, fullest):
            at = tl.minimum(begin + nth, end - 1)
            at = tl.maximum(at, 0)
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
    ids = tl.arange(0, CHUNK)
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
        threshold, left = kth(room, r, valid, n * 0 + K, 3)
        zero = n * 0
        choose(room, out, table, r, position, valid, zero, zero, threshold, left, SLOTS, BY_SCORE)
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
