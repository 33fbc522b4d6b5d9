"""Handover between roles of a CTA: words that they exchange besides tiles."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from envoi.ops.gemm.hopper.pipeline import get_word, new_barriers, put_word
from envoi.runtime.aggregate import aggregate
from envoi.runtime.triton_compat import role_barrier

CONSUMERS = gl.constexpr(2)
UNIT_RING = gl.constexpr(16)  # units; at most 10 are unread: 4 by stages, 5 by `Written`, the next


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
