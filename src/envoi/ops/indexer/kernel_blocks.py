# Type checkers don't know the types that the compiler gives to device code.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Kernels around the selection for two levels: rows of the scores of blocks, and of the tokens of some blocks.

pool     rows of max over a block's tokens, the newest block's NaN   -> selection, NaN first -> blocks
gather   rows of the scores of chosen blocks' tokens, one after the other  -> selection -> place -> tokens
"""

import triton
import triton.language as tl

from envoi.epilogues.device import INF
from envoi.ops.indexer.kernel_order import slot_of
from envoi.ops.indexer.kernel_scores import INTEGERS, PAGE, visible
from envoi.ops.indexer.kernel_select import BAD_LENGTH, BAD_PAGE, pages_are_good

NUM_IDS: tl.constexpr = tl.constexpr(1024)  # blocks that are looked at, at a time


@triton.jit
def judge(errors, seq_lens, table, row, num_rows, num_pages, next_n, width):
    """Store a row's error; return how many tokens it sees, 0 in error."""
    seen = visible(seq_lens, row, num_rows, next_n, width)
    n = tl.maximum(seen, 0)
    good = pages_are_good(table + (row // next_n).to(tl.int64) * width, n, num_pages)
    tl.store(errors + row, tl.where(seen < 0, BAD_LENGTH, tl.where(good, 0, BAD_PAGE)))
    return tl.where(good, n, 0)


@triton.jit(do_not_specialize=INTEGERS)
def pool_kernel(
    logits, pooled, lengths, seq_lens, table, errors, first_row, num_rows, width, num_pages, next_n, columns,
    BLOCK: tl.constexpr, LEAST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store the best scores of TILE blocks of a row, pooled [rows, columns], and lengths [rows] in blocks.

    The newest block's is NaN, other NaN count as -inf. Rows of up to LEAST tokens have no scores and get none.
    """
    own = tl.program_id(1)
    row = first_row + own
    n = tl.maximum(visible(seq_lens, row, first_row + num_rows, next_n, width), 0)
    if tl.program_id(0) == 0:
        good = judge(errors, seq_lens, table, row, first_row + num_rows, num_pages, next_n, width)
        tl.store(lengths + own, tl.cdiv(good, BLOCK))
    first = tl.program_id(0) * TILE
    if (first * BLOCK >= n) | (n <= LEAST):
        return
    ids = first + tl.arange(0, TILE)
    tokens = ids[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    logits += tl.multiple_of(own.to(tl.int64) * width * PAGE, PAGE)
    x = tl.load(logits + tokens, mask=tokens // 4 < tl.cdiv(n, 4), other=0.0)  # so that 16 bytes are loaded at a time
    best = tl.max(tl.where((tokens < n) & (x == x), x, -INF), 1)
    best = tl.where(ids == tl.cdiv(n, BLOCK) - 1, float("nan"), best)
    tl.store(pooled + own.to(tl.int64) * columns + ids, best, mask=ids * BLOCK < n)


@triton.jit
def tokens_of(ids, blocks, count, n, BLOCK: tl.constexpr):
    """Return the tokens at places of a row of `count` blocks, and whether the row sees them."""
    block = tl.load(blocks + ids // BLOCK, mask=ids < count * BLOCK, other=-1)
    tokens = block * BLOCK + ids % BLOCK
    return tokens, (block >= 0) & (block < tl.cdiv(n, BLOCK)) & (tokens < n)


@triton.jit
def last_place(blocks, count, n, BLOCK: tl.constexpr):
    """Return one more than the last place of a row of `count` blocks that has a token."""
    last = n * 0
    for first in range(0, count, NUM_IDS):
        ids = first + tl.arange(0, NUM_IDS)
        block = tl.load(blocks + ids, mask=ids < count, other=-1)
        inside = (block >= 0) & (block < tl.cdiv(n, BLOCK))
        last = tl.maximum(last, tl.max(tl.where(inside, ids * BLOCK + tl.minimum(n - block * BLOCK, BLOCK), 0), 0))
    return last


@triton.jit(do_not_specialize=[*INTEGERS, "count"])
def gather_kernel(
    logits, blocks, gathered, lengths, seq_lens, table, errors,
    first_row, num_rows, width, num_pages, next_n, count, columns, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store the scores of TILE tokens of a row's blocks [rows, count], gathered [rows, columns], and lengths [rows].

    A place whose block there isn't, or whose token the row doesn't see, gets NaN.
    """
    own = tl.program_id(1)
    row = first_row + own
    n = tl.maximum(visible(seq_lens, row, first_row + num_rows, next_n, width), 0)
    blocks += row.to(tl.int64) * count
    if tl.program_id(0) == 0:
        good = judge(errors, seq_lens, table, row, first_row + num_rows, num_pages, next_n, width)
        tl.store(lengths + own, last_place(blocks, count, good, BLOCK))
    ids = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tokens, inside = tokens_of(ids, blocks, count, n, BLOCK)
    x = tl.load(logits + own.to(tl.int64) * width * PAGE + tokens, mask=inside, other=float("nan"))
    tl.store(gathered + own.to(tl.int64) * columns + ids, x, mask=ids < columns)


@triton.jit(do_not_specialize=[*INTEGERS, "count"])
def place_kernel(
    out, blocks, seq_lens, table, first_row, num_rows, width, next_n, count,
    K: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Replace places in a row of blocks by the tokens there, or their slots; -1 where there is none."""
    row = first_row + tl.program_id(0)
    n = tl.maximum(visible(seq_lens, row, first_row + num_rows, next_n, width), 0)
    k = tl.arange(0, PLACES)
    place = tl.load(out + row.to(tl.int64) * K + k, mask=k < K, other=-1)
    tokens, inside = tokens_of(tl.maximum(place, 0), blocks + row.to(tl.int64) * count, count, n, BLOCK)
    inside = inside & (place >= 0)
    found = slot_of(table + (row // next_n).to(tl.int64) * width, tokens, inside, SLOTS)
    tl.store(out + row.to(tl.int64) * K + k, tl.where(inside, found, -1), mask=k < K)
