"""Order of L1's units and of L2's tiles: CTAs take the next one whenever they have room for it."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from envoi.ops.gemm.hopper.tile_scheduler import TileScheduler


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
