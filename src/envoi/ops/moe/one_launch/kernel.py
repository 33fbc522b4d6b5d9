"""Experts in one launch: L1 and L2 over one ring of stages. See the package."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from envoi.ops.gemm.hopper.consumer import ConsumerArgs, PublishedTiles, consume
from envoi.ops.gemm.hopper.mainloop import SCALE_BLOCK, BlockScales
from envoi.ops.gemm.hopper.pipeline import TILE_WORDS, Pipeline, Written, get_word, put_word
from envoi.ops.gemm.hopper.problem import Problem
from envoi.ops.gemm.hopper.producer import PRODUCER, ProducerArgs, load_unit, weights_tile
from envoi.ops.gemm.hopper.run_epilogue import EpilogueArgs, RowReductions
from envoi.ops.gemm.hopper.tile_scheduler import TileScheduler
from envoi.ops.gemm.hopper.y_boxes import OneWidth
from envoi.ops.moe.one_launch import config
from envoi.runtime.aggregate import Scalar, aggregate
from envoi.runtime.ring import Ring, new_barriers
from envoi.runtime.timeline_device import note_begin, note_moment
from envoi.runtime.triton_compat import reinterpret, role_barrier

# The first counter, number 0, is unused.
LEFT = gl.constexpr(1)
TAKEN = gl.constexpr(2)  # units of L1
TAKEN_IN_L2 = gl.constexpr(3)  # tiles
WRITTEN = gl.constexpr(config.OTHER_COUNTERS)  # the first of the counters of written units
LANES = gl.constexpr(config.LANES)
NUM_COUNTERS = gl.constexpr(config.NUM_COUNTERS)
CONSUMERS = gl.constexpr(2)
UNIT_RING = gl.constexpr(16)  # units; at most 10 are unread: 4 by stages, 5 by `Written`, the next


@gluon.jit
def take(counter):
    """Take the next unit, or tile, for this CTA; past the last one if there is none."""
    return gl.atomic_add(counter, 1, sem="relaxed", scope="gpu")


@gluon.jit
def units_until(place, first, second):
    """Return how many units of L1 are taken up to the last one of the expert that a tile of L2 belongs to.

    place: of the tile among L2's. first, second: MixedTiles of L1 and L2. No load: both are in its registers.
    """
    return first.places_until(second.search(second.tile_at(place)))


@gluon.jit
def scheduler_of_next(first, problem):
    """Return L2's TileScheduler: its tiles have the rows of L1's, whose TileScheduler is `first`."""
    num_feature_tiles = gl.cdiv(problem.N, problem.cfg.block_n)
    experts = first.experts.of_next(problem, num_feature_tiles)
    return TileScheduler(problem, first.num_token_tiles, num_feature_tiles, experts.num_tiles(), experts)


@gluon.jit
def signal(counter):
    """Add 1 to a counter (release): a role that acquires it sees what this one has seen."""
    role_barrier()
    gl.atomic_add(counter, 1, sem="release", scope="gpu")


@gluon.jit
def signal_unit(progress, unit, shift):
    """Count a unit of L1 as written. shift: log2 of the units that a counter counts."""
    signal(progress + WRITTEN + (unit >> shift))


@gluon.jit
def wait_for_units(progress, known, end, num_units, shift):
    """Wait until units [0, end) are written, of which the first `known` are; return how many are known to be then.

    All units must have been taken: those of the last counter are waited for too, up to 2**shift - 1 after `end`. A look
    loads a counter a lane, 1024 units or more. A call ends with an acquire, which costs two microseconds and the SM's
    L1 cache: while L1 ends that is one for each expert, afterwards one or two for all.
    """
    while known < end:
        counter = (known >> shift) + lanes()
        wanted = gl.minimum(num_units - (counter << shift), 1 << shift)
        is_short = load_of_lanes(progress + WRITTEN + counter) < wanted
        num_complete = gl.min(gl.where(is_short, lanes(), LANES), 0)
        known = gl.minimum(((known >> shift) + num_complete) << shift, num_units)
    acquire()
    return known


@gluon.jit
def lanes():
    """Return the numbers of a warp's lanes."""
    return gl.arange(0, LANES, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))


@gluon.jit
def load_of_lanes(counters):
    """Load an int32 a lane, relaxed. Not acquired, which would empty the L1 cache each time."""
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.s32 $0, [$1];", "=r,l", [counters.to(gl.int64)], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def acquire():
    """Acquire at GPU scope what any lane's relaxed loads have seen, and order it before this role's TMA loads."""
    gl.inline_asm_elementwise("fence.acq_rel.gpu; // $0", "=r", [], gl.int32, is_pure=False, pack=1)
    role_barrier()
    gl.inline_asm_elementwise("fence.proxy.async; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def leave(progress):
    """Count this producer, which waits for nothing any more; the last one resets the counters."""
    role_barrier()
    if gl.atomic_add(progress + LEFT, 1, sem="acq_rel", scope="gpu") == gl.num_programs(0) - 1:
        for first in range(0, NUM_COUNTERS, LANES):
            gl.store(progress + first + lanes(), 0, mask=first + lanes() < NUM_COUNTERS)


@aggregate
class Handover:
    """Memory and barriers through which roles of a CTA exchange words besides tiles."""

    ended: gl.shared_memory_descriptor  # mbarrier [1, 1]: the producer arrives after all tiles of L1
    counts: gl.shared_memory_descriptor  # int32 [2, 1]: how many tiles of L1 the producer published, and their steps
    # int32 [UNIT_RING, 1]: units of this CTA, from the producer to the signaler, then -1.
    units: gl.shared_memory_descriptor

    @staticmethod
    @gluon.jit
    def create():
        """Allocate memory and barriers, initialise these. The caller fences before any role uses them.

        Only barriers that are used: the compiler gives the memory of others away, and the hardware writes their state
        there, also microseconds later (it did, to the first eight bytes of L1's pairs of tiles). `ended` counts as
        used: the producer arrives on it in every tiling.
        """
        word: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        ended = new_barriers(1, 1)
        counts = gl.allocate_shared_memory(gl.int32, [2, 1], word)
        return Handover(ended, counts, gl.allocate_shared_memory(gl.int32, [UNIT_RING, 1], word))

    @gluon.jit
    def signal_unit(self, n, unit):
        """Producer: publish which unit is the CTA's n-th, before the unit's tiles; -1 after the last one."""
        put_word(self.units, n % UNIT_RING, unit)

    @gluon.jit
    def unit(self, n):
        """Teller: return the CTA's n-th unit, after it has been written."""
        return get_word(self.units, n % UNIT_RING)

    @gluon.jit
    def end_first(self, count, step):
        """Producer: publish the number of L1's tiles, with the one that ends them, and the steps they took."""
        put_word(self.counts, 0, count)
        put_word(self.counts, 1, step)
        role_barrier()
        mbarrier.arrive(self.ended.index(0), count=1)

    @gluon.jit
    def first_ended(self):
        """Consumer that has no part in L1: wait for its end, return (steps, published tiles)."""
        mbarrier.wait(self.ended.index(0), 0)
        return get_word(self.counts, 1), get_word(self.counts, 0)


CONSUMER_REGISTERS = gl.constexpr(config.CONSUMER_REGISTERS)
PRODUCER_REGISTERS = gl.constexpr(config.PRODUCER_REGISTERS)
SECOND = gl.constexpr(PRODUCER.value + 1)  # track of the first consumer in L2, whose producer is the next but one


@aggregate
class FusedProducerArgs:
    """Producer's arguments of both GEMMs, and the counters that it waits for."""

    first: ProducerArgs
    second: ProducerArgs
    handover: Handover
    progress: gl.tensor  # pointer to int32 [NUM_COUNTERS]
    unit_shift: Scalar  # log2 of the units of L1 that a counter counts


@aggregate
class FusedConsumerArgs:
    """Consumer's arguments of both GEMMs."""

    first: ConsumerArgs
    second: ConsumerArgs
    handover: Handover


@aggregate
class SignalerArgs:
    """Units that the signaler waits for, and the counters that it adds to."""

    written: Written
    handover: Handover
    progress: gl.tensor
    unit_shift: Scalar


@gluon.jit
def consumer(args, role: gl.constexpr):
    """Role: multiply this consumer's share of L1's units, then of L2's tiles."""
    if role < args.first.epilogue.problem.cfg.num_consumers:
        step, count = consume(args.first, PublishedTiles(args.first.pipeline), 0, 0, role, role)
    else:
        step, count = args.handover.first_ended()
    consume(args.second, PublishedTiles(args.second.pipeline), step, count, role, SECOND + role)


@gluon.jit
def producer(args):
    """Role: fill the stages with the operands of L1's units, then of L2's tiles, once their rows are there."""
    first, second, progress, handover = args.first, args.second, args.progress, args.handover
    cfg: gl.constexpr = second.problem.cfg
    ahead = TileScheduler.create(first.problem)
    num_units = ahead.experts.num_tiles()
    num_k_steps = gl.cdiv(first.problem.K, first.problem.cfg.block_k)
    step = gl.to_tensor(0)
    count = gl.to_tensor(0)  # of published tiles
    unit = take(progress + TAKEN)
    while unit < num_units:
        handover.signal_unit(count // 2, unit)
        for half in range(2):
            index = 2 * unit + half
            note_begin(first.trace, PRODUCER, count, index)
            tile = ahead.tile(index)
            note_moment(first.trace, PRODUCER, count, 1)
            first.pipeline.ring.wait_empty(step)  # first: the slot of `tiles` must have been read
            first.pipeline.publish_tile(count, index, tile)
            step = load_unit(first, step, 0, num_k_steps, weights_tile(tile, first), False)
            note_moment(first.trace, PRODUCER, count, 2)
            count += 1
        unit = take(progress + TAKEN)  # now: that takes a microsecond, and consumers have stages left
    handover.signal_unit(count // 2, -1)
    first.pipeline.ring.wait_empty(step)
    first.pipeline.publish_end(count)
    count += 1
    handover.end_first(count, step)
    scheduler = scheduler_of_next(ahead, second.problem)
    num_k_steps = gl.cdiv(second.problem.K, cfg.block_k)
    known = gl.to_tensor(0)  # units of L1 that are known to be written
    event = gl.to_tensor(0)
    index = take(progress + TAKEN_IN_L2)
    while index < scheduler.num_units:
        tile = scheduler.tile(index)
        note_begin(second.trace, SECOND + PRODUCER, event, index)
        end = units_until(index, ahead.experts, scheduler.experts)
        if known < end:
            known = wait_for_units(progress, known, end, num_units, args.unit_shift)
        note_moment(second.trace, SECOND + PRODUCER, event, 1)
        second.pipeline.ring.wait_empty(step)
        second.pipeline.publish_tile(count, index, tile)
        step = load_unit(second, step, 0, num_k_steps, weights_tile(tile, second), False)
        index = take(progress + TAKEN_IN_L2)
        note_moment(second.trace, SECOND + PRODUCER, event, 2)
        count += 1
        event += 1
    for i in gl.static_range(CONSUMERS // cfg.consumers_per_tile):
        second.pipeline.ring.wait_empty(step + i)
        second.pipeline.publish_end(count + i)
    leave(progress)


@gluon.jit
def signaler(args):
    """Role: signal units that this CTA's consumers have written to other CTAs, by a release add. One warp.

    The fence of an addition takes microseconds while memory is busy; consumers would multiply nothing meanwhile.
    """
    n = gl.to_tensor(0)
    args.written.wait(n)
    unit = args.handover.unit(n)
    while unit >= 0:
        signal_unit(args.progress, unit, args.unit_shift)
        n += 1
        args.written.wait(n)
        unit = args.handover.unit(n)


@gluon.jit
def told_pipelines(first, y_desc, takes_halves: gl.constexpr, cfg: gl.constexpr):
    """Return L1's pipeline, and L2's over the same stages, with the ring of tiles. The caller fences before use."""
    num_stages: gl.constexpr = cfg.num_stages
    ring: gl.constexpr = cfg.num_stages + 1  # see `Pipeline.wait_for_tile`
    tiles = Ring(new_barriers(ring, 1), None, ring)
    tile_words = gl.allocate_shared_memory(gl.int32, [ring * TILE_WORDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    x_bufs = first.x_bufs
    y_shape: gl.constexpr = [num_stages * cfg.y_boxes_per_stage, cfg.main_y, cfg.block_k]
    y_bufs = reinterpret(x_bufs if cfg.wide_tail_tiles else first.y.bufs, y_desc.dtype, y_shape, y_desc.layout)
    if cfg.pingpong:
        turn = new_barriers(2, 1)
    else:
        turn: gl.constexpr = None
    one = Pipeline(x_bufs, first.y, first.ring, None, tiles, tile_words, first.takes_halves, first.cfg)
    y = OneWidth(y_bufs, takes_halves, cfg)
    two = Pipeline(x_bufs, y, first.ring, turn, tiles, tile_words, takes_halves, cfg)
    return one, two


@gluon.jit(do_not_specialize=["unit_shift", "M"])
def fused_kernel(
    x_desc, gate_up_desc, operands1, outputs1, x_sf, gate_up_sf,
    hidden_desc, down_desc, out_desc, operands2, outputs2, hidden_sf, down_sf, x_rest_desc, hidden_rest_desc,
    offsets, row_parts, row_counters, progress, unit_shift, M, N1, K1, N2, K2, num_experts,
    cfg1: gl.constexpr, code1: gl.constexpr, cfg2: gl.constexpr, code2: gl.constexpr, ROW_MODE: gl.constexpr,
    MAX_EXPERTS: gl.constexpr, trace,
):  # fmt: skip
    """Set up the pipeline, then start one role for each partition of warps.

    Grid: (number of CTAs,).

    Arguments with a number are those of `gemm_kernel` for L1 and L2. progress, unit_shift: see `progress`. trace: see
    `runtime.timeline_device`.
    """
    stages = Pipeline.create(x_desc, gate_up_desc, None, code1.takes_halves, cfg1)
    pipeline, next_pipeline = told_pipelines(stages, down_desc, code2.takes_halves, cfg2)
    handover = Handover.create()
    written = Written.create(cfg1.num_consumers)
    fence_async_shared()
    first = Problem(M, N1, K1, num_experts, 0, offsets, ROW_MODE, MAX_EXPERTS, cfg1)
    second = Problem(M, N2, K2, num_experts, 0, offsets, ROW_MODE, MAX_EXPERTS, cfg2)
    scales1 = BlockScales(x_sf, gate_up_sf, gl.cdiv(K1, SCALE_BLOCK), gl.cdiv(N1, SCALE_BLOCK))
    scales2 = BlockScales(hidden_sf, down_sf, gl.cdiv(K2, SCALE_BLOCK), gl.cdiv(N2, SCALE_BLOCK))
    sums = RowReductions(row_parts, row_counters)
    epilogue1 = EpilogueArgs((None, None, None, None), operands1, outputs1, sums, None, first, code1)
    epilogue2 = EpilogueArgs((out_desc, None, None, None), operands2, outputs2, sums, None, second, code2)
    role_barrier()
    consumer1 = ConsumerArgs(pipeline, epilogue1, scales1, True, written, trace)
    consumer2 = ConsumerArgs(next_pipeline, epilogue2, scales2, True, None, trace)
    consumer_args = FusedConsumerArgs(consumer1, consumer2, handover)
    producer1 = ProducerArgs(x_desc, gate_up_desc, x_rest_desc, pipeline, first, trace)
    producer2 = ProducerArgs(hidden_desc, down_desc, hidden_rest_desc, next_pipeline, second, trace)
    producer_args = FusedProducerArgs(producer1, producer2, handover, progress, unit_shift)
    # Role numbers are literals within the list, see `gemm_kernel`.
    gl.warp_specialize([
        (consumer, (consumer_args, 0)),
        (consumer, (consumer_args, 1)),
        (producer, (producer_args,)),
        (signaler, (SignalerArgs(written, handover, progress, unit_shift),)),
    ], [cfg1.num_warps, 1, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
