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
from envoi.indexer.kernel_scores import BINS, FAILED, HEAD_DIM, KEY_SHIFT, NUM_COUNTERS, PAGE, PAGE_BYTES, ordered
from envoi.indexer.kernel_scores import visible as visible_of
from envoi.triton_compat import role_barrier

TILE: gl.constexpr = gl.constexpr(128)
ROWS_OF_PAGE: gl.constexpr = gl.constexpr(66)  # of 128 bytes: 64 of values, two of scales


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
def page_of(table, row, token, n, lengths, num_pages):
    """The page of a token, 0 if there is none; False if it is outside the cache."""
    seq_lens, first_row, next_n, width = lengths
    request = ((first_row + row) // next_n).to(gl.int64)
    page = gl.load(table + request * width + token // PAGE, mask=token < n, other=0)
    good = (page >= 0) & (page < num_pages)
    return gl.where(good, page, 0), good


@gluon.jit
def fetch(desc, pages, ready, slot, table, row, n, token, lengths, counters, num_pages):
    """Two pages into a stage."""
    mbarrier.expect(ready.index(slot), 2 * desc.block_type.nbytes)
    for half in gl.static_range(2):
        page, good = page_of(table, row, token + half * PAGE, n, lengths, num_pages)
        tma.async_copy_global_to_shared(desc, [page * ROWS_OF_PAGE, 0], ready.index(slot), pages.index(slot * 2 + half))
        if not good:
            gl.store(counters + row * NUM_COUNTERS + FAILED, 1)


@gluon.jit
def load_scales(scales, table, row, n, token, lengths, num_pages, layout: gl.constexpr):
    """The scale factors of a tile's tokens."""
    tokens = token + gl.arange(0, TILE, layout)
    page, good = page_of(table, row, tokens, n, lengths, num_pages)
    at = page.to(gl.int64) * (PAGE_BYTES // 4) + PAGE * HEAD_DIM // 4 + tokens % PAGE
    return gl.load(scales + at, mask=tokens < n, other=0.0)


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
def scores_kernel(
    desc, q, scales, weights, seq_lens, table, logits, histogram, counters,
    first_row, num_rows, next_n, width, num_pages,
    H: gl.constexpr, ROWS: gl.constexpr, COPIES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As the Triton kernel of that name; desc: the cache as rows of 128 bytes, by boxes of a page's values."""
    pages = gl.allocate_shared_memory(desc.dtype, [2 * STAGES] + desc.block_type.shape, desc.layout)
    tiles = pages._reinterpret(desc.dtype, [STAGES, TILE, HEAD_DIM], desc.layout)
    queries = gl.allocate_shared_memory(desc.dtype, [H, HEAD_DIM], desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    role_barrier()
    lengths = (seq_lens, first_row, next_n, width)
    row, n, token, count = first_tile(lengths, num_rows, ROWS)
    ahead_row, ahead_n, ahead_token = row, n, token
    for i in range(gl.minimum(count, STAGES)):
        fetch(desc, pages, ready, i, table, ahead_row, ahead_n, ahead_token, lengths, counters, num_pages)
        ahead_row, ahead_n, ahead_token = next_tile(ahead_row, ahead_n, ahead_token, lengths, num_rows)
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, H, 32]
    )
    zero = gl.full((TILE, H), 0.0, gl.float32, layout)
    weight = gl.full((H,), 0.0, gl.float32, gl.SliceLayout(0, layout))
    loaded = row - 1
    scale = load_scales(scales, table, row, n, token, lengths, num_pages, gl.SliceLayout(1, layout))
    for i in range(count):
        slot = i % STAGES
        if row != loaded:
            own = (first_row + row).to(gl.int64)
            weight = load_queries(q, weights, queries, own, H, gl.SliceLayout(0, layout))
            loaded = row
        mbarrier.wait(ready.index(slot), (i // STAGES) & 1)
        products = warpgroup_mma(tiles.index(slot), queries.permute((1, 0)), zero, use_acc=False)
        if i + STAGES < count:
            role_barrier()
            fetch(desc, pages, ready, slot, table, ahead_row, ahead_n, ahead_token, lengths, counters, num_pages)
            ahead_row, ahead_n, ahead_token = next_tile(ahead_row, ahead_n, ahead_token, lengths, num_rows)
        positive = maximum(products * gl.where(scale < 0.0, -1.0, 1.0)[:, None], 0.0)
        s = gl.sum(positive * weight[None, :], 1) * gl.abs(scale)
        tokens = token + gl.arange(0, TILE, gl.SliceLayout(1, layout))
        gl.store(logits + row.to(gl.int64) * width * PAGE + tokens, s, mask=tokens < n)
        bins = (ordered(s, False) >> KEY_SHIFT) + BINS // 2 + (row * COPIES + gl.program_id(0) % COPIES) * BINS
        gl.atomic_add(histogram + bins, (tokens < n).to(gl.int32), mask=tokens < n, sem="relaxed")
        row, n, token = next_tile(row, n, token, lengths, num_rows)
        scale = load_scales(scales, table, row, n, token, lengths, num_pages, gl.SliceLayout(1, layout))
