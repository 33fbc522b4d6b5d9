"""Tile scheduler of the persistent GEMM kernels: which CTA computes which tile, in which order.

Static: CTA c takes units c, c + num_ctas, c + 2 num_ctas, ..: `first_unit`, `unit_stride`. Every role derives the
sequence by itself from the problem's sizes, so the scheduler needs no shared memory and no barrier.

A unit is a whole tile or, with split-K, one of `cfg.split_k` parts of a tile along K. Only the tiles of the last,
partly filled round of the persistent loop are split, and their units are last:

    4 CTAs, 6 tiles, split_k = 2: num_whole_tiles = 4

    unit        0   1   2   3 |  4     5     6     7
    CTA         0   1   2   3 |  0     1     2     3
    tile        0   1   2   3 |  4     4     5     5
    part of K   all           |  1st   2nd   1st   2nd

With `cfg.paired_tiles` a CTA takes pairs of tiles, neighbours along the features, whose outputs are quantised together.
Units are tiles, numbered anew in each CTA:

    4 CTAs, 6 pairs of tiles

    CTA     0      1      2      3    |  0      1
    tiles   0, 1   2, 3   4, 5   6, 7 |  8, 9   10, 11
    unit    0, 1   0, 1   0, 1   0, 1 |  2, 3   2, 3

Operands are called x and y after their side of the wgmma instruction: x [M side, K] are the tokens and y [N side, K]
the features, or the other way round with `cfg.swap_ab`.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from envoi.epilogues.device import plus
from envoi.ops.gemm.hopper.expert_rows import rows_of, rows_of_all
from envoi.ops.gemm.hopper.mixed_experts import MixedTiles
from envoi.ops.gemm.hopper.problem import Problem
from envoi.runtime.aggregate import Scalar, aggregate


@aggregate
class Tile:
    """Corner of a tile, of the whole CTA's or of one consumer's share of it.

    x, y: first row in x and in y, within the expert's weights. row_end: end of the token rows that the tile may touch.
    expert: its expert; num_experts for rows of no expert, 0 in a dense GEMM.
    """

    x: Scalar
    y: Scalar
    row_end: Scalar
    expert: Scalar


@aggregate
class Unit:
    """Unit of work: steps [k_begin, k_end) along K of one tile."""

    tile: Scalar
    k_begin: Scalar
    k_end: Scalar
    split: Scalar  # which part of K; 0 for a whole tile
    is_split: Scalar  # True if another unit has the tile's other steps


@aggregate
class ExpertTiles:
    """Tiles of each expert in a grouped GEMM; with `RowMode.has_tail`, rows of no expert count as one expert more.

    With `cfg.paired_tiles` a pair of tiles counts as one.
    Only `tile_ends` is kept in registers: with hundreds of experts, a second vector would be spilled.
    """

    tile_ends: gl.tensor  # int32 [max_experts], inclusive prefix sum of tiles
    num_expert_tiles: gl.tensor  # int32, tiles of all experts, without the tail's
    problem: Problem

    @staticmethod
    @gluon.jit
    def create(problem, num_feature_tiles):
        """Count the tiles of every expert. Rows outside [0, M) are ignored, whatever `offsets` says."""
        ids, begin, end = rows_of_all(problem)
        tiles = gl.cdiv(end - begin, problem.cfg.block_m) * num_feature_tiles
        num_expert_tiles = gl.sum(gl.where(ids < problem.num_experts, tiles, 0), axis=0)
        return ExpertTiles(gl.associative_scan(tiles, 0, plus), num_expert_tiles, problem)

    @gluon.jit
    def tiles_of_experts(self):
        """Return the number of tiles without the tail's."""
        return self.num_expert_tiles

    @gluon.jit
    def num_tiles(self):
        """Return the number of all tiles."""
        return gl.max(self.tile_ends, axis=0)

    @gluon.jit
    def tile_at(self, place):
        """Return the tile that has a place in the order in which CTAs take them: the tile's own number."""
        return place

    @gluon.jit
    def find(self, tile):
        """Return the expert of a tile, the expert's rows [begin, end), and the number of tiles before the expert's."""
        is_before = self.tile_ends <= tile
        expert = gl.sum(is_before.to(gl.int32), axis=0)
        tiles_before = gl.max(gl.where(is_before, self.tile_ends, 0), axis=0)
        begin, end = rows_of(expert, self.problem)
        return expert, begin, end, tiles_before


@aggregate
class TileScheduler:
    """Sequence of units of one launch. Every role creates its own and loops over its CTA's units."""

    problem: Problem
    num_token_tiles: Scalar
    num_feature_tiles: Scalar
    num_units: Scalar  # of all CTAs; with `paired_tiles` of this one
    experts: ExpertTiles | MixedTiles | gl.constexpr  # None in a dense GEMM

    @staticmethod
    @gluon.jit
    def create(problem):
        """Build the scheduler of a launch."""
        cfg: gl.constexpr = problem.cfg
        num_token_tiles = gl.cdiv(problem.M, cfg.block_m)
        num_feature_tiles = gl.cdiv(problem.N, cfg.block_n)
        if problem.row_mode.is_grouped:
            if cfg.mixed_experts:
                experts = MixedTiles.create(problem, num_feature_tiles)
            else:
                experts = ExpertTiles.create(problem, num_feature_tiles)
            num_units = experts.num_tiles()
            if cfg.paired_tiles:
                num_units = units_in_pairs(num_units, gl.program_id(0), gl.num_programs(0))
        else:
            experts: gl.constexpr = None
            num_split_tiles = num_token_tiles * num_feature_tiles - problem.num_whole_tiles
            num_units = problem.num_whole_tiles + num_split_tiles * cfg.split_k
        return TileScheduler(problem, num_token_tiles, num_feature_tiles, num_units, experts)

    @gluon.jit
    def first_unit(self):
        """Return this CTA's first unit."""
        if self.problem.cfg.paired_tiles:
            return 0
        else:
            return gl.program_id(0)

    @gluon.jit
    def unit_stride(self):
        """Return how far this CTA's units are apart."""
        if self.problem.cfg.paired_tiles:
            return 1
        else:
            return gl.num_programs(0)

    @gluon.jit
    def take(self, u):
        """Return whether there is a unit u, and what `taken` takes: its number."""
        return u < self.num_units, u

    @gluon.jit
    def taken(self, u, num_k_steps):
        """Return unit u, where all of K takes num_k_steps, and its tile."""
        unit = self.unit(u, num_k_steps)
        return unit, self.tile(unit.tile)

    @gluon.jit
    def unit(self, u, num_k_steps):
        """Return unit u, where all of K takes num_k_steps.

        Rows of no expert get no steps, so that their accumulator stays 0.
        """
        unit = self.split(u, num_k_steps)
        if self.problem.row_mode.has_tail:
            has_weights = unit.tile // self.problem.cfg.tiles_per_unit < self.experts.tiles_of_experts()
            k_end = gl.where(has_weights, unit.k_end, unit.k_begin)
            return Unit(unit.tile, unit.k_begin, k_end, unit.split, unit.is_split)
        else:
            return unit

    @gluon.jit
    def split(self, u, num_k_steps):
        """Return unit u with its part of K. Split tiles are last, so that CTAs stay in step and share the L2."""
        split_k: gl.constexpr = self.problem.cfg.split_k
        if self.problem.cfg.paired_tiles:
            return Unit(tile_in_pairs(u, gl.program_id(0), gl.num_programs(0)), 0, num_k_steps, 0, False)
        elif split_k == 1:
            return Unit(u, 0, num_k_steps, 0, False)
        else:
            num_whole_tiles = self.problem.num_whole_tiles
            is_split = u >= num_whole_tiles
            v = u - num_whole_tiles
            split = gl.where(is_split, v % split_k, 0)
            tile = gl.where(is_split, num_whole_tiles + v // split_k, u)
            steps = gl.where(is_split, gl.cdiv(num_k_steps, split_k), num_k_steps)
            k_begin = split * steps
            k_end = max(k_begin, min(k_begin + steps, num_k_steps))
            return Unit(tile, k_begin, k_end, split, is_split)

    @gluon.jit
    def num_steps(self, u, num_k_steps):
        """Return the number of steps along K of unit u."""
        unit = self.unit(u, num_k_steps)
        return unit.k_end - unit.k_begin

    @gluon.jit
    def tile(self, index):
        """Return the corner of a tile."""
        if self.problem.row_mode.is_grouped:
            return self.grouped_tile(index)
        else:
            x, y = self.dense_tile(index)
            return Tile(x, y, self.problem.M, 0)

    @gluon.jit
    def dense_tile(self, index):
        """Return the first row in x and in y of a dense GEMM's tile.

        L2 swizzle: tiles go down `cfg.swizzle_rows` rows of tiles, then one column to the right, so that the tiles in
        flight share both operands.
        """
        cfg: gl.constexpr = self.problem.cfg
        num_x_tiles, num_y_tiles = self.num_token_tiles, self.num_feature_tiles
        if cfg.swap_ab:
            num_x_tiles, num_y_tiles = self.num_feature_tiles, self.num_token_tiles
        band_tiles = cfg.swizzle_rows * num_y_tiles
        first = (index // band_tiles) * cfg.swizzle_rows
        height = min(num_x_tiles - first, cfg.swizzle_rows)
        x = (first + index % height) * cfg.block_x
        y = ((index % band_tiles) // height) * cfg.block_y
        if cfg.tiles_overlap:
            if cfg.swap_ab:
                y = self.ending_with_tokens(y, cfg.block_y, cfg.block_y)
            else:
                x = self.ending_with_tokens(x, cfg.block_x, cfg.rows_per_consumer)
        return x, y

    @gluon.jit
    def ending_with_tokens(self, row, block: gl.constexpr, box: gl.constexpr):
        """Return the first token of a tile, moved so that the last TMA box with tokens has no row after the last one.

        row: a multiple of block, itself a multiple of box. Unless narrowed, box is a power of two. TMA takes several
        times as long for a box that ends outside of the matrix. The rows before are computed twice, with the same bits:
        not where one tile is split along K and the other isn't. A moved box starts at no multiple of its size, so no
        other tile has its counter in `RowReductions`.
        """
        problem = self.problem
        missing = -problem.M & (box - 1)
        if problem.cfg.narrowed and problem.cfg.swap_ab:
            missing = (problem.M + block - 1) // block * block - problem.M
        if problem.cfg.split_k > 1 and problem.num_whole_tiles > 0:
            missing = 0
        if row + block > problem.M and row >= missing:
            row -= missing
        return row

    @gluon.jit
    def grouped_tile(self, index):
        """Return the corner of a grouped GEMM's tile. Token tiles run fastest: an expert's weights are read once."""
        cfg: gl.constexpr = self.problem.cfg
        second = 0
        if cfg.paired_tiles:
            second, index = index % 2, index // 2
        index = self.experts.tile_at(index)
        expert, row, row_end, tiles_before = self.experts.find(index)
        token_tiles = gl.cdiv(row_end - row, cfg.block_m)
        x, y = corner_in_expert(index - tiles_before, token_tiles, row, cfg)
        if cfg.paired_tiles:
            y += second * cfg.block_y
        return Tile(x, y, row_end, expert)


@gluon.jit
def corner_in_expert(index, token_tiles, row, cfg: gl.constexpr):
    """Return the first row in x and in y of an expert's tile, or pair of tiles, whose tokens begin at `row`."""
    token_tile = index % token_tiles
    feature_tile = index // token_tiles
    if cfg.swap_ab:
        return feature_tile * cfg.block_x, row + token_tile * cfg.block_y
    elif cfg.wide_tail_tiles:
        # Two wide tiles, one below the other, become two high ones side by side; an odd one stays wide.
        return row + token_tile // 2 * cfg.block_x, feature_tile * cfg.block_n + token_tile % 2 * cfg.y_pitch
    else:
        return row + token_tile * cfg.block_x, feature_tile * cfg.block_n


@gluon.jit
def units_in_pairs(num_pairs, cta, num_ctas):
    """Return the number of units, two a pair, that a CTA has if it takes pairs cta, cta + num_ctas, .."""
    return 2 * ((max(num_pairs - cta, 0) + num_ctas - 1) // num_ctas)


@gluon.jit
def tile_in_pairs(u, cta, num_ctas):
    """Return the tile of a CTA's unit u: 2 p or 2 p + 1 of its pair p."""
    return 2 * (cta + u // 2 * num_ctas) + u % 2
