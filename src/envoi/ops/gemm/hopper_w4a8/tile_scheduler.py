"""Order of tiles where an expert's last one may be narrower: whole tiles first, narrower ones then.

An expert's rows take tiles of block_y tokens and a last one of as many, half, a quarter or an eighth, the narrowest
that holds what is left. Narrower tiles take less time; CTAs take tiles in turn, and where the long ones come first, all
end at about the same time.

    rows 300, block_y 128: two tiles of 128 tokens, then, after the other experts' tiles of 128, one of 64
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from envoi.epilogues.device import plus
from envoi.ops.gemm.hopper.expert_rows import rows_of, rows_of_all
from envoi.ops.gemm.hopper.problem import Problem
from envoi.ops.gemm.hopper.tile_scheduler import Tile
from envoi.runtime.aggregate import Scalar, aggregate
from envoi.runtime.triton_compat import role_barrier

unswizzled = gl.constexpr(gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0]))


@gluon.constexpr_function
def experts_layout(max_experts, warps):
    """Return the layout of a vector over the experts: each warp has all of it."""
    return gl.BlockedLayout([max(1, max_experts // 32)], [32], [warps], [0])


@gluon.constexpr_function
def narrow_bits(max_experts):
    """Return the bits of a number of narrower tiles, of which an expert has at most one."""
    return max_experts.bit_length()


@gluon.jit
def whole_tiles(rows, cfg: gl.constexpr):
    """Return how many tiles of block_y tokens so many rows take, and whether a narrower one follows: 1 or 0."""
    rest = rows % cfg.block_y
    is_narrow = rest < 0
    if cfg.widths > 1:
        is_narrow = (rest > 0) & (rest <= cfg.block_y // 2)
    narrow = is_narrow.to(gl.int32)
    return gl.cdiv(rows, cfg.block_y) - narrow, narrow


@aggregate
class Tiles:
    """Tiles of a launch, as one role sees them. Counted along the tokens; each has as many along the features.

    Ends are in the role's own shared memory: registers would hold them through every mainloop.
    """

    # int32 [max_experts]: an expert's end among whole tiles, above `narrow_bits` bits of its end among narrower ones.
    ends: gl.shared_memory_descriptor
    num_whole: gl.tensor
    num_tiles: gl.tensor  # times those along the features
    num_feature_tiles: Scalar
    problem: Problem

    @staticmethod
    @gluon.jit
    def create(problem):
        """Count the tiles of every expert. Rows outside [0, M) are ignored, whatever `offsets` says."""
        cfg: gl.constexpr = problem.cfg
        bits: gl.constexpr = narrow_bits(problem.max_experts)
        ids, begin, end = rows_of_all(problem)
        whole, narrow = whole_tiles(gl.where(ids < problem.num_experts, end - begin, 0), cfg)
        ends = gl.associative_scan((whole << bits) + narrow, 0, plus)
        last = gl.max(ends, axis=0)
        num_whole = last >> bits
        num_feature_tiles = gl.cdiv(problem.N, cfg.block_x)
        num_tiles = (num_whole + (last & ((1 << bits) - 1))) * num_feature_tiles
        kept = gl.allocate_shared_memory(gl.int32, [problem.max_experts], unswizzled)
        kept.store(ends)
        role_barrier()
        return Tiles(kept, num_whole, num_tiles, num_feature_tiles, problem)

    @gluon.jit
    def tile(self, index):
        """Return the corner of a tile, and its width: 0 is block_y tokens, each further one half of it.

        Token tiles run fastest: an expert's weights are read once by its whole tiles.
        """
        problem = self.problem
        cfg: gl.constexpr = problem.cfg
        bits: gl.constexpr = narrow_bits(problem.max_experts)
        num_whole = self.num_whole * self.num_feature_tiles
        is_narrow = index >= num_whole
        index = gl.where(is_narrow, index - num_whole, index)
        ends = self.ends.load(experts_layout(problem.max_experts, gl.num_warps()))
        ends = gl.where(is_narrow, ends & ((1 << bits) - 1), ends >> bits)
        is_before = ends <= index // self.num_feature_tiles
        expert = gl.sum(is_before.to(gl.int32), axis=0)
        index -= gl.max(gl.where(is_before, ends, 0), axis=0) * self.num_feature_tiles
        begin, end = rows_of(expert, problem)
        whole, _ = whole_tiles(end - begin, cfg)
        count = gl.where(is_narrow, 1, whole)
        token_tile = gl.where(is_narrow, whole, index % count)
        width = gl.where(is_narrow, narrow_width((end - begin) % cfg.block_y, cfg), 0)
        return Tile(index // count * cfg.block_x, begin + token_tile * cfg.block_y, end, expert), width


@gluon.jit
def narrow_width(rest, cfg: gl.constexpr):
    """Return the width of an expert's last, narrower tile for so many rows: 1, 2 or 3."""
    return 1 + (rest <= cfg.block_y // 4).to(gl.int32) + (rest <= cfg.block_y // 8).to(gl.int32)
