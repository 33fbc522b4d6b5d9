"""Producer of the fused L1: that of the GEMM, but it loads tokens only once their rows have arrived."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from envoi.gemm.hopper.producer import PRODUCER, ProducerArgs, has_low_tiles, weights_tile
from envoi.gemm.hopper.tile_scheduler import TileScheduler
from envoi.moe.parallel.fused import config
from envoi.moe.parallel.fused.scheduler import BLOCK_ROWS, rows_before, rows_in_block
from envoi.moe.parallel.shared_device import LATE_IN_L1, LOST, OUTCOME
from envoi.runtime.aggregate import Scalar, aggregate
from envoi.runtime.sync import wait_for_grid
from envoi.runtime.timeline_device import note_begin, note_moment
from envoi.runtime.triton_compat import role_barrier

LANES = gl.constexpr(config.LANES)
ALL_ROWS = gl.constexpr(0x7FFFFFFF)


@aggregate
class Arrivals:
    """Counters of rows that have arrived, and what to do if some never do."""

    counts: gl.tensor  # pointer to int32, one for each block of rows; 0 at launch
    num_rows: gl.tensor  # pointer to int32: rows of this rank's experts in this call
    state: gl.tensor  # of the call, see `shared_device`
    report: gl.tensor  # pointer to int32 [2, num_ranks]
    rank: Scalar
    timeout_us: Scalar


@aggregate
class FusedProducerArgs:
    """Arguments of the GEMM's producer, and the arrivals that this one waits for."""

    gemm: ProducerArgs
    arrivals: Arrivals


@gluon.jit
def prefill_weights(args):
    """Load the weights of the CTA's first stages; called by all warps, before the roles. `full` isn't arrived on."""
    cfg: gl.constexpr = args.problem.cfg
    scheduler = TileScheduler.create(args.problem)
    u = scheduler.first_unit()
    unit = scheduler.unit(u, gl.cdiv(args.problem.K, cfg.block_k))
    tile = weights_tile(scheduler.tile(unit.tile), args)
    if u < scheduler.num_units:
        for k in range(gl.minimum(unit.k_end, cfg.num_stages)):
            load_weights(args, k, tile, k)


@gluon.jit
def producer(args):
    """Role: fill the stages with the operands of this CTA's units, in the scheduler's order. One warp.

    Waits on `empty` before each fill and, once a unit, for the arrival of its rows; then tells the consumers.
    """
    gemm = args.gemm
    cfg: gl.constexpr = gemm.problem.cfg
    scheduler = TileScheduler.create(gemm.problem)
    num_k_steps = gl.cdiv(gemm.problem.K, cfg.block_k)
    wait_for_grid()  # arrivals are read only then; and consumers read what it wrote once this role tells them of rows
    arrived = gl.to_tensor(0)  # rows known to have arrived, without a gap
    step = 0
    units_before = gl.to_tensor(0)
    first = scheduler.first_unit()
    for u in range(first, scheduler.num_units, scheduler.unit_stride()):
        unit = scheduler.unit(u, num_k_steps)
        tile = weights_tile(scheduler.tile(unit.tile), gemm)
        # Steps whose stages get weights before the rows are waited for; `prefill_weights` has done the first unit's.
        head = gl.minimum(unit.k_end, cfg.num_stages)
        if u != first:
            head = gl.to_tensor(1)
            gemm.pipeline.wait_empty(step)
            load_weights(gemm, step % cfg.num_stages, tile, 0)
        note_begin(gemm.trace, PRODUCER, units_before, unit.tile)
        rows = end_of_rows(tile, cfg)
        if u == first:
            rows = gl.maximum(rows, end_of_round(scheduler, gemm, num_k_steps))
        arrived = wait_for_rows(args.arrivals, arrived, rows)
        note_moment(gemm.trace, PRODUCER, units_before, 1)
        gemm.pipeline.tell_rows(units_before)
        if is_low_tile(tile, cfg):
            load_unit(gemm, step, head, unit.k_end, tile, True)
        else:
            load_unit(gemm, step, head, unit.k_end, tile, False)
        note_moment(gemm.trace, PRODUCER, units_before, 2)
        units_before += 1
        step += unit.k_end


@gluon.jit
def end_of_round(scheduler, gemm, num_k_steps):
    """Return the end of the token rows of the first round's last unit.

    CTAs that began as their rows come would stay as far apart, and share less in the L2, as long as the launch takes.
    The last of them can't begin earlier, and all have equally many units or one less.
    """
    last = gl.minimum(scheduler.unit_stride(), scheduler.num_units) - 1
    tile = weights_tile(scheduler.tile(scheduler.unit(last, num_k_steps).tile), gemm)
    return end_of_rows(tile, gemm.problem.cfg)


@gluon.jit
def end_of_rows(tile, cfg: gl.constexpr):
    """Return the end of a tile's token rows. tile: as loaded."""
    if cfg.swap_ab:
        return gl.minimum(tile.y + cfg.block_y, tile.row_end)
    else:
        return gl.minimum(tile.x + cfg.block_x, tile.row_end)


@gluon.jit
def is_low_tile(tile, cfg: gl.constexpr):
    """Return True if the tile has one x box only."""
    if has_low_tiles(cfg):
        return tile.x + cfg.rows_per_consumer >= tile.row_end
    else:
        return False


@gluon.jit
def load_unit(gemm, step, head, k_end, tile, IS_LOW: gl.constexpr):
    """Load steps [0, k_end) of a tile into the stages from `step` on; weights of the first `head` steps are loaded."""
    cfg: gl.constexpr = gemm.problem.cfg
    for k in range(head):
        stage = (step + k) % cfg.num_stages
        gemm.pipeline.expect(gemm.x_desc, gemm.y_desc, stage, IS_LOW)
        load_tokens(gemm, stage, tile, k, IS_LOW)
    for k in range(head, k_end):
        gemm.pipeline.wait_empty(step + k)
        stage = (step + k) % cfg.num_stages
        gemm.pipeline.fill(gemm.x_desc, gemm.y_desc, stage, tile, k * cfg.block_k, IS_LOW)


@gluon.jit
def load_weights(gemm, stage, tile, k):
    """Start the loads of a stage's weights, of step k."""
    cfg: gl.constexpr = gemm.problem.cfg
    at = k * cfg.block_k
    if cfg.swap_ab:
        gemm.pipeline.load_x(gemm.x_desc, stage, tile, at, False)
    elif is_low_tile(tile, cfg):
        gemm.pipeline.load_y(gemm.y_desc, stage, tile, at, True)
    else:
        gemm.pipeline.load_y(gemm.y_desc, stage, tile, at, False)


@gluon.jit
def load_tokens(gemm, stage, tile, k, IS_LOW: gl.constexpr):
    """Start the loads of a stage's tokens, of step k."""
    cfg: gl.constexpr = gemm.problem.cfg
    if cfg.swap_ab:
        gemm.pipeline.load_y(gemm.y_desc, stage, tile, k * cfg.block_k, IS_LOW)
    else:
        gemm.pipeline.load_x(gemm.x_desc, stage, tile, k * cfg.block_k, IS_LOW)


@gluon.jit
def wait_for_rows(arrivals, arrived, end):
    """Wait until rows [0, end) have arrived; return how many are known to have. Called by one warp.

    Acquires at GPU scope what the movers wrote, then orders it before this warp's TMA loads. After the timeout the call
    is lost: the rank is reported, and no row is waited for any more.
    """
    if arrived < end:
        num_rows = gl.load(arrivals.num_rows)
        start = now()
        while arrived < end:
            arrived = count_arrived(arrivals, arrived, num_rows)
            if arrived < end:
                if now() - start > arrivals.timeout_us.to(gl.int64) * 1000:
                    gl.store(arrivals.report + arrivals.rank, LATE_IN_L1)
                    gl.store(arrivals.state + OUTCOME, LOST)
                    arrived = gl.to_tensor(ALL_ROWS)
        acquire_rows()
    return arrived


@gluon.jit
def acquire_rows():
    """Acquire at GPU scope what any lane's relaxed loads have seen, and order it before this warp's TMA loads."""
    gl.inline_asm_elementwise("fence.acq_rel.gpu; // $0", "=r", [], gl.int32, is_pure=False, pack=1)
    role_barrier()
    gl.inline_asm_elementwise("fence.proxy.async; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def count_arrived(arrivals, arrived, num_rows):
    """Return how many rows have arrived without a gap, at most LANES blocks more than `arrived`, a whole block's end.

    Relaxed: each load that acquires would empty this multiprocessor's L1 cache.
    """
    lane = gl.arange(0, LANES, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    block = arrived // BLOCK_ROWS
    expected = rows_in_block(block + lane, num_rows)
    # Lanes past the last block read that one. Not an atomic addition of 0: all producers would queue at few addresses.
    counts = arrivals.counts + gl.minimum(block + lane, (num_rows - 1) // BLOCK_ROWS)
    found = gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.s32 $0, [$1];", "=r,l", [counts.to(gl.int64)], gl.int32, is_pure=False, pack=1
    )
    return rows_before(block, lane, found < expected, LANES)


@gluon.jit
def now():
    """Read the GPU's clock in nanoseconds, one value for all lanes."""
    lane = gl.arange(0, LANES, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return gl.max(gl.inline_asm_elementwise("mov.u64 $0, %globaltimer; // $1", "=l,r", [lane], gl.int64, False, 1), 0)
