"""Order of L1's units and of L2's tiles: CTAs take the next one whenever they have room for it."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon


@gluon.jit
def take(counter):
    """Take the next unit, or tile, for this CTA; past the last one if there is none."""
    return gl.atomic_add(counter, 1, sem="relaxed", scope="gpu")


@gluon.jit
def units_of_tile(index, first, second):
    """Return the expert of a tile of L2, and the units of L1 [begin, end) that write the expert's hidden rows.

    first, second: schedulers of L1 and L2.
    """
    expert, begin, end, tiles_before = second.experts.find(index)
    token_tiles = gl.cdiv(end - begin, second.problem.cfg.block_m)
    first_tile = tiles_before // second.num_feature_tiles
    return expert, first_tile * first.num_feature_tiles, (first_tile + token_tiles) * first.num_feature_tiles
