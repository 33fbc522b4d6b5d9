"""The fast mode's scores on Hopper: what `kernel_scores` computes, the pages by TMA.

    for each tile of two pages among this program's neighbouring tiles:      producer             consumer
                                                                            TMA -> stage         S = values @ q.T
                                                                                                 scores, groups

Neighbours belong to the same row, mostly: the row's queries stay in shared memory, its weights in registers.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)

from envoi.epilogue.device import maximum
from envoi.indexer.kernel_scores import HEAD_DIM, INTEGERS, KEY_SHIFT, NUM_GROUPS, PAGE, TALLIES, level_of, ordered
from envoi.indexer.kernel_scores import visible as visible_of
from envoi.triton_compat import reinterpret, role_barrier, tma_load

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
def fetch(descs, stages, slot, page0, page1):
    """Two pages into a stage."""
    values_desc, scales_desc = descs
    values, scales, ready, empty = stages
    mbarrier.expect(ready.index(slot), 2 * (values_desc.block_type.nbytes + scales_desc.block_type.nbytes))
    for half in gl.static_range(2):
        page = page1 if half == 1 else page0
        at = slot * 2 + half
        tma_load(values_desc, [page * ROWS_OF_VALUES, 0], ready.index(slot), values.index(at))
        row_of_scales = (page + 1) * ROWS_OF_SCALES - 1
        tma_load(scales_desc, [row_of_scales, 0], ready.index(slot), scales.index(at))


@gluon.jit
def producer(descs, stages, lengths, table, num_rows, num_pages, ROWS: gl.constexpr, STAGES: gl.constexpr):
    """One warp: fills the stages, as far ahead as they reach. It reads the block table for 16 tiles at a time.

    A page that is outside the cache is replaced by page 0; `kernel_sift` finds it too.
    """
    empty = stages[3]
    seq_lens, first_row, next_n, width = lengths
    ids = gl.arange(0, 32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    row, n, token, count = first_tile(lengths, num_rows, ROWS)
    done = 0
    while done < count:
        tokens = token + ids * PAGE
        request = ((first_row + row) // next_n).to(gl.int64)
        pages = gl.load(table + request * width + tokens // PAGE, mask=tokens < n, other=0)
        pages = gl.where((pages >= 0) & (pages < num_pages), pages, 0)
        here = gl.minimum(gl.minimum((n - token + TILE - 1) // TILE, 16), count - done)
        for i in range(here):
            slot = (done + i) % STAGES
            page0 = gl.sum(gl.where(ids == 2 * i, pages, 0), 0)
            page1 = gl.sum(gl.where(ids == 2 * i + 1, pages, 0), 0)
            mbarrier.wait(empty.index(slot), (((done + i) // STAGES) & 1) ^ 1)
            fetch(descs, stages, slot, page0, page1)
        done += here
        row, n, token = next_tile(row, n, token + (here - 1) * TILE, lengths, num_rows)


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
def keep(best, groups):
    """Write what a tile's groups have."""
    flat = gl.reshape(best, [best.numel])
    gl.store(groups + gl.arange(0, best.numel, flat.type.layout), (flat >> KEY_SHIFT).to(gl.int16))


@gluon.jit
def better_half(best):
    """Of neighbouring groups, as lanes hold them, the better."""
    return gl.max(gl.reshape(best, [best.numel // 2, 2]), 1)


@gluon.jit
def keep_best(s, token, n, groups):
    """Write the best of each of a tile's groups to those of its row; tokens behind n are the least.

    Tokens 64 and 8 apart meet first: a thread holds them.
    """
    tokens = token + gl.arange(0, TILE, s.type.layout)
    keys = gl.where(tokens < n, ordered(s, False), -0x80000000)
    level = level_of(n)
    groups += token >> level
    if token >> level < NUM_GROUPS:
        if level == 0:
            keep(keys, groups)
        else:
            pairs = gl.max(gl.reshape(keys, [2, TILE // 2]), 0)
            if level == 1:
                keep(pairs, groups)
            else:
                keep_best_of_pairs(pairs, level, groups)


@gluon.jit
def keep_best_of_pairs(pairs, level, groups):
    """The same of groups of 4 to 32, from those of 2."""
    fours = gl.reshape(gl.max(gl.reshape(pairs, [TILE // 32, 2, 8]), 1), [TILE // 4])
    if level == 2:
        keep(fours, groups)
    else:
        eights = better_half(fours)
        if level == 3:
            keep(eights, groups)
        else:
            sixteens = better_half(eights)
            if level == 4:
                keep(sixteens, groups)
            else:
                keep(better_half(sixteens), groups)


@gluon.jit
def consumer(
    stages, queries, lengths, given, num_rows, H: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Four warps: the scores of every tile."""
    values, scales, ready, empty = stages
    q, weights, logits, groups = given
    seq_lens, first_row, next_n, width = lengths
    tiles = reinterpret(values, values.dtype, [STAGES, TILE, HEAD_DIM], queries.layout)
    factors = reinterpret(scales, gl.float32, [STAGES, TILE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, H, 32]
    )
    zero = gl.full((TILE, H), 0.0, gl.float32, layout)
    weight = gl.full((H,), 0.0, gl.float32, gl.SliceLayout(0, layout))
    row, n, token, count = first_tile(lengths, num_rows, ROWS)
    loaded = row - 1
    for i in range(count):
        slot = i % STAGES
        if row != loaded:
            weight = load_queries(q, weights, queries, (first_row + row).to(gl.int64), H, gl.SliceLayout(0, layout))
            loaded = row
        mbarrier.wait(ready.index(slot), (i // STAGES) & 1)
        products = warpgroup_mma(tiles.index(slot), queries.permute((1, 0)), zero, use_acc=False)
        scale = factors.index(slot).load(gl.SliceLayout(1, layout))
        mbarrier.arrive(empty.index(slot), count=1)
        s = score(products, scale, weight)
        tokens = token + gl.arange(0, TILE, gl.SliceLayout(1, layout))
        gl.store(logits + row.to(gl.int64) * width * PAGE + tokens, s, mask=tokens < n)
        keep_best(s, token, n, groups + row * NUM_GROUPS)
        row, n, token = next_tile(row, n, token, lengths, num_rows)


@gluon.jit(do_not_specialize=INTEGERS)
def scores_kernel(
    values_desc, scales_desc, q, weights, seq_lens, table, logits, groups, tallies,
    first_row, num_rows, width, num_pages,
    NEXT_N: gl.constexpr, H: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As the Triton kernel of that name; descs: the cache as rows of 128 bytes, by boxes of a page's values, and as
    rows of 64 numbers, the last of which are a page's scales."""
    values = gl.allocate_shared_memory(values_desc.dtype, [2 * STAGES, PAGE, HEAD_DIM], values_desc.layout)
    scales = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, PAGE], scales_desc.layout)
    queries = gl.allocate_shared_memory(values_desc.dtype, [H, HEAD_DIM], values_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    role_barrier()
    for own in range(gl.program_id(0), num_rows, gl.num_programs(0)):
        ids = gl.arange(0, TALLIES, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        gl.store(tallies + own * TALLIES + ids, 0)
    lengths = (seq_lens, first_row, NEXT_N, width)
    stages = (values, scales, ready, empty)
    given = (q, weights, logits, groups)
    gl.warp_specialize([
        (consumer, (stages, queries, lengths, given, num_rows, H, ROWS, STAGES)),
        (producer, ((values_desc, scales_desc), stages, lengths, table, num_rows, num_pages, ROWS, STAGES)),
    ], [1], [40])  # fmt: skip
