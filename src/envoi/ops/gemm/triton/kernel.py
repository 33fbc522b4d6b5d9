# Triton compiles code that type checkers reject: constants with attributes, names that must be bound, else after
# return.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
"""GEMM in plain Triton for any sizes, strides, formats and epilogues, also in the interpreter.

    for each tile of BLOCK_M rows and BLOCK_N columns:            one program
        for k in K, BLOCK_K at a time:
            acc += widened a[rows, k] @ widened b[columns, k].T       MX on Blackwell: as stored, by `tl.dot_scaled`
        visit(acc) -> outputs; partial reductions of its rows -> workspace, for finish_kernel
    an epilogue that needs whole rows wider than a tile: acc -> workspace, for rows_kernel
    column reductions, totals: their inputs -> workspace, for reduce_kernel

A matrix arrives as a `MatrixArgs` and a constant `Side`, its format. In a grouped GEMM rows from offsets[E] on are
treated, with WRITE_TAIL, as those of one more expert, whose product is 0; else they are not written.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from envoi.epilogues.chunk import ChunkBuffers, ChunkPosition
from envoi.epilogues.codes_triton import from_e2m1, from_e4m3, from_e8m0, widen
from envoi.epilogues.device import INF, INTERPRETED, halves_in_turn, maximum
from envoi.epilogues.tile_triton import col_ids, largest, load_tile, row_ids


class MatrixArgs(NamedTuple):
    """Matrix [experts, rows, K]: elements and strides, scale factors and strides, the rows that share a factor.

    Strides are in elements. Without scale factors `sf` is any pointer, and its strides are 0.
    """

    elements: Any
    stride_e: Any
    stride_row: Any
    stride_k: Any
    sf: Any
    sf_stride_e: Any
    sf_stride_row: Any
    sf_stride_k: Any
    group_rows: Any


class Product(NamedTuple):
    """Matrices of a GEMM: a [M, K], shared by all experts, and b [experts, N, K]."""

    a: Any
    b: Any


class Tile(NamedTuple):
    """Tile of the product: rows [BLOCK_M] below m_end, columns [BLOCK_N] below N (from `columns_of`), of expert e."""

    rows: Any
    m_end: Any
    columns: Any
    N: Any
    e: Any


@triton.jit
def place(tile, offsets, M, num_experts, BLOCK_M: tl.constexpr, MAX_EXPERTS: tl.constexpr, WRITE_TAIL: tl.constexpr):
    """Return a grouped GEMM's tile: its first row, the end of its expert's rows, its expert.

    After the last tile the expert is MAX_EXPERTS, and there are no rows.
    """
    ids = tl.arange(0, MAX_EXPERTS)
    first = tl.load(offsets + ids, mask=ids <= num_experts, other=M)
    last = tl.load(offsets + ids + 1, mask=ids < num_experts, other=M)
    if not WRITE_TAIL:
        last = tl.where(ids < num_experts, last, first)
    tiles = tl.cdiv(last - first, BLOCK_M)
    ends = tl.cumsum(tiles, 0)
    e = tl.sum((ends <= tile).to(tl.int32), 0)
    m = tl.sum(tl.where(ids == e, first + (tile - ends + tiles) * BLOCK_M, 0), 0)
    return m, tl.sum(tl.where(ids == e, last, 0), 0), e


@triton.jit
def columns_of(n, BLOCK_N: tl.constexpr, N, code: tl.constexpr):
    """Return the columns of the product that an epilogue takes as its accumulator's columns n, n + 1, .."""
    if code.takes_halves:
        return halves_in_turn(tl.arange(0, BLOCK_N), n, N)
    else:
        return n + tl.arange(0, BLOCK_N)


@triton.jit
def scale_factors(x, e, ids, groups, mask, side: tl.constexpr):
    """Load float32 scale factors of rows `ids` and groups `groups` along K, broadcast; 1 where masked."""
    row = (ids // x.group_rows).to(tl.int64)
    at = e.to(tl.int64) * x.sf_stride_e + row * x.sf_stride_row + groups * x.sf_stride_k
    if side.scale == "e8m0":
        return from_e8m0(tl.load(x.sf + at, mask=mask, other=127))
    elif side.scale == "e4m3":
        return from_e4m3(tl.load(x.sf + at, mask=mask, other=0x38))
    else:
        return tl.load(x.sf + at, mask=mask, other=1.0)


@triton.jit
def load_block(x, e, ids, num_ids, ks, k_end, side: tl.constexpr):
    """Load [ids, ks] of a matrix, widened for the product and times the scale factors that are folded in; 0 outside."""
    ids = ids[:, None]
    ks = ks[None, :]
    mask = (ids < num_ids) & (ks < k_end)
    at = e.to(tl.int64) * x.stride_e + ids.to(tl.int64) * x.stride_row
    at = at + (ks // side.per_byte).to(tl.int64) * x.stride_k
    v = tl.load(x.elements + at, mask=mask, other=0)
    if side.values == "e4m3":
        v = from_e4m3(v)
    elif side.values == "e2m1":
        v = from_e2m1((v >> (ks % 2 * 4).to(tl.uint8)) & 15)
    if side.folds:
        v = v * scale_factors(x, e, ids, ks // side.group_k, mask, side)
    if INTERPRETED:
        return widen(v)
    elif side.values == "plain":
        return v
    else:
        return v.to(tl.bfloat16)  # exact: at most six significant bits


@triton.jit(do_not_specialize=["num_rows"])
def widen_kernel(x, out, num_rows, K, side: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write a matrix x [num_rows, K], a `MatrixArgs`, as bf16 to out [num_rows, K], times its scale factors.

    Each byte and each factor is read once: COLUMNS are whole groups, and K is.
    """
    groups: tl.constexpr = COLUMNS // side.group_k
    first = tl.program_id(1) * COLUMNS
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (rows < num_rows)[:, None]
    at = first // side.per_byte + tl.arange(0, COLUMNS // side.per_byte)[None, :]
    addresses = x.elements + rows[:, None].to(tl.int64) * x.stride_row + at.to(tl.int64) * x.stride_k
    v = tl.load(addresses, mask=inside & (at < K // side.per_byte), other=0)
    if side.values == "e2m1":
        v = tl.reshape(tl.join(from_e2m1(v & 15), from_e2m1(v >> 4)), (ROWS, COLUMNS))
    else:
        v = from_e4m3(v)
    group = first // side.group_k + tl.arange(0, groups)[None, :]
    known = inside & (group < K // side.group_k)
    factors = scale_factors(x, tl.program_id(0) * 0, rows[:, None], group, known, side)
    v = tl.reshape(tl.reshape(v, (ROWS, groups, side.group_k)) * factors[:, :, None], (ROWS, COLUMNS))
    columns = first + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + rows[:, None].to(tl.int64) * K + columns, v.to(tl.bfloat16), mask=inside & (columns < K))


@triton.jit
def load_stored(x, e, ids, num_ids, k, k_end, BLOCK_K: tl.constexpr, side: tl.constexpr):
    """Load [ids, k : k + BLOCK_K] of a matrix as it is stored, in bytes, and its UE8M0 factors of 32 each; 0 outside.

    The factors are 1 for a matrix under float32 factors, which the product is multiplied by later.
    """
    ids = ids[:, None]
    at = e.to(tl.int64) * x.stride_e + ids.to(tl.int64) * x.stride_row
    bytes_k = k // side.per_byte + tl.arange(0, BLOCK_K // side.per_byte)[None, :]
    mask = (ids < num_ids) & (bytes_k < k_end // side.per_byte)
    v = tl.load(x.elements + at + bytes_k.to(tl.int64) * x.stride_k, mask=mask, other=0)
    if side.folds:
        groups = k // 32 + tl.arange(0, BLOCK_K // 32)[None, :]
        row = (ids // x.group_rows).to(tl.int64)
        at = e.to(tl.int64) * x.sf_stride_e + row * x.sf_stride_row + groups * x.sf_stride_k
        return v, tl.load(x.sf + at, mask=(ids < num_ids) & (groups < k_end // 32), other=127)
    else:
        return v, tl.full((ids.shape[0], BLOCK_K // 32), 127, tl.uint8)


@triton.jit
def multiply_stored(acc, product, tile, first, last, A: tl.constexpr, B: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return acc + a[rows, first : last] @ b[e, columns, first : last].T by block-scaled instructions.

    They take 128 rows of their left matrix: of b if the tile has fewer rows.
    """
    few: tl.constexpr = acc.shape[0] < 128
    acc = tl.trans(acc) if few else acc
    for k in range(first, last, BLOCK_K):
        x, x_sf = load_stored(product.a, tile.e * 0, tile.rows, tile.m_end, k, last, BLOCK_K, A)
        y, y_sf = load_stored(product.b, tile.e, tile.columns, tile.N, k, last, BLOCK_K, B)
        if few:
            acc = tl.dot_scaled(y, y_sf, B.kind, tl.trans(x), x_sf, A.kind, acc)
        else:
            acc = tl.dot_scaled(x, x_sf, A.kind, tl.trans(y), y_sf, B.kind, acc)
    return tl.trans(acc) if few else acc


@triton.jit
def multiply(acc, product, tile, first, last, A: tl.constexpr, B: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return acc + a[rows, first : last] @ b[e, columns, first : last].T."""
    if A.block_scaled:
        acc = multiply_stored(acc, product, tile, first, last, A, B, BLOCK_K)
    else:
        for k in range(first, last, BLOCK_K):
            ks = k + tl.arange(0, BLOCK_K)
            x = load_block(product.a, tile.e * 0, tile.rows, tile.m_end, ks, last, A)
            y = load_block(product.b, tile.e, tile.columns, tile.N, ks, last, B)
            acc = tl.dot(x, tl.trans(y), acc, input_precision="ieee")
    return acc


@triton.jit
def accumulate(product, tile, K, A: tl.constexpr, B: tl.constexpr, GROUP_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return a tile of the product, scaled. GROUP_K: elements of K that share a float32 scale factor; 0 = all."""
    rows, columns = tile.rows, tile.columns
    block_m: tl.constexpr = rows.shape[0]
    block_n: tl.constexpr = columns.shape[0]
    acc = tl.zeros((block_m, block_n), tl.float32)
    if GROUP_K > 0:
        for k in range(0, K, GROUP_K):
            zeros = tl.zeros((block_m, block_n), tl.float32)
            part = multiply(zeros, product, tile, k, k + GROUP_K, A, B, BLOCK_K)
            acc += part * block_scale(product, tile, k, A, B)
    else:
        acc = multiply(acc, product, tile, 0, K, A, B, BLOCK_K)
        if A.scales:
            acc = acc * scale_factors(product.a, tile.e * 0, rows, 0, (rows < tile.m_end) & (K > 0), A)[:, None]
        if B.scales:
            acc = acc * scale_factors(product.b, tile.e, columns, 0, (columns < tile.N) & (K > 0), B)[None, :]
    return acc


@triton.jit
def block_scale(product, tile, k, A: tl.constexpr, B: tl.constexpr):
    """Return the factors [rows, columns] of one group along K; one factor for all of K counts in each group."""
    rows, columns = tile.rows, tile.columns
    if A.scales:
        x = scale_factors(product.a, tile.e * 0, rows, k // A.group_k if A.group_k > 0 else 0, rows < tile.m_end, A)
    else:
        x = tl.full(rows.shape, 1.0, tl.float32)
    if B.scales:
        y = scale_factors(product.b, tile.e, columns, k // B.group_k if B.group_k > 0 else 0, columns < tile.N, B)
    else:
        y = tl.full(columns.shape, 1.0, tl.float32)
    return x[:, None] * y[None, :]


@triton.jit(do_not_specialize=["M"])
def gemm_kernel(
    a, b, offsets, operands, outputs, workspace, M, N, K, num_experts,
    code: tl.constexpr, A: tl.constexpr, B: tl.constexpr, GROUP_K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, MAX_EXPERTS: tl.constexpr, WRITE_TAIL: tl.constexpr,
):  # fmt: skip
    """Compute a tile and run its epilogue. MAX_EXPERTS: a power of two above the number of experts; 0 = not grouped."""
    tile = tl.program_id(0)
    n_tile = tl.program_id(1)
    n = n_tile * BLOCK_N
    if MAX_EXPERTS > 0:
        m, m_end, e = place(tile, offsets, M, num_experts, BLOCK_M, MAX_EXPERTS, WRITE_TAIL)
        if (e == MAX_EXPERTS) & (tile > 0):  # the first tile writes outputs without rows
            return
        own = tl.maximum(tl.minimum(e, num_experts - 1), 0)
        k_end = tl.where(e < num_experts, K, 0)
        block = Tile(m + tl.arange(0, BLOCK_M), m_end, columns_of(n, BLOCK_N, N, code), N, own)
        acc = accumulate(Product(a, b), block, k_end, A, B, GROUP_K, BLOCK_K)
        mine = code.of_expert(operands, own, N)
        if e >= num_experts:
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        parts = code.visit(acc, ChunkPosition(m, n, m_end, N), mine, outputs, ChunkBuffers(0, 0, 0, 0, 0), True, 0)
    else:
        m = tile * BLOCK_M
        m_end = M
        block = Tile(m + tl.arange(0, BLOCK_M), M, columns_of(n, BLOCK_N, N, code), N, tile * 0)
        acc = accumulate(Product(a, b), block, K, A, B, GROUP_K, BLOCK_K)
        parts = code.visit(acc, ChunkPosition(m, n, M, N), operands, outputs, ChunkBuffers(0, 0, 0, 0, 0), False, 0)
    if code.partials > 0:
        code.save(parts, workspace, n_tile, tl.num_programs(1), m, m_end, M)


@triton.jit
def finish_kernel(workspace, operands, outputs, num_slots, M, code: tl.constexpr, BLOCK_M: tl.constexpr):
    """Complete the reductions of BLOCK_M rows from the partial ones of their tiles."""
    like = tl.zeros((BLOCK_M,), tl.float32)
    code.finish(like, workspace, num_slots, tl.program_id(0) * BLOCK_M, M, M, operands, outputs)


@triton.jit
def rows_kernel(
    acc, offsets, operands, outputs, M, N, num_experts,
    code: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MAX_EXPERTS: tl.constexpr,
    WRITE_TAIL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Run an epilogue of whole rows (or of chunks) on accumulators [M, N]; rows of no expert count as 0.

    OVERLAP: launched with `launch_pdl`, so that it starts before the kernel that writes the accumulators has ended.
    """
    if OVERLAP:
        gdc_wait()
    tile = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N
    like = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if MAX_EXPERTS > 0:
        m, m_end, e = place(tile, offsets, M, num_experts, BLOCK_M, MAX_EXPERTS, WRITE_TAIL)
        if (e == MAX_EXPERTS) & (tile > 0):
            return
        mine = code.of_expert(operands, tl.maximum(tl.minimum(e, num_experts - 1), 0), N)
        x = load_product(acc, like, m, n, tl.where(e < num_experts, m_end, 0), N, code)
        code.visit(x, ChunkPosition(m, n, m_end, N), mine, outputs, ChunkBuffers(0, 0, 0, 0, 0), True, 0)
    else:
        m = tile * BLOCK_M
        x = load_product(acc, like, m, n, M, N, code)
        code.visit(x, ChunkPosition(m, n, M, N), operands, outputs, ChunkBuffers(0, 0, 0, 0, 0), False, 0)


@triton.jit
def load_product(acc, like, m, n, m_end, N, code: tl.constexpr):
    """Load the accumulators of a chunk like `like` from the product in memory, [.., N]."""
    if code.takes_halves:
        rows, columns = row_ids(like, m), halves_in_turn(col_ids(like, 0), n, N)
        at = rows[:, None].to(tl.int64) * N + columns[None, :]
        return tl.load(acc + at, mask=(rows < m_end)[:, None] & (col_ids(like, n) < N)[None, :], other=0.0)
    else:
        return load_tile(acc, like, m, n, m_end, N)


@triton.jit
def reduce_kernel(
    x, out, offsets, M, C, OP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, GROUPED: tl.constexpr
):
    """Reduce x [M, C] over rows by sum, max or absmax: to out [C], or over each expert's rows to [experts, C]."""
    columns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    group = tl.program_id(0)
    first = tl.load(offsets + group) if GROUPED else 0
    last = tl.load(offsets + group + 1) if GROUPED else M
    fill: tl.constexpr = -INF if OP == "max" else 0.0
    acc = tl.full((BLOCK_M, BLOCK_C), fill, tl.float32)
    for m in range(first, last, BLOCK_M):
        rows = m + tl.arange(0, BLOCK_M)
        at = rows[:, None].to(tl.int64) * C + columns[None, :]
        v = tl.load(x + at, mask=(rows < last)[:, None] & (columns < C)[None, :], other=fill)
        if OP == "sum":
            acc += v
        elif OP == "max":
            acc = maximum(acc, v)
        else:
            acc = maximum(acc, tl.abs(v))
    total = tl.sum(acc, 0) if OP == "sum" else largest(acc, 0)
    tl.store(out + group.to(tl.int64) * C + columns, total, mask=columns < C)
