"""Rows of each expert in a grouped GEMM, as the tile scheduler's roles read them."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon


@gluon.jit
def rows_of_all(problem):
    """Return the numbers of all experts and their rows [begin, end), vectors of max_experts.

    Of those from num_experts on the first has the tail, if there is one, and the others nothing. Rows outside [0, M)
    are left out.
    """
    max_experts: gl.constexpr = problem.max_experts
    # Each warp holds the whole vector, so that sums over it need no barrier, unless that takes too many registers.
    per_thread: gl.constexpr = 1 if problem.cfg.spread_experts else max(1, max_experts // 32)
    layout: gl.constexpr = gl.BlockedLayout([per_thread], [32], [gl.num_warps()], [0])
    ids = gl.arange(0, max_experts, layout)
    begin = gl.load(problem.offsets + ids, mask=ids <= problem.num_experts, other=problem.M)
    end = gl.load(problem.offsets + ids + 1, mask=ids < problem.num_experts, other=problem.M)
    if not problem.row_mode.has_tail:
        end = gl.where(ids < problem.num_experts, end, begin)
    begin, end = clamp_rows(begin, end, problem.M)
    return ids, begin, end


@gluon.jit
def rows_of(expert, problem):
    """Return an expert's rows [begin, end); from num_experts on the tail's."""
    begin = gl.load(problem.offsets + gl.minimum(expert, problem.num_experts))
    end = gl.load(problem.offsets + gl.minimum(expert + 1, problem.num_experts))
    return clamp_rows(begin, gl.where(expert < problem.num_experts, end, problem.M), problem.M)


@gluon.jit
def clamp_rows(begin, end, M):
    """Clamp the row range [begin, end) to [0, M); an empty range stays empty."""
    begin = gl.maximum(begin, 0)
    return begin, gl.maximum(gl.minimum(end, M), begin)
