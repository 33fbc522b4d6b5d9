# What the compiler sees isn't what type checkers see.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""The exact mode's scores: every rounding in the order in which torch's CUDA kernels do it.

    for each tile of tokens of each row:                                     one program, persistent
        K[j]      = e4m3(values[j]) * scale[j]
        S[h, j]   = fma over d = 0, 1, .. 127 of q[row, h, d] * K[j, d]       one chain, as cuBLAS adds up
        x[h, j]   = max(S[h, j], 0) * weights[row, h]                         rounded
        s[j]      = ((a0 + a1) + a2) + a3,  ai = x[i] + x[i + 4] + x[i + 8] ..  as torch.sum over dim 0 adds up

Whether a device's torch does have these orders, and for which lengths, is what `envoi indexer certify` finds out.
"""

import triton
import triton.language as tl

from envoi.epilogue.codes_triton import from_e4m3
from envoi.epilogue.device import INTERPRETED, maximum
from envoi.indexer.kernel_scores import (
    BINS, FAILED, HEAD_DIM, NUM_COUNTERS, PAGE, PAGE_BYTES, count, token_pages, visible,
)  # fmt: skip


@triton.jit
def widen(code):
    """E4M3 -> float32."""
    if INTERPRETED:
        return from_e4m3(code)
    else:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def terms(q, cache, scales, weights, row, page, place, mask, H: tl.constexpr, STEP: tl.constexpr):
    """x [H, tokens]. STEP: dimensions at a time, so that operands fit the registers; the chain goes on."""
    h = tl.arange(0, H)
    row = row.to(tl.int64)
    scale = tl.load(scales + page * (PAGE_BYTES // 4) + PAGE * HEAD_DIM // 4 + place, mask=mask, other=0.0)
    products = tl.zeros((H, place.shape[0]), tl.float32)
    for first in range(0, HEAD_DIM, STEP):
        d = first + tl.arange(0, STEP)
        at = (page * PAGE_BYTES + place * HEAD_DIM)[:, None] + d[None, :]
        keys = widen(tl.load(cache + at, mask=mask[:, None], other=0)) * scale[:, None]
        queries = widen(tl.load(q + (row * H + h)[:, None] * HEAD_DIM + d[None, :]))
        products = tl.dot(queries, tl.trans(keys), products, input_precision="ieee")
    return maximum(products, 0.0) * tl.load(weights + row * H + h)[:, None]


@triton.jit
def add_up(scratch, H: tl.constexpr, TILE: tl.constexpr):
    """The sums of x over heads: four chains, then those."""
    t = tl.arange(0, TILE)
    a0 = tl.zeros((TILE,), tl.float32)
    a1 = a0
    a2 = a0
    a3 = a0
    for h in range(0, H, 4):
        a0 += tl.load(scratch + h * TILE + t)
        a1 += tl.load(scratch + (h + 1) * TILE + t)
        a2 += tl.load(scratch + (h + 2) * TILE + t)
        a3 += tl.load(scratch + (h + 3) * TILE + t)
    return ((a0 + a1) + a2) + a3


@triton.jit
def exact_kernel(
    q, cache, scales, weights, seq_lens, table, scratch, logits, histogram, counters,
    first_row, num_rows, next_n, width, num_pages,
    H: tl.constexpr, ROWS: tl.constexpr, COPIES: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """As `scores_kernel`. scratch [programs, H, TILE]: of each program, through which x gets to the adding order."""
    h = tl.arange(0, H)
    t = tl.arange(0, TILE)
    scratch += tl.program_id(0) * (H * TILE)
    ids = tl.arange(0, ROWS)
    seen = tl.maximum(visible(seq_lens, first_row + ids, first_row + num_rows, next_n, width), 0)
    tiles = tl.cdiv(seen, TILE)
    ends = tl.cumsum(tiles, 0)
    for tile in range(tl.program_id(0), tl.sum(tiles, 0), tl.num_programs(0)):
        own = tl.sum((ends <= tile).to(tl.int32), 0)
        tokens = (tile - tl.sum(tl.where(ids == own, ends - tiles, 0), 0)) * TILE + t
        n = tl.sum(tl.where(ids == own, seen, 0), 0)
        row = first_row + own
        page, good = token_pages(table, row // next_n, tokens, n, width, num_pages)
        x = terms(q, cache, scales, weights, row, page, tokens % PAGE, (tokens < n) & good, H, STEP)
        tl.store(scratch + h[:, None] * TILE + t[None, :], x)
        tl.debug_barrier()
        s = add_up(scratch, H, TILE)
        tl.debug_barrier()
        tl.store(logits + own.to(tl.int64) * width * PAGE + tokens, s, mask=tokens < n)
        count(s, tokens < n, histogram + (own * COPIES + tile % COPIES) * BINS, True)
        if tl.min(good.to(tl.int32), 0) == 0:
            tl.store(counters + own * NUM_COUNTERS + FAILED, 1)
