"""How the operands of a Hopper GEMM get into shared memory, in Gluon.

A stage holds the shares of x and of y that one step along K of a tile needs: of x one for each role, of y one for all.
With `Config.wide_last` a tile at the end of an expert has one share of x and two of y instead.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from envoi.gemm.schedule import corner, steps_at, work
from envoi.triton_compat import tma_load


@gluon.jit
def producer(
    x_desc, y_desc, stages, sizes, offsets, cfg: gl.constexpr, GROUPED: gl.constexpr, MAX_GROUPS: gl.constexpr
):
    """One warp: fills the stages by TMA, as far ahead as they reach."""
    plan = work(sizes, offsets, cfg, GROUPED, MAX_GROUPS)
    num_steps = gl.cdiv(sizes[2], cfg.block_k)
    step = 0
    for u in range(gl.program_id(0), plan[2], gl.num_programs(0)):
        first, last, place = tile_of(u, plan, sizes, num_steps, cfg, GROUPED)
        if u == gl.program_id(0):
            step = gl.minimum(last - first, cfg.num_stages)  # `prefill` has done these
            first += step
        step = load_tile(x_desc, y_desc, stages, step, first, last, place, False, cfg, GROUPED)


@gluon.jit
def prefill(x_desc, y_desc, stages, sizes, offsets, cfg: gl.constexpr, GROUPED: gl.constexpr, MAX_GROUPS: gl.constexpr):
    """The first loads of the first tile, before the warps go their ways: that takes them about a microsecond."""
    plan = work(sizes, offsets, cfg, GROUPED, MAX_GROUPS)
    u = gl.program_id(0)
    first, last, place = tile_of(u, plan, sizes, gl.cdiv(sizes[2], cfg.block_k), cfg, GROUPED)
    if u < plan[2]:
        last = gl.minimum(last, first + cfg.num_stages)
        load_tile(x_desc, y_desc, stages, gl.to_tensor(0), first, last, place, True, cfg, GROUPED)


@gluon.jit
def tile_of(u, plan, sizes, num_steps, cfg: gl.constexpr, GROUPED: gl.constexpr):
    """Unit u: its steps along K, and where its tile begins in x, in y, and the row behind its last token."""
    M, N, K, num_groups, num_whole = sizes
    tile, first, last, part, cut = steps_at(u, plan, num_whole, num_steps, cfg, GROUPED)
    x, y, row_end, e = corner(tile, plan, sizes, cfg, GROUPED)
    # The weights of all experts lie below each other.
    if cfg.swap_ab:
        x += e * N
    else:
        y += e * N
    return first, last, (x, y, row_end)


@gluon.jit
def load_tile(
    x_desc, y_desc, stages, step, first, last, place, FRESH: gl.constexpr, cfg: gl.constexpr, GROUPED: gl.constexpr
):
    """Steps first : last of a tile into the stages from `step` on. FRESH: which have never been used."""
    x, y, row_end = place
    if GROUPED and cfg.num_parts == 2 and not cfg.swap_ab:
        # Two loops: a branch or a predicate in each step costs 2 % of a GEMM.
        if x + cfg.role_m < row_end:
            step = load_steps(x_desc, y_desc, stages, step, first, last, x, y, False, FRESH, cfg)
        else:
            step = load_steps(x_desc, y_desc, stages, step, first, last, x, y, True, FRESH, cfg)
        return step
    else:
        return load_steps(x_desc, y_desc, stages, step, first, last, x, y, False, FRESH, cfg)


@gluon.jit
def load_steps(
    x_desc, y_desc, stages, step, first, last, x, y, LOW: gl.constexpr, FRESH: gl.constexpr, cfg: gl.constexpr
):
    """The same of a tile at x, y. LOW: the second role's share of x lies behind the expert's rows."""
    for k in range(first, last):
        stage = step
        if not FRESH:
            stage = step % cfg.num_stages
            mbarrier.wait(stages[2].index(stage), ((step // cfg.num_stages) & 1) ^ 1)
        load_stage(x_desc, y_desc, stages, stage, x, y, k * cfg.block_k, LOW, cfg)
        step += 1
    return step


@gluon.jit
def load_stage(x_desc, y_desc, stages, stage, x, y, k, LOW: gl.constexpr, cfg: gl.constexpr):
    """The tile's elements from k on into a stage; with `wide_last` a low tile has two shares of y."""
    x_bufs, y_bufs, empty, ready, turn = stages
    num_parts: gl.constexpr = 1 if LOW else cfg.num_parts
    num_sides: gl.constexpr = cfg.num_sides if LOW else 1
    mbarrier.expect(ready.index(stage), num_parts * x_desc.block_type.nbytes + num_sides * y_desc.block_type.nbytes)
    for r in gl.static_range(num_parts):
        x_buf, at = x_bufs.index(x_index(stage, r, cfg)), [x + r * cfg.role_m, k]
        tma_load(x_desc, at, ready.index(stage), x_buf)
    for s in gl.static_range(num_sides):
        y_buf, at = y_bufs.index(y_index(stage, s, cfg)), [y + s * cfg.block_y, k]
        tma_load(y_desc, at, ready.index(stage), y_buf)


@gluon.jit
def x_index(stage, part, cfg: gl.constexpr):
    """Which buffer a share of x has. With `wide_last` the second lies where else the second of y would."""
    if cfg.wide_last:
        return 4 * cfg.num_stages + stage + part * (stage - 2 * cfg.num_stages)
    else:
        return stage * cfg.num_parts + part


@gluon.jit
def y_index(stage, side, cfg: gl.constexpr):
    """Which buffer a share of y has."""
    return stage + side * cfg.num_stages
