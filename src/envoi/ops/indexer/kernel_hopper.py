"""Scores of the fast mode on Hopper: computed as in `kernel_scores`, pages loaded by TMA.

    for each tile of two pages among this program's neighbouring tiles:      producer             consumer
                                                                            TMA -> stage         S = values @ q.T
                                                                                                 scores, groups

Neighbours belong to the same row, mostly: the row's queries stay in shared memory, its weights in registers.
"""

from typing import Any, NamedTuple

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)

from envoi.epilogues.device import maximum
from envoi.ops.indexer.kernel_fp4 import value_of, widen
from envoi.ops.indexer.kernel_scores import (
    HEAD_DIM,
    INTEGERS,
    NUM_COUNTERS,
    NUM_GROUPS,
    PAGE,
    TOP_LEVEL,
    as_stored,
    existing,
    least_level,
    level_of,
    load_weights,
    ordered,
    scored,
)
from envoi.runtime.aggregate import Scalar, aggregate
from envoi.runtime.barrier_setup import set_up_together
from envoi.runtime.sync import let_next_start
from envoi.runtime.triton_compat import reinterpret, role_barrier, tma_load

TILE: gl.constexpr = gl.constexpr(128)
ROWS_OF_VALUES: gl.constexpr = gl.constexpr(66)  # rows of 128 bytes in a page, 64 of them values
ROWS_OF_SCALES: gl.constexpr = gl.constexpr(33)  # rows of 64 float32 in a page, the last of them scales
FP4_ROWS_OF_VALUES: gl.constexpr = gl.constexpr(68)  # rows of 64 bytes in a page of keys in FP4, 64 of them values
FP4_ROWS_OF_FACTORS: gl.constexpr = gl.constexpr(17)  # rows of 64 int32, the last of them factors


@aggregate
class Lengths:
    """Lengths of the rows: seq_lens [requests], which rows, rows a request (next_n), pages in a row of the table.

    least: rows of no more tokens aren't scored. share: neighbouring rows of a request that are scored together, a
    block, whose tiles are as many as its last row sees, which sees the most; blocks: at least their number; sets:
    products that a role's rows of a block are divided among.
    """

    seq_lens: gl.tensor
    first_row: gl.tensor
    num_rows: gl.tensor
    next_n: Scalar
    width: gl.tensor
    least: gl.constexpr
    share: gl.constexpr
    blocks: gl.constexpr
    sets: gl.constexpr


class Stages(NamedTuple):
    """Pipeline: pages [2 * stages, 64, 128], scales [2 * stages, 1, 64], barriers full and empty of each stage."""

    pages: Any
    scales: Any
    full: Any
    empty: Any


class Descriptors(NamedTuple):
    """TMA descriptors of the cache: a page's values as rows of 128 bytes, its scales as a row of 64 float32.

    Of keys in FP4: values as rows of 16 int32, factors as a row of 64 int32.
    """

    pages: Any
    scales: Any


class Rows(NamedTuple):
    """Inputs and outputs of the rows, pointers: q [rows, H, 128], weights [rows, H]; logits, groups."""

    q: Any
    weights: Any
    logits: Any
    groups: Any


@gluon.jit
def make_stages(descs, num: gl.constexpr, consumers: gl.constexpr):
    """Allocate Stages and set up their barriers, at a kernel's start. consumers: as many roles empty each stage."""
    columns: gl.constexpr = descs.pages.block_type.shape[1]
    values = gl.allocate_shared_memory(descs.pages.dtype, [2 * num, PAGE, columns], descs.pages.layout)
    scales = gl.allocate_shared_memory(descs.scales.dtype, [2 * num, 1, PAGE], descs.scales.layout)
    full = gl.allocate_shared_memory(gl.int64, [num, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [num, 1], mbarrier.MBarrierLayout())
    set_up_together()
    for i in gl.static_range(num):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=consumers)
    fence_async_shared()
    role_barrier()
    return Stages(values, scales, full, empty)


@gluon.jit
def visible(lengths, row):
    """Return how many tokens of rows are scored. row counts from first_row."""
    end = lengths.first_row + lengths.num_rows
    return scored(lengths.seq_lens, lengths.first_row + row, end, lengths.next_n, lengths.width, lengths.least)


@gluon.jit
def seen_by_block(lengths, block):
    """Return how many tokens of the last rows of blocks are scored. Blocks count from first_row."""
    if lengths.share == 1:
        return visible(lengths, block)
    else:
        last = gl.minimum((block + 1) * lengths.share, lengths.num_rows) - 1
        return gl.where(block * lengths.share < lengths.num_rows, visible(lengths, last), 0)


@gluon.jit
def first_tile(lengths):
    """Find this program's first tile (block of rows, tokens it sees, first token) and its number of tiles.

    A program's tiles are neighbours, so that few programs change blocks.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    ids = gl.arange(0, lengths.blocks, layout)
    seen = seen_by_block(lengths, ids)
    tiles = (seen + TILE - 1) // TILE
    ends = gl.associative_scan(tiles, 0, add)
    total = gl.sum(tiles, 0)
    each = total // gl.num_programs(0)
    more = total % gl.num_programs(0)  # so many programs have one tile more
    begin = gl.program_id(0) * each + gl.minimum(gl.program_id(0), more)
    count = each + (gl.program_id(0) < more).to(gl.int32)
    block = gl.sum((ends <= begin).to(gl.int32), 0)
    if lengths.share == 1:
        token = (begin - gl.sum(gl.where(ids == block, ends - tiles, 0), 0)) * TILE
        n = gl.sum(gl.where(ids == block, seen, 0), 0)
    else:  # a load more, and half the registers
        token = (begin - gl.max(gl.where(ends <= begin, ends, 0), 0)) * TILE
        n = seen_by_block(lengths, block)
    return block, n, token, count


@gluon.jit
def add(x, y):
    """Return x + y."""
    return x + y


@gluon.jit
def next_tile(block, n, token, lengths):
    """Find the next tile: its block of rows, the tokens that the block sees, its first token."""
    token += TILE
    while (token >= n) & ((block + 1) * lengths.share < lengths.num_rows):
        block += 1
        n = seen_by_block(lengths, block)
        token = token * 0
    return block, n, token


@gluon.jit
def load_pages(descs, stages, stage, page0, page1):
    """Load two pages into a stage."""
    fp4: gl.constexpr = descs.pages.dtype == gl.int32
    rows_of_values: gl.constexpr = FP4_ROWS_OF_VALUES if fp4 else ROWS_OF_VALUES
    rows_of_scales: gl.constexpr = FP4_ROWS_OF_FACTORS if fp4 else ROWS_OF_SCALES
    full = stages.full.index(stage)
    mbarrier.expect(full, 2 * (descs.pages.block_type.nbytes + descs.scales.block_type.nbytes))
    for half in gl.static_range(2):
        page = page1 if half == 1 else page0
        at = stage * 2 + half
        tma_load(descs.pages, [page * rows_of_values, 0], full, stages.pages.index(at))
        row = (page + 1) * rows_of_scales - 1
        tma_load(descs.scales, [row, 0], full, stages.scales.index(at))


@gluon.jit
def producer(descs, stages, lengths, table, num_pages, STAGES: gl.constexpr):
    """Fill the stages as they become empty: a role of one warp. Reads the block table for 16 tiles at a time.

    A page that is outside the cache is replaced by page 0; `kernel_select` finds it too.
    """
    ids = gl.arange(0, 32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    block, n, token, count = first_tile(lengths)
    done = 0
    while done < count:
        tokens = token + ids * PAGE
        request = ((lengths.first_row + block * lengths.share) // lengths.next_n).to(gl.int64)
        pages = gl.load(table + request * lengths.width + tokens // PAGE, mask=tokens < n, other=0)
        pages = gl.where((pages >= 0) & (pages < num_pages), pages, 0)
        here = gl.minimum(gl.minimum((n - token + TILE - 1) // TILE, 16), count - done)
        for i in range(here):
            stage = (done + i) % STAGES
            page0 = gl.sum(gl.where(ids == 2 * i, pages, 0), 0)
            page1 = gl.sum(gl.where(ids == 2 * i + 1, pages, 0), 0)
            mbarrier.wait(stages.empty.index(stage), (((done + i) // STAGES) & 1) ^ 1)
            load_pages(descs, stages, stage, page0, page1)
        done += here
        block, n, token = next_tile(block, n, token + (here - 1) * TILE, lengths)


@gluon.jit
def load_queries(q, queries, row, H: gl.constexpr, HEADS: gl.constexpr, FP4: gl.constexpr):
    """Copy a row's queries to shared memory [H, HEAD_DIM]: HEADS of them, then the last again.

    FP4: in the order of the keys' values in the operand.
    """
    wide: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [gl.num_warps(), 1], [1, 0])
    heads = existing(gl.arange(0, H, gl.SliceLayout(1, wide)), HEADS)
    d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, wide))
    if FP4:
        d = value_of(d)
    role_barrier()
    queries.store(gl.load(q + (row * HEADS + heads)[:, None] * HEAD_DIM + d[None, :]))
    fence_async_shared()
    role_barrier()


@gluon.jit
def by_lanes(x, columns: gl.constexpr):
    """Cut x [tokens, rows * columns], as wgmma leaves it, by the four lanes that have a token: [sums, 4, columns / 4].

    A lane's columns of a row, for a sum of `columns`, are the last axis: the same registers.
    """
    sums: gl.constexpr = x.numel // columns
    return x.reshape([sums, columns // 8, 4, 2]).permute([0, 2, 1, 3]).reshape([sums, 4, columns // 4])


@gluon.jit
def add_products(total, x, y):
    """Add the products of x and y [sums, 4, n] along n to total [sums, 4], one after another, each fused with its sum.

    None: a new total, in which elements 1 and 0 change places: the bits that Triton 3.6 makes of a plain sum.
    """
    half: gl.constexpr = x.shape[2] // 2
    if half == 1:
        x0, x1 = gl.split(x)
        y0, y1 = gl.split(y)
        total = gl.fma(x0, y0, x1 * y1) if total is None else gl.fma(x1, y1, gl.fma(x0, y0, total))
    else:
        x0, x1 = gl.split(x.reshape([x.shape[0], 4, 2, half]).permute([0, 1, 3, 2]))
        y0, y1 = gl.split(y.reshape([x.shape[0], 4, 2, half]).permute([0, 1, 3, 2]))
        total = add_products(add_products(total, x0, y0), x1, y1)
    return total


@gluon.jit
def sums_of_heads(positive, weight, rows: gl.constexpr):
    """Reduce products [tokens, columns] of the heads of rows, times their weights [columns], to [tokens * rows].

    In one order, and fused in one way: left to the compiler, both would depend on the kernel and on the compiler.
    """
    columns: gl.constexpr = positive.shape[1] // rows
    weight, _ = gl.broadcast(weight[None, :], positive)
    return gl.sum(add_products(None, by_lanes(positive, columns), by_lanes(weight, columns)), 1)


@gluon.jit
def score(products, scale, weight):
    """Reduce products [tokens, heads] to the tokens' scores."""
    return score_of_positive(products * gl.where(scale < 0.0, -1.0, 1.0)[:, None], scale, weight)


@gluon.jit
def score_of_positive(products, scale, weight):
    """Compute `score` of scales that aren't negative, as those of keys in FP4 are."""
    s = sums_of_heads(maximum(products, 0.0), weight, 1)
    return gl.convert_layout(s, scale.type.layout, assert_trivial=True) * gl.abs(scale)


@gluon.jit
def keep(best, groups):
    """Store the best keys of a tile's groups."""
    flat = gl.reshape(best, [best.numel])
    gl.store(groups + gl.arange(0, best.numel, flat.type.layout), as_stored(flat, groups))


@gluon.jit
def better_half(best):
    """Reduce pairs of neighbouring groups to the better of each."""
    return gl.max(gl.reshape(best, [best.numel // 2, 2]), 1)


@gluon.jit
def keep_best(s, token, n, groups):
    """Store the best key of each group of a tile to its row's groups; tokens from n on count as the least."""
    level = level_of(n)
    if (level >= least_level(groups)) & (level <= TOP_LEVEL):
        tokens = token + gl.arange(0, TILE, s.type.layout)
        keys = gl.where(tokens < n, ordered(s, False), -0x80000000)
        groups += token >> level
        if level == 0:
            keep(keys, groups)
        else:
            twos = better_half(keys)
            if level == 1:
                keep(twos, groups)
            else:
                fours = better_half(twos)
                if level == 2:
                    keep(fours, groups)
                else:
                    keep_best_of_fours(fours, level, groups)


@gluon.jit
def keep_best_of_fours(fours, level, groups):
    """Store the best keys of groups of 8 to 128 tokens, given those of 4."""
    eights = better_half(fours)
    if level == 3:
        keep(eights, groups)
    else:
        sixteens = better_half(eights)
        if level == 4:
            keep(sixteens, groups)
        else:  # other warps hold the neighbours
            best = better_half(sixteens)
            if level == 5:
                keep(best, groups)
            else:
                if level == 6:
                    keep(better_half(best), groups)
                else:
                    gl.store(groups, as_stored(gl.max(best, 0), groups))


@gluon.jit
def keep_scores(args, s, row, token, n, width, GROUPED: gl.constexpr):
    """Store the scores of a tile of a row, and the best keys of its groups if it has more than GROUPED tokens.

    row counts from first_row.
    """
    tokens = token + gl.arange(0, TILE, s.type.layout)
    gl.store(args.logits + row.to(gl.int64) * width * PAGE + tokens, s, mask=tokens < n)
    if args.groups is not None:
        if n > GROUPED:
            keep_best(s, token, n, args.groups + row * NUM_GROUPS)


@gluon.jit
def consumer(
    stages, queries, lengths, args, H: gl.constexpr, HEADS: gl.constexpr, STAGES: gl.constexpr, GROUPED: gl.constexpr
):
    """Score every tile of this program: a role of four warps."""
    fp4: gl.constexpr = stages.pages.dtype == gl.int32
    if fp4:
        tiles = reinterpret(stages.pages, gl.int32, [STAGES, TILE, HEAD_DIM // 8], stages.pages.layout)
    else:
        tiles = reinterpret(stages.pages, stages.pages.dtype, [STAGES, TILE, HEAD_DIM], queries.layout)
    factors = reinterpret(stages.scales, stages.scales.dtype, [STAGES, TILE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, H, 32]
    )
    dot: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=4)
    zero = gl.full((TILE, H), 0.0, gl.float32, layout)
    heads = gl.arange(0, H, gl.SliceLayout(0, layout))
    weight = gl.full((H,), 0.0, gl.float32, gl.SliceLayout(0, layout))
    row, n, token, count = first_tile(lengths)
    loaded = row - 1
    for i in range(count):
        stage = i % STAGES
        if row != loaded:
            at = (lengths.first_row + row).to(gl.int64)
            load_queries(args.q, queries, at, H, HEADS, fp4)
            weight = load_weights(args.weights, at, heads, HEADS)
            loaded = row
        mbarrier.wait(stages.full.index(stage), (i // STAGES) & 1)
        if fp4:
            keys, scale = widen(tiles.index(stage), factors.index(stage), dot)
            scale = gl.convert_layout(scale, gl.SliceLayout(1, layout))
            mbarrier.arrive(stages.empty.index(stage), count=1)
        else:
            keys = tiles.index(stage)
        products = warpgroup_mma(keys, queries.permute((1, 0)), zero, use_acc=False)
        if fp4:
            s = score_of_positive(products, scale, weight)
        else:
            scale = factors.index(stage).load(gl.SliceLayout(1, layout))
            mbarrier.arrive(stages.empty.index(stage), count=1)
            s = score(products, scale, weight)
        keep_scores(args, s, row, token, n, lengths.width, GROUPED)
        row, n, token = next_tile(row, n, token, lengths)


@gluon.jit(do_not_specialize=INTEGERS)
def scores_kernel(
    values_desc, scales_desc, q, weights, seq_lens, table, logits, groups, counters,
    first_row, num_rows, width, num_pages, next_n,
    H: gl.constexpr, HEADS: gl.constexpr, LEAST: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    EARLY: gl.constexpr, GROUPED: gl.constexpr,
):  # fmt: skip
    """Score rows as the Triton kernel of this name does.

    values_desc: the cache as rows of 128 bytes, in boxes of one page's values; scales_desc: the cache as rows of 64
    float32, of which the last of each page are its scales; or, of keys in FP4, as `Descriptors` says. ROWS: at
    least num_rows. H: HEADS, or more: the products' width, of which the rest has zero weights. GROUPED: rows of at
    most so many tokens have no groups.
    """
    in_rows: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    queries = gl.allocate_shared_memory(gl.float8e4nv, [H, HEAD_DIM], in_rows)
    descs = Descriptors(values_desc, scales_desc)
    stages = make_stages(descs, STAGES, 1)
    if EARLY:
        let_next_start()
    if counters is not None:
        ids = gl.arange(0, NUM_COUNTERS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        for own in range(gl.program_id(0), num_rows, gl.num_programs(0)):
            gl.store(counters + own * NUM_COUNTERS + ids, 0)
    lengths = Lengths(seq_lens, first_row, num_rows, next_n, width, LEAST, 1, ROWS, 1)
    args = Rows(q, weights, logits, groups)
    gl.warp_specialize([
        (consumer, (stages, queries, lengths, args, H, HEADS, STAGES, GROUPED)),
        (producer, (descs, stages, lengths, table, num_pages, STAGES)),
    ], [1], [40])  # fmt: skip
