# Type checkers don't know the types that the compiler gives to device code.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Scores of the fast mode, and the best key of each group of neighbouring tokens, from which selection starts.

    for each tile of 128 tokens of each row, TILE by TILE:                   one program, persistent
        S[j, h]   = sum over d of values[j, d] * q[row, h, d]                 FP8 tensor cores, float32
        s[j]      = |scale[j]| * sum over h of max(S[j, h] * sign(scale[j]), 0) * weights[row, h]
        logits[row, j] = s[j];  groups[row, ..] = the best of each group of neighbours

The k-th best group bounds the k-th best score from below: k groups have a score at least as good. There are 4096 to
8192 groups, so few other scores reach the bound. `kernel_select` needs none in rows of up to NUM_GROUPS tokens, and
whole keys; for `kernel_candidates` groups are int16, the upper halves of keys, in all rows. They are None in a prefill,
and where `kernel_set` chooses from all rows.

Lengths are read on the device. A page outside the cache is not read, and `kernel_select` fails its row. Rows of up to
LEAST tokens, all of which are chosen, aren't scored.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from envoi.epilogues.codes_triton import from_e2m1, from_e4m3, from_e8m0
from envoi.epilogues.device import INTERPRETED, in_order, maximum, rounded_product

HEAD_DIM: tl.constexpr = tl.constexpr(128)
PAGE: tl.constexpr = tl.constexpr(64)
PAGE_BYTES: tl.constexpr = tl.constexpr(64 * 132)
FP4_PAGE_BYTES: tl.constexpr = tl.constexpr(64 * 68)
NUM_GROUPS: tl.constexpr = tl.constexpr(8192)  # of a row, at most
KEY_SHIFT: tl.constexpr = tl.constexpr(16)
TOP_LEVEL: tl.constexpr = tl.constexpr(7)  # groups of 1 << level tokens, which a tile holds; longer rows have none

# Counters of a row for `kernel_candidates`: the entries of each bin of its list, then those of the whole list.
SCORE_BINS: tl.constexpr = tl.constexpr(32)
COUNTER_STRIDE: tl.constexpr = tl.constexpr(
    8
)  # int32 in a sector of the L2: one counter in each, or their atomics queue up
NUM_COUNTERS: tl.constexpr = tl.constexpr(512)

INTEGERS = ("first_row", "num_rows", "width", "num_pages")  # arguments of the indexer's kernels


class Inputs(NamedTuple):
    """Pointers: q [rows, H, 128], bytes of E4M3; cache, bytes; scales, it as float32; weights [rows, H] float32."""

    q: Any
    cache: Any
    scales: Any
    weights: Any


@triton.jit
def visible(seq_lens, rows, num_rows, next_n, width):
    """Return how many tokens rows see; -1 for a length that the block table doesn't hold."""
    length = tl.load(seq_lens + rows // next_n, mask=rows < num_rows, other=0)
    seen = tl.maximum(length - next_n + 1 + rows % next_n, 0)
    seen = tl.where((length >= 0) & (length <= width * PAGE), seen, -1)
    return tl.where(rows < num_rows, seen, 0)


@triton.jit
def ordered(x, NAN_FIRST: tl.constexpr):
    """Map float32 to int32 in the same order; -0 equals 0, NaN is the least or the greatest."""
    key = in_order((x + 0.0).to(tl.int32, bitcast=True))
    return tl.where(x == x, key, 0x7FFFFFFF if NAN_FIRST else -0x7F800001)  # -0x7F800001 is the key of -inf


@triton.jit
def level_of(n):
    """Return log2 of the tokens in a group of a row of n: as small as NUM_GROUPS allows, TOP_LEVEL + 1 at most."""
    level = n * 0
    for i in tl.static_range(TOP_LEVEL + 1):
        level += (n > (NUM_GROUPS << i)).to(tl.int32)
    return level


@triton.jit
def clear(counters, num_rows):
    """Set the counters of all rows, if there are any, to zero, each program its share of them."""
    if counters is not None:
        for own in range(tl.program_id(0), num_rows, tl.num_programs(0)):
            tl.store(counters + own * NUM_COUNTERS + tl.arange(0, NUM_COUNTERS), 0)


@triton.jit
def scored(seq_lens, rows, num_rows, next_n, width, LEAST: tl.constexpr):
    """Return how many tokens of rows are scored: what they see, 0 if that is at most LEAST, or a bad length."""
    seen = visible(seq_lens, rows, num_rows, next_n, width)
    return tl.where(seen > LEAST, seen, 0)


@triton.jit
def token_pages(table, request, tokens, n, width, num_pages):
    """Look up the pages of tokens, and whether they are in the cache; page 0 where masked or outside."""
    inside = tokens < n
    page = tl.load(table + request.to(tl.int64) * width + tokens // PAGE, mask=inside, other=0)
    good = (page >= 0) & (page < num_pages)
    return tl.where(good, page, 0).to(tl.int64), good


@triton.jit
def existing(heads, HEADS: tl.constexpr):
    """Return heads, and from HEADS on the last one, whose product is weighted with zero there."""
    if heads.shape[0] > HEADS:
        return tl.minimum(heads, HEADS - 1)
    else:
        return heads


@triton.jit
def load_weights(weights, row, heads, HEADS: tl.constexpr):
    """Load a row's weights, zero from head HEADS on."""
    if heads.shape[0] > HEADS:
        return tl.load(weights + row * HEADS + heads, mask=heads < HEADS, other=0.0)
    else:
        return tl.load(weights + row * HEADS + heads)


@triton.jit
def score_tile(inputs, row, page, place, mask, H: tl.constexpr, HEADS: tl.constexpr):
    """Score tokens of a row: [TILE] float32. inputs: Inputs; page, place, mask [TILE]: where each token's key is.

    H: HEADS, or more: the products' width, of which the rest has zero weights.
    """
    d = tl.arange(0, HEAD_DIM)
    h = tl.arange(0, H)
    row = row.to(tl.int64)
    keys = tl.load(
        inputs.cache + (page * PAGE_BYTES + place * HEAD_DIM)[:, None] + d[None, :], mask=mask[:, None], other=0
    )
    queries = tl.load(inputs.q + (row * HEADS + existing(h, HEADS))[:, None] * HEAD_DIM + d[None, :])
    weight = load_weights(inputs.weights, row, h, HEADS)
    scale = tl.load(inputs.scales + page * (PAGE_BYTES // 4) + PAGE * HEAD_DIM // 4 + place, mask=mask, other=0.0)
    if INTERPRETED:
        products = tl.dot(from_e4m3(keys), tl.trans(from_e4m3(queries)))
    else:
        products = tl.dot(keys.to(tl.float8e4nv, bitcast=True), tl.trans(queries.to(tl.float8e4nv, bitcast=True)))
    sign = tl.where(scale < 0.0, -1.0, 1.0)
    positive = maximum(products * sign[:, None], 0.0)
    return tl.sum(rounded_product(positive, weight[None, :]), 1) * tl.abs(scale)


@triton.jit
def product_of_half(values, factors, queries, chain):
    """Add the products of every other value, E2M1 times its factor [TILE, 64], and queries in E4M3 [64, H] to chain.

    As bf16, which has all numbers of either exactly.
    """
    keys = from_e2m1(values) * factors
    if INTERPRETED:
        return tl.dot(keys, from_e4m3(queries), chain)
    else:
        return tl.dot(keys.to(tl.bfloat16), queries.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16), chain)


@triton.jit
def score_fp4_tile(inputs, row, page, place, mask, H: tl.constexpr, HEADS: tl.constexpr):
    """Score tokens of a row as `score_tile` does, of keys in FP4."""
    c = tl.arange(0, HEAD_DIM // 2)
    h = tl.arange(0, H)
    row = row.to(tl.int64)
    key = inputs.cache + page * FP4_PAGE_BYTES
    pairs = tl.load((key + place * (HEAD_DIM // 2))[:, None] + c[None, :], mask=mask[:, None], other=0)
    at = (key + PAGE * HEAD_DIM // 2 + place * 4)[:, None] + (c // 16)[None, :]
    factors = from_e8m0(tl.load(at, mask=mask[:, None], other=0))
    queries = inputs.q + (row * HEADS + existing(h, HEADS))[None, :] * HEAD_DIM + 2 * c[:, None]
    products = tl.zeros((place.shape[0], H), tl.float32)
    products = product_of_half(pairs & 0xF, factors, tl.load(queries), products)
    products = product_of_half(pairs >> 4, factors, tl.load(queries + 1), products)
    weight = load_weights(inputs.weights, row, h, HEADS)
    return tl.sum(rounded_product(maximum(products, 0.0), weight[None, :]), 1)


@triton.jit
def least_level(groups):
    """Return the least level of groups that are stored."""
    return 0 if groups.dtype.element_ty == tl.int16 else 1


@triton.jit
def as_stored(best, groups):
    """Return keys as the groups hold them."""
    if groups.dtype.element_ty == tl.int16:
        return (best >> KEY_SHIFT).to(tl.int16)
    else:
        return best


@triton.jit
def keep_best(logits, tokens, n, groups, NAN_FIRST: tl.constexpr):
    """Store the best key of each group of a tile to its row's groups; tokens from n on count as the least."""
    keys = tl.where(tokens < n, ordered(logits, NAN_FIRST), -0x80000000)
    level = level_of(n)
    size: tl.constexpr = tokens.shape[0]
    for i in tl.static_range(TOP_LEVEL + 1):
        if (size >> i) > 0 and i >= least_level(groups):
            if level == i:
                best = tl.max(tl.reshape(keys, (size >> i, 1 << i)), 1)
                at = (tl.min(tokens, 0) >> i) + tl.arange(0, size >> i)
                tl.store(groups + at, as_stored(best, groups))


@triton.jit
def place_of_tile(tile, ids, seen, tiles, ends):
    """Find a tile among those of all rows: its row in `ids`, its number within the row, the tokens that the row sees.

    tiles: number of tiles of each row; ends: their inclusive sum.
    """
    own = tl.sum((ends <= tile).to(tl.int32), 0)
    before = tl.sum(tl.where(ids == own, ends - tiles, 0), 0)
    return own, tile - before, tl.sum(tl.where(ids == own, seen, 0), 0)


@triton.jit(do_not_specialize=INTEGERS)
def scores_kernel(
    q, cache, scales, weights, seq_lens, table, logits, groups, counters, first_row, num_rows, width, num_pages, next_n,
    H: tl.constexpr, HEADS: tl.constexpr, FP4: tl.constexpr, LEAST: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Score rows first_row .. first_row + num_rows - 1, at most ROWS of them, and zero their counters, if any.

    FP4: keys are in FP4, without scales.
    """
    clear(counters, num_rows)
    ids = tl.arange(0, ROWS)
    seen = scored(seq_lens, first_row + ids, first_row + num_rows, next_n, width, LEAST)
    tiles = tl.cdiv(seen, TILE)
    ends = tl.cumsum(tiles, 0)
    for tile in range(tl.program_id(0), tl.sum(tiles, 0), tl.num_programs(0)):
        own, nth, n = place_of_tile(tile, ids, seen, tiles, ends)
        first = nth * TILE
        row = first_row + own
        tokens = first + tl.arange(0, TILE)
        page, good = token_pages(table, row // next_n, tokens, n, width, num_pages)
        mask = (tokens < n) & good
        inputs = Inputs(q, cache, scales, weights)
        if FP4:
            s = score_fp4_tile(inputs, row, page, tokens % PAGE, mask, H, HEADS)
        else:
            s = score_tile(inputs, row, page, tokens % PAGE, mask, H, HEADS)
        tl.store(logits + own.to(tl.int64) * width * PAGE + tokens, s, mask=tokens < n)
        if groups is not None:
            keep_best(s, tokens, n, groups + own * NUM_GROUPS, False)
