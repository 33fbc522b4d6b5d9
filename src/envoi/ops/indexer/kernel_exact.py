# Type checkers don't know the types that the compiler gives to device code.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Scores of the exact mode: every rounding in the order in which torch's CUDA kernels do it.

    for each tile of tokens of each row of n tokens:                         one program, persistent
        K[j]      = e4m3(values[j]) * scale[j]
        S[h, j]   = P0 + P1 + .., Pi the chain of fma over part i of d        parts(n) parts, as cuBLAS cuts 128
        x[h, j]   = max(S[h, j], 0) * weights[row, h]                         rounded
        s[j]      = sum over h of x[h, j]                                     in one of the orders of torch.sum

    lone order      ((a0 + a1) + a2) + a3,  ai = x[i] + x[i + 4] + x[i + 8] + ..
    shared order    (b0 + b2) + (b1 + b3),  by = the lone order of x[y], x[y + 4], x[y + 8], ..

`envoi indexer certify` finds out which of them a device's torch uses for which n.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from envoi.epilogues.codes_triton import from_e4m3
from envoi.epilogues.device import INTERPRETED, maximum
from envoi.ops.indexer.kernel_scores import (
    HEAD_DIM,
    INTEGERS,
    NUM_GROUPS,
    PAGE,
    PAGE_BYTES,
    Inputs,
    clear,
    keep_best,
    place_of_tile,
    scored,
    token_pages,
)  # fmt: skip


class Keys(NamedTuple):
    """Keys of a tile's tokens [TILE]: page, place in the page, whether there is one (mask), and its scale factor."""

    page: Any
    place: Any
    mask: Any
    scale: Any


@triton.jit
def widen(code):
    """Convert E4M3 to float32."""
    if INTERPRETED:
        return from_e4m3(code)
    else:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def products_of(inputs, row, keys_at, parts, H: tl.constexpr, STEP: tl.constexpr):
    """Compute S [H, tokens]. STEP: dimensions at a time, so that operands fit the registers.

    A part of half a step is multiplied with zeros for the other half, which change nothing in its chain.
    """
    h = tl.arange(0, H)
    zero = tl.zeros((H, keys_at.place.shape[0]), tl.float32)
    chain = zero
    total = zero
    halves = tl.where(parts * STEP > HEAD_DIM, 2, 1)  # parts in a step
    for first in range(0, HEAD_DIM, STEP):
        d = first + tl.arange(0, STEP)
        at = (keys_at.page * PAGE_BYTES + keys_at.place * HEAD_DIM)[:, None] + d[None, :]
        keys = widen(tl.load(inputs.cache + at, mask=keys_at.mask[:, None], other=0)) * keys_at.scale[:, None]
        queries = widen(tl.load(inputs.q + (row * H + h)[:, None] * HEAD_DIM + d[None, :]))
        for half in range(halves):
            own = ((d % STEP // (STEP // 2) == half) | (halves == 1))[None, :]
            x, y = tl.where(own, queries, 0.0), tl.where(own, keys, 0.0)
            chain = tl.dot(x, tl.trans(y), chain, input_precision="ieee")
            if (halves == 2) | (parts * (first + STEP) % HEAD_DIM == 0):
                total += chain
                chain = zero
    return total


@triton.jit
def lone_sum(x, H: tl.constexpr, STRIDE: tl.constexpr, TILE: tl.constexpr):
    """Sum H lines of x, STRIDE apart, in the lone order."""
    t = tl.arange(0, TILE)
    a0 = tl.zeros((TILE,), tl.float32)
    a1 = a0
    a2 = a0
    a3 = a0
    for h in range(0, H, 4):
        a0 += tl.load(x + h * STRIDE + t)
        a1 += tl.load(x + (h + 1) * STRIDE + t)
        a2 += tl.load(x + (h + 2) * STRIDE + t)
        a3 += tl.load(x + (h + 3) * STRIDE + t)
    return ((a0 + a1) + a2) + a3


@triton.jit
def add_up(x, shared, H: tl.constexpr, TILE: tl.constexpr):
    """Sum x [H, TILE] over its lines, in the shared or the lone order."""
    if shared:
        b0 = lone_sum(x, H // 4, 4 * TILE, TILE)
        b1 = lone_sum(x + TILE, H // 4, 4 * TILE, TILE)
        b2 = lone_sum(x + 2 * TILE, H // 4, 4 * TILE, TILE)
        b3 = lone_sum(x + 3 * TILE, H // 4, 4 * TILE, TILE)
        s = (b0 + b2) + (b1 + b3)
    else:
        s = lone_sum(x, H, TILE, TILE)
    return s


@triton.jit(do_not_specialize=INTEGERS)
def exact_kernel(
    q, cache, scales, weights, seq_lens, table, orders, scratch, logits, groups, counters,
    first_row, num_rows, width, num_pages, next_n,
    H: tl.constexpr, LEAST: tl.constexpr, ROWS: tl.constexpr, NUM_ORDERS: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Score rows as `scores_kernel` does, by exact roundings.

    orders [NUM_ORDERS + 4]: by n below NUM_ORDERS, then by n % 4: parts, + 256 for the shared order. scratch [programs,
    H, TILE]: each program passes x through its own, to add it up by lines.
    """
    clear(counters, num_rows)
    h = tl.arange(0, H)
    t = tl.arange(0, TILE)
    scratch += tl.program_id(0) * (H * TILE)
    ids = tl.arange(0, ROWS)
    seen = scored(seq_lens, first_row + ids, first_row + num_rows, next_n, width, LEAST)
    tiles = tl.cdiv(seen, TILE)
    ends = tl.cumsum(tiles, 0)
    for tile in range(tl.program_id(0), tl.sum(tiles, 0), tl.num_programs(0)):
        own, nth, n = place_of_tile(tile, ids, seen, tiles, ends)
        tokens = nth * TILE + t
        order = tl.load(orders + tl.where(n < NUM_ORDERS, n, NUM_ORDERS + n % 4))
        page, good = token_pages(table, (first_row + own) // next_n, tokens, n, width, num_pages)
        row = (first_row + own).to(tl.int64)
        mask = (tokens < n) & good
        place = tokens % PAGE
        scale = tl.load(scales + page * (PAGE_BYTES // 4) + PAGE * HEAD_DIM // 4 + place, mask=mask, other=0.0)
        keys_at = Keys(page, place, mask, scale)
        products = products_of(Inputs(q, cache, scales, weights), row, keys_at, order % 256, H, STEP)
        x = maximum(products, 0.0) * tl.load(weights + row * H + h)[:, None]
        tl.store(scratch + h[:, None] * TILE + t[None, :], x)
        tl.debug_barrier()
        s = add_up(scratch, order >= 256, H, TILE)
        tl.debug_barrier()
        tl.store(logits + own.to(tl.int64) * width * PAGE + tokens, s, mask=tokens < n)
        if groups is not None:
            keep_best(s, tokens, n, groups + own * NUM_GROUPS, True)
