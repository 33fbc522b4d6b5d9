# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
"""The router on Hopper: TMA, wgmma, one launch from tokens to experts.

    for each CTA: some rows, some columns (experts), some blocks along K                TMA -> stages
        for each block:  p = tokens[rows, block] @ gate[columns, block].T               wgmma
            sum += p                                                                    in registers
    all columns and all of K in one CTA:   sums -> shared memory
    else:                                  sums -> workspace; whoever shares the rows waits, and takes some of them
    route_rows(sums of the blocks, in their order), some rows at a time; of many, what isn't certain, eight at a time

Few sums are waited for themselves: the workspace is blank before and after a launch. For many there is a counter.

An instruction multiplies 64 rows; where fewer make more CTAs the others are left as they are, and nobody looks.

The blocks and their order are the same for every number of tokens, and so are the bits of a token's logits. CTAs that
wait for each other are launched together or not at all (a cooperative launch), so none waits for one that can't start.

Where a CTA's whole part of the operands fits the stages, one role loads all of it at once and then multiplies: that
saves the microsecond that the warps of two roles need to go their ways.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from envoi.gemm.meeting import arrive
from envoi.gemm.overlap import let_next_start, wait_for_grid
from envoi.router.device import load_biases, route_exactly, route_rows, route_tile, store_counts
from envoi.triton_compat import reinterpret, role_barrier, tma_load

BLANK: gl.constexpr = gl.constexpr(-1)  # bits of a sum that isn't there: a NaN that no addition gives


@gluon.jit
def part_of(sizes, cut: gl.constexpr):
    """This CTA: its first row, first column, first step along K, the step behind its last, its number in its rows."""
    _num_tokens, hidden = sizes
    pid = gl.program_id(0)
    part = pid % cut.parts
    first = part // cut.parts_n * cut.steps_each
    last = gl.minimum(first + cut.steps_each, gl.cdiv(hidden, cut.block_k))
    return pid // cut.parts * cut.rows, part % cut.parts_n * cut.block_n, first, last, part


@gluon.jit
def load_stage(x_desc, y_desc, stages, stage, m, n, k, cut: gl.constexpr):
    """One step along K into a stage."""
    x_bufs, y_bufs, _empty, ready = stages
    mbarrier.expect(ready.index(stage), x_desc.block_type.nbytes + y_desc.block_type.nbytes)
    x_buf = x_bufs.index(stage)
    if cut.rows < cut.tile:
        x_buf = x_buf.slice(0, cut.rows, dim=0)  # what stays below are rows that nobody asks for
    tma_load(x_desc, [m, k * cut.block_k], ready.index(stage), x_buf)
    tma_load(y_desc, [n, k * cut.block_k], ready.index(stage), y_bufs.index(stage))


@gluon.jit
def load_first(x_desc, y_desc, stages, sizes, cut: gl.constexpr):
    """As many steps of this CTA as there are stages, before the warps go their ways."""
    m, n, first, last, _part = part_of(sizes, cut)
    for k in range(first, gl.minimum(first + cut.num_stages, last)):
        load_stage(x_desc, y_desc, stages, k - first, m, n, k, cut)


@gluon.jit
def producer(x_desc, y_desc, stages, sizes, cut: gl.constexpr):
    """One warp: fills the stages again, as far ahead as they reach."""
    empty = stages[2]
    m, n, first, last, _part = part_of(sizes, cut)
    for k in range(first + cut.num_stages, last):
        step = k - first
        mbarrier.wait(empty.index(step % cut.num_stages), ((step // cut.num_stages) & 1) ^ 1)
        load_stage(x_desc, y_desc, stages, step % cut.num_stages, m, n, k, cut)


@gluon.constexpr_function
def tile_layout(cut):
    """Of the tile by block_n columns of a CTA: 16 rows a warp, and what there are more warps than rows side by side."""
    down = cut.tile // 16
    side_by_side = cut.num_warps // down
    shape = [16, cut.block_n // side_by_side, 16]
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[down, side_by_side], instr_shape=shape)


@gluon.jit
def multiply(stages, step, num_steps, cut: gl.constexpr):
    """The tile over one block of sums, two products in flight."""
    x_bufs, y_bufs, empty, ready = stages
    layout: gl.constexpr = tile_layout(cut)
    acc = gl.full((cut.tile, cut.block_n), 0.0, gl.float32, layout)
    for k in range(num_steps):
        stage = step % cut.num_stages
        mbarrier.wait(ready.index(stage), (step // cut.num_stages) & 1)
        y = y_bufs.index(stage).permute((1, 0))
        acc = warpgroup_mma(x_bufs.index(stage), y, acc, is_async=True, use_acc=k > 0)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        if not cut.loads_all:
            mbarrier.arrive(empty.index((step + cut.num_stages - 1) % cut.num_stages), count=1, pred=k > 0)
        step += 1
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    if not cut.loads_all:
        mbarrier.arrive(empty.index((step + cut.num_stages - 1) % cut.num_stages), count=1)
    return acc, step


@gluon.constexpr_function
def row_layout(cut, lanes):
    """Of a tile of rows of logits, so many lanes a row."""
    return gl.BlockedLayout([1, cut.columns // lanes], [32 // lanes, lanes], [cut.num_warps, 1], [1, 0])


@gluon.constexpr_function
def sum_layout(cut):
    """Of the same rows when they are added up: spread over all threads, no element twice."""
    each = min(4, max(1, cut.rows_each * cut.columns // (32 * cut.num_warps)))
    lanes = min(32, cut.columns // each)
    warps = min(cut.num_warps, cut.columns // (each * lanes))
    return gl.BlockedLayout([1, each], [32 // lanes, lanes], [cut.num_warps // warps, warps], [1, 0])


@gluon.constexpr_function
def slot_layout(cut, lanes, slots):
    """Of what was chosen for the same rows, in the same lanes."""
    return gl.BlockedLayout([1, max(1, slots // lanes)], [32 // lanes, lanes], [cut.num_warps, 1], [1, 0])


@gluon.jit
def columns_in(layout: gl.constexpr, count: gl.constexpr):
    """0, 1, 2 ... as [1, count] for tiles of a layout."""
    return gl.arange(0, count, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def places_of(LANES: gl.constexpr, cut: gl.constexpr, spec: gl.constexpr):
    """0, 1, 2 ... for columns, slots and groups, in layouts with so many lanes a row."""
    layout: gl.constexpr = row_layout(cut, LANES)
    slots: gl.constexpr = slot_layout(cut, LANES, spec.slots)
    return columns_in(layout, cut.columns), columns_in(slots, spec.slots), columns_in(layout, spec.group_slots)


@gluon.constexpr_function
def board_layout(columns):
    """Of totals and logits in shared memory: no two lanes of a half warp write to the same bank."""
    return gl.SwizzledSharedLayout(8, 1, min(8, columns // 8), [1, 0])


@gluon.jit
def board_of(stages, rows: gl.constexpr, cut: gl.constexpr):
    """The gate's stages when they have done their work: the tile's logits, in tiles of some rows."""
    return reinterpret(stages[1], gl.float32, [cut.tile // rows, rows, cut.columns], board_layout(cut.columns))


@gluon.jit
def leave(x, sums, set, m, n, sizes, cut: gl.constexpr, spec: gl.constexpr):
    """A tile of sums into the workspace [sets, padded rows, columns]. What is waited for is never blank, and only what
    someone waits for is written."""
    rows = m + gl.arange(0, cut.tile, gl.SliceLayout(1, x.type.layout))
    columns = n + gl.arange(0, cut.block_n, gl.SliceLayout(0, x.type.layout))
    at = sums + (set * padded_rows(sizes, cut) + rows).to(gl.int64)[:, None] * cut.columns + columns[None, :]
    if cut.signals:
        gl.store(at, x + 0.0, mask=(rows < sizes[0])[:, None] & (columns < spec.num_experts)[None, :])
    else:
        gl.store(at, x)


@gluon.jit
def padded_rows(sizes, cut: gl.constexpr):
    """Rows of a set of sums."""
    if cut.signals:
        return sizes[0]
    else:
        return gl.cdiv(sizes[0], cut.tile) * cut.tile


@gluon.jit
def add_sets(sums, rows, sizes, cut: gl.constexpr, layout: gl.constexpr):
    """The logits of rows: the sets of sums, added up in their order."""
    columns = gl.arange(0, cut.columns, gl.SliceLayout(0, layout))
    at = sums + rows.to(gl.int64)[:, None] * cut.columns + columns[None, :]
    total = gl.load(at, cache_modifier=".cg") + 0.0
    sets: gl.constexpr = cut.num_sets
    for s in gl.static_range(1, sets):
        total += gl.load(at + s * padded_rows(sizes, cut).to(gl.int64) * cut.columns, cache_modifier=".cg")
    return total


@gluon.jit
def take_sets(sums, row, end, sizes, cut: gl.constexpr, spec: gl.constexpr):
    """The same for rows from one on, as soon as none of their sums is blank any more; they become blank again for the
    next launch. No two threads have the same element, so nobody misses what is taken."""
    layout: gl.constexpr = sum_layout(cut)
    rows = row + gl.arange(0, cut.rows_each, gl.SliceLayout(1, layout))
    columns = gl.arange(0, cut.columns, gl.SliceLayout(0, layout))
    mask = (rows < end)[:, None] & (columns < spec.num_experts)[None, :]
    at = sums + rows.to(gl.int64)[:, None] * cut.columns + columns[None, :]
    step = padded_rows(sizes, cut).to(gl.int64) * cut.columns
    sets: gl.constexpr = cut.num_sets
    total = gl.full((cut.rows_each, cut.columns), 0.0, gl.float32, layout)
    blank = mask
    while gl.max(gl.max(blank.to(gl.int32), 1), 0) > 0:
        total = gl.load(at, mask=mask, other=0.0, volatile=True)
        blank = total.to(gl.int32, bitcast=True) == BLANK
        for s in gl.static_range(1, sets):
            x = gl.load(at + s * step, mask=mask, other=0.0, volatile=True)
            blank |= x.to(gl.int32, bitcast=True) == BLANK
            total += x
    none = gl.full((cut.rows_each, cut.columns), BLANK, gl.int32, layout).to(gl.float32, bitcast=True)
    for s in gl.static_range(sets):
        gl.store(at + s * step, none, mask=mask)
    return gl.convert_layout(total, row_layout(cut, cut.lanes))


@gluon.jit
def wait_for_all(counter, waits, num_parts):
    """Say that this part's sums are there, and wait for those of all parts of its rows."""
    role_barrier()
    gl.atomic_add(counter, 1, sem="release", scope="gpu")
    if waits:
        while gl.atomic_add(counter, 0, sem="acquire", scope="gpu") < num_parts:
            pass
    # The last part to leave puts back the zeros.
    if gl.atomic_add(counter + 1, 1, sem="relaxed", scope="gpu") == num_parts - 1:
        gl.store(counter, 0)
        gl.store(counter + 1, 0)


@gluon.jit
def add_up(stages, sums, given, cut: gl.constexpr, spec: gl.constexpr):
    """All products of this CTA; their sums -> shared memory, or the workspace if parts meet.

    The part that begins with block 0 may add up all blocks that it has; every other block is a set of its own.
    """
    m, n, first, last, _part = part_of(given[0], cut)
    layout: gl.constexpr = tile_layout(cut)
    num_steps: gl.constexpr = cut.steps_in_block
    step = 0
    sum = gl.full((cut.tile, cut.block_n), 0.0, gl.float32, layout)
    for k in range(first, last, num_steps):
        p, step = multiply(stages, step, gl.minimum(num_steps, last - k), cut)
        if cut.parts_k > 1:
            if first > 0:
                leave(p, sums, (k - cut.steps_each) // num_steps + 1, m, n, given[0], cut, spec)
        sum += p
    if cut.parts == 1:
        board_of(stages, cut.tile, cut).index(0).store(sum)
    elif first == 0:
        leave(sum, sums, 0, m, n, given[0], cut, spec)


@gluon.jit
def meet(counters, given, cut: gl.constexpr):
    """The rows that this CTA routes, first and last, when their sums are there or are waited for themselves."""
    m, _n, _first, _last, part = part_of(given[0], cut)
    num_tokens = given[0][0]
    end = gl.minimum(m + cut.rows, num_tokens)
    if cut.parts == 1:
        role_barrier()
        return m, end
    elif cut.waits:
        begin = m + part * cut.share
        end = gl.minimum(begin + cut.share, end)
        if not cut.signals:
            wait_for_all(counters + m // cut.rows * 2, begin < end, cut.parts)
        return begin, end
    else:
        if not arrive(counters + m // cut.rows * 2, cut.parts):
            end = m
        return m, end


@gluon.jit
def logits_of(stages, sums, row, sizes, ROWS: gl.constexpr, LANES: gl.constexpr, cut: gl.constexpr):
    """The rows from one on, and their logits, for which nobody has to wait."""
    layout: gl.constexpr = row_layout(cut, LANES)
    m, _n, _first, _last, _part = part_of(sizes, cut)
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    if cut.parts == 1:
        return rows, board_of(stages, ROWS, cut).index((row - m) // ROWS).load(layout)
    else:
        return rows, add_sets(sums, rows, sizes, cut, layout)


@gluon.jit
def route_eights(again, stages, sums, row, given, cut: gl.constexpr, spec: gl.constexpr):
    """By exact keys: the rows from one on whose bits are set, and what they are with in eight rows."""
    sizes, numbers, tables, outputs = given
    places = places_of(32, cut, spec)
    biases = load_biases(tables, places[0], spec)
    while again != 0:
        if again & 255 != 0:
            rows, logits = logits_of(stages, sums, row, sizes, 8, 32, cut)
            rows = gl.where((again >> (rows - row).to(gl.uint64)) & 1 != 0, rows, -1)
            route_exactly(logits, rows, places, numbers, biases, outputs, spec)
        row += 8
        again = again >> 8


@gluon.jit
def route_share(stages, sums, given, biases, begin, end, cut: gl.constexpr, spec: gl.constexpr):
    """Rows begin to end, rows_each at a time."""
    sizes, numbers, tables, outputs = given
    places = places_of(cut.lanes, cut, spec)
    for row in range(begin, end, cut.rows_each):
        if cut.signals:
            rows = row + gl.arange(0, cut.rows_each, gl.SliceLayout(1, row_layout(cut, cut.lanes)))
            logits = take_sets(sums, row, end, sizes, cut, spec)
        else:
            rows, logits = logits_of(stages, sums, row, sizes, cut.rows_each, cut.lanes, cut)
        if cut.in_eights and not spec.hashed:
            again = route_rows(logits, rows, rows < end, places, numbers, biases, tables, outputs, spec)
            bits = gl.sum((again >= 0).to(gl.uint64) << (rows - row).to(gl.uint64), 0)
            if bits != 0:
                route_eights(bits, stages, sums, row, given, cut, spec)
        else:
            route_tile(logits, rows, rows < end, places, numbers, biases, tables, outputs, spec)


@gluon.jit
def role(stages, given, scratch, totals, counter, cut: gl.constexpr, spec: gl.constexpr):
    """Some warps: the sums of a tile, then the experts of a share of the rows."""
    sums, counters = scratch
    biases = load_biases(given[2], columns_in(row_layout(cut, cut.lanes), cut.columns), spec)
    add_up(stages, sums, given, cut, spec)
    begin, end = meet(counters, given, cut)
    route_share(stages, sums, given, biases, begin, end, cut, spec)
    if spec.want_counts:
        if arrive(counter, gl.num_programs(0)):
            experts = gl.arange(0, spec.columns, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
            store_counts(given[3][4], totals[0], totals[1], experts, spec)


@gluon.jit
def router_kernel(
    x_desc, y_desc, num_tokens, hidden, alpha, routed_scale, k, logit_bias, expert_bias, token_ids, hash_table,
    vocabulary, weights, ids, logits, dense, histogram, counts, offsets, counter, sums, counters,
    cut: gl.constexpr, spec: gl.constexpr,
):  # fmt: skip
    """Set up the stages, then a role that multiplies and chooses, and a warp that loads if stages come back."""
    x_shape: gl.constexpr = [cut.num_stages, cut.tile, cut.block_k]
    y_shape: gl.constexpr = [cut.num_stages] + y_desc.block_type.shape
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, x_shape, x_desc.layout)
    y_bufs = gl.allocate_shared_memory(y_desc.dtype, y_shape, y_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [cut.num_stages, 1], mbarrier.MBarrierLayout())
    empty = ready  # none if stages don't come back
    if not cut.loads_all:
        empty = gl.allocate_shared_memory(gl.int64, [cut.num_stages, 1], mbarrier.MBarrierLayout())
    num_stages: gl.constexpr = cut.num_stages
    for i in gl.static_range(num_stages):
        if not cut.loads_all:
            mbarrier.init(empty.index(i), count=1)
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    stages = (x_bufs, y_bufs, empty, ready)
    sizes = (num_tokens, hidden)
    tables = (logit_bias, expert_bias, token_ids, hash_table, vocabulary)
    outputs = (weights, ids, logits, dense, histogram)
    given = (sizes, (alpha, routed_scale, k), tables, outputs)
    scratch = (sums, counters)
    totals = (counts, offsets)
    role_barrier()
    wait_for_grid()  # so far this ran beside the kernel in front
    let_next_start()
    load_first(x_desc, y_desc, stages, sizes, cut)
    # The tuples of arguments are written out: bound to a name, their constants would become tensors.
    if cut.loads_all:
        role(stages, given, scratch, totals, counter, cut, spec)
        ready._keep_alive()  # or their memory would go to others while they are set up
    else:
        gl.warp_specialize([
            (role, (stages, given, scratch, totals, counter, cut, spec)),
            (producer, (x_desc, y_desc, stages, sizes, cut)),
        ], [1], [40])  # fmt: skip
