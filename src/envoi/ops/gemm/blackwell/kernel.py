"""Blackwell GEMM: persistent, TMA loads, warp-specialised tcgen05, any epilogue. Compiled, never run yet.

One CTA on each SM. `gemm_kernel` allocates stages and accumulators, starts the first loads and then splits its warps:

    role         warps    registers a thread       work
    epilogue     4 or 8   all that remain          loads accumulators from tensor memory, runs the epilogue
    producer     1        `role_registers`         TMA loads of both operands and their scale factors
    multiplier   1        `role_registers`         starts the products

    for each unit of work of this CTA:    producer              multiplier                 epilogue
        for k in its part of K:           TMA x, y -> stage     acc += x[stage] @ y[stage].T
        last k:                                                 acc is complete            wait for it
        the next unit:                    stages ahead          the other accumulator      acc, chunk by chunk ->
                                                                                           epilogue -> outputs; acc free

x are the tokens, 128 a tile, y the features. Scale factors, one for each 16 or 32 elements of K (`sf_group`), are
loaded by TMA into the stage; the multiplier copies them to tensor memory before the product. Units, their order and
split-K are those of `hopper.tile_scheduler`; `pipeline.py` has the barriers.

Scale factors are packed for the tensor cores: [rows, factors along K], a byte each, is cut into blocks of 128 rows and
4 factors. A block is 512 bytes; blocks along K are adjacent, then those of the next 128 rows. Partial blocks are padded
with 0. In a grouped GEMM each expert's rows start a new block.

    packed[r // 128, j // 4, (r % 32) * 16 + (r % 128) // 32 * 4 + j % 4] = sf[r, j]
"""

# Device code has no enumerate.
# ruff: noqa: SIM113

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.blackwell import (
    fence_async_shared,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma,
    tcgen05_mma_scaled,
    tma,
)

from envoi.ops.gemm.blackwell.pipeline import Accumulators, Inputs, Pipeline, StageFactors, create_pipeline, release
from envoi.ops.gemm.blackwell.run_epilogue import Products, apply_in_chunks, store_partial_sums
from envoi.ops.gemm.hopper.problem import Problem
from envoi.ops.gemm.hopper.run_epilogue import (
    ChunkArgs,
    EpilogueArgs,
    EpilogueBuffers,
    OutputTile,
    RowReductions,
    complete_rows,
    with_expert,
)
from envoi.ops.gemm.hopper.split_k import SplitK
from envoi.ops.gemm.hopper.tile_scheduler import TileScheduler
from envoi.runtime.aggregate import Scalar, aggregate
from envoi.runtime.sync import arrive
from envoi.runtime.triton_compat import role_barrier


@aggregate
class ProducerArgs:
    """Producer's TMA descriptors and stages. The weights of all experts are one matrix."""

    inputs: Inputs
    pipeline: Pipeline
    problem: Problem


@aggregate
class Source:
    """Operands of a unit: first rows in x and y, first blocks of 128 rows in their scale factors, its steps along K."""

    x: Scalar
    y: Scalar
    x_block: Scalar
    y_block: Scalar
    k_begin: Scalar
    k_end: Scalar


@gluon.jit
def producer(args):
    """Role: fill the stages with the operands of this CTA's units, in the scheduler's order.

    Waits on `empty` before each fill. The first `num_stages` steps of the first unit have been loaded by `prefill`.
    """
    cfg: gl.constexpr = args.problem.cfg
    scheduler = TileScheduler.create(args.problem)
    step = 0
    for u in range(gl.program_id(0), scheduler.num_units, gl.num_programs(0)):
        source = source_of(u, scheduler)
        k_begin = source.k_begin
        if u == gl.program_id(0):
            step = gl.minimum(source.k_end - source.k_begin, cfg.num_stages)
            k_begin += step
        for k in range(k_begin, source.k_end):
            args.pipeline.ring.wait_empty(step)
            args.pipeline.fill(args.inputs, args.pipeline.ring.stage(step), source, k)
            step += 1


@gluon.jit
def prefill(args):
    """Load the first steps of the CTA's first unit, as many as there are stages; called by all warps."""
    scheduler = TileScheduler.create(args.problem)
    source = source_of(gl.program_id(0), scheduler)
    if gl.program_id(0) < scheduler.num_units:
        for k in range(gl.minimum(source.k_end - source.k_begin, args.problem.cfg.num_stages)):
            args.pipeline.fill(args.inputs, k, source, source.k_begin + k)


@gluon.jit
def source_of(u, scheduler):
    """Return the operands of unit u."""
    problem = scheduler.problem
    unit = scheduler.unit(u, gl.cdiv(problem.K, problem.cfg.block_k))
    tile = scheduler.tile(unit.tile)
    x_block, y_block = 0, 0
    if problem.cfg.sf_group > 0:
        x_block, y_block = factor_blocks(unit.tile, tile, scheduler)
    y = tile.y + tile.expert * problem.N
    return Source(tile.x, y, x_block, y_block, unit.k_begin, gl.maximum(unit.k_begin, unit.k_end))


@gluon.jit
def factor_blocks(index, tile, scheduler):
    """Return the first blocks of 128 rows of a tile's scale factors. Each expert's start a new block."""
    x_block = tile.x // 128
    if scheduler.problem.row_mode.is_grouped:
        _expert, row, row_end, tiles_before = scheduler.experts.find(index)
        blocks_before = tiles_before // scheduler.num_feature_tiles
        x_block = blocks_before + (index - tiles_before) % gl.cdiv(row_end - row, 128)
    return x_block, tile.y // 128 + tile.expert * gl.cdiv(scheduler.problem.N, 128)


@aggregate
class MultiplierArgs:
    """Multiplier's stages, scale factors and accumulators."""

    pipeline: Pipeline
    accumulators: Accumulators
    factors: StageFactors
    problem: Problem


@gluon.jit
def multiplier(args):
    """Role: start the products of each unit as its stages fill; tcgen05 commits arrive on both rings.

    Waits on `empty` of the unit's accumulator and on `full` of each stage.
    """
    pipeline, accumulators, problem = args.pipeline, args.accumulators, args.problem
    cfg: gl.constexpr = problem.cfg
    scheduler = TileScheduler.create(problem)
    num_k_steps = gl.cdiv(problem.K, cfg.block_k)
    step = 0
    count = 0
    for u in range(gl.program_id(0), scheduler.num_units, gl.num_programs(0)):
        unit = scheduler.unit(u, num_k_steps)
        turn = accumulators.ring.stage(count)
        accumulators.ring.wait_empty(count)
        for k in range(unit.k_begin, unit.k_end):
            stage = pipeline.ring.stage(step)
            pipeline.ring.wait_full(step)
            start_product(pipeline, stage, accumulators.bufs.index(turn), args.factors, k > unit.k_begin)
            tcgen05_commit(pipeline.ring.empty.index(stage))
            step += 1
        tcgen05_commit(accumulators.ring.full.index(turn))
        count += 1


@gluon.jit
def start_product(pipeline, stage, acc, factors, use_acc):
    """Start acc += x @ y.T of a stage. Copies to tensor memory and products run in the order in which they start."""
    x = pipeline.x_bufs.index(stage)
    y = pipeline.y_bufs.index(stage).permute((1, 0))
    if pipeline.cfg.sf_group > 0:
        tcgen05_copy(unpacked(pipeline.x_sf_bufs.index(stage)), factors.x)
        tcgen05_copy(unpacked(pipeline.y_sf_bufs.index(stage)), factors.y)
        x_kind: gl.constexpr = "e2m1" if x.dtype == gl.uint8 else "e4m3"
        y_kind: gl.constexpr = "e2m1" if y.dtype == gl.uint8 else "e4m3"
        tcgen05_mma_scaled(x, y, acc, factors.x, factors.y, x_kind, y_kind, use_acc=use_acc)
    else:
        tcgen05_mma(x, y, acc, use_acc=use_acc)


@gluon.jit
def unpacked(packed):
    """View packed scale factors in shared memory as [rows, factors along K]."""
    blocks: gl.constexpr = packed.shape[1]
    steps: gl.constexpr = packed.shape[2]
    cut = packed.reshape((blocks, steps, 32, 4, 4)).permute((0, 3, 2, 1, 4))
    return cut.reshape((blocks * 128, steps * 4))


@gluon.jit
def epilogue(accumulators, args):
    """Role: run the epilogue on every unit's accumulator, in the scheduler's order. args: `EpilogueArgs`.

    For a split tile, store the partial sums; the last CTA to arrive runs the epilogue on the sum of all parts.
    """
    problem = args.problem
    cfg: gl.constexpr = problem.cfg
    code: gl.constexpr = args.code
    scheduler = TileScheduler.create(problem)
    num_k_steps = gl.cdiv(problem.K, cfg.block_k)
    buffers = EpilogueBuffers.create(args, cfg)
    tiles_done = 0
    count = 0
    for u in range(gl.program_id(0), scheduler.num_units, gl.num_programs(0)):
        unit = scheduler.unit(u, num_k_steps)
        tile = scheduler.tile(unit.tile)
        if cfg.split_k == 1:
            code.fetch_operands(args.descs, buffers.loads, buffers.loaded, tile.x, tile.y, cfg)
        accumulators.ring.wait_full(count)
        turn = accumulators.ring.stage(count)
        acc = accumulators.bufs.index(turn)
        is_complete = num_k_steps >= 0  # true, as a run-time value that a branch may replace
        is_empty = unit.k_begin >= unit.k_end
        share = unit.tile - problem.num_whole_tiles
        first_slot = share * cfg.split_k
        if cfg.split_k > 1:
            if unit.is_split:
                store_partial_sums(acc, is_empty, args.split_k, first_slot + unit.split, cfg)
                release(accumulators.ring.empty.index(turn), True)
                is_complete = arrive(args.split_k.counters + share, cfg.split_k)
        if is_complete:
            if cfg.split_k > 1:
                code.fetch_operands(args.descs, buffers.loads, buffers.loaded, tile.x, tile.y, cfg)
            own = args
            if problem.row_mode.is_grouped:
                own = with_expert(args, gl.maximum(gl.minimum(tile.expert, problem.num_experts - 1), 0))
            products = Products(acc, accumulators.ring.empty.index(turn), is_empty)
            out = OutputTile(tile.x, tile.y, tile.row_end, first_slot, unit.is_split)
            partials = apply_in_chunks(products, out, ChunkArgs(own, buffers, tiles_done), 0, cfg.block_y)
            tiles_done += 1
            complete_rows(partials, out, args, cfg.block_y)
        count += 1
    if code.num_descs > 0:
        tma.store_wait(pendings=0)


@gluon.jit
def gemm_kernel(
    x_desc, y_desc, x_sf_desc, y_sf_desc, desc0, desc1, desc2, desc3, operands, outputs, offsets, sums, counters,
    row_parts, row_counters, M, N, K, num_experts, num_whole_tiles,
    cfg: gl.constexpr, code: gl.constexpr, ROW_MODE: gl.constexpr, MAX_EXPERTS: gl.constexpr,
):  # fmt: skip
    """Set up stages and accumulators, then start one role for each partition of warps. Grid: (number of CTAs,).

    x_desc .. y_sf_desc: fields of `Inputs`. desc0, desc1: of outputs; desc2, desc3: of epilogue operands; None where
    there is none. The other arguments are fields of `Problem`, `EpilogueArgs`, `SplitK` and `RowReductions`. They are
    flat because a launch takes no descriptor within a tuple.
    """
    inputs = Inputs(x_desc, y_desc, x_sf_desc, y_sf_desc)
    pipeline, factors, accumulators = create_pipeline(inputs, cfg)
    fence_async_shared()
    problem = Problem(M, N, K, num_experts, num_whole_tiles, offsets, ROW_MODE, MAX_EXPERTS, cfg)
    descs = (desc0, desc1, desc2, desc3)
    rows = RowReductions(row_parts, row_counters)
    epilogue_args = EpilogueArgs(descs, operands, outputs, rows, SplitK(sums, counters), problem, code)
    role_barrier()
    producer_args = ProducerArgs(inputs, pipeline, problem)
    prefill(producer_args)
    multiplier_args = MultiplierArgs(pipeline, accumulators, factors, problem)
    gl.warp_specialize([
        (epilogue, (accumulators, epilogue_args)),
        (producer, (producer_args,)),
        (multiplier, (multiplier_args,)),
    ], [1, 1], [cfg.role_registers, cfg.role_registers])  # fmt: skip
