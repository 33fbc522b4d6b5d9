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

If experts are chosen by a launch of its own, `kernel_hopper_choice`, CTAs only multiply, store their sums and count
their arrival, one tile after the other: the loads of the next tile start while the sums of this one are stored. Tiles
of a last round that isn't full are cut along K.

Columns that aren't a power of two, such as 160, may be multiplied by two accumulators, 128 + 32, whose wgmma read the
same stage of tokens. Their gate is y and z in shared memory, and so are their logits in the end.

With many rows a CTA may take more columns than registers hold sums for, in turns: it goes along K once for each
block_n columns, and the logits of a turn wait in shared memory for those of the others.

If all of a CTA's operands fit into the stages, one role loads them all and then multiplies, which saves the
microsecond that it takes to start two roles.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
)

from envoi.ops.gemm.hopper.mainloop import waited
from envoi.ops.moe.router.choose_experts import route_exactly, route_rows, route_tile, store_counts
from envoi.ops.moe.router.device_types import Args, Outputs, Scalars, Tables
from envoi.ops.moe.router.kernel_hopper_loads import (
    Problem,
    ProducerArgs,
    Rest,
    Stages,
    count_tile,
    load_first,
    producer,
)
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
from envoi.runtime.aggregate import Scalar, aggregate
from envoi.runtime.sync import arrive, let_next_start, wait_for_grid
from envoi.runtime.triton_compat import role_barrier

NO_SUM: gl.constexpr = gl.constexpr(-1)  # sentinel of a sum not yet stored: the bits of a NaN that no addition gives


@aggregate
class Exchange:
    """Workspace between the CTAs of the same rows; None without such CTAs, and counters if sums are polled."""

    sums: Scalar  # pointer to partial sums [sets, padded rows, columns]
    counters: Scalar  # pointer to arrival counters, two for each block of rows


@aggregate
class Counts:
    """Outputs counts and offsets, and the arrival counter of all CTAs; None if they aren't wanted."""

    counts: Scalar  # pointer to int32 [N]
    offsets: Scalar  # pointer to int32 [N + 1]
    counter: Scalar


@aggregate
class ConsumerArgs:
    """Consumer's stages, workspace and outputs."""

    stages: Stages
    problem: Problem
    routing: gl.tuple  # `Args`
    exchange: Exchange
    totals: Counts


@gluon.constexpr_function
def tile_layout(tiling, width):
    """Layout of a CTA's accumulator [tile, width]: 16 rows a warp; surplus warps split the columns."""
    down = tiling.tile // 16
    side_by_side = tiling.num_warps // down
    shape = [16, width // side_by_side, 16]
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[down, side_by_side], instr_shape=shape)


@gluon.jit
def zeros(tiling: gl.constexpr):
    """Return accumulators of 0: a tuple of that of y's columns and, with two widths, that of z's."""
    acc = gl.full((tiling.tile, tiling.block_n), 0.0, gl.float32, tile_layout(tiling, tiling.block_n))
    if tiling.rest_n > 0:
        rest = gl.full((tiling.tile, tiling.rest_n), 0.0, gl.float32, tile_layout(tiling, tiling.rest_n))
        return acc, rest
    else:
        return (acc,)


@gluon.jit
def start_products(stages, stage, accs, use_acc):
    """Start the wgmma of a stage, tokens times gate, for each accumulator; return these. use_acc: they aren't 0."""
    if stages.tiling.rest_n > 0:
        x = stages.x.index(stage)
        acc = warpgroup_mma(x, stages.y.index(stage).permute((1, 0)), accs[0], is_async=True, use_acc=use_acc)
        rest = warpgroup_mma(x, stages.z.index(stage).permute((1, 0)), accs[1], is_async=True, use_acc=use_acc)
        return acc, rest
    else:
        y = stages.y.index(stage).permute((1, 0))
        return (warpgroup_mma(stages.x.index(stage), y, accs[0], is_async=True, use_acc=use_acc),)


@gluon.jit
def multiply(stages, step, num_steps):
    """Multiply num_steps stages, wgmma of two steps in flight. Return the accumulators, from 0, and the next step."""
    tiling: gl.constexpr = stages.tiling
    ring = stages.ring
    accs = zeros(tiling)
    for k in range(num_steps):
        stage = ring.stage(step)
        ring.wait_full(step)
        accs = start_products(stages, stage, accs, k > 0)
        accs = waited(accs, len(accs))
        ring.release_previous(step, k > 0)
        step += 1
    accs = waited(accs, 0)
    ring.release_previous(step)
    return accs, step


@gluon.constexpr_function
def sum_layout(tiling):
    """Layout of partial sums [rows, columns] while they are added: over all threads, no element twice."""
    each = min(4, max(1, tiling.rows_per_pass * tiling.columns // (32 * tiling.num_warps)))
    lanes = min(32, tiling.columns // each)
    warps = min(tiling.num_warps, tiling.columns // (each * lanes))
    return gl.BlockedLayout([1, each], [32 // lanes, lanes], [tiling.num_warps // warps, warps], [1, 0])


@gluon.jit
def store_partials(accs, sums, set, part, problem):
    """Store a set of partial sums of a CTA's columns, those of y and those of z, in the workspace."""
    store_partial(accs[0], sums, set, part.m, part.n, problem)
    if len(accs) == 2:
        store_partial(accs[1], sums, set, part.m, part.rest_n, problem)


@gluon.jit
def store_partial(x, sums, set, m, n, problem):
    """Store a tile of partial sums in the workspace. With polls_sums, only elements that are read, never a sentinel."""
    tiling: gl.constexpr = problem.tiling
    rows = m + gl.arange(0, tiling.tile, gl.SliceLayout(1, x.type.layout))
    columns = n + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    at = sums + (set * padded_rows(problem) + rows).to(gl.int64)[:, None] * tiling.columns + columns[None, :]
    if tiling.polls_sums or tiling.apart:
        mask = (rows < problem.num_tokens)[:, None] & (columns < problem.spec.num_experts)[None, :]
        gl.store(at, x + 0.0, mask=mask)
    else:
        gl.store(at, x)


@gluon.jit
def padded_rows(problem):
    """Return the number of rows in a set of partial sums."""
    tiling: gl.constexpr = problem.tiling
    # The number of tokens is a Python number if it is 1.
    if problem.rest.first is not None:  # of sets but the first: rows of tiles that are cut along K
        return gl.to_tensor(problem.num_tokens - problem.rest.first // tiling.parts * tiling.rows_per_cta)
    elif tiling.polls_sums or tiling.apart:
        return gl.to_tensor(problem.num_tokens)
    else:
        return gl.to_tensor(gl.cdiv(problem.num_tokens, tiling.tile) * tiling.tile)


@gluon.jit
def sum_partials(sums, rows, problem, layout: gl.constexpr):
    """Sum the sets of partial sums of rows in their order: [R, columns]."""
    tiling: gl.constexpr = problem.tiling
    columns = gl.arange(0, tiling.columns, gl.SliceLayout(0, layout))
    at = sums + rows.to(gl.int64)[:, None] * tiling.columns + columns[None, :]
    total = gl.load(at, cache_modifier=".cg") + 0.0
    sets: gl.constexpr = tiling.num_sets
    for s in gl.static_range(1, sets):
        total += gl.load(at + s * padded_rows(problem).to(gl.int64) * tiling.columns, cache_modifier=".cg")
    return total


@gluon.jit
def wait_and_sum_partials(sums, row, end, problem):
    """Poll the partial sums of rows from `row` on until none is the sentinel; return their sums, added in their order.

    Writes the sentinel back for the next launch: each element belongs to one thread, so no other still waits for it.
    """
    tiling: gl.constexpr = problem.tiling
    layout: gl.constexpr = sum_layout(tiling)
    rows = row + gl.arange(0, tiling.rows_per_pass, gl.SliceLayout(1, layout))
    columns = gl.arange(0, tiling.columns, gl.SliceLayout(0, layout))
    mask = (rows < end)[:, None] & (columns < problem.spec.num_experts)[None, :]
    at = sums + rows.to(gl.int64)[:, None] * tiling.columns + columns[None, :]
    step = padded_rows(problem).to(gl.int64) * tiling.columns
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
def multiply_blocks(stages, step, part, sums, problem):
    """Return the sums of all blocks of this CTA, and the next step; store the sets of those that aren't the first part.

    The part that begins with block 0 adds all its blocks to one set of sums; every other block is a set of its own.
    """
    tiling: gl.constexpr = problem.tiling
    if tiling.one_sum:
        return multiply_at_once(stages, step, part, sums, problem)
    num_steps: gl.constexpr = tiling.steps_in_block
    totals = zeros(tiling)
    for k in range(part.first, part.last, num_steps):
        products, step = multiply(stages, step, gl.minimum(num_steps, part.last - k))
        if problem.rest.first is not None:
            if part.first > 0:
                store_partials(products, sums, (k - problem.rest.steps) // num_steps + 1, part, problem)
        elif tiling.parts_k > 1:
            if part.first > 0:
                store_partials(products, sums, (k - tiling.steps_each) // num_steps + 1, part, problem)
        totals = added(totals, products)
    return totals, step


@gluon.jit
def multiply_at_once(stages, step, part, sums, problem):
    """Return the products of this CTA, all in one sum, and the next step; store those of parts of K but the first."""
    products, step = multiply(stages, step, part.last - part.first)
    if problem.rest.first is not None:
        if part.first > 0:
            store_partials(products, sums, part.first // problem.rest.steps, part, problem)
    return products, step


@gluon.jit
def added(totals, products):
    """Return the sums of two tuples of accumulators."""
    if len(totals) == 1:
        return (totals[0] + products[0],)
    else:
        return totals[0] + products[0], totals[1] + products[1]


@gluon.jit
def accumulate(stages, sums, problem):
    """Multiply all blocks of this CTA; store sums in shared memory, or in the workspace if CTAs share the rows."""
    tiling: gl.constexpr = problem.tiling
    part = problem.part()
    step = 0
    if tiling.turns > 1:
        for turn in range(tiling.turns - 1):
            totals, step = multiply_blocks(stages, step, part, sums, problem)
            logits_buffer(stages, tiling.tile).index(board_of(turn, tiling)).store(totals[0])
    totals, step = multiply_blocks(stages, step, part, sums, problem)
    if tiling.parts == 1:
        if tiling.rest_n > 0:
            left, right = both_buffers(stages, tiling.tile)
            left.index(0).store(totals[0])
            right.index(0).store(totals[1])
        else:
            logits_buffer(stages, tiling.tile).index(board_of(tiling.turns - 1, tiling)).store(totals[0])
    elif part.first == 0:
        store_partials(totals, sums, 0, part, problem)


@gluon.jit
def multiply_tiles(stages, exchange, problem):
    """Multiply one tile after the other and store its sums; the producer counts the arrival of all but the last."""
    step = 0
    last = gl.program_id(0)
    for tile in range(gl.program_id(0), problem.num_parts(), gl.num_programs(0)):
        part = problem.part_of(tile)
        totals, step = multiply_blocks(stages, step, part, exchange.sums, problem)
        if part.first == 0:
            store_partials(totals, exchange.sums, 0, part, problem)
        last = tile
    role_barrier()
    count_tile(exchange.counters, last, problem)


@gluon.jit
def rows_to_route(counters, problem):
    """Return the rows [begin, end) that this CTA routes, once their sums are stored or can be polled."""
    tiling: gl.constexpr = problem.tiling
    part = problem.part()
    end = gl.minimum(part.m + tiling.rows_per_cta, problem.num_tokens)
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
def products_of(stages, sums, row, problem, ROWS: gl.constexpr, LANES: gl.constexpr):
    """Return ROWS rows from `row` on and their products with the gate, whose sums are all stored."""
    tiling: gl.constexpr = problem.tiling
    layout: gl.constexpr = row_layout(tiling, LANES)
    part = problem.part()
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    if tiling.parts == 1:
        if tiling.rest_n > 0:
            return rows, load_both(stages, row - part.m, ROWS, LANES)
        else:
            return rows, load_logits(stages, row - part.m, ROWS, LANES)
    else:
        return rows, sum_partials(sums, rows, problem, layout)


@gluon.jit
def reroute_uncertain(again, row, args):
    """Route again by exact keys, eight rows at a time, the rows from `row` on whose bit is set in `again`."""
    problem = args.problem
    positions = positions_of(32, problem.tiling, problem.spec)
    biases = biases_of(args.routing.tables, 32, problem.tiling, problem.spec)
    while again != 0:
        if again & 255 != 0:
            rows, products = products_of(args.stages, args.exchange.sums, row, problem, 8, 32)
            rows = gl.where((again >> (rows - row).to(gl.uint64)) & 1 != 0, rows, -1)
            route_exactly(products, rows, positions, biases, args.routing, problem.spec)
        row += 8
        again = again >> 8


@gluon.jit
def route_share(biases, args):
    """Route this CTA's share of the rows, rows_per_pass at a time."""
    problem, sums = args.problem, args.exchange.sums
    tiling: gl.constexpr = problem.tiling
    spec: gl.constexpr = problem.spec
    begin, end = rows_to_route(args.exchange.counters, problem)
    positions = positions_of(tiling.lanes, tiling, spec)
    for row in range(begin, end, tiling.rows_per_pass):
        if tiling.polls_sums:
            rows = row + gl.arange(0, tiling.rows_per_pass, gl.SliceLayout(1, row_layout(tiling, tiling.lanes)))
            products = wait_and_sum_partials(sums, row, end, problem)
        else:
            rows, products = products_of(args.stages, sums, row, problem, tiling.rows_per_pass, tiling.lanes)
        if tiling.reroutes_eights and not spec.hashed:
            settle: gl.constexpr = tiling.settles
            again, doubt = route_rows(products, rows, rows < end, positions, biases, args.routing, settle, spec)
            if doubt > 0:
                bits = gl.sum((again >= 0).to(gl.uint64) << (rows - row).to(gl.uint64), 0)
                if bits != 0:
                    reroute_uncertain(bits, row, args)
        else:
            route_tile(products, rows, rows < end, positions, biases, args.routing, spec)


@gluon.jit
def consumer(args):
    """Multiply a tile, then choose the experts of a share of its rows, unless a launch of its own does."""
    tiling: gl.constexpr = args.problem.tiling
    spec: gl.constexpr = args.problem.spec
    if tiling.apart:
        multiply_tiles(args.stages, args.exchange, args.problem)
    else:
        biases = biases_of(args.routing.tables, tiling.lanes, tiling, spec)
        accumulate(args.stages, args.exchange.sums, args.problem)
        route_share(biases, args)
        finish_counts(args.routing.outputs.histogram, args.totals, spec)


@gluon.jit
def finish_counts(histogram, totals, spec: gl.constexpr):
    """Store the counts if they are wanted and this is the last CTA of all."""
    if totals.counter is not None:
        if arrive(totals.counter, gl.num_programs(0)):
            experts = gl.arange(0, spec.columns, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
            store_counts(histogram, totals.counts, totals.offsets, experts, spec)


@gluon.jit(do_not_specialize=["rest_first", "rest_parts", "rest_steps"])
def router_kernel(
    x_desc, y_desc, num_tokens, hidden, alpha, routed_scale, k, logit_bias, expert_bias, token_ids, hash_table,
    vocabulary, weights, ids, logits, dense, histogram, counts, offsets, counter, sums, counters,
    rest_first, rest_parts, rest_steps, tiling: gl.constexpr, spec: gl.constexpr,
):  # fmt: skip
    """Set up the stages, then start the consumer, and the producer if stages are filled more than once.

    rest_*: the Rest of a launch that only multiplies, None where no tile is cut.
    """
    stages = Stages.create(x_desc, y_desc, tiling)
    fence_async_shared()
    problem = Problem(num_tokens, hidden, Rest(rest_first, rest_parts, rest_steps), tiling, spec)
    tables = Tables(logit_bias, expert_bias, token_ids, hash_table, vocabulary)
    outputs = Outputs(weights, ids, logits, dense, histogram)
    routing = Args(Scalars(alpha, routed_scale, k), tables, outputs)
    consumer_args = ConsumerArgs(stages, problem, routing, Exchange(sums, counters), Counts(counts, offsets, counter))
    producer_args = ProducerArgs(x_desc, y_desc, stages, problem, counters if tiling.apart else None)
    role_barrier()
    wait_for_grid()  # up to here this may overlap with the kernel before it
    let_next_start()
    load_first(producer_args)
    if tiling.single_fill:
        consumer(consumer_args)
        stages.ring.full._keep_alive()  # or the compiler reuses the barriers' memory while it is in use
    else:
        gl.warp_specialize([
            (consumer, (consumer_args,)),
            (producer, (producer_args,)),
        ], [1], [40])  # fmt: skip
