# What the compiler sees isn't what type checkers see.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""The fast mode's scores, and what selecting needs to know of them before it reads them.

    for each tile of 128 tokens of each row, TILE by TILE:                   one program, persistent
        S[j, h]   = sum over d of values[j, d] * q[row, h, d]                 FP8 tensor cores, float32
        s[j]      = |scale[j]| * sum over h of max(S[j, h] * sign(scale[j]), 0) * weights[row, h]
        logits[row, j] = s[j];  histogram[row, top 13 bits of s[j]'s key] += 1

Lengths are read here, on the device. A page outside the cache is not read; its row is marked as failed.
"""

import triton
import triton.language as tl

from envoi.epilogue.codes_triton import from_e4m3
from envoi.epilogue.device import INTERPRETED, in_order, maximum

HEAD_DIM: tl.constexpr = tl.constexpr(128)
PAGE: tl.constexpr = tl.constexpr(64)
PAGE_BYTES: tl.constexpr = tl.constexpr(64 * 132)
BINS: tl.constexpr = tl.constexpr(8192)  # 16 an octave
KEY_SHIFT: tl.constexpr = tl.constexpr(19)  # bits of a key below its bin
SECTORS: tl.constexpr = tl.constexpr(1024)
NUM_COUNTERS: tl.constexpr = tl.constexpr(4)
FAILED: tl.constexpr = tl.constexpr(2)  # counters 0 and 1 are those of kernel_select


@triton.jit
def visible(seq_lens, rows, num_rows, next_n, width):
    """Tokens that rows see; -1 for a length that the block table doesn't hold."""
    length = tl.load(seq_lens + rows // next_n, mask=rows < num_rows, other=0)
    seen = tl.maximum(length - next_n + 1 + rows % next_n, 0)
    seen = tl.where((length >= 0) & (length <= width * PAGE), seen, -1)
    return tl.where(rows < num_rows, seen, 0)


@triton.jit
def ordered(x, NAN_FIRST: tl.constexpr):
    """float32 -> int32 in the same order; -0 equals 0, NaN is the least or the greatest."""
    key = in_order((x + 0.0).to(tl.int32, bitcast=True))
    return tl.where(x == x, key, 0x7FFFFFFF if NAN_FIRST else -0x7F800001)  # the latter is the key of -inf


@triton.jit
def place_of_bin(bins):
    """Where a bin of the histogram lies. Neighbours are 32 bytes apart: the L2 adds to one sector at a time."""
    return ((bins % SECTORS) * (BINS // SECTORS)) + bins // SECTORS


@triton.jit
def bin_at(places):
    """The bin of a place."""
    return (places % (BINS // SECTORS)) * SECTORS + places // (BINS // SECTORS)


@triton.jit
def token_pages(table, request, tokens, n, width, num_pages):
    """The pages of tokens, and whether they are in the cache; page 0 where masked or outside."""
    inside = tokens < n
    page = tl.load(table + request.to(tl.int64) * width + tokens // PAGE, mask=inside, other=0)
    good = (page >= 0) & (page < num_pages)
    return tl.where(good, page, 0).to(tl.int64), good


@triton.jit
def score_tile(q, cache, scales, weights, row, page, place, mask, H: tl.constexpr):
    """The scores of tokens, given by page and place in it."""
    d = tl.arange(0, HEAD_DIM)
    h = tl.arange(0, H)
    row = row.to(tl.int64)
    keys = tl.load(cache + (page * PAGE_BYTES + place * HEAD_DIM)[:, None] + d[None, :], mask=mask[:, None], other=0)
    queries = tl.load(q + (row * H + h)[:, None] * HEAD_DIM + d[None, :])
    weight = tl.load(weights + row * H + h)
    scale = tl.load(scales + page * (PAGE_BYTES // 4) + PAGE * HEAD_DIM // 4 + place, mask=mask, other=0.0)
    if INTERPRETED:
        products = tl.dot(from_e4m3(keys), tl.trans(from_e4m3(queries)))
    else:
        products = tl.dot(keys.to(tl.float8e4nv, bitcast=True), tl.trans(queries.to(tl.float8e4nv, bitcast=True)))
    sign = tl.where(scale < 0.0, -1.0, 1.0)
    positive = maximum(products * sign[:, None], 0.0)
    return tl.sum(positive * weight[None, :], 1) * tl.abs(scale)


@triton.jit
def count(logits, mask, histogram, NAN_FIRST: tl.constexpr):
    """Add scores to a row's histogram."""
    bins = (ordered(logits, NAN_FIRST) >> KEY_SHIFT) + BINS // 2
    tl.atomic_add(histogram + place_of_bin(bins), 1, mask=mask, sem="relaxed")


@triton.jit
def place_of_tile(tile, ids, seen, tiles, ends):
    """Of a tile among those of all rows: its row in `ids`, which of the row's tiles it is, the tokens the row sees.

    tiles: of each row; ends: how many end with it.
    """
    own = tl.sum((ends <= tile).to(tl.int32), 0)
    before = tl.sum(tl.where(ids == own, ends - tiles, 0), 0)
    return own, tile - before, tl.sum(tl.where(ids == own, seen, 0), 0)


@triton.jit
def scores_kernel(
    q, cache, scales, weights, seq_lens, table, logits, histogram, counters,
    first_row, num_rows, next_n, width, num_pages,
    H: tl.constexpr, ROWS: tl.constexpr, COPIES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The scores of rows first_row .. first_row + num_rows - 1, at most ROWS of them."""
    ids = tl.arange(0, ROWS)
    seen = tl.maximum(visible(seq_lens, first_row + ids, first_row + num_rows, next_n, width), 0)
    tiles = tl.cdiv(seen, TILE)
    ends = tl.cumsum(tiles, 0)
    for tile in range(tl.program_id(0), tl.sum(tiles, 0), tl.num_programs(0)):
        own, nth, n = place_of_tile(tile, ids, seen, tiles, ends)
        first = nth * TILE
        row = first_row + own
        tokens = first + tl.arange(0, TILE)
        page, good = token_pages(table, row // next_n, tokens, n, width, num_pages)
        mask = (tokens < n) & good
        s = score_tile(q, cache, scales, weights, row, page, tokens % PAGE, mask, H)
        tl.store(logits + own.to(tl.int64) * width * PAGE + tokens, s, mask=tokens < n)
        count(s, tokens < n, histogram + (own * COPIES + tile % COPIES) * BINS, False)
        if tl.min(good.to(tl.int32), 0) == 0:
            tl.store(counters + own * NUM_COUNTERS + FAILED, 1)
