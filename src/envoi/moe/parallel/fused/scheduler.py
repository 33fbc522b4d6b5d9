"""Tiles of L2 that a CTA takes once its units of L1 are done."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from envoi.gemm.hopper.tile_scheduler import TileScheduler, Unit
from envoi.runtime.aggregate import Scalar, aggregate


@aggregate
class SecondScheduler:
    """Sequence of L2's tiles in this CTA, as `TileScheduler` has it; units are numbered anew in each CTA.

    CTAs without a unit in L1's last round, `late` to the last, take the first `head` tiles among themselves; all take
    the others in turns.
    """

    tiles: TileScheduler  # of L2 alone
    units_ahead: Scalar  # of L1, of all CTAs
    late: Scalar  # CTAs that have a unit in L1's last round
    early: Scalar  # the others
    head: Scalar
    own_head: Scalar  # of the head this CTA's
    num_units: Scalar

    @staticmethod
    @gluon.jit
    def create(problem, first, tiles_per_unit: gl.constexpr):
        """Build the sequence that follows L1's problem, `first`, whose tiles have as many rows as L2's.

        tiles_per_unit: tiles of L2 that last as long as a unit of L1.
        """
        tiles = TileScheduler.create(problem)
        cta, num_ctas = gl.program_id(0), gl.num_programs(0)
        units_ahead = tiles.num_units // tiles.num_feature_tiles * gl.cdiv(first.N, first.cfg.block_n)
        late, early, head = split_second(units_ahead, tiles.num_units, num_ctas, tiles_per_unit)
        own_head = own_tiles(cta - late, head, early)
        num_units = own_head + own_tiles(cta, tiles.num_units - head, num_ctas)
        return SecondScheduler(tiles, units_ahead, late, early, head, own_head, num_units)

    @gluon.jit
    def early_rows(self, first):
        """Return the end of the rows that are complete before L1's last round: those of experts without units in it."""
        num_ctas = gl.num_programs(0)
        last_round = gl.maximum(gl.cdiv(self.units_ahead, num_ctas) - 1, 0) * num_ctas
        row_of_tiles = last_round // gl.cdiv(first.N, first.cfg.block_n)
        _expert, begin, _end, _before = self.tiles.experts.find(row_of_tiles * self.tiles.num_feature_tiles)
        return begin

    @gluon.jit
    def first_unit(self):
        """Return this CTA's first unit."""
        return 0

    @gluon.jit
    def unit_stride(self):
        """Return how far this CTA's units are apart."""
        return 1

    @gluon.jit
    def unit(self, u, num_k_steps):
        """Return unit u, where all of K takes num_k_steps."""
        cta, num_ctas = gl.program_id(0), gl.num_programs(0)
        tile = tile_of(u, cta, num_ctas, self.late, self.early, self.head, self.own_head)
        return Unit(tile, 0, num_k_steps, 0, False)

    @gluon.jit
    def num_steps(self, u, num_k_steps):
        """Return the number of steps along K of unit u."""
        return num_k_steps

    @gluon.jit
    def tile(self, index):
        """Return the corner of a tile."""
        return self.tiles.tile(index)


@gluon.jit
def split_second(units_ahead, num_tiles, num_ctas, tiles_per_unit: gl.constexpr):
    """Return the CTAs with a unit in L1's last round, those without, and the tiles of L2 that the latter take alone."""
    late = units_ahead % num_ctas
    early = (num_ctas - late) % num_ctas
    return late, early, min(tiles_per_unit * early, num_tiles)


@gluon.jit
def own_tiles(place, num_tiles, num_ctas):
    """Return the tiles that a CTA has if num_ctas of them take num_tiles in turns. place: its place among them."""
    tiles = max(num_tiles - place + num_ctas - 1, 0) // max(num_ctas, 1)
    return tiles if place >= 0 else 0


@gluon.jit
def tile_of(u, cta, num_ctas, late, early, head, own_head):
    """Return the tile of a CTA's unit u: of the head, then of the tiles that all take."""
    return cta - late + u * early if u < own_head else head + cta + (u - own_head) * num_ctas
