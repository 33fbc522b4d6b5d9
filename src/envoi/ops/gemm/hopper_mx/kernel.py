"""Hopper GEMM for MXFP4 and MXFP8 weights, widened to bf16 between shared memory and the tensor cores, in registers.

    role              warps    registers a thread        work
    consumer 0        4 or 8   all that remain           its features of each tile: mainloop, then epilogue
    consumer 1        4 or 8   `consumer_registers`      with two consumers
    weights_producer  1        40; 24 with 2 consumers   TMA loads of weights and their scale factors
    tokens_producer   1        40; 24 with 2 consumers   TMA loads of tokens

    for each tile of this CTA:         producers                       consumers
        for 512 of K (a span):         TMA scale factors
            for block_k of K:          TMA weights; TMA tokens         for 64 of K:
                                                                           weights -> bf16 registers, scaled
                                                                           acc += registers @ tokens.T
        acc -> epilogue -> outputs

E2M1 and E4M3 times a power of two are exact in bf16 (except below its smallest number), so that scale factors cost
nothing after the product and K is summed as in bf16. Weights are the M side of wgmma, as they are in memory. Their
loads don't wait for the tokens, which the kernel launched before this one widens: each operand has its own producer.
Hiding the widening takes many warps, but every consumer has its own copy of the loop and all share the instruction
caches: hence at most two consumers of 8 warps, and a short loop. `pipeline.py` has the barriers.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from envoi.ops.gemm.hopper.problem import Problem
from envoi.ops.gemm.hopper.run_epilogue import EpilogueArgs, EpilogueBuffers, RowReductions, run_epilogue
from envoi.ops.gemm.hopper.tile_scheduler import Tile, TileScheduler
from envoi.ops.gemm.hopper_mx.mainloop import accumulate, in_order
from envoi.ops.gemm.hopper_mx.pipeline import SPAN, MxPipeline
from envoi.runtime.aggregate import aggregate
from envoi.runtime.sync import wait_for_grid
from envoi.runtime.triton_compat import role_barrier, tma_load


@aggregate
class WeightsArgs:
    """Weights producer's TMA descriptors and stages. The weights of all experts are one matrix."""

    w_desc: tma.tensor_descriptor  # words of weights [rows, words of K] in boxes [block_x, words]
    sf_desc: tma.tensor_descriptor  # words of scale factors [rows, K / 128] in boxes [block_x, 4]
    pipeline: MxPipeline
    problem: Problem


@gluon.jit
def weights_producer(args):
    """Role: fill the stages with weights, and each span's first stage with its scale factors too.

    Waits on `empty` before each fill.
    """
    pipeline, problem, ring = args.pipeline, args.problem, args.pipeline.ring
    cfg: gl.constexpr = pipeline.cfg
    num_bytes: gl.constexpr = args.w_desc.block_type.nbytes
    words: gl.constexpr = args.w_desc.block_type.shape[1]
    steps_per_span: gl.constexpr = SPAN // cfg.block_k
    scheduler = TileScheduler.create(problem)
    step = 0
    for u in range(gl.program_id(0), scheduler.num_units, gl.num_programs(0)):
        unit = scheduler.unit(u, gl.cdiv(problem.K, SPAN))
        tile = scheduler.tile(unit.tile)
        row = tile.x + tile.expert * problem.N
        for span in range(unit.k_begin, unit.k_end):
            for part in gl.static_range(steps_per_span):
                stage = ring.stage(step)
                full = ring.full.index(stage)
                ring.wait_empty(step)
                if part == 0:
                    ring.expect(stage, num_bytes + args.sf_desc.block_type.nbytes)
                    sf_buf = pipeline.sf_bufs.index(step // steps_per_span % cfg.num_sf_spans)
                    tma_load(args.sf_desc, [row, span * (SPAN // 128)], full, sf_buf)
                else:
                    ring.expect(stage, num_bytes)
                k = span * steps_per_span + part
                tma_load(args.w_desc, [row, k * words], full, pipeline.w_bufs.index(stage))
                step += 1


@aggregate
class TokensArgs:
    """Tokens producer's TMA descriptor and stages."""

    x_desc: tma.tensor_descriptor  # bf16 tokens [M, K] in boxes [block_y, block_k]
    pipeline: MxPipeline
    problem: Problem


@gluon.jit
def tokens_producer(args):
    """Role: fill the stages with tokens, once the kernel launched before this one has widened them.

    Waits for that kernel, then on `empty` before each fill.
    """
    pipeline, problem, ring = args.pipeline, args.problem, args.pipeline.ring
    cfg: gl.constexpr = pipeline.cfg
    steps_per_span: gl.constexpr = SPAN // cfg.block_k
    scheduler = TileScheduler.create(problem)
    step = 0
    wait_for_grid()
    for u in range(gl.program_id(0), scheduler.num_units, gl.num_programs(0)):
        unit = scheduler.unit(u, gl.cdiv(problem.K, SPAN))
        tile = scheduler.tile(unit.tile)
        for k in range(steps_per_span * unit.k_begin, steps_per_span * unit.k_end):
            stage = ring.stage(step)
            full = ring.full.index(stage)
            ring.wait_empty(step)
            ring.expect(stage, args.x_desc.block_type.nbytes)
            at = [tile.y, k * cfg.block_k]
            tma_load(args.x_desc, at, full, pipeline.x_bufs.index(stage))
            step += 1


@aggregate
class ConsumerArgs:
    """Consumer's stages and epilogue."""

    pipeline: MxPipeline
    epilogue: EpilogueArgs


@gluon.jit
def consumer(args, role: gl.constexpr):
    """Role: multiply this consumer's features of every tile, in the scheduler's order, and run the epilogue on them."""
    problem = args.epilogue.problem
    cfg: gl.constexpr = problem.cfg
    scheduler = TileScheduler.create(problem)
    buffers = EpilogueBuffers.create(args.epilogue, cfg)
    step = 0
    for u in range(gl.program_id(0), scheduler.num_units, gl.num_programs(0)):
        unit = scheduler.unit(u, gl.cdiv(problem.K, SPAN))
        tile = scheduler.tile(unit.tile)
        acc, step = accumulate(args.pipeline, step, unit.k_end - unit.k_begin, role)
        tile = Tile(tile.x + role * cfg.rows_per_consumer, tile.y, tile.row_end, tile.expert)
        if tile.x < problem.N:
            run_epilogue((in_order(acc),), tile, 0, False, 0, buffers, args.epilogue)


# Kernels for other divisors of these numbers, which vary from call to call, would have the same machine code.
@gluon.jit(do_not_specialize=["M", "num_tiles"])
def mx_kernel(
    w_desc, sf_desc, x_desc, operands, outputs, offsets, row_parts, row_counters, M, N, K, num_experts, num_tiles,
    cfg: gl.constexpr, code: gl.constexpr, ROW_MODE: gl.constexpr, MAX_EXPERTS: gl.constexpr,
):  # fmt: skip
    """Set up the pipeline, then start one role for each partition of warps. Grid: (number of CTAs,).

    w_desc, sf_desc: fields of `WeightsArgs`; x_desc: of `TokensArgs`. The other arguments are fields of `Problem`,
    `EpilogueArgs` and `RowReductions`. They are flat because a launch takes no descriptor within a tuple.
    """
    pipeline = MxPipeline.create(w_desc, sf_desc, x_desc, cfg)
    fence_async_shared()
    role_barrier()
    problem = Problem(M, N, K, num_experts, num_tiles, offsets, ROW_MODE, MAX_EXPERTS, cfg)
    rows = RowReductions(row_parts, row_counters)
    descs = (None, None, None, None)  # the epilogue loads and stores without TMA
    epilogue = EpilogueArgs(descs, operands, outputs, rows, None, problem, code)
    weights_args = WeightsArgs(w_desc, sf_desc, pipeline, problem)
    tokens_args = TokensArgs(x_desc, pipeline, problem)
    consumer_args = ConsumerArgs(pipeline, epilogue)
    # Role numbers are literals within the list: a tuple of arguments that is bound to a name first turns its integers
    # into run-time values.
    if cfg.num_consumers == 1:
        gl.warp_specialize([
            (consumer, (consumer_args, 0)),
            (weights_producer, (weights_args,)),
            (tokens_producer, (tokens_args,)),
        ], [1, 1], [40, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (consumer_args, 0)),
            (consumer, (consumer_args, 1)),
            (weights_producer, (weights_args,)),
            (tokens_producer, (tokens_args,)),
        ], [cfg.num_warps, 1, 1], [cfg.consumer_registers, 24, 24])  # fmt: skip
