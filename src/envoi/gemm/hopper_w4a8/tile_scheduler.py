"""Order of tiles of the kernel for MXFP4 weights and FP8 tokens: whole ones first, an expert's narrower last ones then.

An expert's rows take tiles of block_y tokens and a last one of as many, half or a quarter, the narrowest that holds
what is left. Narrower tiles take less time; CTAs take tiles in turn, and where the long ones come first, all end at
about the same time.

    rows 300, block_y 128: two tiles of 128 tokens, then, after the other experts' tiles of 128, one of 64
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from envoi.epilogue.device import plus
from envoi.gemm.hopper.expert_rows import rows_of, rows_of_all
from envoi.gemm.hopper.problem import Problem
from envoi.gemm.hopper.tile_scheduler import Tile
from envoi.runtime.aggregate import aggregate


@gluon.jit
def tiles_of_width(rows, WIDTH: gl.constexpr, block_y: gl.constexpr, widths: gl.constexpr):
    """Return how many tiles of block_y >> WIDTH tokens so many rows take, with tiles of so many widths."""
    rest = rows % block_y
    holds = rest <= (block_y >> WIDTH)
    if widths > WIDTH + 1:
        holds = holds & (rest > (block_y >> (WIDTH + 1)))
    else:
        holds = holds & (rest > 0)
    last = holds.to(gl.int32)
    if WIDTH == 0:
        last += rows // block_y
    return last


@aggregate
class Tiles:
    """Tiles of a launch, by width and expert: entry w * max_experts + e is of those block_y >> w tokens wide."""

    ends: gl.tensor  # int32 [widths * max_experts], inclusive prefix sum of tiles
    num_tiles: gl.tensor  # int32
    problem: Problem

    @staticmethod
    @gluon.jit
    def create(problem):
        """Count the tiles of every expert. Rows outside [0, M) are ignored, whatever `offsets` says."""
        cfg: gl.constexpr = problem.cfg
        ids, begin, end = rows_of_all(problem)
        rows = gl.where(ids < problem.num_experts, end - begin, 0)
        num_feature_tiles = gl.cdiv(problem.N, cfg.block_x)
        tiles = tiles_of_width(rows, 0, cfg.block_y, cfg.widths)
        if cfg.widths == 4:
            second = tiles_of_width(rows, 1, cfg.block_y, cfg.widths)
            third = tiles_of_width(rows, 2, cfg.block_y, cfg.widths)
            fourth = tiles_of_width(rows, 3, cfg.block_y, cfg.widths)
            # [experts, (first, second), (third, fourth)] -> width by width
            tiles = gl.join(gl.join(tiles, third), gl.join(second, fourth)).permute((1, 2, 0))
            tiles = tiles.reshape([4 * problem.max_experts])
        per_thread: gl.constexpr = max(1, cfg.widths * problem.max_experts // 32)
        layout: gl.constexpr = gl.BlockedLayout([per_thread], [32], [gl.num_warps()], [0])
        tiles = gl.convert_layout(tiles, layout) * num_feature_tiles
        ends = gl.associative_scan(tiles, 0, plus)
        return Tiles(ends, gl.max(ends, axis=0), problem)

    @gluon.jit
    def tile(self, index):
        """Return the corner of a tile, and its width: 0 is block_y tokens, each further one half of it."""
        problem = self.problem
        cfg: gl.constexpr = problem.cfg
        is_before = self.ends <= index
        entry = gl.sum(is_before.to(gl.int32), axis=0)
        index -= gl.max(gl.where(is_before, self.ends, 0), axis=0)
        width = entry // problem.max_experts
        expert = entry % problem.max_experts
        begin, end = rows_of(expert, problem)
        # Token tiles run fastest: an expert's weights are read once by those that have one width.
        count = tiles_of_width(end - begin, 0, cfg.block_y, cfg.widths)
        count = gl.where(width == 0, count, 1)
        y = begin + gl.where(width == 0, index % count, (end - begin) // cfg.block_y) * cfg.block_y
        return Tile(index // count * cfg.block_x, y, end, expert), width
