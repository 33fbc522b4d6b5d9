"""Scores of a prefill on Hopper: the rows of a request by blocks. Their bits are those of `kernel_hopper`.

    for each tile of two pages among this program's neighbouring tiles:     producer            consumer
                                                                           TMA -> stage
        for each page of it:                                                                    S = keys @ queries.T
                                                                                                scores of a block's rows

Two roles of four warps each multiply every page by half of a block's rows, so a page comes once from the L2 for all of
them; a role of one warp loads. The heads of a role's rows are the columns of a product, or of two. Queries stay in
shared memory, and weights in registers, for all of a block's tiles. While a product is added up, the next one runs, and
those of the other role.
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
from envoi.ops.indexer.kernel_fp4 import value_of, widen
from envoi.ops.indexer.kernel_hopper import (
    TILE,
    Descriptors,
    Lengths,
    Rows,
    first_tile,
    make_stages,
    next_tile,
    producer,
    sums_of_heads,
)
from envoi.ops.indexer.kernel_scores import HEAD_DIM, INTEGERS, PAGE
from envoi.runtime.sync import let_next_start, wait_for_grid
from envoi.runtime.triton_compat import reinterpret, role_barrier

CONSUMERS: gl.constexpr = gl.constexpr(2)  # roles that multiply, each by its half of the rows


class Block(NamedTuple):
    """A role's rows of a block: the first, counted from first_row; the block's last row, and tokens that it sees.

    token: the first of this program's tiles of the block; begin, end: the numbers of these tiles. weights: of each
    set [columns].
    """

    row: Any
    last: Any
    n: Any
    token: Any
    begin: Any
    end: Any
    weights: Any


# All of a tile's scales in every warp, four a lane.
in_each_warp = gl.constexpr(gl.DistributedLinearLayout([[1], [2]], [[4], [8], [16], [32], [64]], [[0], [0]], [], [128]))


@gluon.constexpr_function
def of_lanes(rows):
    """Return the layout [4 warps, 8 lanes, row pair, lane of four], all but pairs in lanes; for a row [4, 8, 1, 2]."""
    pairs = [[0, 0, 1 << bit, 0] for bit in range((rows // 2).bit_length() - 1)]
    lanes = [[0, 0, 0, 1], [0, 0, 0, 2 if rows > 1 else 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    shape = [4, 8, rows // 2, 4] if rows > 1 else [4, 8, 1, 2]
    return gl.DistributedLinearLayout(pairs, lanes, [[1, 0, 0, 0], [2, 0, 0, 0]], [], shape)


@gluon.jit
def in_lanes(x, layout: gl.constexpr):
    """Give x [4 warps, 8 lanes, pairs], which all lanes of four have, a dimension of lanes."""
    return gl.convert_layout(x, gl.SliceLayout(3, layout), assert_trivial=True)[:, :, :, None]


@gluon.jit
def one_each(s):
    """Divide scores [PAGE, rows] among the four lanes that each have all of those of two tokens: [rows, PAGE].

    Lane i keeps those of token i % 2 in rows i // 2, i // 2 + 2, ..: three selects a score, and no shuffle. Of one row,
    lanes 2 and 3 have what 0 and 1 have.
    """
    rows: gl.constexpr = s.shape[1]
    layout: gl.constexpr = of_lanes(rows)
    lanes: gl.constexpr = 2 if rows == 1 else 4
    lane = gl.arange(0, lanes, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))[None, None, None, :]
    if rows == 1:
        a, b = gl.split(s.reshape([4, 2, 8, 1]).permute([0, 2, 3, 1]))
        own = gl.where(lane == 0, in_lanes(a, layout), in_lanes(b, layout))
        return own.permute([2, 0, 3, 1]).reshape([1, PAGE])
    else:
        even, odd = gl.split(s.reshape([4, 2, 8, rows // 2, 2]).permute([0, 2, 3, 1, 4]))
        a, b = gl.split(even)
        c, d = gl.split(odd)
        first = gl.where(lane < 2, in_lanes(a, layout), in_lanes(c, layout))
        own = gl.where(lane % 2 == 0, first, gl.where(lane < 2, in_lanes(b, layout), in_lanes(d, layout)))
        return own.reshape([4, 8, rows // 2, 2, 2]).permute([2, 3, 0, 4, 1]).reshape([rows, PAGE])


@gluon.jit
def row_and_head(lengths, row, columns, COLUMNS: gl.constexpr, HEADS: gl.constexpr):
    """Return of columns [COLUMNS] of rows from `row` on the row, as in the call, the head, and whether it exists.

    Where it doesn't, the row or the head is the last that does.
    """
    h: gl.constexpr = CONSUMERS * lengths.sets * COLUMNS // lengths.share
    nth, head = columns // h, columns % h
    exists = (row + nth < lengths.num_rows) & (head < HEADS)
    nth = gl.minimum(nth, lengths.num_rows - 1 - row)
    return (lengths.first_row + row + nth).to(gl.int64), gl.minimum(head, HEADS - 1), exists


@gluon.jit
def load_set(args, queries, lengths, row, layout: gl.constexpr, HEADS: gl.constexpr, FP4: gl.constexpr):
    """Copy the queries of rows to shared memory [columns, HEAD_DIM]; return their weights, zero where no head is.

    FP4: in the order of the keys' values in the operand.
    """
    COLUMNS: gl.constexpr = queries.shape[0]
    wide: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [gl.num_warps(), 1], [1, 0])
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(1, wide))
    d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, wide))
    if FP4:
        d = value_of(d)
    rows, heads, _ = row_and_head(lengths, row, columns, COLUMNS, HEADS)
    loaded = gl.load(args.q + ((rows * HEADS + heads) * HEAD_DIM)[:, None] + d[None, :])
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    rows, heads, exist = row_and_head(lengths, row, columns, COLUMNS, HEADS)
    weights = gl.load(args.weights + rows * HEADS + heads, mask=exist, other=0.0)  # under way with the queries
    role_barrier()
    queries.store(loaded)
    fence_async_shared()
    role_barrier()
    return weights


@gluon.jit
def score(products, scales, weight, any_negative, rows: gl.constexpr):
    """Reduce products [PAGE, columns] of a page to scores [rows, PAGE]. scales: in shared memory, [PAGE]."""
    if any_negative:
        scale = scales.load(gl.SliceLayout(1, products.type.layout))
        s = sums_of_heads(maximum(products * gl.where(scale < 0.0, -1.0, 1.0)[:, None], 0.0), weight, rows)
    else:
        s = sums_of_heads(maximum(products, 0.0), weight, rows)
    s = one_each(s.reshape([PAGE, rows]))
    return s * gl.abs(scales.load(gl.SliceLayout(0, s.type.layout)))[None, :]


@gluon.jit
def keep_scores(args, s, block, nth, token, lengths):
    """Store scores [rows, PAGE] of a page, of the block's nth set. token: the page's first.

    Rows that don't exist, or aren't scored, have none.
    """
    own = nth * s.shape[0] + gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))
    place = gl.arange(0, PAGE, gl.SliceLayout(0, s.type.layout))
    rows = block.row + own
    seen = block.n - block.last + rows
    seen = gl.where((rows <= block.last) & (seen > lengths.least), seen, 0)
    line = lengths.width * PAGE
    logits = args.logits + block.row.to(gl.int64) * line + token
    gl.store(logits + (own * line)[:, None] + place[None, :], s, mask=(token + place)[None, :] < seen[:, None])


@gluon.jit
def multiply(pages, page, queries, nth, zero):
    """Start the products of the keys of one of the pages and the queries of the nth set: [PAGE, columns]."""
    return warpgroup_mma(pages.index(page), queries.index(nth).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def score_tiles(stages, queries, lengths, args, block, zero, STAGES: gl.constexpr, ROLE: gl.constexpr):
    """Score a block's tiles of keys in FP8.

    A product runs while the one before is added up; a tile's nth is of a page and a set of rows. None follows the last
    of the tiles here: the tile's first is made once more, for nothing, and its stage handed back afterwards.
    """
    sets: gl.constexpr = lengths.sets
    first: gl.constexpr = ROLE * sets  # of the role's sets
    rows: gl.constexpr = lengths.share // (CONSUMERS * sets)
    in_line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tile_scales = reinterpret(stages.scales, gl.float32, [STAGES, TILE], in_line)
    page_scales = reinterpret(stages.scales, gl.float32, [2 * STAGES, PAGE], in_line)
    mbarrier.wait(stages.full.index(block.begin % STAGES), (block.begin // STAGES) & 1)
    started = multiply(stages.pages, 2 * (block.begin % STAGES), queries, first, zero)
    token = block.token
    for i in range(block.begin, block.end):
        stage = i % STAGES
        negative = gl.max((tile_scales.index(stage).load(in_each_warp) < 0.0).to(gl.int32), 0) > 0
        for nth in gl.static_range(2 * sets):
            products = warpgroup_mma_wait(0, deps=(started,))
            if nth + 1 < 2 * sets:
                page = 2 * stage + (nth + 1) // sets
                started = multiply(stages.pages, page, queries, first + (nth + 1) % sets, zero)
            else:
                following = gl.minimum(i + 1, block.end - 1)
                mbarrier.wait(stages.full.index(following % STAGES), (following // STAGES) & 1)
                started = multiply(stages.pages, 2 * (following % STAGES), queries, first, zero)
            if nth == 0:
                mbarrier.arrive(stages.empty.index((i + STAGES - 1) % STAGES), count=1, pred=i > block.begin)
            s = score(products, page_scales.index(2 * stage + nth // sets), block.weights[nth % sets], negative, rows)
            keep_scores(args, s, block, nth % sets, token + nth // sets * PAGE, lengths)
        token += TILE
    warpgroup_mma_wait(0, deps=(started,))
    mbarrier.arrive(stages.empty.index((block.end - 1) % STAGES), count=1)


@gluon.jit
def score_fp4_tiles(stages, queries, lengths, args, block, zero, STAGES: gl.constexpr, ROLE: gl.constexpr):
    """Score a block's tiles of keys in FP4, which are widened to registers by each role for itself."""
    layout: gl.constexpr = zero.type.layout
    rows: gl.constexpr = lengths.share // CONSUMERS
    dot: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=4)
    factors = reinterpret(stages.scales, gl.int32, [2 * STAGES, PAGE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    token = block.token
    for i in range(block.begin, block.end):
        stage = i % STAGES
        mbarrier.wait(stages.full.index(stage), (i // STAGES) & 1)
        for half in gl.static_range(2):
            page = 2 * stage + half
            keys, scale = widen(stages.pages.index(page), factors.index(page), dot)
            if half == 1:
                mbarrier.arrive(stages.empty.index(stage), count=1)
            products = warpgroup_mma(keys, queries.index(ROLE).permute((1, 0)), zero, use_acc=False)
            s = sums_of_heads(maximum(products, 0.0), block.weights[0], rows).reshape([PAGE, rows])
            scale = gl.convert_layout(scale, gl.SliceLayout(1, s.type.layout))
            keep_scores(args, one_each(s * scale[:, None]), block, 0, token + half * PAGE, lengths)
        token += TILE


@gluon.jit
def in_all_lanes(x):
    """Return lane 0's number, which all lanes have: the assembler, told so, computes with it once a warp.

    Else it may compute the places of stages in each lane, and move them to the registers that products take between a
    wait and the next product, which tensor cores wait for: under Triton 3.8 it did.
    """
    asm: gl.constexpr = "shfl.sync.idx.b32 $0, $1, 0, 31, -1;"
    return gl.inline_asm_elementwise(asm, "=r,r", [x], gl.int32, is_pure=False, pack=1)


@gluon.jit
def consumer(stages, queries, lengths, args, HEADS: gl.constexpr, STAGES: gl.constexpr, ROLE: gl.constexpr):
    """Score every tile of this program for the role's half of each block's rows: a role of four warps."""
    fp4: gl.constexpr = stages.pages.dtype == gl.int32
    COLUMNS: gl.constexpr = queries.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, COLUMNS, 32]
    )
    zero = gl.full((PAGE, COLUMNS), 0.0, gl.float32, layout)
    rows: gl.constexpr = lengths.share // CONSUMERS
    sets: gl.constexpr = lengths.sets
    number, n, token, count = first_tile(lengths)
    number, n, token, count = in_all_lanes(number), in_all_lanes(n), in_all_lanes(token), in_all_lanes(count)
    wait_for_grid()  # until the last rows' scores have been read
    done = 0
    while done < count:
        end = gl.minimum(done + (n - token + TILE - 1) // TILE, count)  # of this block's tiles
        row = number * lengths.share + ROLE * rows
        last = gl.minimum((number + 1) * lengths.share, lengths.num_rows) - 1
        weights = (load_set(args, queries.index(ROLE * sets), lengths, row, layout, HEADS, fp4),)
        if sets == 2:
            weights += (load_set(args, queries.index(ROLE * sets + 1), lengths, row + rows // 2, layout, HEADS, fp4),)
        block = Block(row, last, n, token, done, end, weights)
        if fp4:
            score_fp4_tiles(stages, queries, lengths, args, block, zero, STAGES, ROLE)
        else:
            score_tiles(stages, queries, lengths, args, block, zero, STAGES, ROLE)
        number, n, token = next_tile(number, n, token + (end - 1 - done) * TILE, lengths)
        done = end


@gluon.jit(do_not_specialize=INTEGERS)
def prefill_scores_kernel(
    values_desc, scales_desc, q, weights, seq_lens, table, logits,
    first_row, num_rows, width, num_pages, next_n,
    HEADS: gl.constexpr, LEAST: gl.constexpr, BLOCKS: gl.constexpr, SHARE: gl.constexpr, SETS: gl.constexpr,
    COLUMNS: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Score rows as `kernel_hopper.scores_kernel` does, in blocks of SHARE rows; a block has rows of one request only.

    SETS, COLUMNS: products that each role makes of a page, and their width, for its half of the rows. HEADS: at most
    CONSUMERS * SETS * COLUMNS // SHARE. BLOCKS: at least the number of blocks. Stores no groups.
    """
    in_rows: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    queries = gl.allocate_shared_memory(gl.float8e4nv, [CONSUMERS * SETS, COLUMNS, HEAD_DIM], in_rows)
    descs = Descriptors(values_desc, scales_desc)
    stages = make_stages(descs, STAGES, CONSUMERS)
    if first_row == 0:
        wait_for_grid()  # for the inputs; later launches of the same call start before the selection in front ends
    if EARLY:
        let_next_start()
    lengths = Lengths(seq_lens, first_row, num_rows, next_n, width, LEAST, SHARE, BLOCKS, SETS)
    args = Rows(q, weights, logits, None)
    gl.warp_specialize([
        (consumer, (stages, queries, lengths, args, HEADS, STAGES, 0)),
        (consumer, (stages, queries, lengths, args, HEADS, STAGES, 1)),
        (producer, (descs, stages, lengths, table, num_pages, STAGES)),
    ], [gl.num_warps(), 1], [232, 40])  # fmt: skip
