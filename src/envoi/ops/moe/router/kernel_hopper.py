# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
"""Router kernel for Hopper, in Gluon: tokens to experts in one launch, by TMA and wgmma.

    for each CTA: some rows, some columns (experts), some blocks along K                TMA -> stages
        for each block:  p = tokens[rows, block] @ gate[columns, block].T               wgmma
            sum += p                                                                    in registers
    all columns and all of K in one CTA:   sums -> shared memory, the columns perhaps in several turns
    else:                                  sums -> workspace; CTAs of the same rows wait, and each routes some of them
    route_rows(sums of the blocks, in their order), some rows at a time; in large passes uncertain rows, eight at a time

Barriers, one of each for a stage: `full` (TMA's bytes arrive; the consumer waits) and `empty` (the consumer arrives
once its wgmma has read the stage; the producer waits; only where stages are filled more than once).

Between CTAs: if few sums are exchanged, readers poll the sums themselves. The workspace holds the sentinel NO_SUM
before and after a launch; the reader of a sum writes the sentinel back. If many are exchanged, an arrival counter
tells when all parts are stored; the last part to pass resets it to 0. CTAs that wait for each other are launched
together or not at all (a cooperative launch), so none waits for one that can't start.

wgmma multiplies 64 rows; if a CTA has fewer, so that there are more CTAs, the other rows hold old data whose results
are never read. The blocks and their order are the same for every number of tokens, and so are a token's logits, bit
for bit.

Columns that aren't a power of two, such as 160, may be multiplied by two accumulators, 128 + 32, whose wgmma read the
same stage of tokens. Their gate is y and z in shared memory, and so are their logits in the end.

With many rows a CTA may take more columns than registers hold sums for, in turns: it goes along K once for each
block_n columns, and the logits of a turn wait in shared memory for those of the others.

If all of a CTA's operands fit into the stages, one role loads them all and then multiplies, which saves the
microsecond that it takes to start two roles.
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

from envoi.ops.moe.router.choose_experts import route_exactly, route_rows, route_tile, store_counts
from envoi.ops.moe.router.device_types import Args, Outputs, Scalars, Tables
from envoi.ops.moe.router.kernel_hopper_loads import Sizes, Stages, load_first, part_of, producer, shifted
from envoi.ops.moe.router.kernel_hopper_logits import (
    biases_of,
    board_of,
    both_buffers,
    load_both,
    load_logits,
    logits_buffer,
    positions_of,
    row_layout,
)
from envoi.runtime.barrier_setup import set_up_together
from envoi.runtime.sync import arrive, let_next_start, wait_for_grid
from envoi.runtime.triton_compat import role_barrier

NO_SUM: gl.constexpr = gl.constexpr(-1)  # sentinel of a sum not yet stored: the bits of a NaN that no addition gives


class Exchange(NamedTuple):
    """Workspace between the CTAs of the same rows: partial sums [sets, padded rows, columns], arrival counters."""

    sums: Any
    counters: Any


class Counts(NamedTuple):
    """Outputs counts [N] and offsets [N + 1], and the arrival counter of all CTAs."""

    counts: Any
    offsets: Any
    counter: Any


@gluon.constexpr_function
def tile_layout(tiling, width):
    """Layout of a CTA's accumulator [tile, width]: 16 rows a warp; surplus warps split the columns."""
    down = tiling.tile // 16
    side_by_side = tiling.num_warps // down
    shape = [16, width // side_by_side, 16]
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[down, side_by_side], instr_shape=shape)


@gluon.jit
def multiply(stages, step, num_steps, tiling: gl.constexpr):
    """Multiply num_steps stages into a fresh accumulator, two wgmma in flight. Returns it and the next step."""
    layout: gl.constexpr = tile_layout(tiling, tiling.block_n)
    acc = gl.full((tiling.tile, tiling.block_n), 0.0, gl.float32, layout)
    for k in range(num_steps):
        stage = step % tiling.num_stages
        mbarrier.wait(stages.full.index(stage), (step // tiling.num_stages) & 1)
        y = stages.y.index(stage).permute((1, 0))
        acc = warpgroup_mma(stages.x.index(stage), y, acc, is_async=True, use_acc=k > 0)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        if not tiling.single_fill:
            mbarrier.arrive(stages.empty.index((step + tiling.num_stages - 1) % tiling.num_stages), count=1, pred=k > 0)
        step += 1
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    if not tiling.single_fill:
        mbarrier.arrive(stages.empty.index((step + tiling.num_stages - 1) % tiling.num_stages), count=1)
    return acc, step


@gluon.jit
def multiply_both(stages, step, num_steps, tiling: gl.constexpr):
    """Multiply num_steps stages with the columns of y and with those of z: `multiply` with two accumulators."""
    acc = gl.full((tiling.tile, tiling.block_n), 0.0, gl.float32, tile_layout(tiling, tiling.block_n))
    rest = gl.full((tiling.tile, tiling.rest_n), 0.0, gl.float32, tile_layout(tiling, tiling.rest_n))
    for k in range(num_steps):
        stage = step % tiling.num_stages
        mbarrier.wait(stages.full.index(stage), (step // tiling.num_stages) & 1)
        x = stages.x.index(stage)
        acc = warpgroup_mma(x, stages.y.index(stage).permute((1, 0)), acc, is_async=True, use_acc=k > 0)
        rest = warpgroup_mma(x, stages.z.index(stage).permute((1, 0)), rest, is_async=True, use_acc=k > 0)
        acc, rest = warpgroup_mma_wait(num_outstanding=2, deps=(acc, rest))
        if not tiling.single_fill:
            mbarrier.arrive(stages.empty.index((step + tiling.num_stages - 1) % tiling.num_stages), count=1, pred=k > 0)
        step += 1
    acc, rest = warpgroup_mma_wait(num_outstanding=0, deps=(acc, rest))
    if not tiling.single_fill:
        mbarrier.arrive(stages.empty.index((step + tiling.num_stages - 1) % tiling.num_stages), count=1)
    return acc, rest, step


@gluon.constexpr_function
def sum_layout(tiling):
    """Layout of partial sums [rows, columns] while they are added: over all threads, no element twice."""
    each = min(4, max(1, tiling.rows_per_pass * tiling.columns // (32 * tiling.num_warps)))
    lanes = min(32, tiling.columns // each)
    warps = min(tiling.num_warps, tiling.columns // (each * lanes))
    return gl.BlockedLayout([1, each], [32 // lanes, lanes], [tiling.num_warps // warps, warps], [1, 0])


@gluon.jit
def store_partial(x, sums, set, part, sizes, tiling: gl.constexpr, spec: gl.constexpr):
    """Store a tile of partial sums in the workspace. With polls_sums, only elements that are read, never a sentinel."""
    rows = part.m + gl.arange(0, tiling.tile, gl.SliceLayout(1, x.type.layout))
    columns = part.n + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    at = sums + (set * padded_rows(sizes, tiling) + rows).to(gl.int64)[:, None] * tiling.columns + columns[None, :]
    if tiling.polls_sums:
        gl.store(at, x + 0.0, mask=(rows < sizes.num_tokens)[:, None] & (columns < spec.num_experts)[None, :])
    else:
        gl.store(at, x)


@gluon.jit
def padded_rows(sizes, tiling: gl.constexpr):
    """Return the number of rows in a set of partial sums."""
    if tiling.polls_sums:
        return sizes.num_tokens
    else:
        return gl.cdiv(sizes.num_tokens, tiling.tile) * tiling.tile


@gluon.jit
def sum_partials(sums, rows, sizes, tiling: gl.constexpr, layout: gl.constexpr):
    """Sum the sets of partial sums of rows in their order: [R, columns]."""
    columns = gl.arange(0, tiling.columns, gl.SliceLayout(0, layout))
    at = sums + rows.to(gl.int64)[:, None] * tiling.columns + columns[None, :]
    total = gl.load(at, cache_modifier=".cg") + 0.0
    sets: gl.constexpr = tiling.num_sets
    for s in gl.static_range(1, sets):
        total += gl.load(at + s * padded_rows(sizes, tiling).to(gl.int64) * tiling.columns, cache_modifier=".cg")
    return total


@gluon.jit
def wait_and_sum_partials(sums, row, end, sizes, tiling: gl.constexpr, spec: gl.constexpr):
    """Poll the partial sums of rows from `row` on until none is the sentinel; return their sums, added in their order.

    Writes the sentinel back for the next launch: each element belongs to one thread, so no other still waits for it.
    """
    layout: gl.constexpr = sum_layout(tiling)
    rows = row + gl.arange(0, tiling.rows_per_pass, gl.SliceLayout(1, layout))
    columns = gl.arange(0, tiling.columns, gl.SliceLayout(0, layout))
    mask = (rows < end)[:, None] & (columns < spec.num_experts)[None, :]
    at = sums + rows.to(gl.int64)[:, None] * tiling.columns + columns[None, :]
    step = padded_rows(sizes, tiling).to(gl.int64) * tiling.columns
    sets: gl.constexpr = tiling.num_sets
    total = gl.full((tiling.rows_per_pass, tiling.columns), 0.0, gl.float32, layout)
    missing = mask
    while gl.max(gl.max(missing.to(gl.int32), 1), 0) > 0:
        total = gl.load(at, mask=mask, other=0.0, volatile=True)
        missing = total.to(gl.int32, bitcast=True) == NO_SUM
        for s in gl.static_range(1, sets):
            x = gl.load(at + s * step, mask=mask, other=0.0, volatile=True)
            missing |= x.to(gl.int32, bitcast=True) == NO_SUM
            total += x
    none = gl.full((tiling.rows_per_pass, tiling.columns), NO_SUM, gl.int32, layout).to(gl.float32, bitcast=True)
    for s in gl.static_range(sets):
        gl.store(at + s * step, none, mask=mask)
    return gl.convert_layout(total, row_layout(tiling, tiling.lanes))


@gluon.jit
def arrive_and_wait(counter, waits, num_parts):
    """Count this part's arrival; if `waits`, wait for all parts of its rows. The last part to pass resets both."""
    role_barrier()
    gl.atomic_add(counter, 1, sem="release", scope="gpu")
    if waits:
        while gl.atomic_add(counter, 0, sem="acquire", scope="gpu") < num_parts:
            pass
    if gl.atomic_add(counter + 1, 1, sem="relaxed", scope="gpu") == num_parts - 1:
        gl.store(counter, 0)
        gl.store(counter + 1, 0)


@gluon.jit
def accumulate(stages, sums, sizes, tiling: gl.constexpr, spec: gl.constexpr):
    """Multiply all blocks of this CTA; store sums to shared memory, or to the workspace if other CTAs share the rows.

    The part that begins with block 0 adds all its blocks to one set of sums; every other block is a set of its own.
    """
    part = part_of(sizes, tiling)
    layout: gl.constexpr = tile_layout(tiling, tiling.block_n)
    num_steps: gl.constexpr = tiling.steps_in_block
    step = 0
    if tiling.turns > 1:
        for turn in range(tiling.turns - 1):
            sum = gl.full((tiling.tile, tiling.block_n), 0.0, gl.float32, layout)
            for k in range(part.first, part.last, num_steps):
                p, step = multiply(stages, step, gl.minimum(num_steps, part.last - k), tiling)
                sum += p
            logits_buffer(stages, tiling.tile, tiling).index(board_of(turn, tiling)).store(sum)
    sum = gl.full((tiling.tile, tiling.block_n), 0.0, gl.float32, layout)
    for k in range(part.first, part.last, num_steps):
        p, step = multiply(stages, step, gl.minimum(num_steps, part.last - k), tiling)
        if tiling.parts_k > 1:
            if part.first > 0:
                store_partial(p, sums, (k - tiling.steps_each) // num_steps + 1, part, sizes, tiling, spec)
        sum += p
    if tiling.parts == 1:
        logits_buffer(stages, tiling.tile, tiling).index(board_of(tiling.turns - 1, tiling)).store(sum)
    elif part.first == 0:
        store_partial(sum, sums, 0, part, sizes, tiling, spec)


@gluon.jit
def accumulate_both(stages, sums, sizes, tiling: gl.constexpr, spec: gl.constexpr):
    """Multiply and store like `accumulate`, the columns of y and those of z; in one turn."""
    part = part_of(sizes, tiling)
    after = shifted(part, tiling.block_n)
    num_steps: gl.constexpr = tiling.steps_in_block
    step = 0
    sum = gl.full((tiling.tile, tiling.block_n), 0.0, gl.float32, tile_layout(tiling, tiling.block_n))
    rest = gl.full((tiling.tile, tiling.rest_n), 0.0, gl.float32, tile_layout(tiling, tiling.rest_n))
    for k in range(part.first, part.last, num_steps):
        p, q, step = multiply_both(stages, step, gl.minimum(num_steps, part.last - k), tiling)
        if tiling.parts_k > 1:
            if part.first > 0:
                set = (k - tiling.steps_each) // num_steps + 1
                store_partial(p, sums, set, part, sizes, tiling, spec)
                store_partial(q, sums, set, after, sizes, tiling, spec)
        sum += p
        rest += q
    if tiling.parts == 1:
        left, right = both_buffers(stages, tiling.tile, tiling)
        left.index(0).store(sum)
        right.index(0).store(rest)
    elif part.first == 0:
        store_partial(sum, sums, 0, part, sizes, tiling, spec)
        store_partial(rest, sums, 0, after, sizes, tiling, spec)


@gluon.jit
def rows_to_route(counters, sizes, tiling: gl.constexpr):
    """Return the rows [begin, end) that this CTA routes, once their sums are stored or can be polled."""
    part = part_of(sizes, tiling)
    end = gl.minimum(part.m + tiling.rows_per_cta, sizes.num_tokens)
    if tiling.parts == 1:
        role_barrier()
        return part.m, end
    elif tiling.all_parts_wait:
        begin = part.m + part.number * tiling.rows_per_part
        end = gl.minimum(begin + tiling.rows_per_part, end)
        if not tiling.polls_sums:
            arrive_and_wait(counters + part.m // tiling.rows_per_cta * 2, begin < end, tiling.parts)
        return begin, end
    else:
        if not arrive(counters + part.m // tiling.rows_per_cta * 2, tiling.parts):
            end = part.m
        return part.m, end


@gluon.jit
def products_of(stages, sums, row, sizes, ROWS: gl.constexpr, LANES: gl.constexpr, tiling: gl.constexpr):
    """Return ROWS rows from `row` on and their products with the gate, whose sums are all stored."""
    layout: gl.constexpr = row_layout(tiling, LANES)
    part = part_of(sizes, tiling)
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    if tiling.parts == 1:
        if tiling.rest_n > 0:
            return rows, load_both(stages, row - part.m, ROWS, LANES, tiling)
        else:
            return rows, load_logits(stages, row - part.m, ROWS, LANES, tiling)
    else:
        return rows, sum_partials(sums, rows, sizes, tiling, layout)


@gluon.jit
def reroute_uncertain(again, stages, sums, row, sizes, args, tiling: gl.constexpr, spec: gl.constexpr):
    """Route again by exact keys, eight rows at a time, the rows from `row` on whose bit is set in `again`."""
    positions = positions_of(32, tiling, spec)
    biases = biases_of(args.tables, 32, tiling, spec)
    while again != 0:
        if again & 255 != 0:
            rows, products = products_of(stages, sums, row, sizes, 8, 32, tiling)
            rows = gl.where((again >> (rows - row).to(gl.uint64)) & 1 != 0, rows, -1)
            route_exactly(products, rows, positions, biases, args, spec)
        row += 8
        again = again >> 8


@gluon.jit
def route_share(stages, exchange, sizes, args, biases, tiling: gl.constexpr, spec: gl.constexpr):
    """Route this CTA's share of the rows, rows_per_pass at a time."""
    begin, end = rows_to_route(exchange.counters, sizes, tiling)
    sums = exchange.sums
    positions = positions_of(tiling.lanes, tiling, spec)
    for row in range(begin, end, tiling.rows_per_pass):
        if tiling.polls_sums:
            rows = row + gl.arange(0, tiling.rows_per_pass, gl.SliceLayout(1, row_layout(tiling, tiling.lanes)))
            products = wait_and_sum_partials(sums, row, end, sizes, tiling, spec)
        else:
            rows, products = products_of(stages, sums, row, sizes, tiling.rows_per_pass, tiling.lanes, tiling)
        if tiling.reroutes_eights and not spec.hashed:
            again = route_rows(products, rows, rows < end, positions, biases, args, spec)
            bits = gl.sum((again >= 0).to(gl.uint64) << (rows - row).to(gl.uint64), 0)
            if bits != 0:
                reroute_uncertain(bits, stages, sums, row, sizes, args, tiling, spec)
        else:
            route_tile(products, rows, rows < end, positions, biases, args, spec)


@gluon.jit
def consumer(stages, sizes, args, exchange, totals, tiling: gl.constexpr, spec: gl.constexpr):
    """Multiply a tile, then choose the experts of a share of its rows; the last CTA of all stores the counts."""
    biases = biases_of(args.tables, tiling.lanes, tiling, spec)
    if tiling.rest_n > 0:
        accumulate_both(stages, exchange.sums, sizes, tiling, spec)
    else:
        accumulate(stages, exchange.sums, sizes, tiling, spec)
    route_share(stages, exchange, sizes, args, biases, tiling, spec)
    if totals.counter is not None:
        if arrive(totals.counter, gl.num_programs(0)):
            experts = gl.arange(0, spec.columns, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
            store_counts(args.outputs.histogram, totals.counts, totals.offsets, experts, spec)


@gluon.jit
def router_kernel(
    x_desc, y_desc, num_tokens, hidden, alpha, routed_scale, k, logit_bias, expert_bias, token_ids, hash_table,
    vocabulary, weights, ids, logits, dense, histogram, counts, offsets, counter, sums, counters,
    tiling: gl.constexpr, spec: gl.constexpr,
):  # fmt: skip
    """Set up the stages, then start the consumer, and the producer if stages are filled more than once."""
    x_shape: gl.constexpr = [tiling.num_stages, tiling.tile, tiling.block_k]
    y_shape: gl.constexpr = [tiling.gate_slots, tiling.block_n, tiling.block_k]
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, x_shape, x_desc.layout)
    y_bufs = gl.allocate_shared_memory(y_desc.dtype, y_shape, y_desc.layout)
    z_bufs = y_bufs
    if tiling.rest_n > 0:
        z_shape: gl.constexpr = [tiling.gate_slots, tiling.rest_n, tiling.block_k]
        z_bufs = gl.allocate_shared_memory(y_desc.dtype, z_shape, y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [tiling.num_stages, 1], mbarrier.MBarrierLayout())
    empty = full  # not used if every stage is filled once
    if not tiling.single_fill:
        empty = gl.allocate_shared_memory(gl.int64, [tiling.num_stages, 1], mbarrier.MBarrierLayout())
    num_stages: gl.constexpr = tiling.num_stages
    set_up_together()
    for i in gl.static_range(num_stages):
        if not tiling.single_fill:
            mbarrier.init(empty.index(i), count=1)
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    stages = Stages(x_bufs, y_bufs, z_bufs, empty, full)
    sizes = Sizes(num_tokens, hidden)
    tables = Tables(logit_bias, expert_bias, token_ids, hash_table, vocabulary)
    outputs = Outputs(weights, ids, logits, dense, histogram)
    args = Args(Scalars(alpha, routed_scale, k), tables, outputs)
    exchange = Exchange(sums, counters)
    totals = Counts(counts, offsets, counter)
    role_barrier()
    wait_for_grid()  # up to here this may overlap with the kernel before it
    let_next_start()
    load_first(x_desc, y_desc, stages, sizes, tiling, spec)
    # The tuples of arguments are written out: bound to a name, their constants would become tensors.
    if tiling.single_fill:
        consumer(stages, sizes, args, exchange, totals, tiling, spec)
        full._keep_alive()  # or the compiler reuses the barriers' memory while it is in use
    else:
        gl.warp_specialize([
            (consumer, (stages, sizes, args, exchange, totals, tiling, spec)),
            (producer, (x_desc, y_desc, stages, sizes, tiling, spec)),
        ], [1], [40])  # fmt: skip
