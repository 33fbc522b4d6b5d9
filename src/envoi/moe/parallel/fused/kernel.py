"""L1 of the experts and the pull of its rows, in one launch: `gemm.hopper.kernel` with movers. See the package."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from envoi.gemm.hopper.consumer import ConsumerArgs, consumer
from envoi.gemm.hopper.mainloop import SCALE_BLOCK, BlockScales
from envoi.gemm.hopper.pipeline import Pipeline
from envoi.gemm.hopper.producer import ProducerArgs
from envoi.gemm.hopper.run_epilogue import EpilogueArgs, RowReductions
from envoi.gemm.hopper.split_k import SplitK
from envoi.gemm.hopper.tile_scheduler import Problem
from envoi.moe.parallel.fused.mover import MoverArgs, mover
from envoi.moe.parallel.fused.producer import Arrivals, FusedProducerArgs, prefill_weights, producer
from envoi.runtime.triton_compat import MORE_REGISTERS, role_barrier

REGISTERS = 504  # of a thread of both consumers and one of the producer's and the movers' warpgroup


@gluon.constexpr_function
def registers_of_consumer(registers):
    """Return the registers of a consumer's thread beside producer and movers with so many."""
    return (REGISTERS - registers) // 2 // 8 * 8


@gluon.jit(do_not_specialize=["token_bits", "rank", "timeout_us"])
def fused_l1_kernel(
    x_desc, y_desc, desc0, desc1, desc2, desc3, operands, outputs, offsets, sums, counters, row_parts, row_counters,
    a_sf, b_sf, M, N, K, num_experts, num_whole_tiles,
    row_map, regions, state, report, token_bits, rank, timeout_us,
    cfg: gl.constexpr, code: gl.constexpr, ROW_MODE: gl.constexpr, MAX_EXPERTS: gl.constexpr, moving: gl.constexpr,
    trace,
):  # fmt: skip
    """Set up the pipeline, then start one role for each partition of warps. Grid: (number of CTAs,).

    The arguments up to num_whole_tiles are those of `gemm_kernel`, of a GEMM with scales along K and rows by expert.
    row_map: RowMap. regions: `symmetric_memory.Regions`. state, report: of the call. moving: MoverConfig.
    trace: see `runtime.timeline_device`.
    """
    pipeline = Pipeline.create(x_desc, y_desc, None, code.takes_halves, cfg, True)
    fence_async_shared()
    problem = Problem(M, N, K, num_experts, num_whole_tiles, offsets, ROW_MODE, MAX_EXPERTS, cfg)
    scales = BlockScales(a_sf, b_sf, gl.cdiv(K, SCALE_BLOCK), gl.cdiv(N, SCALE_BLOCK))
    rows = RowReductions(row_parts, row_counters)
    descs = (desc0, desc1, desc2, desc3)
    epilogue = EpilogueArgs(descs, operands, outputs, rows, SplitK(sums, counters), problem, code)
    role_barrier()
    gemm = ProducerArgs(x_desc, y_desc, None, pipeline, problem, trace)
    prefill_weights(gemm)
    num_rows = offsets + num_experts
    arrivals = Arrivals(row_map.arrivals, num_rows, state, report, rank, timeout_us)
    producer_args = FusedProducerArgs(gemm, arrivals)
    consumer_args = ConsumerArgs(pipeline, epilogue, scales, True, True, not MORE_REGISTERS, trace)
    mover_args = MoverArgs(row_map, num_rows, regions.tokens, regions.token_sf, token_bits, moving, trace)
    few: gl.constexpr = moving.registers
    many: gl.constexpr = registers_of_consumer(few)
    # Role numbers are literals within the list, see `gemm_kernel`.
    if cfg.num_consumers == 1:
        gl.warp_specialize([
            (consumer, (consumer_args, 0)),
            (producer, (producer_args,)),
            (mover, (mover_args, 0)),
            (mover, (mover_args, 1)),
            (mover, (mover_args, 2)),
        ], [1, 1, 1, 1], [few, few, few, few])  # fmt: skip
    elif moving.num_movers == 2:
        gl.warp_specialize([
            (consumer, (consumer_args, 0)),
            (consumer, (consumer_args, 1)),
            (producer, (producer_args,)),
            (mover, (mover_args, 0)),
            (mover, (mover_args, 1)),
        ], [cfg.num_warps, 1, 1, 1], [many, few, few, few])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (consumer_args, 0)),
            (consumer, (consumer_args, 1)),
            (producer, (producer_args,)),
            (mover, (mover_args, 0)),
            (mover, (mover_args, 1)),
            (mover, (mover_args, 2)),
        ], [cfg.num_warps, 1, 1, 1, 1], [many, few, few, few, few])  # fmt: skip
