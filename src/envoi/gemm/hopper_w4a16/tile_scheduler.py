"""Tiles of the kernel for few tokens, from the ids or from `offsets`; parts of tiles that are split over workers."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from envoi.epilogue.device import plus
from envoi.gemm.hopper_few.tile_scheduler import Slots
from envoi.runtime.aggregate import Scalar, aggregate
from envoi.runtime.triton_compat import role_barrier

ROW_BITS, ROW_MASK = gl.constexpr(15), gl.constexpr(32767)  # of a number of rows


@aggregate
class Tile:
    """64 or 128 rows of an expert's weights, and up to tile_tokens of its tokens: rows token to token_end."""

    expert: gl.tensor
    row_tile: gl.tensor
    token: gl.tensor
    token_end: gl.tensor
    strip: gl.tensor  # number of the tile of tokens: tiles of one strip share their tokens


@aggregate
class Routing:
    """Rows of experts: offsets, int32 pointer [num_experts + 1], and the ids [num_slots] they are computed from."""

    offsets: gl.tensor
    topk_ids: gl.tensor
    num_slots: Scalar
    num_experts: Scalar

    @gluon.jit
    def load(self, cfg: gl.constexpr):
        """Start loading what `counts` takes: each slot's expert, or the number of each expert's rows."""
        if cfg.reads_ids:
            # `offsets` isn't there yet, and weights can be requested without it.
            _, e = Slots(self.topk_ids, self.num_slots, self.num_experts, cfg).load()
            return e
        else:
            index = gl.arange(0, cfg.max_experts, experts_layout(cfg.max_experts, gl.num_warps()))
            first = gl.load(self.offsets + gl.minimum(index, self.num_experts))
            return gl.load(self.offsets + gl.minimum(index + 1, self.num_experts)) - first


@gluon.constexpr_function
def experts_layout(max_experts, warps):
    """Layout of experts: every warp has all of them, so that sums need no barrier."""
    return gl.BlockedLayout([max_experts // 32], [32], [warps], [0])


@gluon.jit
def counted(loaded, cfg: gl.constexpr):
    """Return the number of each expert's rows, int32 [max_experts], from what `Routing.load` returned."""
    if cfg.reads_ids:
        layout: gl.constexpr = experts_layout(cfg.max_experts, gl.num_warps())
        return gl.histogram(loaded, cfg.max_experts, mask=loaded >= 0, layout=layout)
    else:
        return loaded


@aggregate
class Schedule:
    """Positions of strips and rows, sums int32 [max_experts].

    sums[e] = strips << 15 | rows, both counted up to and with expert e; it rises with e. For a strip, the largest sum
    that doesn't reach it is that of the expert before the strip's own, and the smallest that does is its own.
    """

    sums: gl.tensor
    num_experts: Scalar
    cfg: gl.constexpr

    @staticmethod
    @gluon.jit
    def create(loaded, num_experts, cfg: gl.constexpr):
        """Count the strips. loaded: from `Routing.load`."""
        counts = counted(loaded, cfg)
        sums = gl.associative_scan((gl.cdiv(counts, cfg.tile_tokens) << ROW_BITS) + counts, 0, plus)
        return Schedule(sums, num_experts, cfg)

    @gluon.jit
    def num_units(self):
        """Return how many groups of steps there are to share out."""
        return (gl.max(self.sums, 0) >> ROW_BITS) * (self.cfg.tiles_per_strip * self.cfg.num_groups)

    @gluon.jit
    def tile(self, t):
        """Return tile t; for one past the last some tile."""
        tiles_per_strip: gl.constexpr = self.cfg.tiles_per_strip
        strip = t // tiles_per_strip
        passed = self.sums < ((strip + 1) << ROW_BITS)
        e = gl.minimum(gl.sum(passed.to(gl.int32), 0), self.num_experts - 1)
        before = gl.max(gl.where(passed, self.sums, 0), 0)
        here = gl.min(gl.where(passed, 0x7FFFFFFF, self.sums), 0)
        token = (before & ROW_MASK) + (strip - (before >> ROW_BITS)) * self.cfg.tile_tokens
        row_tile = (t - strip * tiles_per_strip) * self.cfg.num_row_tiles
        return Tile(e, row_tile, token, here & ROW_MASK, strip)


@aggregate
class Parts:
    """Partial sums of tiles that are split over workers, for the worker with a tile's first unit.

    A worker has at most one such tile that begins before its own units. `store` writes the worker's sums and sets its
    flag to 1; the worker that finishes the tile reads them in `add` and resets the flag to 0.
    """

    sums: gl.tensor  # float32 pointer, [workers, 16 * warps * tile_tokens]
    flags: gl.tensor  # int32 pointer [workers]; 0 between launches
    each: gl.tensor  # units of every worker,
    more: gl.tensor  # and one more of so many, the first

    @gluon.jit
    def begin_of(self, worker):
        """Return the first unit of a worker, or of the one after the last."""
        return worker * self.each + gl.minimum(worker, self.more)

    @gluon.jit
    def store(self, worker, acc):
        """Keep a worker's sums of its first tile and set its flag."""
        gl.store(self.sums + worker * acc.numel + place_in(acc), acc)
        role_barrier()
        gl.atomic_xchg(self.flags + worker, 1, sem="release", scope="gpu")

    @gluon.jit
    def add(self, worker, acc, missing, tile_end):
        """Return acc plus the sums of the workers after this one, until no unit of the tile is missing."""
        other = worker + 1
        while missing > 0:
            while gl.atomic_cas(self.flags + other, 1, 0, sem="acquire", scope="gpu") == 0:
                pass
            role_barrier()
            acc += gl.load(self.sums + other * acc.numel + place_in(acc), cache_modifier=".cg")
            missing = tile_end - self.begin_of(other + 1)
            other += 1
        return acc


@gluon.jit
def place_in(acc):
    """Return the place of each element in a part."""
    layout: gl.constexpr = acc.type.layout
    row = gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout))
    return row[:, None] * acc.shape[1] + gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))[None, :]
