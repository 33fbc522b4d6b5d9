"""Producer of the Hopper GEMM: one warp that loads both operands by TMA, up to `num_stages` steps ahead."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import tma

from envoi.ops.gemm.hopper.pipeline import Pipeline
from envoi.ops.gemm.hopper.problem import Problem
from envoi.ops.gemm.hopper.tile_scheduler import Tile, TileScheduler
from envoi.runtime import timeline
from envoi.runtime.aggregate import aggregate
from envoi.runtime.sync import let_next_start, wait_for_grid
from envoi.runtime.timeline_device import note_begin, note_moment

PRODUCER = gl.constexpr(timeline.PRODUCER)


@aggregate
class ProducerArgs:
    """Producer's TMA descriptors and stages. The weights of all experts are one matrix; with halves see `Pipeline`."""

    x_desc: tma.tensor_descriptor  # x [rows, K] in boxes [rows_per_consumer, block_k]
    y_desc: tma.tensor_descriptor  # y [rows, K] in boxes [main_y, block_k]
    # y in boxes [rest_y or small_box, block_k], with short_boxes x in boxes [SHORT_ROWS, SHORT_BYTES]; else None
    rest_desc: tma.tensor_descriptor | gl.constexpr
    pipeline: Pipeline
    problem: Problem
    trace: gl.tuple | gl.constexpr  # `Trace`, or None


@gluon.jit
def producer(args):
    """Role: fill the stages with the operands of this CTA's units, in the scheduler's order.

    Waits on `empty` before each fill. The first `num_stages` steps of the first unit have been loaded by `prefill`.
    """
    cfg: gl.constexpr = args.problem.cfg
    scheduler = TileScheduler.create(args.problem)
    num_k_steps = gl.cdiv(args.problem.K, cfg.block_k)
    step = 0
    first = scheduler.first_unit()
    for u in range(first, scheduler.num_units, scheduler.unit_stride()):
        unit = scheduler.unit(u, num_k_steps)
        event = (u - first) // scheduler.unit_stride()
        note_begin(args.trace, PRODUCER, event, unit.tile)
        tile = weights_tile(scheduler.tile(unit.tile), args)
        k_begin = unit.k_begin
        if u == first:
            step = gl.minimum(unit.k_end - unit.k_begin, cfg.num_stages)
            k_begin += step
        step = load_unit(args, step, k_begin, unit.k_end, tile, False)
        note_moment(args.trace, PRODUCER, event, 1)


@gluon.jit
def prefill(args, OVERLAP: gl.constexpr):
    """Load the first steps of the CTA's first unit, as many as there are stages; called by all warps, before the roles.

    Starting the roles takes about a microsecond; the first loads are under way during it.
    OVERLAP: this launch starts before the one in front ends; it waits for that end after it has asked for weights. Of
    what other launches have written, it reads only `offsets` before.
    """
    cfg: gl.constexpr = args.problem.cfg
    scheduler = TileScheduler.create(args.problem)
    u = scheduler.first_unit()
    unit = scheduler.unit(u, gl.cdiv(args.problem.K, cfg.block_k))
    tile = weights_tile(scheduler.tile(unit.tile), args)
    k_end = gl.minimum(unit.k_end, unit.k_begin + cfg.num_stages)
    if OVERLAP:
        k_end = gl.where(u < scheduler.num_units, k_end, unit.k_begin)
        load_operand(args, unit.k_begin, k_end, tile, True)
        wait_for_grid()
        let_next_start()
        load_operand(args, unit.k_begin, k_end, tile, False)
    elif u < scheduler.num_units:
        load_unit(args, gl.to_tensor(0), unit.k_begin, k_end, tile, True)


@gluon.jit
def load_operand(args, k_begin, k_end, tile, IS_WEIGHTS: gl.constexpr):
    """Load the weights, or after them the tokens, of steps [k_begin, k_end) of an expert's tile into fresh stages."""
    cfg: gl.constexpr = args.problem.cfg
    if has_low_tiles(cfg):
        if tile.x + cfg.rows_per_consumer < tile.row_end:
            load_steps_of_operand(args, k_begin, k_end, tile, False, IS_WEIGHTS)
        else:
            load_steps_of_operand(args, k_begin, k_end, tile, True, IS_WEIGHTS)
    else:
        load_steps_of_operand(args, k_begin, k_end, tile, False, IS_WEIGHTS)


@gluon.jit
def load_steps_of_operand(args, k_begin, k_end, tile, IS_LOW: gl.constexpr, IS_WEIGHTS: gl.constexpr):
    """Loop of `load_operand`. IS_LOW: as in `load_steps`."""
    cfg: gl.constexpr = args.problem.cfg
    pipeline = args.pipeline
    for k in range(k_begin, k_end):
        stage = k - k_begin
        if IS_WEIGHTS:
            pipeline.expect(args.x_desc, args.y_desc, args.rest_desc, stage, tile, IS_LOW)
        if cfg.swap_ab == IS_WEIGHTS:
            pipeline.load_x(args.x_desc, args.rest_desc, stage, tile, k * cfg.block_k, IS_LOW)
        else:
            full = pipeline.ring.full.index(stage)
            pipeline.y.load(args.y_desc, args.rest_desc, full, stage, tile, k * cfg.block_k, IS_LOW)


@gluon.jit
def weights_tile(tile, args):
    """Return the tile with its weight rows counted from the first expert's: all experts' weights are one matrix.

    With halves they are counted within the expert's: the descriptor has a coordinate for the expert.
    """
    problem = args.problem
    if args.pipeline.takes_halves:
        return tile
    elif problem.cfg.swap_ab:
        return Tile(tile.x + tile.expert * problem.N, tile.y, tile.row_end, tile.expert)
    else:
        return Tile(tile.x, tile.y + tile.expert * problem.N, tile.row_end, tile.expert)


@gluon.constexpr_function
def has_low_tiles(cfg):
    """Return True if a tile's second x box may start after its expert's last row; see `Pipeline.fill`."""
    return cfg.consumers_per_tile == 2 and not cfg.swap_ab


@gluon.jit
def load_unit(args, step, k_begin, k_end, tile, IS_FRESH: gl.constexpr):
    """Load steps [k_begin, k_end) of a tile into the stages from `step` on; return the next step.

    IS_FRESH: the stages have never been used, so nothing needs to be waited for.
    """
    cfg: gl.constexpr = args.problem.cfg
    if args.problem.row_mode.is_grouped and has_low_tiles(cfg):
        # Two loops: a branch or a predicate in every step costs 2 % of a GEMM.
        if tile.x + cfg.rows_per_consumer < tile.row_end:
            step = load_steps(args, step, k_begin, k_end, tile, False, IS_FRESH)
        else:
            step = load_steps(args, step, k_begin, k_end, tile, True, IS_FRESH)
        return step
    else:
        return load_steps(args, step, k_begin, k_end, tile, False, IS_FRESH)


@gluon.jit
def load_steps(args, step, k_begin, k_end, tile, IS_LOW: gl.constexpr, IS_FRESH: gl.constexpr):
    """Loop of `load_unit`. IS_LOW: the rows of the second x box are after the expert's last; see `Pipeline.fill`."""
    cfg: gl.constexpr = args.problem.cfg
    for k in range(k_begin, k_end):
        stage = step
        if not IS_FRESH:
            stage = args.pipeline.ring.stage(step)
            args.pipeline.ring.wait_empty(step)
        args.pipeline.fill(args.x_desc, args.y_desc, args.rest_desc, stage, tile, k * cfg.block_k, IS_LOW)
        step += 1
    return step
