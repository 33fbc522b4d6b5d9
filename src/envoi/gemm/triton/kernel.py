# Triton compiles code that type checkers reject: constants with attributes, names that must be bound, else after
# return.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
"""GEMM in plain Triton for any sizes, strides, formats and epilogues, also in the interpreter.

    for each tile of BLOCK_M rows and BLOCK_N columns:            one program
        for k in K, BLOCK_K at a time:
            acc += widened a[rows, k] @ widened b[columns, k].T
        visit(acc) -> outputs; partial reductions of its rows -> workspace, for finish_kernel
    an epilogue that needs whole rows wider than a tile: acc -> workspace, for rows_kernel
    column reductions, totals: their inputs -> workspace, for reduce_kernel

A matrix arrives as the tuple (values, strides of an expert, a row and k, scale factors, their three strides, rows that
share one) and a constant `Side`, its format. In a grouped GEMM rows from offsets[E] on are treated, with WRITE_TAIL, as
those of one more expert, whose product is 0; else they are not written.
"""

import triton
import triton.language as tl

from envoi.epilogue.codes_triton import from_e2m1, from_e4m3, from_e8m0, widen
from envoi.epilogue.device import INF, INTERPRETED, maximum
from envoi.epilogue.tile_triton import largest, load_tile


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
def scale_factors(x, e, ids, groups, mask, side: tl.constexpr):
    """Load float32 scale factors of rows `ids` and groups `groups` along K, broadcast; 1 where masked."""
    values, stride_e, stride_row, stride_k, sf, sf_e, sf_row, sf_k, group_rows = x
    at = e.to(tl.int64) * sf_e + (ids // group_rows).to(tl.int64) * sf_row + groups * sf_k
    if side.scale == "e8m0":
        return from_e8m0(tl.load(sf + at, mask=mask, other=127))
    elif side.scale == "e4m3":
        return from_e4m3(tl.load(sf + at, mask=mask, other=0x38))
    else:
        return tl.load(sf + at, mask=mask, other=1.0)


@triton.jit
def load_block(x, e, ids, num_ids, ks, k_end, side: tl.constexpr):
    """Load [ids, ks] of a matrix, widened for the product and times the scale factors that are folded in; 0 outside."""
    values, stride_e, stride_row, stride_k, sf, sf_e, sf_row, sf_k, group_rows = x
    ids = ids[:, None]
    ks = ks[None, :]
    mask = (ids < num_ids) & (ks < k_end)
    at = e.to(tl.int64) * stride_e + ids.to(tl.int64) * stride_row + (ks // side.per_byte).to(tl.int64) * stride_k
    v = tl.load(values + at, mask=mask, other=0)
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


@triton.jit
def multiply(
    acc, a, b, e, rows, m_end, columns, N, first, last,
    A: tl.constexpr, B: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return acc + a[rows, first : last] @ b[e, columns, first : last].T."""
    for k in range(first, last, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        x = load_block(a, e * 0, rows, m_end, ks, last, A)
        y = load_block(b, e, columns, N, ks, last, B)
        acc = tl.dot(x, tl.trans(y), acc, input_precision="ieee")
    return acc


@triton.jit
def accumulate(
    a, b, e, m, m_end, n, N, K,
    A: tl.constexpr, B: tl.constexpr, GROUP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return a tile of the product, scaled. GROUP_K: elements of K that share a float32 scale factor; 0 = all."""
    rows = m + tl.arange(0, BLOCK_M)
    columns = n + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if GROUP_K > 0:
        for k in range(0, K, GROUP_K):
            zeros = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            part = multiply(zeros, a, b, e, rows, m_end, columns, N, k, k + GROUP_K, A, B, BLOCK_K)
            acc += part * block_scale(a, b, e, rows, m_end, columns, N, k, A, B)
    else:
        acc = multiply(acc, a, b, e, rows, m_end, columns, N, 0, K, A, B, BLOCK_K)
        if A.scales:
            acc = acc * scale_factors(a, e * 0, rows, 0, (rows < m_end) & (K > 0), A)[:, None]
        if B.scales:
            acc = acc * scale_factors(b, e, columns, 0, (columns < N) & (K > 0), B)[None, :]
    return acc


@triton.jit
def block_scale(a, b, e, rows, m_end, columns, N, k, A: tl.constexpr, B: tl.constexpr):
    """Return the factors [rows, columns] of one group along K; one factor for all of K counts in each group."""
    if A.scales:
        x = scale_factors(a, e * 0, rows, k // A.group_k if A.group_k > 0 else 0, rows < m_end, A)
    else:
        x = tl.full(rows.shape, 1.0, tl.float32)
    if B.scales:
        y = scale_factors(b, e, columns, k // B.group_k if B.group_k > 0 else 0, columns < N, B)
    else:
        y = tl.full(columns.shape, 1.0, tl.float32)
    return x[:, None] * y[None, :]


@triton.jit
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
        acc = accumulate(
            a, b, own, m, m_end, n, N, tl.where(e < num_experts, K, 0), A, B, GROUP_K, BLOCK_M, BLOCK_N, BLOCK_K
        )
        mine = code.of_expert(operands, own, N)
        if e >= num_experts:
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        parts = code.visit(acc, m, n, m_end, N, mine, outputs, 0, 0, 0, True, 0, 0)
    else:
        m = tile * BLOCK_M
        m_end = M
        acc = accumulate(a, b, tile * 0, m, M, n, N, K, A, B, GROUP_K, BLOCK_M, BLOCK_N, BLOCK_K)
        parts = code.visit(acc, m, n, M, N, operands, outputs, 0, 0, 0, False, 0, 0)
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
    WRITE_TAIL: tl.constexpr,
):  # fmt: skip
    """Run an epilogue of whole rows (or of chunks) on accumulators [M, N]; rows of no expert count as 0."""
    tile = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N
    like = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if MAX_EXPERTS > 0:
        m, m_end, e = place(tile, offsets, M, num_experts, BLOCK_M, MAX_EXPERTS, WRITE_TAIL)
        if (e == MAX_EXPERTS) & (tile > 0):
            return
        mine = code.of_expert(operands, tl.maximum(tl.minimum(e, num_experts - 1), 0), N)
        x = load_tile(acc, like, m, n, tl.where(e < num_experts, m_end, 0), N)
        code.visit(x, m, n, m_end, N, mine, outputs, 0, 0, 0, True, 0, 0)
    else:
        m = tile * BLOCK_M
        x = load_tile(acc, like, m, n, M, N)
        code.visit(x, m, n, M, N, operands, outputs, 0, 0, 0, False, 0, 0)


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
