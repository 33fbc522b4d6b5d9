"""Rows of the experts, order of the tiles, and slots of a tile's rows, from the ids alone.

Every CTA reads all ids and counts for itself: nothing waits for another launch, and nothing is counted by atomics. All
of it runs once, from instructions that aren't in any cache yet, so few instructions count for more than few operations.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from envoi.epilogues.device import plus
from envoi.ops.moe.decode.bf16_fp8 import config
from envoi.runtime.aggregate import Scalar, aggregate

BITS = gl.constexpr(10)  # of a number of slots, of strips or of experts
MASK = gl.constexpr(1023)
TOKENS = gl.constexpr(config.TOKENS)  # of a strip


@aggregate
class Slots:
    """Ids of the experts of all slots, topk_ids [num_tokens, num_topk] in global memory, negative = masked."""

    topk_ids: gl.tensor
    num_slots: Scalar
    num_experts: Scalar
    cfg: gl.constexpr

    @gluon.jit
    def load(self):
        """Return each slot's number and its expert, int32 [max_slots]; -1 where there is none."""
        cfg: gl.constexpr = self.cfg
        warps: gl.constexpr = gl.num_warps()
        per_thread: gl.constexpr = cfg.max_slots // (32 * warps)
        s = gl.arange(0, cfg.max_slots, gl.BlockedLayout([per_thread], [32], [warps], [0]))
        e = gl.load(self.topk_ids + s, mask=s < self.num_slots, other=-1)
        return s, gl.where((e >= 0) & (e < self.num_experts), e, -1).to(gl.int32)


@aggregate
class Tile:
    """64 features of an expert's weights, and up to 8 of its rows: row to row_end, in the experts' order."""

    expert: gl.tensor
    row_tile: gl.tensor
    row: gl.tensor
    row_end: gl.tensor
    first_row: gl.tensor  # of the expert
    strip: gl.tensor  # number of the tile of tokens: tiles of one strip share their tokens


@aggregate
class Schedule:
    """Positions of strips and rows, sums int32 [max_experts].

    sums[e] = strips << 20 | rows << 10 | experts, each counted up to and with expert e; it rises with e. For a strip,
    the largest sum that doesn't reach it is that of the expert before the strip's own, and the smallest that does is
    its own.
    """

    sums: gl.tensor
    slots: Slots
    tiles_per_strip: gl.tensor

    @staticmethod
    @gluon.jit
    def create(slots, tiles_per_strip):
        """Count rows and strips of every expert."""
        cfg: gl.constexpr = slots.cfg
        # Each warp holds all experts, so that sums need no barrier.
        layout: gl.constexpr = gl.BlockedLayout([cfg.max_experts // 32], [32], [gl.num_warps()], [0])
        _, e = slots.load()
        counts = gl.histogram(e, cfg.max_experts, mask=e >= 0, layout=layout)
        sums = gl.associative_scan((gl.cdiv(counts, TOKENS) << 2 * BITS) + (counts << BITS) + 1, 0, plus)
        return Schedule(sums, slots, tiles_per_strip)

    @gluon.jit
    def num_tiles(self):
        """Return the number of tiles."""
        return (gl.max(self.sums, 0) >> 2 * BITS) * self.tiles_per_strip

    @gluon.jit
    def tile(self, t):
        """Return tile t; for one past the last some tile."""
        strip = t // self.tiles_per_strip
        passed = self.sums < ((strip + 1) << 2 * BITS)
        before = gl.max(gl.where(passed, self.sums, 0), 0)
        here = gl.min(gl.where(passed, 0x7FFFFFFF, self.sums), 0)
        expert = gl.minimum((here & MASK), self.slots.num_experts) - 1
        first_row = (before >> BITS) & MASK
        row = first_row + (strip - (before >> 2 * BITS)) * TOKENS
        return Tile(expert, t % self.tiles_per_strip, row, (here >> BITS) & MASK, first_row, strip)

    @gluon.jit
    def slots_of(self, tile):
        """Return the slot of each row of a tile, int32 [8], in all threads; 0 from its end on."""
        warps: gl.constexpr = gl.num_warps()
        per_thread: gl.constexpr = self.slots.cfg.max_slots // (32 * warps)
        wide: gl.constexpr = gl.BlockedLayout([TOKENS, per_thread], [1, 32], [1, warps], [1, 0])
        of: gl.constexpr = gl.SliceLayout(0, wide)
        s, e = self.slots.load()
        own = (e == tile.expert).to(gl.int32)
        row = gl.where(own > 0, tile.first_row + gl.associative_scan(own, 0, plus) - 1, -1)
        s, row = gl.convert_layout(s, of), gl.convert_layout(row, of)
        c = gl.arange(0, TOKENS, gl.SliceLayout(1, wide))
        return gl.sum(gl.where(row[None, :] == (tile.row + c)[:, None], s[None, :], 0), axis=1)
