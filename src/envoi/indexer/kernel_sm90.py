"""The fast mode's scores on Hopper: what `kernel_scores` computes, the pages by TMA.

    for each tile of two pages among this program's neighbouring tiles:     four warps, several programs on an SM
        wait for the tile;  S = values @ q.T;  fetch the tile STAGES later into its place
        scores, histogram

Nobody else fills the stages: while one program is busy with its scores, the others' tiles are on their way.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from envoi.epilogue.device import maximum
from envoi.indexer.kernel_scores import BINS, FAILED, HEAD_DIM, KEY_SHIFT, NUM_COUNTERS, PAGE, ordered
from envoi.indexer.kernel_scores import visible as visible_of
from envoi.triton_compat import role_barrier

TILE: gl.constexpr = gl.constexpr(128)
ROWS_OF_VALUES: gl.constexpr = gl.constexpr(66)  # of 128 bytes: rows of a page, 64 of them values
ROWS_OF_SCALES: gl.constexpr = gl.constexpr(33)  # of 64 float32: rows of a page, the last of them scales


@gluon.jit
def first_tile(lengths, num_rows, ROWS: gl.constexpr):
    """Where this program begins, and how many tiles it has: neighbours, so that few programs change rows."""
    seq_lens, first_row, next_n, width = lengths
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    ids = gl.arange(0, ROWS, layout)
    seen = gl.maximum(visible_of(seq_lens, first_row + ids, first_row + num_rows, next_n, width), 0)
    tiles = (seen + TILE - 1) // TILE
    ends = gl.associative_scan(tiles, 0, add)
    total = gl.sum(tiles, 0)
    each = total // gl.num_programs(0)
    more = total % gl.num_programs(0)  # as many programs have one tile more
    begin = gl.program_id(0) * each + gl.minimum(gl.program_id(0), more)
    count = each + (gl.program_id(0) < more).to(gl.int32)
    row = gl.sum((ends <= begin).to(gl.int32), 0)
    token = (begin - gl.sum(gl.where(ids == row, ends - tiles, 0), 0)) * TILE
    return row, gl.sum(gl.where(ids == row, seen, 0), 0), token, count


@gluon.jit
def add(x, y):
    """x + y."""
    return x + y


@gluon.jit
def next_tile(row, n, token, lengths, num_rows):
    """The tile behind: its row, the tokens that the row sees, its first token."""
    seq_lens, first_row, next_n, width = lengths
    token += TILE
    while (token >= n) & (row + 1 < num_rows):
        row += 1
        n = gl.maximum(visible_of(seq_lens, first_row + row, first_row + num_rows, next_n, width), 0)
        token = token * 0
    return row, n, token


@gluon.jit
def pages_of(table, row, token, n, lengths):
    """The entries of the block table that a tile begins and goes on with; 0 behind the row's end."""
    seq_lens, first_row, next_n, width = lengths
    at = table + ((first_row + row) // next_n).to(gl.int64) * width + token // PAGE
    return gl.load(at, mask=token < n, other=0), gl.load(at + 1, mask=token + PAGE < n, other=0)


@gluon.jit
def fetch(descs, stages, slot, pages, row, counters, num_pages):
    """Two pages into a stage; one that is outside the cache is replaced by page 0, and the row has failed."""
    values_desc, scales_desc = descs
    values, scales, ready = stages
    mbarrier.expect(ready.index(slot), 2 * (values_desc.block_type.nbytes + scales_desc.block_type.nbytes))
    for half in gl.static_range(2):
        good = (pages[half] >= 0) & (pages[half] < num_pages)
        page = gl.where(good, pages[half], 0)
        tma.async_copy_global_to_shared(
            values_desc, [page * ROWS_OF_VALUES, 0], ready.index(slot), values.index(slot * 2 + half)
        )
        tma.async_copy_global_to_shared(
            scales_desc, [page * ROWS_OF_SCALES + ROWS_OF_SCALES - 1, 0], ready.index(slot),
            scales.index(slot * 2 + half),
        )  # fmt: skip
        if not good:
            gl.store(counters + row * NUM_COUNTERS + FAILED, 1)


@gluon.jit
def load_queries(q, weights, queries, row, H: gl.constexpr, layout: gl.constexpr):
    """A row's queries to shared memory; returns its weights."""
    wide: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [gl.num_warps(), 1], [1, 0])
    heads = gl.arange(0, H, gl.SliceLayout(1, wide))
    d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, wide))
    role_barrier()
    queries.store(gl.load(q + (row * H + heads)[:, None] * HEAD_DIM + d[None, :]))
    fence_async_shared()
    role_barrier()
    return gl.load(weights + row * H + gl.arange(0, H, layout))


@gluon.jit
def score(products, scale, weight):
    """[tokens, heads] -> the tokens' scores."""
    positive = maximum(products * gl.where(scale < 0.0, -1.0, 1.0)[:, None], 0.0)
    return gl.sum(positive * weight[None, :], 1) * gl.abs(scale)


@gluon.jit
def scores_kernel(
    values_desc, scales_desc, q, weights, seq_lens, table, logits, histogram, counters,
    first_row, num_rows, next_n, width, num_pages,
    H: gl.constexpr, ROWS: gl.constexpr, COPIES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As the Triton kernel of that name; descs: the cache as rows of 128 bytes, by boxes of a page's values, and as
    rows of 64 numbers, the last of which are a page's scales."""
    values = gl.allocate_shared_memory(values_desc.dtype, [2 * STAGES, PAGE, HEAD_DIM], values_desc.layout)
    scales = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, PAGE], scales_desc.layout)
    tiles = values._reinterpret(values_desc.dtype, [STAGES, TILE, HEAD_DIM], values_desc.layout)
    factors = scales._reinterpret(gl.float32, [STAGES, TILE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    queries = gl.allocate_shared_memory(values_desc.dtype, [H, HEAD_DIM], values_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    role_barrier()
    lengths = (seq_lens, first_row, next_n, width)
    descs = (values_desc, scales_desc)
    stages = (values, scales, ready)
    row, n, token, count = first_tile(lengths, num_rows, ROWS)
    ahead_row, ahead_n, ahead_token = row, n, token
    page0, page1 = pages_of(table, row, token, n, lengths)
    for i in range(gl.minimum(count, STAGES)):
        fetch(descs, stages, i, (page0, page1), ahead_row, counters, num_pages)
        ahead_row, ahead_n, ahead_token = next_tile(ahead_row, ahead_n, ahead_token, lengths, num_rows)
        page0, page1 = pages_of(table, ahead_row, ahead_token, ahead_n, lengths)
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, H, 32]
    )
    zero = gl.full((TILE, H), 0.0, gl.float32, layout)
    weight = gl.full((H,), 0.0, gl.float32, gl.SliceLayout(0, layout))
    loaded = row - 1
    for i in range(count):
        slot = i % STAGES
        if row != loaded:
            weight = load_queries(q, weights, queries, (first_row + row).to(gl.int64), H, gl.SliceLayout(0, layout))
            loaded = row
        mbarrier.wait(ready.index(slot), (i // STAGES) & 1)
        products = warpgroup_mma(tiles.index(slot), queries.permute((1, 0)), zero, use_acc=False)
        scale = factors.index(slot).load(gl.SliceLayout(1, layout))
        if i + STAGES < count:
            role_barrier()
            # Its pages were asked for a tile ago: waiting for them here would keep the tensor cores waiting.
            fetch(descs, stages, slot, (page0, page1), ahead_row, counters, num_pages)
            ahead_row, ahead_n, ahead_token = next_tile(ahead_row, ahead_n, ahead_token, lengths, num_rows)
            page0, page1 = pages_of(table, ahead_row, ahead_token, ahead_n, lengths)
        s = score(products, scale, weight)
        tokens = token + gl.arange(0, TILE, gl.SliceLayout(1, layout))
        gl.store(logits + row.to(gl.int64) * width * PAGE + tokens, s, mask=tokens < n)
        bins = (ordered(s, False) >> KEY_SHIFT) + BINS // 2 + (row * COPIES + gl.program_id(0) % COPIES) * BINS
        gl.atomic_add(histogram + bins, (tokens < n).to(gl.int32), mask=tokens < n, sem="relaxed")
        row, n, token = next_tile(row, n, token, lengths, num_rows)
