"""Consumer of the Hopper GEMM: four or eight warps that multiply their share of each tile and run its epilogue."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import tma

from envoi.ops.gemm.hopper.mainloop import BlockScales, accumulate, accumulate_block_scaled
from envoi.ops.gemm.hopper.pipeline import Pipeline, StageBoxes, Written
from envoi.ops.gemm.hopper.run_epilogue import (
    EpilogueArgs,
    EpilogueBuffers,
    load_columns,
    run_epilogue,
    with_addresses,
)
from envoi.ops.gemm.hopper.tile_scheduler import Tile, TileScheduler, Unit
from envoi.runtime.aggregate import aggregate
from envoi.runtime.timeline_device import note_begin, note_moment


@aggregate
class ConsumerArgs:
    """Consumer's stages, epilogue and scale factors."""

    pipeline: Pipeline
    epilogue: EpilogueArgs
    scales: BlockScales
    is_block_scaled: gl.constexpr
    written: Written | gl.constexpr  # signalled after each pair of tiles; None if no role waits for them
    trace: gl.tuple | gl.constexpr  # `Trace`, or None


@aggregate
class PublishedTiles:
    """Tiles that the CTA's producer publishes (`Pipeline.publish_tile`), with what `consume` asks of a `TileScheduler`.

    Units are whole tiles, counted in the order in which they are published.
    """

    pipeline: Pipeline

    @gluon.jit
    def unit_stride(self):
        """Return 1: all are this CTA's."""
        return 1

    @gluon.jit
    def take(self, count):
        """Wait for the count-th tile; return whether it isn't the end, and what `taken` takes."""
        index, tile = self.pipeline.wait_for_tile(count)
        return index >= 0, (index, tile)

    @gluon.jit
    def taken(self, published, num_k_steps):
        """Return a unit and its tile."""
        index, tile = published
        return Unit(index, 0, num_k_steps, 0, False), tile

    @gluon.jit
    def num_steps(self, count, num_k_steps):
        """Return the number of steps along K, the same for all."""
        return num_k_steps


@gluon.jit
def consumer(args, role: gl.constexpr):
    """Role: multiply this consumer's share of every unit, in the scheduler's order. role: 0 to 2."""
    scheduler = TileScheduler.create(args.epilogue.problem)
    consume(args, scheduler, 0, scheduler.first_unit(), role, role)


@gluon.jit
def consume(args, units, step, place, role: gl.constexpr, track: gl.constexpr):
    """Multiply this consumer's share of all units from number `place` on, and run the epilogue on it.

    Consumers share each tile (role = part) or, two of them with pingpong, take whole tiles alternately: while one runs
    its epilogue, the other multiplies. units: a `TileScheduler` or `PublishedTiles`. step: of the pipeline, before the
    first unit. Returns the step and the place after the last unit, or after the end marker; not with pingpong, whose
    consumers end apart. With `written`, arrive there once a pair's second tile is stored, and for the end.
    """
    problem, epilogue = args.epilogue.problem, args.epilogue
    cfg: gl.constexpr = problem.cfg
    num_k_steps = gl.cdiv(problem.K, cfg.block_k)
    buffers = EpilogueBuffers.create(epilogue, cfg)
    alternate: gl.constexpr = cfg.num_consumers // cfg.consumers_per_tile  # 2 with pingpong, else 1
    stride = units.unit_stride()
    tiles_done, tiles_multiplied, event = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    step, place = gl.to_tensor(step), gl.to_tensor(place) + role // cfg.consumers_per_tile * stride
    more, taken = units.take(place)
    while more:
        if alternate == 2 and role == 1:
            step += units.num_steps(place - stride, num_k_steps)  # of the other consumer's unit, before this one
        unit, tile = units.taken(taken, num_k_steps)
        note_begin(args.trace, track, event, unit.tile)
        step, tiles_done, tiles_multiplied = multiply_unit(
            args, unit, tile, buffers, (step, tiles_done, tiles_multiplied), event, role, track
        )
        if args.written is not None:
            if event % 2 == 1:
                args.written.arrive(event // 2)
        if alternate == 2 and role == 0:
            step += units.num_steps(place + stride, num_k_steps)  # of the other consumer's unit, after this one
        place += alternate * stride
        event += 1
        more, taken = units.take(place)
    if epilogue.code.num_descs > 0:
        tma.store_wait(pendings=0)
    if args.written is not None:
        args.written.arrive(event // 2)
    return step, place + stride


@gluon.jit
def multiply_unit(args, unit, tile, buffers, counts, event, role: gl.constexpr, track: gl.constexpr):
    """Multiply this consumer's share of a unit, whose tile is `tile`, and run its epilogue; return the next counts.

    counts: steps of the pipeline, shares stored and, with pingpong, tiles multiplied. event: of the trace's track.
    """
    step, tiles_done, tiles_multiplied = counts
    problem, pipeline, epilogue = args.epilogue.problem, args.pipeline, args.epilogue
    cfg: gl.constexpr = problem.cfg
    num_k_steps = gl.cdiv(problem.K, cfg.block_k)
    part: gl.constexpr = role % cfg.consumers_per_tile  # this consumer's share of a tile
    boxes = boxes_of(part, tile, cfg)
    tile = Tile(tile.x + boxes.x * cfg.rows_per_consumer, tile.y + boxes.y * cfg.y_pitch, tile.row_end, tile.expert)
    # False if this share starts after the last token, or after the last feature.
    has_rows = (tile.y < tile.row_end) & (tile.x < problem.N) if cfg.swap_ab else tile.x < tile.row_end
    if cfg.split_k == 1:
        if has_rows:
            m, n = (tile.y, tile.x) if cfg.swap_ab else (tile.x, tile.y)
            epilogue.code.fetch_operands(epilogue.descs, buffers.loads, buffers.loaded, m, n, cfg)
    columns, scattering = load_columns(tile, epilogue), with_addresses(tile, epilogue)
    if cfg.pingpong:
        pipeline.wait_for_turn(tiles_multiplied, role)
        tiles_multiplied += 1
    if args.trace is not None:
        if unit.k_end > unit.k_begin:
            pipeline.ring.wait_full(step)  # as the mainloop does first
    note_moment(args.trace, track, event, 1)
    # A share without rows multiplies the stages' contents too: CTAs that skipped it would drift apart and share
    # less in the L2. Not where experts are mixed: those with few rows are to leave time to those with many.
    if skips_shares(cfg):
        skipped = gl.where(has_rows, 0, unit.k_end - unit.k_begin)
        unit = Unit(unit.tile, unit.k_begin, unit.k_end - skipped, unit.split, unit.is_split)
    if args.is_block_scaled:
        scaled_tile = Tile(tile.x, tile.y, tile.row_end, expert_with_weights(tile, problem))
        accs, step = accumulate_block_scaled(pipeline, step, unit, scaled_tile, args.scales, boxes, role)
    else:
        accs, step = accumulate(pipeline, step, unit.k_end - unit.k_begin, boxes, role)
    if skips_shares(cfg):
        step = pipeline.ring.skip(step, skipped)
    note_moment(args.trace, track, event, 2)
    if cfg.columns_ahead:
        epilogue.code.keep_columns(columns, buffers.columns)
    is_complete = num_k_steps >= 0  # true, as a run-time value that a branch may replace
    share = (unit.tile - problem.num_whole_tiles) * cfg.consumers_per_tile + part  # see `SplitK`
    first_slot = share * cfg.split_k
    if cfg.split_k > 1:
        if unit.is_split:
            acc, is_complete = epilogue.split_k.store(accs[0], share, first_slot, unit.split, cfg)
            accs = (acc,)
    if is_complete & has_rows:
        run_epilogue(accs, tile, first_slot, unit.is_split, tiles_done, buffers, scattering)
        tiles_done += 1
    note_moment(args.trace, track, event, 3)
    return step, tiles_done, tiles_multiplied


@gluon.constexpr_function
def skips_shares(cfg):
    """Return True if a consumer multiplies nothing where its share of a tile has no rows."""
    return cfg.mixed_experts and cfg.consumers_per_tile > 1


@gluon.jit
def boxes_of(part, tile, cfg: gl.constexpr):
    """Return which boxes of a stage a consumer multiplies: its own x box and the one y box.

    In a wide tail tile (the second x box would start after the expert's rows) the one x box and its own y box.
    """
    if cfg.wide_tail_tiles:
        is_wide = (tile.x + cfg.rows_per_consumer >= tile.row_end).to(gl.int32)
        return StageBoxes(part * (1 - is_wide), part * is_wide)
    else:
        return StageBoxes(part, 0)


@gluon.jit
def expert_with_weights(tile, problem):
    """Return the tile's expert; for rows of no expert, which have no steps along K, the last one with scale factors."""
    if problem.row_mode.has_tail:
        return gl.minimum(tile.expert, problem.num_experts - 1)
    else:
        return tile.expert
