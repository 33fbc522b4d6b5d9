"""Scores of a prefill on Hopper: keys in FP8, the rows of a request by blocks. Their bits are those of `kernel_hopper`.

    for each tile of two pages among this program's neighbouring tiles:     producer            consumer
                                                                           TMA -> stage
        for each page of it:                                                                    S = keys @ queries.T
                                                                                                scores of a block's rows

The heads of a block's rows are the COLUMNS columns of a product, so tensor cores read a page once for all of the rows.
Queries stay in shared memory, and weights in registers, for all of a block's tiles. A role of one warp loads and one
of four multiplies; while a page is added up, the next one's products run, and those of the SM's other program.

Each lane of the four that hold a token's products ends up with all of its scores. `one_each` leaves each lane a
quarter of them, so that stores and all that follows take a quarter of the instructions.
"""

from typing import Any, NamedTuple

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from envoi.epilogues.device import maximum
from envoi.ops.indexer.kernel_hopper import TILE, Descriptors, Lengths, Rows, Stages, first_tile, next_tile, producer
from envoi.ops.indexer.kernel_scores import (
    HEAD_DIM,
    INTEGERS,
    NUM_GROUPS,
    PAGE,
    level_of,
    ordered,
)
from envoi.runtime.barrier_setup import set_up_together
from envoi.runtime.sync import let_next_start
from envoi.runtime.triton_compat import reinterpret, role_barrier

COLUMNS: gl.constexpr = gl.constexpr(128)  # of a product: heads of a block's rows
PAGE_LEVEL: gl.constexpr = gl.constexpr(6)  # log2 of a page's tokens: larger groups aren't stored


class Block(NamedTuple):
    """Block of rows: its first, how many, tokens that its last sees; least and greatest level of its rows' groups."""

    row: Any
    num: Any
    n: Any
    least: Any
    most: Any


# All of a tile's scales in every warp, four a lane.
in_each_warp = gl.constexpr(gl.DistributedLinearLayout([[1], [2]], [[4], [8], [16], [32], [64]], [[0], [0]], [], [128]))


@gluon.constexpr_function
def of_lanes(rows):
    """Return the layout [16 tokens of a warp, 8 of lanes, pair of rows, lane of four], all of it but pairs in lanes."""
    pairs = [[0, 0, 1 << bit, 0] for bit in range((rows // 2).bit_length() - 1)]
    lanes = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    return gl.DistributedLinearLayout(pairs, lanes, [[1, 0, 0, 0], [2, 0, 0, 0]], [], [4, 8, rows // 2, 4])


@gluon.jit
def one_each(s):
    """Leave each of four lanes with the same scores [PAGE, rows] one token's, of every other row: [rows, PAGE]."""
    rows: gl.constexpr = s.shape[1]
    layout: gl.constexpr = of_lanes(rows)
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))[None, None, None, :]
    even, odd = gl.split(s.reshape([4, 2, 8, rows // 2, 2]).permute([0, 2, 3, 1, 4]))
    a, b = gl.split(even)
    c, d = gl.split(odd)
    in_lane: gl.constexpr = gl.SliceLayout(3, layout)
    a = gl.convert_layout(a, in_lane, assert_trivial=True)[:, :, :, None]
    b = gl.convert_layout(b, in_lane, assert_trivial=True)[:, :, :, None]
    c = gl.convert_layout(c, in_lane, assert_trivial=True)[:, :, :, None]
    d = gl.convert_layout(d, in_lane, assert_trivial=True)[:, :, :, None]
    own = gl.where(lane % 2 == 0, gl.where(lane < 2, a, c), gl.where(lane < 2, b, d))
    return own.reshape([4, 8, rows // 2, 2, 2]).permute([2, 3, 0, 4, 1]).reshape([rows, PAGE])


@gluon.jit
def block_of(number, n, lengths):
    """Return the Block of this number, whose last row sees n tokens."""
    row = number * lengths.share
    num = gl.minimum(lengths.num_rows - row, lengths.share)
    return Block(row, num, n, level_of(gl.maximum(n - num + 1, 0)), level_of(n))


@gluon.jit
def row_and_head(lengths, row, columns, HEADS: gl.constexpr):
    """Return of columns of a block that begins at `row` the row, as in the call, the head, and whether it exists.

    Where it doesn't, the row or the head is the last that does.
    """
    h: gl.constexpr = COLUMNS // lengths.share
    nth, head = columns // h, columns % h
    exists = (row + nth < lengths.num_rows) & (head < HEADS)
    nth = gl.minimum(nth, lengths.num_rows - 1 - row)
    return (lengths.first_row + row + nth).to(gl.int64), gl.minimum(head, HEADS - 1), exists


@gluon.jit
def load_block(args, queries, lengths, row, layout: gl.constexpr, HEADS: gl.constexpr):
    """Copy a block's queries to shared memory; return its weights [COLUMNS], zero where there is no such head."""
    wide: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [gl.num_warps(), 1], [1, 0])
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(1, wide))
    d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, wide))
    rows, heads, _ = row_and_head(lengths, row, columns, HEADS)
    role_barrier()
    queries.store(gl.load(args.q + ((rows * HEADS + heads) * HEAD_DIM)[:, None] + d[None, :]))
    fence_async_shared()
    role_barrier()
    rows, heads, exist = row_and_head(lengths, row, gl.arange(0, COLUMNS, gl.SliceLayout(0, layout)), HEADS)
    return gl.load(args.weights + rows * HEADS + heads, mask=exist, other=0.0)


@gluon.jit
def sums_of_heads(positive, weight, rows: gl.constexpr):
    """Reduce products [PAGE, COLUMNS] without negative numbers to [PAGE, rows]."""
    return gl.sum((positive * weight[None, :]).reshape([PAGE, rows, COLUMNS // rows]), 2)


@gluon.jit
def score(products, scales, weight, any_negative, rows: gl.constexpr):
    """Reduce products [PAGE, COLUMNS] of a page to scores [rows, PAGE]. scales: in shared memory, [PAGE]."""
    if any_negative:
        scale = scales.load(gl.SliceLayout(1, products.type.layout))
        s = sums_of_heads(maximum(products * gl.where(scale < 0.0, -1.0, 1.0)[:, None], 0.0), weight, rows)
    else:
        s = sums_of_heads(maximum(products, 0.0), weight, rows)
    s = one_each(s)
    return s * gl.abs(scales.load(gl.SliceLayout(0, s.type.layout)))[None, :]


@gluon.jit
def seen_by(block, rows, lengths):
    """Return how many tokens each of a block's rows sees; 0 for those that aren't scored or don't exist."""
    seen = block.n - (block.num - 1) + rows
    return gl.where((rows < block.num) & (seen > lengths.least), seen, 0)


@gluon.jit
def keep_scores(args, s, block, token, lengths, GROUPS: gl.constexpr):
    """Store scores [rows, PAGE] of a page and, if GROUPS, the best key of each of its groups of neighbours.

    token: the page's first.
    """
    rows = gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))
    place = gl.arange(0, PAGE, gl.SliceLayout(0, s.type.layout))
    inside = (token + place)[None, :] < seen_by(block, rows, lengths)[:, None]
    line = lengths.width * PAGE
    logits = args.logits + block.row.to(gl.int64) * line + token
    gl.store(logits + (rows * line)[:, None] + place[None, :], s, mask=inside)
    if GROUPS:
        keys = gl.where(inside, ordered(s, False), -0x80000000)
        keep_best(keys, args.groups + block.row * NUM_GROUPS, block, token, lengths)


@gluon.jit
def keep_level(best, groups, block, token, lengths, level: gl.constexpr):
    """Store the best keys [rows, ..] of groups of 1 << level tokens of those rows that have such groups."""
    rows = gl.arange(0, best.shape[0], gl.SliceLayout(1, best.type.layout))
    nth = gl.arange(0, best.shape[1], gl.SliceLayout(0, best.type.layout))
    seen = seen_by(block, rows, lengths)
    seen = gl.where((seen > NUM_GROUPS << (level - 1)) & (seen <= NUM_GROUPS << level), seen, 0)  # whose level it is
    at = groups + (token >> level) + (rows * NUM_GROUPS)[:, None] + nth[None, :]
    gl.store(at, best, mask=(token + (nth << level))[None, :] < seen[:, None])


@gluon.jit
def better_half(best):
    """Reduce pairs of neighbouring groups [rows, ..] to the better of each."""
    return gl.max(best.reshape([best.shape[0], best.shape[1] // 2, 2]), 2)


@gluon.jit
def keep_best(keys, groups, block, token, lengths):
    """Store the best key of each group of a page."""
    if block.most >= 1:
        twos = better_half(keys)
        if block.least <= 1:
            keep_level(twos, groups, block, token, lengths, 1)
        if block.most >= 2:
            fours = better_half(twos)
            if block.least <= 2:
                keep_level(fours, groups, block, token, lengths, 2)
            if block.most >= 3:
                keep_best_of_eights(better_half(fours), groups, block, token, lengths)


@gluon.jit
def keep_best_of_eights(best, groups, block, token, lengths):
    """Store the best keys of groups of 8 to 64 tokens, given those of 8."""
    if block.least <= 3:
        keep_level(best, groups, block, token, lengths, 3)
    if block.most >= 4:
        sixteens = better_half(best)
        if block.least <= 4:
            keep_level(sixteens, groups, block, token, lengths, 4)
        if block.most >= 5:  # other warps hold the neighbours
            half_pages = better_half(sixteens)
            if block.least <= 5:
                keep_level(half_pages, groups, block, token, lengths, 5)
            if block.most >= PAGE_LEVEL:
                keep_level(better_half(half_pages), groups, block, token, lengths, PAGE_LEVEL)


@gluon.jit
def multiply(page, queries, zero):
    """Start the products of a page's keys and a block's queries: [PAGE, COLUMNS]."""
    return warpgroup_mma(page, queries.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def consumer(stages, queries, lengths, args, HEADS: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr):
    """Score every tile of this program: a role of four warps.

    A page is multiplied while the one before is added up. No page follows the last of a block's tiles here: the tile's
    first is multiplied once more, for nothing, and its stage handed back afterwards.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, COLUMNS, 32]
    )
    zero = gl.full((PAGE, COLUMNS), 0.0, gl.float32, layout)
    in_line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tile_scales = reinterpret(stages.scales, gl.float32, [STAGES, TILE], in_line)
    page_scales = reinterpret(stages.scales, gl.float32, [2 * STAGES, PAGE], in_line)
    number, n, token, count = first_tile(lengths)
    done = 0
    while done < count:
        end = gl.minimum(done + (n - token + TILE - 1) // TILE, count)  # of this block's tiles
        block = block_of(number, n, lengths)
        weight = load_block(args, queries, lengths, block.row, layout, HEADS)
        mbarrier.wait(stages.full.index(done % STAGES), (done // STAGES) & 1)
        even = multiply(stages.pages.index(2 * (done % STAGES)), queries, zero)
        for i in range(done, end):
            stage = i % STAGES
            negative = gl.max((tile_scales.index(stage).load(in_each_warp) < 0.0).to(gl.int32), 0) > 0
            products = warpgroup_mma_wait(0, deps=(even,))
            odd = multiply(stages.pages.index(2 * stage + 1), queries, zero)
            mbarrier.arrive(stages.empty.index((i + STAGES - 1) % STAGES), count=1, pred=i > done)
            s = score(products, page_scales.index(2 * stage), weight, negative, lengths.share)
            keep_scores(args, s, block, token, lengths, GROUPS)
            products = warpgroup_mma_wait(0, deps=(odd,))
            following = gl.minimum(i + 1, end - 1)
            mbarrier.wait(stages.full.index(following % STAGES), (following // STAGES) & 1)
            even = multiply(stages.pages.index(2 * (following % STAGES)), queries, zero)
            s = score(products, page_scales.index(2 * stage + 1), weight, negative, lengths.share)
            keep_scores(args, s, block, token + PAGE, lengths, GROUPS)
            token += TILE
        warpgroup_mma_wait(0, deps=(even,))
        mbarrier.arrive(stages.empty.index((end - 1) % STAGES), count=1)
        done = end
        number, n, token = next_tile(number, n, token - TILE, lengths)


@gluon.jit(do_not_specialize=INTEGERS)
def prefill_scores_kernel(
    values_desc, scales_desc, q, weights, seq_lens, table, logits, groups,
    first_row, num_rows, width, num_pages, next_n,
    HEADS: gl.constexpr, LEAST: gl.constexpr, BLOCKS: gl.constexpr, SHARE: gl.constexpr, STAGES: gl.constexpr,
    GROUPS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Score rows as `kernel_hopper.scores_kernel` does, in blocks of SHARE rows; a block has rows of one request only.

    HEADS: at most COLUMNS // SHARE. BLOCKS: at least the number of blocks. GROUPS: store groups, int32, too; those of
    more than a page aren't.
    """
    columns: gl.constexpr = values_desc.block_type.shape[1]
    values = gl.allocate_shared_memory(values_desc.dtype, [2 * STAGES, PAGE, columns], values_desc.layout)
    scales = gl.allocate_shared_memory(scales_desc.dtype, [2 * STAGES, 1, PAGE], scales_desc.layout)
    queries = gl.allocate_shared_memory(gl.float8e4nv, [COLUMNS, HEAD_DIM], gl.NVMMASharedLayout(128, 8, 2))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    set_up_together()
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    role_barrier()
    if EARLY:
        let_next_start()
    lengths = Lengths(seq_lens, first_row, num_rows, next_n, width, LEAST, SHARE, BLOCKS)
    stages = Stages(values, scales, full, empty)
    args = Rows(q, weights, logits, groups)
    descs = Descriptors(values_desc, scales_desc)
    gl.warp_specialize([
        (consumer, (stages, queries, lengths, args, HEADS, STAGES, GROUPS)),
        (producer, (descs, stages, lengths, table, num_pages, STAGES)),
    ], [1], [40 if SHARE <= 4 else 24])  # fmt: skip
