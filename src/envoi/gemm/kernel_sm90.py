"""The GEMM of Hopper: persistent, TMA, warp-specialised, any epilogue.

    for each unit of work of this CTA:                  producer             consumers, one for each share of a tile
        for k in its part of K:                         TMA x, y -> stage    acc += x[stage] @ y[stage].T
        partial sums of a tile cut along K:                                  leave them; the last to come adds all up
        acc -> visit(acc), piece by piece -> outputs                         while the producer fills the next stages

x and y are tokens and features, or with swap_ab features and tokens; the epilogue sees [tokens, features] always.
A unit is a tile, or one of split_k parts of a tile along K: the tiles of the last, unfilled wave can be cut so.
Parts are added in their order by whichever consumer arrives last, so the result doesn't depend on who that is.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from envoi.epilogue.tile_gluon import halves
from envoi.gemm.loading import prefill, producer, x_index, y_index
from envoi.gemm.meeting import arrive
from envoi.gemm.schedule import corner, steps_at, steps_of, work
from envoi.triton_compat import WIDE_ROLES, reinterpret, role_barrier


@gluon.jit
def share_of(x, row_end, P: gl.constexpr, cfg: gl.constexpr):
    """Which share of x and which of y belongs to role P of a tile."""
    if cfg.wide_last:
        wide = (x + cfg.role_m >= row_end).to(gl.int32)
        return P * (1 - wide), P * wide
    else:
        return P, 0


@gluon.jit
def share_of_stage(stages, stage, share, cfg: gl.constexpr):
    """What a role multiplies of a stage: x, and y transposed."""
    x_bufs, y_bufs, empty, ready, turn = stages
    x, y = x_bufs.index(x_index(stage, share[0], cfg)), y_bufs.index(y_index(stage, share[1], cfg))
    return x, y.permute((1, 0))


@gluon.jit
def multiply(stages, step, num_steps, share, R: gl.constexpr, cfg: gl.constexpr):
    """acc = x @ y.T over the next num_steps stages, two products in flight."""
    x_bufs, y_bufs, empty, ready, turn = stages
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[gl.num_warps(), 1],
        instr_shape=[16, cfg.block_y, 256 // x_bufs.dtype.primitive_bitwidth],
    )
    acc = gl.full((cfg.role_m, cfg.block_y), 0.0, gl.float32, layout)
    for k in range(num_steps):
        stage = step % cfg.num_stages
        mbarrier.wait(ready.index(stage), (step // cfg.num_stages) & 1)
        x, y = share_of_stage(stages, stage, share, cfg)
        acc = warpgroup_mma(x, y, acc, is_async=True, use_acc=k > 0)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        mbarrier.arrive(empty.index((step + cfg.num_stages - 1) % cfg.num_stages), count=1, pred=k > 0)
        step += 1
    if cfg.pingpong:
        mbarrier.arrive(turn.index(1 - R), count=1)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(empty.index((step + cfg.num_stages - 1) % cfg.num_stages), count=1, pred=num_steps > 0)
    return acc, step


@gluon.jit
def factor_pointers(place, scales, layout: gl.constexpr, cfg: gl.constexpr):
    """Where the factors of block 0 lie: of the role's tokens (one each), and of its features (one for 128).

    place: the role's corner in x and y, the row behind its last token, its expert. Tokens behind that row take the
    factor of the last.
    """
    x, y, row_end, e = place
    a_sf, b_sf, num_blocks, num_groups = scales
    if cfg.swap_ab:
        tokens = y + gl.arange(0, cfg.block_y, gl.SliceLayout(0, layout))
        features = x
    else:
        tokens = x + gl.arange(0, cfg.role_m, gl.SliceLayout(1, layout))
        features = y
    of_tokens = a_sf + gl.minimum(tokens, row_end - 1).to(gl.int64) * num_blocks
    return of_tokens, b_sf + (e * num_groups + features // 128).to(gl.int64) * num_blocks


@gluon.jit
def load_factors(of_tokens, of_features, block, last_block):
    """The factors of tokens and of features of one block, then of the next three; behind the last block, its own."""
    k0 = gl.minimum(block, last_block)
    k1 = gl.minimum(block + 1, last_block)
    k2 = gl.minimum(block + 2, last_block)
    k3 = gl.minimum(block + 3, last_block)
    return (
        gl.load(of_tokens + k0), gl.load(of_features + k0), gl.load(of_tokens + k1), gl.load(of_features + k1),
        gl.load(of_tokens + k2), gl.load(of_features + k2), gl.load(of_tokens + k3), gl.load(of_features + k3),
    )  # fmt: skip


@gluon.jit
def promote(acc, product, factors, cfg: gl.constexpr):
    """acc + product * factors, the factors along tokens."""
    if cfg.swap_ab:
        return acc + product * factors[None, :]
    else:
        return acc + product * factors[:, None]


@gluon.jit
def issue(stages, step, zero, share, BLOCK: gl.constexpr, cfg: gl.constexpr):
    """Start the product of a block, the BLOCK-th from the stage of `step` on."""
    x_bufs, y_bufs, empty, ready, turn = stages
    blocks_per_stage: gl.constexpr = cfg.block_k // 128
    column: gl.constexpr = BLOCK % blocks_per_stage * 128
    step += BLOCK // blocks_per_stage
    stage = step % cfg.num_stages
    if column == 0:
        mbarrier.wait(ready.index(stage), (step // cfg.num_stages) & 1)
    x, y = share_of_stage(stages, stage, share, cfg)
    return warpgroup_mma(x.slice(column, 128, 1), y.slice(column, 128, 0), zero, use_acc=False, is_async=True)


@gluon.jit
def settle(acc, product, stages, step, factors, BLOCK: gl.constexpr, BEHIND: gl.constexpr, cfg: gl.constexpr):
    """acc + the product of a block, BEHIND which another may be in flight; frees the stage that it was the last of."""
    blocks_per_stage: gl.constexpr = cfg.block_k // 128
    product = warpgroup_mma_wait(num_outstanding=BEHIND, deps=(product,))
    if (BLOCK + 1) % blocks_per_stage == 0:
        mbarrier.arrive(stages[2].index((step + BLOCK // blocks_per_stage) % cfg.num_stages), count=1)
    return promote(acc, product, factors[2 * BLOCK] * factors[2 * BLOCK + 1], cfg)


@gluon.jit
def chain(acc, stages, step, factors, zero, share, NUM_STEPS: gl.constexpr, cfg: gl.constexpr):
    """acc + the products of all blocks of NUM_STEPS stages.

    While a block is added up, the tensor cores work on the next: they run dry once a chain.
    """
    last_block: gl.constexpr = NUM_STEPS * (cfg.block_k // 128) - 1
    product = issue(stages, step, zero, share, 0, cfg)
    for b in gl.static_range(last_block):
        if b > 0:
            # Else the compiler puts all additions off to the end, and the products wouldn't fit the registers.
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        behind = issue(stages, step, zero, share, b + 1, cfg)
        acc = settle(acc, product, stages, step, factors, b, 1, cfg)
        product = behind
    return settle(acc, product, stages, step, factors, last_block, 0, cfg)


@gluon.jit
def multiply_scaled(stages, step, first, last, place, scales, share, R: gl.constexpr, cfg: gl.constexpr):
    """acc = sum over blocks of 128 along K of (x @ y.T) * factors.

    The tensor cores add up a block; adding that to acc is for the other units. An iteration is a chain of four blocks
    or, with two blocks a stage, of one stage: the compiler takes no product in flight from one iteration to the next.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, cfg.block_y, 32]
    )
    zero = gl.full((cfg.role_m, cfg.block_y), 0.0, gl.float32, layout)
    acc = zero
    blocks_per_stage: gl.constexpr = cfg.block_k // 128
    num_steps: gl.constexpr = 4 if blocks_per_stage == 1 else 1
    of_tokens, of_features = factor_pointers(place, scales, layout, cfg)
    last_block = scales[2] - 1
    ahead = load_factors(of_tokens, of_features, first * blocks_per_stage, last_block)
    rest = first + (last - first) // num_steps * num_steps
    for k in range(first, rest, num_steps):
        # Loaded a chain ahead: the compiler multiplies factors before the products it issues, and would wait for them.
        factors = ahead
        ahead = load_factors(of_tokens, of_features, (k + num_steps) * blocks_per_stage, last_block)
        acc = chain(acc, stages, step, factors, zero, share, num_steps, cfg)
        step += num_steps
    for _k in range(rest, last):
        acc = chain(acc, stages, step, ahead, zero, share, 1, cfg)
        ahead = ahead[2:] + ahead[:2]
        step += 1
    if cfg.pingpong:
        mbarrier.arrive(stages[4].index(1 - R), count=1)
    return acc, step


@gluon.jit
def flat(x):
    """A piece of the accumulator as a vector in the order of its registers: a thread's next four are neighbours."""
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1]
    warps: gl.constexpr = gl.num_warps()
    x = gl.reshape(x, (rows // (16 * warps), warps, 2, 8, columns // 8, 4, 2))
    return gl.reshape(gl.permute(x, (4, 0, 1, 3, 5, 2, 6)), (rows * columns,))


@gluon.jit
def unflat(v, like):
    """The inverse of `flat`."""
    rows: gl.constexpr = like.shape[0]
    columns: gl.constexpr = like.shape[1]
    warps: gl.constexpr = gl.num_warps()
    v = gl.reshape(v, (columns // 8, rows // (16 * warps), warps, 8, 4, 2, 2))
    v = gl.reshape(gl.permute(v, (1, 2, 5, 3, 0, 4, 6)), (rows, columns))
    return gl.convert_layout(v, like.type.layout, assert_trivial=True)


@gluon.jit
def part_pointers(sums, v, slot, column, cfg: gl.constexpr):
    """Where a piece of a role's partial sums of a tile lies."""
    base = sums + slot.to(gl.int64) * (cfg.role_m * cfg.block_y) + column * cfg.role_m
    return base + gl.arange(0, v.shape[0], v.type.layout)


@gluon.jit
def all_parts(x, sums, slot, column, cfg: gl.constexpr):
    """A piece of the sums of all parts, added up in their order."""
    v = flat(x)
    total = gl.load(part_pointers(sums, v, slot, column, cfg), cache_modifier=".cg")
    splits: gl.constexpr = cfg.split_k
    for s in gl.static_range(1, splits):
        total += gl.load(part_pointers(sums, v, slot + s, column, cfg), cache_modifier=".cg")
    return unflat(total, x)


@gluon.jit
def leave(
    x, m, n, m_end, N, slot, cut, args, COLUMN: gl.constexpr, GROUPED: gl.constexpr, cfg: gl.constexpr,
    code: gl.constexpr,
):  # fmt: skip
    """Visit a tile in pieces, this one from COLUMN on; returns the merged partial reductions of its rows.

    A tile that was cut along K (and not summed yet) is read from its parts piece by piece: twice the accumulator
    wouldn't fit the registers.
    """
    if x.shape[1] <= cfg.piece:
        operands, outputs, descs, buffers, sums, side = args
        if cfg.split_k > 1 and not cfg.swap_ab:
            if cut:
                x = all_parts(x, sums, slot, COLUMN, cfg)
        turn: gl.constexpr = COLUMN // cfg.piece
        return code.visit(x, m, n + COLUMN, m_end, N, operands, outputs, descs, buffers, side, GROUPED, turn, cfg)
    else:
        left, right = halves(x)
        half: gl.constexpr = x.shape[1] // 2
        a = leave(left, m, n, m_end, N, slot, cut, args, COLUMN, GROUPED, cfg, code)
        b = leave(right, m, n, m_end, N, slot, cut, args, COLUMN + half, GROUPED, cfg, code)
        return code.merge(a, b)


@gluon.jit
def upright(acc, cfg: gl.constexpr):
    """The accumulator as [tokens, features]."""
    if not cfg.swap_ab:
        return acc
    else:
        warps: gl.constexpr = gl.num_warps()
        lanes: gl.constexpr = min(32, cfg.role_m // 4)
        layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // lanes, lanes], [warps, 1], [1, 0])
        return gl.convert_layout(gl.permute(acc, (1, 0)), layout)


@gluon.jit
def end_tile(
    acc, corner, slot, cut, given, buffers, side, GROUPED: gl.constexpr, cfg: gl.constexpr, code: gl.constexpr
):
    """The epilogue of a role's part of a tile. corner: in x and y, the row behind its last token, its expert."""
    descs, _stages, sizes, _offsets, operands, outputs, scratch, _scales = given
    M, N, _K, num_groups, _num_whole = sizes
    sums, _counters, row_parts, row_counters = scratch
    x, y, row_end, e = corner
    m, n = (y, x) if cfg.swap_ab else (x, y)
    if cfg.split_k > 1:
        code.fetch_side(descs, side[0], side[1], m, n)
    own = operands
    if GROUPED:
        own = code.of_expert(operands, gl.minimum(e, num_groups - 1), N)
    out = upright(acc, cfg)
    parts = leave(out, m, n, row_end, N, slot, cut, (own, outputs, descs, buffers, sums, side), 0, GROUPED, cfg, code)
    if code.partials > 0:
        num_slots = gl.cdiv(N, out.shape[1])
        code.save(parts, row_parts, n // out.shape[1], num_slots, m, row_end, M)
        if arrive(row_counters + m, num_slots):
            code.finish(parts[0], row_parts, num_slots, m, row_end, M, operands, outputs)


@gluon.jit
def keep_part(acc, slot, part, counter, sums, cfg: gl.constexpr):
    """Leave the sums of a part of K; the last role to come goes on with the tile (and, swapped, with all its sums)."""
    v = flat(acc)
    gl.store(part_pointers(sums, v, slot + part, 0, cfg), v)
    complete = arrive(counter, cfg.split_k)
    if cfg.swap_ab and complete:
        acc = all_parts(acc, sums, slot, 0, cfg)
    return acc, complete


@gluon.jit
def consumer(
    given, R: gl.constexpr, cfg: gl.constexpr, code: gl.constexpr, SCALED: gl.constexpr, GROUPED: gl.constexpr,
    MAX_GROUPS: gl.constexpr,
):  # fmt: skip
    """Four or eight warps: multiply a share of every tile, then its epilogue. R: which role."""
    descs, stages, sizes, offsets, _operands, _outputs, scratch, scales = given
    K, num_whole = sizes[2], sizes[4]
    plan = work(sizes, offsets, cfg, GROUPED, MAX_GROUPS)
    num_steps = gl.cdiv(K, cfg.block_k)
    buffers = code.buffers(descs, cfg.turns)
    side_buffers, arrived = code.side_buffers(descs)
    before = 0  # tiles whose operands have come
    turns: gl.constexpr = cfg.num_roles // cfg.num_parts
    P: gl.constexpr = R % cfg.num_parts  # this role's share of a tile
    next = gl.num_programs(0)
    step = 0
    count = 0
    for u in range(gl.program_id(0) + R // cfg.num_parts * next, plan[2], turns * next):
        if turns == 2 and R == 1:
            step += steps_of(u - next, plan, num_whole, num_steps, cfg, GROUPED)
        tile, first, last, part, cut = steps_at(u, plan, num_whole, num_steps, cfg, GROUPED)
        x, y, row_end, e = corner(tile, plan, sizes, cfg, GROUPED)
        share = share_of(x, row_end, P, cfg)
        x += share[0] * cfg.role_m
        y += share[1] * cfg.block_y
        # Else this role's share lies behind the tokens, or behind the features.
        live = (y < row_end) & (x < sizes[1]) if cfg.swap_ab else x < row_end
        if cfg.split_k == 1:
            if live:
                code.fetch_side(descs, side_buffers, arrived, x, y)
        if cfg.pingpong:
            # A stage's barrier can only tell one round from the next, so a role must not wait for stages far ahead.
            mbarrier.wait(stages[4].index(R), (count & 1) ^ (1 - R))
            count += 1
        # An empty share is multiplied too, of whatever the stages hold: CTAs that save the time drift apart, and share
        # less in the L2.
        if SCALED:
            weights = gl.minimum(e, sizes[3] - 1) if GROUPED == 2 else e  # of no expert: none are multiplied
            acc, step = multiply_scaled(stages, step, first, last, (x, y, row_end, weights), scales, share, R, cfg)
        else:
            acc, step = multiply(stages, step, last - first, share, R, cfg)
        complete = num_steps >= 0
        ordinal = (tile - num_whole) * cfg.num_parts + P
        slot = ordinal * cfg.split_k
        if cfg.split_k > 1:
            if cut:
                acc, complete = keep_part(acc, slot, part, scratch[1] + ordinal, scratch[0], cfg)
        if complete & live:
            side = (side_buffers, arrived, before)
            end_tile(acc, (x, y, row_end, e), slot, cut, given, buffers, side, GROUPED, cfg, code)
            before += 1
        if turns == 2 and R == 0:
            step += steps_of(u + next, plan, num_whole, num_steps, cfg, GROUPED)
    if code.num_descs > 0:
        tma.store_wait(pendings=0)


@gluon.jit
def gemm_kernel(
    x_desc, y_desc, desc0, desc1, desc2, desc3, operands, outputs, offsets, sums, counters, row_parts, row_counters,
    a_sf, b_sf, M, N, K, num_groups, num_whole,
    cfg: gl.constexpr, code: gl.constexpr, SCALED: gl.constexpr, GROUPED: gl.constexpr, MAX_GROUPS: gl.constexpr,
):  # fmt: skip
    """Set up the stages, then one role for each partition of warps."""
    x_shape: gl.constexpr = [cfg.num_buffers] + x_desc.block_type.shape
    y_shape: gl.constexpr = [cfg.num_stages * cfg.num_sides] + y_desc.block_type.shape
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, x_shape, x_desc.layout)
    if cfg.wide_last:
        y_bufs = reinterpret(x_bufs, y_desc.dtype, y_shape, y_desc.layout)
    else:
        y_bufs = gl.allocate_shared_memory(y_desc.dtype, y_shape, y_desc.layout)
    empty = gl.allocate_shared_memory(gl.int64, [cfg.num_stages, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [cfg.num_stages, 1], mbarrier.MBarrierLayout())
    num_stages: gl.constexpr = cfg.num_stages
    for i in gl.static_range(num_stages):
        mbarrier.init(empty.index(i), count=cfg.num_parts)
        mbarrier.init(ready.index(i), count=1)
    turn = ready  # of pingpong only: the memory of barriers that nobody uses would go to others, who mustn't have it
    if cfg.pingpong:
        turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
            mbarrier.init(turn.index(i), count=1)
    fence_async_shared()
    stages = (x_bufs, y_bufs, empty, ready, turn)
    sizes = (M, N, K, num_groups, num_whole)
    scales = (a_sf, b_sf, gl.cdiv(K, 128), gl.cdiv(N, 128))
    descs = (desc0, desc1, desc2, desc3)  # in a tuple the launcher doesn't take them
    scratch = (sums, counters, row_parts, row_counters)
    role_barrier()
    prefill(x_desc, y_desc, stages, sizes, offsets, cfg, GROUPED, MAX_GROUPS)
    given = (descs, stages, sizes, offsets, operands, outputs, scratch, scales)
    # The tuples of arguments are written out: bound to a name, their constants would become tensors.
    if cfg.num_roles == 1:
        gl.warp_specialize([
            (consumer, (given, 0, cfg, code, SCALED, GROUPED, MAX_GROUPS)),
            (producer, (x_desc, y_desc, stages, sizes, offsets, cfg, GROUPED, MAX_GROUPS)),
        ], [1], [40])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (given, 0, cfg, code, SCALED, GROUPED, MAX_GROUPS)),
            (consumer, (given, 1, cfg, code, SCALED, GROUPED, MAX_GROUPS)),
            (producer, (x_desc, y_desc, stages, sizes, offsets, cfg, GROUPED, MAX_GROUPS)),
        ], [cfg.num_warps, 1], [240, 24] if SCALED or WIDE_ROLES else [232, 40])  # fmt: skip
