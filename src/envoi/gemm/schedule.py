"""Who works on which tile: the order that all roles of a persistent GEMM kernel walk through, in Gluon.

Every role computes the same sequence by itself, so none has to be told. A unit of work is a tile, or one of split_k
parts of a tile along K: the tiles of the last, unfilled wave can be cut so. x and y are the sides of the instruction:
tokens and features, or with swap_ab features and tokens.

sizes: (M, N, K, number of experts, number of tiles that stay whole).
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from envoi.epilogue.device import plus


@gluon.jit
def group_ends(offsets, M, num_groups, num_tiles_y, cfg: gl.constexpr, GROUPED: gl.constexpr, MAX_GROUPS: gl.constexpr):
    """How many tiles end with each expert, and all tiles that belong to one; then what `group_at` reads.

    With GROUPED == 2 the rows behind the last expert's are one more, whose product is 0. Rows outside [0, M) don't
    count, whatever the offsets say.
    """
    # Every warp has all of them, and sums need no barrier; unless that takes too many registers.
    per_thread: gl.constexpr = 1 if cfg.spread_experts else max(1, MAX_GROUPS // 32)
    layout: gl.constexpr = gl.BlockedLayout([per_thread], [32], [gl.num_warps()], [0])
    ids = gl.arange(0, MAX_GROUPS, layout)
    first = gl.load(offsets + ids, mask=ids <= num_groups, other=M)
    last = gl.load(offsets + ids + 1, mask=ids < num_groups, other=M)
    if GROUPED == 1:
        last = gl.where(ids < num_groups, last, first)
    first, last = inside(first, last, M)
    tiles = gl.cdiv(last - first, cfg.block_m) * num_tiles_y
    num_real = gl.sum(gl.where(ids < num_groups, tiles, 0), axis=0)
    return gl.associative_scan(tiles, 0, plus), num_real, offsets, M, num_groups


@gluon.jit
def inside(first, last, M):
    """An expert's rows, as far as they are in [0, M)."""
    first = gl.maximum(first, 0)
    return first, gl.maximum(gl.minimum(last, M), first)


@gluon.jit
def group_at(t, groups):
    """The expert of tile t, its first row, the row behind its last, the tiles before it.

    Only the ends are kept in registers: with hundreds of experts each vector more would be spilled.
    """
    ends, _num_real, offsets, M, num_groups = groups
    passed = ends <= t
    e = gl.sum(passed.to(gl.int32), axis=0)
    before = gl.max(gl.where(passed, ends, 0), axis=0)
    first = gl.load(offsets + gl.minimum(e, num_groups))
    last = gl.load(offsets + gl.minimum(e + 1, num_groups))
    first, last = inside(first, gl.where(e < num_groups, last, M), M)
    return e, first, last, before


@gluon.jit
def place_grouped(t, groups, cfg: gl.constexpr):
    """Tile t of a grouped GEMM: its corner in x and y, the rows it may touch, its expert.

    Tokens run fastest within an expert, so that its weights are read once.
    """
    e, row, row_end, before = group_at(t, groups)
    tiles_tokens = gl.cdiv(row_end - row, cfg.block_m)
    token_tile = (t - before) % tiles_tokens
    feature_tile = (t - before) // tiles_tokens
    if cfg.swap_ab:
        x, y = feature_tile * cfg.block_x, row + token_tile * cfg.block_y
    elif cfg.wide_last:
        # Two wide tiles below each other are cut into two high ones; an odd one stays.
        x, y = row + token_tile // 2 * cfg.block_x, feature_tile * cfg.block_n + token_tile % 2 * cfg.block_y
    else:
        x, y = row + token_tile * cfg.block_x, feature_tile * cfg.block_y
    return x, y, row_end, e


@gluon.jit
def place(t, tiles_x, tiles_y, cfg: gl.constexpr):
    """Tile t of a plain GEMM: its corner in x and y. Tiles go down `group` rows, then to the next column."""
    width = cfg.group * tiles_y
    first = (t // width) * cfg.group
    height = min(tiles_x - first, cfg.group)
    return (first + t % height) * cfg.block_x, ((t % width) // height) * cfg.block_y


@gluon.jit
def unit_at(u, num_whole, num_steps, cfg: gl.constexpr):
    """Unit u: its tile, the part of K it covers in steps of block_k, its part, and whether it is only a part.

    Cut tiles come last: in front they would set the CTAs apart, and with them what these share in the L2.
    """
    if cfg.split_k == 1:
        return u, 0, num_steps, 0, False
    cut = u >= num_whole
    v = u - num_whole
    part = gl.where(cut, v % cfg.split_k, 0)
    tile = gl.where(cut, num_whole + v // cfg.split_k, u)
    steps = gl.where(cut, gl.cdiv(num_steps, cfg.split_k), num_steps)
    first = part * steps
    return tile, first, max(first, min(first + steps, num_steps)), part, cut


@gluon.jit
def steps_at(u, plan, num_whole, num_steps, cfg: gl.constexpr, GROUPED: gl.constexpr):
    """Unit u as `unit_at` has it, without steps for rows of no expert."""
    tile, first, last, part, cut = unit_at(u, num_whole, num_steps, cfg)
    if GROUPED == 2:
        last = gl.where(u < plan[3][1], last, first)
    return tile, first, last, part, cut


@gluon.jit
def steps_of(u, plan, num_whole, num_steps, cfg: gl.constexpr, GROUPED: gl.constexpr):
    """How many steps along K a unit has."""
    _tile, first, last, _part, _cut = steps_at(u, plan, num_whole, num_steps, cfg, GROUPED)
    return last - first


@gluon.jit
def work(sizes, offsets, cfg: gl.constexpr, GROUPED: gl.constexpr, MAX_GROUPS: gl.constexpr):
    """What a role needs to walk through the units: how many there are, and the experts' tiles."""
    M, N, K, num_groups, num_whole = sizes
    tiles_tokens = gl.cdiv(M, cfg.block_m)
    tiles_features = gl.cdiv(N, cfg.block_n)
    groups = (0, 0, 0, 0, 0)
    if GROUPED:
        groups = group_ends(offsets, M, num_groups, tiles_features, cfg, GROUPED, MAX_GROUPS)
        num_units = gl.max(groups[0], axis=0)
    else:
        num_units = num_whole + (tiles_tokens * tiles_features - num_whole) * cfg.split_k
    return tiles_tokens, tiles_features, num_units, groups


@gluon.jit
def corner(tile, plan, sizes, cfg: gl.constexpr, GROUPED: gl.constexpr):
    """Where a tile starts in x and y, the row behind its last token, its expert."""
    M, N, K, num_groups, num_whole = sizes
    tiles_tokens, tiles_features, num_units, groups = plan
    if GROUPED:
        return place_grouped(tile, groups, cfg)
    if cfg.swap_ab:
        x, y = place(tile, tiles_features, tiles_tokens, cfg)
    else:
        x, y = place(tile, tiles_tokens, tiles_features, cfg)
    return x, y, M, 0
