"""Order of L1's units and of L2's tiles: CTAs take the next one whenever they have room for it."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon


@gluon.jit
def take(counter):
    """Take the next unit, or tile, for this CTA; past the last one if there is none."""
    return gl.atomic_add(counter, 1, sem="relaxed", scope="gpu")


@gluon.jit
def units_until(index, first, second):
    """Return how many units of L1 there are up to the last one of the expert that a tile of L2 belongs to.

    first, second: ExpertTiles of L1 and L2. No load: the producer has both prefix sums in registers.
    """
    return gl.min(gl.where(second.tile_ends > index, first.tile_ends, 2**31 - 1), 0)
