# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
"""The router on Hopper: TMA, wgmma, one launch from tokens to experts.

    for each CTA: some rows, some columns (experts), some blocks of 1024 along K        TMA -> stages
        for each block:  p = tokens[rows, block] @ gate[columns, block].T               wgmma, some columns a role
            sum += p
    all columns and all of K in one CTA:   sums -> shared memory
    else:                                  sums -> workspace; whoever shares the rows waits, and takes some of them
    route_rows(sums of the blocks, in their order), a few rows at a time

An instruction multiplies 64 rows; where fewer make more CTAs the others are left as they are, and nobody looks.

The blocks and their order are the same for every number of tokens, and so are the bits of a token's logits. CTAs that
wait for each other are launched together or not at all (a cooperative launch), so none waits for one that can't start.

Where a CTA's whole part of the operands fits the stages, one role loads all of it at once and then multiplies: that
saves the microsecond that the warps of several roles need to go their ways.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from envoi.gemm.meeting import arrive
from envoi.gemm.overlap import let_next_start, wait_for_grid
from envoi.router.device import load_biases, route_rows, store_counts
from envoi.triton_compat import role_barrier


@gluon.jit
def part_of(sizes, cut: gl.constexpr):
    """This CTA: its first row, first column, first step along K, the step behind its last, its number in its rows."""
    _num_tokens, hidden = sizes
    pid = gl.program_id(0)
    part = pid % cut.parts
    first = part // cut.parts_n * cut.steps_each
    last = gl.minimum(first + cut.steps_each, gl.cdiv(hidden, cut.block_k))
    return pid // cut.parts * cut.rows, part % cut.parts_n * cut.width, first, last, part


@gluon.jit
def load_stage(x_desc, y_desc, stages, stage, m, n, k, cut: gl.constexpr):
    """One step along K into a stage."""
    x_bufs, y_bufs, _empty, ready, _parked = stages
    roles: gl.constexpr = cut.num_roles
    mbarrier.expect(ready.index(stage), x_desc.block_type.nbytes + roles * y_desc.block_type.nbytes)
    x_buf = x_bufs.index(stage)
    if cut.rows < 64:
        x_buf = x_buf.slice(0, cut.rows, dim=0)  # what stays below are rows that nobody asks for
    tma.async_copy_global_to_shared(x_desc, [m, k * cut.block_k], ready.index(stage), x_buf)
    for r in gl.static_range(roles):
        y_buf = y_bufs.index(stage * roles + r)
        tma.async_copy_global_to_shared(y_desc, [n + r * cut.block_n, k * cut.block_k], ready.index(stage), y_buf)


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
    """Of the 64 rows by block_n columns of a role."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, cut.block_n, 16])


@gluon.jit
def multiply(stages, step, num_steps, R: gl.constexpr, cut: gl.constexpr):
    """64 rows by block_n columns over one block of sums, two products in flight."""
    x_bufs, y_bufs, empty, ready, _parked = stages
    layout: gl.constexpr = tile_layout(cut)
    acc = gl.full((64, cut.block_n), 0.0, gl.float32, layout)
    for k in range(num_steps):
        stage = step % cut.num_stages
        mbarrier.wait(ready.index(stage), (step // cut.num_stages) & 1)
        y = y_bufs.index(stage * cut.num_roles + R).permute((1, 0))
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
def lanes_of(columns):
    """Lanes that share a row, which no other warp has a part of. A whole warp reduces integers in one instruction."""
    return 32 if columns >= 128 else max(4, columns // 8)


@gluon.constexpr_function
def row_layout(columns):
    """Of a tile of rows of logits."""
    lanes = lanes_of(columns)
    return gl.BlockedLayout([1, columns // lanes], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.constexpr_function
def slot_layout(columns, slots):
    """Of what was chosen for the same rows, in the same lanes."""
    lanes = lanes_of(columns)
    return gl.BlockedLayout([1, max(1, slots // lanes)], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def columns_in(layout: gl.constexpr, count: gl.constexpr):
    """0, 1, 2 ... as [1, count] for tiles of a layout."""
    return gl.arange(0, count, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def finish_rows(logits, rows, given, biases, spec: gl.constexpr):
    """`route_rows`, with what it wants to know of the layout."""
    sizes, numbers, tables, outputs = given
    layout: gl.constexpr = logits.type.layout
    chosen: gl.constexpr = slot_layout(logits.shape[1], spec.slots)
    columns = columns_in(layout, logits.shape[1])
    slots = columns_in(chosen, spec.slots)
    group_slots = columns_in(layout, spec.group_slots)
    route_rows(logits, rows, sizes[0], columns, slots, group_slots, numbers, biases, tables, outputs, spec)


@gluon.jit
def load_early(given, cut: gl.constexpr, spec: gl.constexpr):
    """The biases, before anyone waits."""
    layout: gl.constexpr = row_layout(cut.columns)
    return load_biases(given[2], columns_in(layout, cut.columns), spec)


@gluon.jit
def shared_rows(stages, rows: gl.constexpr, columns: gl.constexpr, cut: gl.constexpr):
    """The memory of the gate's stages, when they have done their work, as 64 rows of float32 in tiles of a size."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(4, 1, min(8, cut.columns // 4), [1, 0])
    tiles: gl.constexpr = 64 * cut.columns // (rows * columns)
    return stages[1]._reinterpret(gl.float32, [tiles, rows, columns], layout)


@gluon.jit
def from_shared(sum, stages, given, m, R: gl.constexpr, cut: gl.constexpr, spec: gl.constexpr):
    """A CTA has all columns and all of K: its roles exchange their columns, then each routes a share of the rows."""
    parked = stages[4]
    biases = load_early(given, cut, spec)
    mbarrier.arrive(parked, count=1)
    mbarrier.wait(parked, 0)  # all products are done: the memory is free
    whole = shared_rows(stages, 64, cut.columns, cut).index(0)
    whole.slice(R * cut.block_n, cut.block_n, dim=1).store(sum)
    role_barrier()
    mbarrier.arrive(parked, count=1)
    mbarrier.wait(parked, 1)
    tiles = shared_rows(stages, cut.rows_each, cut.columns, cut)
    layout: gl.constexpr = row_layout(cut.columns)
    i = gl.arange(0, cut.rows_each, gl.SliceLayout(1, layout))
    for row in range(R * cut.share, gl.minimum((R + 1) * cut.share, given[0][0] - m), cut.rows_each):
        finish_rows(tiles.index(row // cut.rows_each).load(layout), m + row + i, given, biases, spec)


@gluon.jit
def leave(sum, sums, set, m, n, padded, cut: gl.constexpr):
    """64 x block_n sums into the workspace [sets, padded rows, columns]; only the last rows can be nobody's."""
    rows = m + gl.arange(0, 64, gl.SliceLayout(1, sum.type.layout))
    columns = n + gl.arange(0, cut.block_n, gl.SliceLayout(0, sum.type.layout))
    gl.store(sums + (set * padded + rows).to(gl.int64)[:, None] * cut.columns + columns[None, :], sum)


@gluon.jit
def add_sets(sums, rows, padded, cut: gl.constexpr, layout: gl.constexpr):
    """The logits of rows: the sets of sums, added up in their order."""
    columns = gl.arange(0, cut.columns, gl.SliceLayout(0, layout))
    at = sums + rows.to(gl.int64)[:, None] * cut.columns + columns[None, :]
    total = gl.load(at, cache_modifier=".cg")
    sets: gl.constexpr = cut.num_sets
    for s in gl.static_range(1, sets):
        total += gl.load(at + s * padded.to(gl.int64) * cut.columns, cache_modifier=".cg")
    return total


@gluon.jit
def wait_for_all(counter, num_parts):
    """Say that this role's sums are there, and wait for those of all parts of its rows."""
    role_barrier()
    gl.atomic_add(counter, 1, sem="release", scope="gpu")
    while gl.atomic_add(counter, 0, sem="acquire", scope="gpu") < num_parts:
        pass


@gluon.jit
def from_workspace(sums, first, last, padded, given, biases, cut: gl.constexpr, spec: gl.constexpr):
    """Rows first to last, rows_each at a time."""
    layout: gl.constexpr = row_layout(cut.columns)
    for row in range(first, gl.minimum(last, given[0][0]), cut.rows_each):
        rows = row + gl.arange(0, cut.rows_each, gl.SliceLayout(1, layout))
        finish_rows(add_sets(sums, rows, padded, cut, layout), rows, given, biases, spec)


@gluon.jit
def meet(sums, counters, m, part, padded, given, R: gl.constexpr, cut: gl.constexpr, spec: gl.constexpr):
    """Roles that have parts of the same rows meet; each routes a share of the rows, or the last to come all of them."""
    num_parts: gl.constexpr = cut.parts * cut.num_roles
    own = counters + m // cut.rows * 2
    biases = load_early(given, cut, spec)
    if cut.waits:
        share = (part * cut.num_roles + R) * cut.share
        if (share < cut.rows) & (m + share < given[0][0]):
            wait_for_all(own, num_parts)
            from_workspace(sums, m + share, m + share + cut.share, padded, given, biases, cut, spec)
        else:
            role_barrier()
            gl.atomic_add(own, 1, sem="release", scope="gpu")
        # The last role to leave puts back the zeros.
        if gl.atomic_add(own + 1, 1, sem="relaxed", scope="gpu") == num_parts - 1:
            gl.store(own, 0)
            gl.store(own + 1, 0)
    else:
        if arrive(own, num_parts):
            from_workspace(sums, m, m + cut.rows, padded, given, biases, cut, spec)


@gluon.jit
def role(stages, given, scratch, totals, counter, R: gl.constexpr, cut: gl.constexpr, spec: gl.constexpr):
    """Four warps: the sums of 64 rows and block_n columns, then the experts of a share of the rows.

    The part that begins with block 0 adds up all blocks that it has; every other block is a set of sums of its own.
    """
    sums, counters = scratch
    m, n, first, last, part = part_of(given[0], cut)
    padded = gl.cdiv(given[0][0], 64) * 64
    layout: gl.constexpr = tile_layout(cut)
    sum = gl.full((64, cut.block_n), 0.0, gl.float32, layout)
    step = 0
    for k in range(first, last, cut.steps_in_block):
        p, step = multiply(stages, step, gl.minimum(cut.steps_in_block, last - k), R, cut)
        if cut.parts_k > 1:
            if first > 0:
                set = (k - cut.steps_each) // cut.steps_in_block + 1
                leave(p, sums, set, m, n + R * cut.block_n, padded, cut)
        sum += p
    if cut.parts == 1:
        from_shared(sum, stages, given, m, R, cut, spec)
    else:
        if first == 0:
            leave(sum, sums, 0, m, n + R * cut.block_n, padded, cut)
        meet(sums, counters, m, part, padded, given, R, cut, spec)
    if spec.want_counts:
        if arrive(counter, gl.num_programs(0) * cut.num_roles):
            experts = gl.arange(0, spec.columns, gl.BlockedLayout([1], [32], [4], [0]))
            store_counts(given[3][4], totals[0], totals[1], experts, spec)


@gluon.jit
def router_kernel(
    x_desc, y_desc, num_tokens, hidden, alpha, routed_scale, k, logit_bias, expert_bias, token_ids, hash_table,
    vocabulary, weights, ids, logits, dense, histogram, counts, offsets, counter, sums, counters,
    cut: gl.constexpr, spec: gl.constexpr,
):  # fmt: skip
    """Set up the stages, then one role for each partition of warps."""
    x_shape: gl.constexpr = [cut.num_stages, 64, cut.block_k]
    y_shape: gl.constexpr = [cut.num_stages * cut.num_roles] + y_desc.block_type.shape
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, x_shape, x_desc.layout)
    y_bufs = gl.allocate_shared_memory(y_desc.dtype, y_shape, y_desc.layout)
    empty = gl.allocate_shared_memory(gl.int64, [cut.num_stages, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [cut.num_stages, 1], mbarrier.MBarrierLayout())
    num_stages: gl.constexpr = cut.num_stages
    for i in gl.static_range(num_stages):
        mbarrier.init(empty.index(i), count=cut.num_roles)
        mbarrier.init(ready.index(i), count=1)
    parked = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(parked, count=cut.num_roles)
    fence_async_shared()
    stages = (x_bufs, y_bufs, empty, ready, parked)
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
        role(stages, given, scratch, totals, counter, 0, cut, spec)
    elif cut.num_roles == 1:
        gl.warp_specialize([
            (role, (stages, given, scratch, totals, counter, 0, cut, spec)),
            (producer, (x_desc, y_desc, stages, sizes, cut)),
        ], [1], [40])  # fmt: skip
    else:
        gl.warp_specialize([
            (role, (stages, given, scratch, totals, counter, 0, cut, spec)),
            (role, (stages, given, scratch, totals, counter, 1, cut, spec)),
            (producer, (x_desc, y_desc, stages, sizes, cut)),
        ], [4, 1], [232, 40])  # fmt: skip
