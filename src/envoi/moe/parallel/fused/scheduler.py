"""Order of L2's tiles: CTAs take the next one whenever they have room for it, so all end together."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from envoi.moe.parallel.fused.progress import TAKEN


@gluon.jit
def take_tile(progress):
    """Take the next of L2's tiles for this CTA; past the last one if there is none."""
    return gl.atomic_add(progress + TAKEN, 1, sem="relaxed", scope="gpu")


@gluon.jit
def early_rows(first, second):
    """Return the end of the rows that the early rounds of L1 complete: those of experts with all their units in them.

    first, second: schedulers of L1 and L2.
    """
    units = first.early_rounds() * gl.num_programs(0)
    return row_before(units // first.num_feature_tiles, second)


@gluon.jit
def row_before(token_tiles, scheduler):
    """Return the first row of the expert that has the token tile after so many, of all experts; rows' end if none."""
    _expert, begin, _end, _before = scheduler.experts.find(token_tiles * scheduler.num_feature_tiles)
    return begin
