"""Experts in one launch: pull, L1 and L2 over one ring of stages. See the package."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from envoi.gemm.hopper.consumer import ConsumerArgs, arrive_on, multiply_told_tiles, multiply_units
from envoi.gemm.hopper.mainloop import SCALE_BLOCK, BlockScales
from envoi.gemm.hopper.pipeline import Pipeline
from envoi.gemm.hopper.producer import PRODUCER, ProducerArgs, load_unit, weights_tile
from envoi.gemm.hopper.run_epilogue import EpilogueArgs, RowReductions
from envoi.gemm.hopper.tile_scheduler import Problem, TileScheduler
from envoi.moe.parallel.fused import config
from envoi.moe.parallel.fused.progress import EARLY, ENDED, PULLED, leave, tell, wait_for_all
from envoi.moe.parallel.fused.pull import PullArgs, pull
from envoi.moe.parallel.fused.scheduler import early_rows, take_tile
from envoi.runtime.aggregate import aggregate
from envoi.runtime.timeline_device import note_begin, note_moment
from envoi.runtime.triton_compat import reinterpret, role_barrier

CONSUMERS = gl.constexpr(2)
CONSUMER_REGISTERS = gl.constexpr(config.CONSUMER_REGISTERS)
PRODUCER_REGISTERS = gl.constexpr(config.PRODUCER_REGISTERS)
SECOND = gl.constexpr(PRODUCER.value + 1)  # track of the first consumer in L2, whose producer is the next but one
PULL = gl.constexpr(SECOND.value + PRODUCER.value + 1)  # and in the pull


@aggregate
class FusedProducerArgs:
    """Producer's arguments of both GEMMs, and the counters that it waits for."""

    first: ProducerArgs
    second: ProducerArgs
    progress: gl.tensor  # pointer to int32 [NUM_COUNTERS]


@aggregate
class FusedConsumerArgs:
    """Consumer's arguments of the pull and of both GEMMs."""

    pull: PullArgs
    first: ConsumerArgs
    second: ConsumerArgs
    pulled: gl.shared_memory_descriptor  # mbarrier [1, 1]: both consumers arrive, the teller waits
    progress: gl.tensor


@aggregate
class TellerArgs:
    """Barriers that the teller waits for, and the counters that it adds to."""

    pulled: gl.shared_memory_descriptor
    written: gl.shared_memory_descriptor
    progress: gl.tensor


@gluon.jit
def consumer(args, role: gl.constexpr):
    """Role: pull a share of the tokens, then multiply this consumer's share of L1's units and of L2's tiles."""
    trace = args.first.trace
    note_begin(trace, PULL + role, 0, 0)
    pull(args.pull, role, CONSUMERS)
    note_moment(trace, PULL + role, 0, 1)
    arrive_on(args.pulled.index(0))
    problem = args.first.epilogue.problem
    cfg: gl.constexpr = problem.cfg
    scheduler = TileScheduler.create(problem)
    wait_for_all(args.progress + PULLED)
    note_moment(trace, PULL + role, 0, 2)
    if role < cfg.num_consumers:
        step = multiply_units(args.first, scheduler, gl.to_tensor(0), role, role)
    else:
        step = scheduler.num_units * gl.cdiv(problem.K, cfg.block_k)
        for i in gl.static_range(2):  # so that no CTA leaves, and resets `progress`, while this role still waits
            arrive_on(args.first.written.index(i))
    multiply_told_tiles(args.second, TileScheduler.create(args.second.epilogue.problem), step, role, SECOND + role)


@gluon.jit
def producer(args):
    """Role: fill the stages with the operands of L1's units, then of L2's tiles, once their rows are there."""
    first, second = args.first, args.second
    cfg: gl.constexpr = second.problem.cfg
    ahead = TileScheduler.create(first.problem)
    num_k_steps = gl.cdiv(first.problem.K, first.problem.cfg.block_k)
    wait_for_all(args.progress + PULLED)
    step = gl.to_tensor(0)
    for u in range(ahead.num_units):
        unit = ahead.unit(u, num_k_steps)
        note_begin(first.trace, PRODUCER, u, unit.tile)
        note_moment(first.trace, PRODUCER, u, 1)
        step = load_unit(first, step, 0, num_k_steps, weights_tile(ahead.tile(unit.tile), first), False)
        note_moment(first.trace, PRODUCER, u, 2)
    scheduler = TileScheduler.create(second.problem)
    early = early_rows(ahead, scheduler)
    num_k_steps = gl.cdiv(second.problem.K, cfg.block_k)
    wait_for_all(args.progress + EARLY)
    knows_all = False
    count = gl.to_tensor(0)
    index = take_tile(args.progress)
    while index < scheduler.num_units:
        tile = weights_tile(scheduler.tile(index), second)
        note_begin(second.trace, SECOND + PRODUCER, count, index)
        if tile.row_end > early:
            if not knows_all:
                wait_for_all(args.progress + ENDED)
                knows_all = True
        note_moment(second.trace, SECOND + PRODUCER, count, 1)
        second.pipeline.wait_empty(step)  # first: the ring of `told` mustn't be passed twice before it is read
        second.pipeline.tell_tile(count, index)
        step = load_unit(second, step, 0, num_k_steps, tile, False)
        index = take_tile(args.progress)  # now: that takes a microsecond, and consumers have stages left
        note_moment(second.trace, SECOND + PRODUCER, count, 2)
        count += 1
    for i in gl.static_range(CONSUMERS // cfg.consumers_per_tile):
        second.pipeline.wait_empty(step + i)
        second.pipeline.tell_tile(count + i, -1)
    if not knows_all:
        wait_for_all(args.progress + ENDED)
    leave(args.progress)


@gluon.jit
def teller(args):
    """Role: tell the other CTAs what this one's consumers have written. One warp.

    The fence of an addition takes microseconds while memory is busy; consumers would multiply nothing meanwhile.
    """
    mbarrier.wait(args.pulled.index(0), 0)
    tell(args.progress + PULLED)
    mbarrier.wait(args.written.index(0), 0)
    tell(args.progress + EARLY)
    mbarrier.wait(args.written.index(1), 0)
    tell(args.progress + ENDED)


@gluon.jit
def second_pipeline(pipeline, x_desc, y_desc, takes_halves: gl.constexpr, cfg: gl.constexpr):
    """Return the same stages and barriers for L2's boxes. The caller fences before any role uses them."""
    x_bufs = pipeline.x_bufs
    y_shape: gl.constexpr = [cfg.num_stages * cfg.y_boxes_per_stage, cfg.main_y, cfg.block_k]
    y_bufs = reinterpret(x_bufs if cfg.wide_tail_tiles else pipeline.y_bufs, y_desc.dtype, y_shape, y_desc.layout)
    if cfg.pingpong:
        turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
            mbarrier.init(turn.index(i), count=1)
    else:
        turn: gl.constexpr = None
    told = gl.allocate_shared_memory(gl.int64, [cfg.num_stages, 1], mbarrier.MBarrierLayout())
    num_stages: gl.constexpr = cfg.num_stages
    for i in gl.static_range(num_stages):
        mbarrier.init(told.index(i), count=1)
    tiles = gl.allocate_shared_memory(gl.int32, [num_stages, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Pipeline(x_bufs, y_bufs, pipeline.empty, pipeline.full, None, turn, told, tiles, takes_halves, cfg)


@gluon.jit(do_not_specialize=["rank", "first_expert"])
def fused_kernel(
    x_desc, gate_up_desc, operands1, outputs1, x_sf, gate_up_sf,
    hidden_desc, down_desc, out_desc, operands2, outputs2, hidden_sf, down_sf,
    offsets, row_parts, row_counters, progress, M, N1, K1, N2, K2, num_experts,
    to, regions, rank, first_expert,
    cfg1: gl.constexpr, code1: gl.constexpr, cfg2: gl.constexpr, code2: gl.constexpr, ROW_MODE: gl.constexpr,
    MAX_EXPERTS: gl.constexpr, pulled: gl.constexpr, trace,
):  # fmt: skip
    """Set up the pipeline, then start one role for each partition of warps. Grid: (number of CTAs,), cooperative.

    Arguments with a number are those of `gemm_kernel` for L1 and L2. progress: see `progress`. to, regions, rank,
    first_expert: of the pull, see `PullArgs`. pulled: PullConfig. trace: see `runtime.timeline_device`.
    """
    pipeline = Pipeline.create(x_desc, gate_up_desc, None, code1.takes_halves, cfg1)
    next_pipeline = second_pipeline(pipeline, hidden_desc, down_desc, code2.takes_halves, cfg2)
    pulled_barrier = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(pulled_barrier.index(0), count=CONSUMERS)
    written = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(written.index(i), count=CONSUMERS)
    fence_async_shared()
    first = Problem(M, N1, K1, num_experts, 0, offsets, ROW_MODE, MAX_EXPERTS, cfg1)
    second = Problem(M, N2, K2, num_experts, 0, offsets, ROW_MODE, MAX_EXPERTS, cfg2)
    scales1 = BlockScales(x_sf, gate_up_sf, gl.cdiv(K1, SCALE_BLOCK), gl.cdiv(N1, SCALE_BLOCK))
    scales2 = BlockScales(hidden_sf, down_sf, gl.cdiv(K2, SCALE_BLOCK), gl.cdiv(N2, SCALE_BLOCK))
    sums = RowReductions(row_parts, row_counters)
    epilogue1 = EpilogueArgs((None, None, None, None), operands1, outputs1, sums, None, first, code1)
    epilogue2 = EpilogueArgs((out_desc, None, None, None), operands2, outputs2, sums, None, second, code2)
    role_barrier()
    consumer1 = ConsumerArgs(pipeline, epilogue1, scales1, True, False, written, trace)
    consumer2 = ConsumerArgs(next_pipeline, epilogue2, scales2, True, False, None, trace)
    pull_args = PullArgs(to, regions, rank, first_expert, pulled)
    consumer_args = FusedConsumerArgs(pull_args, consumer1, consumer2, pulled_barrier, progress)
    producer1 = ProducerArgs(x_desc, gate_up_desc, None, pipeline, first, trace)
    producer2 = ProducerArgs(hidden_desc, down_desc, None, next_pipeline, second, trace)
    producer_args = FusedProducerArgs(producer1, producer2, progress)
    # Role numbers are literals within the list, see `gemm_kernel`.
    gl.warp_specialize([
        (consumer, (consumer_args, 0)),
        (consumer, (consumer_args, 1)),
        (producer, (producer_args,)),
        (teller, (TellerArgs(pulled_barrier, written, progress),)),
    ], [cfg1.num_warps, 1, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
