"""The GEMM of Blackwell: persistent, TMA, tcgen05, warp-specialised, any epilogue. Compiled, never run yet.

    for each unit of work of this CTA:    producer              multiplier                 epilogue, 4 or 8 warps
        for k in its part of K:           TMA x, y -> stage     acc += x[stage] @ y[stage].T
        last k:                                                 acc is full ->             wait for it
        the next unit:                    stages ahead          the other accumulator      acc, piece by piece ->
                                                                                           visit -> outputs; acc is free

The accumulators lie in tensor memory. x are 128 tokens, y features. Operands with a scale factor for each 16 or 32
elements of K (cfg.sf_group) bring them along: TMA takes them into the stage, the multiplier copies them to tensor
memory in front of the product. How they have to lie in memory: `envoi.gemm.sf_layout`.
A unit is a tile, or one of split_k parts of a tile along K: the tiles of the last, unfilled wave can be cut so.
Parts are added in their order by whichever CTA comes last, so the result doesn't depend on who that is.
"""

# Which branch of an `if` is compiled, and that an `else` follows a return, means something here.
# ruff: noqa: SIM113, SIM300

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    TensorMemoryScalesLayout,
    allocate_tensor_memory,
    fence_async_shared,
    mbarrier,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma,
    tcgen05_mma_scaled,
    tma,
)

from envoi.gemm.kernel_sm90 import part_pointers
from envoi.gemm.meeting import arrive
from envoi.gemm.schedule import corner, group_at, steps_at, work
from envoi.triton_compat import role_barrier, tma_load, tmem_layout


@gluon.jit
def producer(inputs, stages, sizes, offsets, cfg: gl.constexpr, GROUPED: gl.constexpr, MAX_GROUPS: gl.constexpr):
    """One warp: fills the stages by TMA, as far ahead as they reach."""
    _x_bufs, _y_bufs, _x_sf_bufs, _y_sf_bufs, empty, _ready = stages
    plan = work(sizes, offsets, cfg, GROUPED, MAX_GROUPS)
    step = 0
    for u in range(gl.program_id(0), plan[2], gl.num_programs(0)):
        place, first, last = source(u, plan, sizes, cfg, GROUPED)
        if u == gl.program_id(0):
            step = gl.minimum(last - first, cfg.num_stages)  # `prefill` has done these
            first += step
        for k in range(first, last):
            stage = step % cfg.num_stages
            mbarrier.wait(empty.index(stage), ((step // cfg.num_stages) & 1) ^ 1)
            fill(inputs, stages, stage, place, k, cfg)
            step += 1


@gluon.jit
def prefill(inputs, stages, sizes, offsets, cfg: gl.constexpr, GROUPED: gl.constexpr, MAX_GROUPS: gl.constexpr):
    """The first loads of the first tile, before the warps go their ways."""
    plan = work(sizes, offsets, cfg, GROUPED, MAX_GROUPS)
    place, first, last = source(gl.program_id(0), plan, sizes, cfg, GROUPED)
    if gl.program_id(0) < plan[2]:
        for k in range(gl.minimum(last - first, cfg.num_stages)):
            fill(inputs, stages, k, place, first + k, cfg)


@gluon.jit
def source(u, plan, sizes, cfg: gl.constexpr, GROUPED: gl.constexpr):
    """What a unit reads: its corner in x and y and in their scale factors; its first step along K, and the last."""
    _M, N, K, _num_groups, num_whole = sizes
    tile, first, last, _part, _cut = steps_at(u, plan, num_whole, gl.cdiv(K, cfg.block_k), cfg, GROUPED)
    x, y, _row_end, e = corner(tile, plan, sizes, cfg, GROUPED)
    blocks = (0, 0)
    if cfg.sf_group > 0:
        blocks = factor_blocks(tile, x, y, e, plan, N, GROUPED)
    # The weights of all experts lie below each other.
    return (x, y + e * N, blocks[0], blocks[1]), first, gl.maximum(first, last)


@gluon.jit
def fill(inputs, stages, stage, place, k, cfg: gl.constexpr):
    """Start the loads of step k into a stage."""
    x_desc, y_desc, x_sf_desc, y_sf_desc = inputs
    x_bufs, y_bufs, x_sf_bufs, y_sf_bufs, _empty, all_ready = stages
    x, y, x_block, y_block = place
    ready = all_ready.index(stage)
    num_bytes: gl.constexpr = x_desc.block_type.nbytes + y_desc.block_type.nbytes
    if cfg.sf_group > 0:
        mbarrier.expect(ready, num_bytes + x_sf_desc.block_type.nbytes + y_sf_desc.block_type.nbytes)
        steps: gl.constexpr = x_sf_desc.block_type.shape[2]
        tma_load(x_sf_desc, [0, x_block, k * steps, 0, 0], ready, x_sf_bufs.index(stage))
        tma_load(y_sf_desc, [0, y_block, k * steps, 0, 0], ready, y_sf_bufs.index(stage))
    else:
        mbarrier.expect(ready, num_bytes)
    # A box counts elements as they are stored: two FP4 numbers are one.
    tma_load(x_desc, [x, k * x_desc.block_type.shape[1]], ready, x_bufs.index(stage))
    tma_load(y_desc, [y, k * y_desc.block_type.shape[1]], ready, y_bufs.index(stage))


@gluon.jit
def factor_blocks(tile, x, y, e, plan, N, GROUPED: gl.constexpr):
    """In which blocks of 128 rows a tile's scale factors lie. Each expert's begin with a block of their own."""
    x_block = x // 128
    if GROUPED:
        _tiles_tokens, tiles_features, _num_units, groups = plan
        _e, row, row_end, before = group_at(tile, groups)
        x_block = before // tiles_features + (tile - before) % gl.cdiv(row_end - row, 128)
    return x_block, y // 128 + e * gl.cdiv(N, 128)


@gluon.jit
def multiplier(
    stages, accumulators, factors, sizes, offsets, cfg: gl.constexpr, GROUPED: gl.constexpr, MAX_GROUPS: gl.constexpr
):
    """One warp: starts the products of a tile as its stages come, and says when they are complete."""
    _x_bufs, _y_bufs, _x_sf_bufs, _y_sf_bufs, empty, ready = stages
    accs, full, free = accumulators
    _M, _N, K, _num_groups, num_whole = sizes
    plan = work(sizes, offsets, cfg, GROUPED, MAX_GROUPS)
    num_steps = gl.cdiv(K, cfg.block_k)
    step = 0
    count = 0
    for u in range(gl.program_id(0), plan[2], gl.num_programs(0)):
        _tile, first, last, _part, _cut = steps_at(u, plan, num_whole, num_steps, cfg, GROUPED)
        turn = count % cfg.num_accumulators
        mbarrier.wait(free.index(turn), ((count // cfg.num_accumulators) & 1) ^ 1)
        for k in range(first, last):
            stage = step % cfg.num_stages
            mbarrier.wait(ready.index(stage), (step // cfg.num_stages) & 1)
            multiply(stages, stage, accs.index(turn), factors, k > first, cfg)
            tcgen05_commit(empty.index(stage))
            step += 1
        tcgen05_commit(full.index(turn))
        count += 1


@gluon.jit
def multiply(stages, stage, acc, factors, use_acc, cfg: gl.constexpr):
    """Start acc += x @ y.T of a stage. Copies to tensor memory and products run in the order they are started in."""
    x_bufs, y_bufs, x_sf_bufs, y_sf_bufs, _empty, _ready = stages
    x = x_bufs.index(stage)
    y = y_bufs.index(stage).permute((1, 0))
    if cfg.sf_group > 0:
        x_sf, y_sf = factors
        tcgen05_copy(unpacked(x_sf_bufs.index(stage)), x_sf)
        tcgen05_copy(unpacked(y_sf_bufs.index(stage)), y_sf)
        x_kind: gl.constexpr = "e2m1" if x.dtype == gl.uint8 else "e4m3"
        y_kind: gl.constexpr = "e2m1" if y.dtype == gl.uint8 else "e4m3"
        tcgen05_mma_scaled(x, y, acc, x_sf, y_sf, x_kind, y_kind, use_acc=use_acc)
    else:
        tcgen05_mma(x, y, acc, use_acc=use_acc)


@gluon.jit
def unpacked(packed):
    """Packed scale factors in shared memory, seen as [rows, factors along K]."""
    blocks: gl.constexpr = packed.shape[1]
    steps: gl.constexpr = packed.shape[2]
    cut = packed.reshape((blocks, steps, 32, 4, 4)).permute((0, 3, 2, 1, 4))
    return cut.reshape((blocks * 128, steps * 4))


@gluon.constexpr_function
def piece_layout(rows, columns, num_warps):
    """Which thread has what of a piece: one of 4 warps' threads has a row, one of 8 warps' a half of one."""
    part = TensorMemoryLayout((rows, columns), col_stride=1)
    return tmem_layout(gl.float32, (rows, columns), part, num_warps)


@gluon.jit
def take(acc, COLUMN: gl.constexpr, cfg: gl.constexpr):
    """A piece of an accumulator in registers."""
    layout: gl.constexpr = piece_layout(cfg.block_x, cfg.piece, gl.num_warps())
    return acc.slice(COLUMN, cfg.piece).load(layout)


@gluon.jit
def release(free, pred):
    """Tell the multiplier that an accumulator has been read."""
    role_barrier()  # by all warps
    mbarrier.arrive(free, count=1, pred=pred)


@gluon.jit
def flat(x):
    """A piece as a vector whose neighbours in memory are neighbouring threads' quadruples of registers."""
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1]
    return gl.reshape(gl.permute(gl.reshape(x, (rows, columns // 4, 4)), (1, 0, 2)), (rows * columns,))


@gluon.jit
def unflat(v, like):
    """The inverse of `flat`."""
    rows: gl.constexpr = like.shape[0]
    columns: gl.constexpr = like.shape[1]
    v = gl.reshape(gl.permute(gl.reshape(v, (columns // 4, rows, 4)), (1, 0, 2)), (rows, columns))
    return gl.convert_layout(v, like.type.layout, assert_trivial=True)


@gluon.jit
def keep(acc, sums, slot, empty, cfg: gl.constexpr):
    """Leave a part's sums where whoever comes last adds all of them up; 0 if there were no steps."""
    num_pieces: gl.constexpr = cfg.num_pieces
    for i in gl.static_range(num_pieces):
        v = flat(take(acc, i * cfg.piece, cfg))
        gl.store(part_pointers(sums, v, slot, i * cfg.piece, cfg), gl.where(empty, 0.0, v))


@gluon.jit
def all_parts(sums, slot, COLUMN: gl.constexpr, cfg: gl.constexpr):
    """A piece of the sums of all parts, added up in their order."""
    layout: gl.constexpr = piece_layout(cfg.block_x, cfg.piece, gl.num_warps())
    like = gl.full((cfg.block_x, cfg.piece), 0.0, gl.float32, layout)
    v = flat(like)
    total = gl.load(part_pointers(sums, v, slot, COLUMN, cfg), cache_modifier=".cg")
    splits: gl.constexpr = cfg.split_k
    for s in gl.static_range(1, splits):
        total += gl.load(part_pointers(sums, v, slot + s, COLUMN, cfg), cache_modifier=".cg")
    return unflat(total, like)


@gluon.jit
def settled(parts, COUNT: gl.constexpr):
    """The partial reductions of a piece, computed before the next piece is loaded: the compiler would keep both."""
    if COUNT == 0:
        return parts
    else:
        found = ()
        for i in gl.static_range(COUNT):
            mov: gl.constexpr = "mov.b32 $0, $1;"
            found += (gl.inline_asm_elementwise(mov, "=r,r", [parts[i]], gl.float32, is_pure=False, pack=1),)
        return found


@gluon.jit
def leave(
    acc, free, m, n, m_end, N, slot, cut, empty, args, COLUMN: gl.constexpr, WIDTH: gl.constexpr, GROUPED: gl.constexpr,
    cfg: gl.constexpr, code: gl.constexpr,
):  # fmt: skip
    """Visit WIDTH columns of a tile from COLUMN on, in pieces; returns the merged partial reductions of its rows.

    The accumulator is free once the last piece has been read, unless the tile was cut along K: then it was free before.
    """
    if WIDTH <= cfg.piece:
        operands, outputs, descs, buffers, sums, side = args
        if cfg.split_k > 1:
            if cut:
                x = all_parts(sums, slot, COLUMN, cfg)
            else:
                x = take(acc, COLUMN, cfg)
        else:
            x = take(acc, COLUMN, cfg)
            if GROUPED == 2:  # rows of no expert
                x = gl.where(empty, 0.0, x)
        if COLUMN + WIDTH == cfg.block_y:
            release(free, cut == 0)
        turn: gl.constexpr = COLUMN // cfg.piece
        parts = code.visit(x, m, n + COLUMN, m_end, N, operands, outputs, descs, buffers, side, GROUPED, turn, cfg)
        return settled(parts, code.partials)
    else:
        half: gl.constexpr = WIDTH // 2
        a = leave(acc, free, m, n, m_end, N, slot, cut, empty, args, COLUMN, half, GROUPED, cfg, code)
        b = leave(acc, free, m, n, m_end, N, slot, cut, empty, args, COLUMN + half, half, GROUPED, cfg, code)
        return code.merge(a, b)


@gluon.jit
def epilogue(
    descs,
    accumulators,
    sizes,
    offsets,
    operands,
    outputs,
    scratch,
    cfg: gl.constexpr,
    code: gl.constexpr,
    GROUPED: gl.constexpr,
    MAX_GROUPS: gl.constexpr,
):
    """Four or eight warps: what becomes of every tile."""
    accs, full, free = accumulators
    M, N, K, num_groups, num_whole = sizes
    sums, counters, row_parts, row_counters = scratch
    plan = work(sizes, offsets, cfg, GROUPED, MAX_GROUPS)
    num_steps = gl.cdiv(K, cfg.block_k)
    buffers = code.buffers(descs, cfg.turns)
    side_buffers, arrived = code.side_buffers(descs)
    before = 0  # tiles whose operands have come
    count = 0
    for u in range(gl.program_id(0), plan[2], gl.num_programs(0)):
        tile, first, last, part, cut = steps_at(u, plan, num_whole, num_steps, cfg, GROUPED)
        m, n, row_end, e = corner(tile, plan, sizes, cfg, GROUPED)
        if cfg.split_k == 1:
            code.fetch_side(descs, side_buffers, arrived, m, n)
        turn = count % cfg.num_accumulators
        mbarrier.wait(full.index(turn), (count // cfg.num_accumulators) & 1)
        acc = accs.index(turn)
        complete = num_steps >= 0
        empty = first >= last
        slot = (tile - num_whole) * cfg.split_k
        if cfg.split_k > 1:
            if cut:
                keep(acc, sums, slot + part, empty, cfg)
                release(free.index(turn), True)
                complete = arrive(counters + (tile - num_whole), cfg.split_k)
        if complete:
            if cfg.split_k > 1:
                code.fetch_side(descs, side_buffers, arrived, m, n)
            own = operands
            if GROUPED:
                own = code.of_expert(operands, gl.maximum(gl.minimum(e, num_groups - 1), 0), N)
            args = (own, outputs, descs, buffers, sums, (side_buffers, arrived, before))
            parts = leave(
                acc, free.index(turn), m, n, row_end, N, slot, cut, empty, args, 0, cfg.block_y, GROUPED, cfg, code
            )
            before += 1
            if code.partials > 0:
                num_slots = gl.cdiv(N, cfg.block_y)
                code.save(parts, row_parts, n // cfg.block_y, num_slots, m, row_end, M)
                if arrive(row_counters + m, num_slots):
                    code.finish(parts[0], row_parts, num_slots, m, row_end, M, operands, outputs)
        count += 1
    if code.num_descs > 0:
        tma.store_wait(pendings=0)


@gluon.jit
def barriers(COUNT: gl.constexpr):
    """Barriers that one arrival completes."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=1)
    return bars


@gluon.jit
def buffers_for(desc, COUNT: gl.constexpr):
    """A box of shared memory for each stage."""
    return gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_type.shape, desc.layout)


@gluon.jit
def factors_for(desc, cfg: gl.constexpr):
    """Tensor memory for an operand's scale factors of one stage."""
    shape: gl.constexpr = [desc.block_type.shape[1] * 128, desc.block_type.shape[2] * 4]
    return allocate_tensor_memory(desc.dtype, shape, TensorMemoryScalesLayout())


@gluon.jit
def gemm_kernel(
    x_desc,
    y_desc,
    x_sf_desc,
    y_sf_desc,
    desc0,
    desc1,
    desc2,
    desc3,
    operands,
    outputs,
    offsets,
    sums,
    counters,
    row_parts,
    row_counters,
    M,
    N,
    K,
    num_groups,
    num_whole,
    cfg: gl.constexpr,
    code: gl.constexpr,
    GROUPED: gl.constexpr,
    MAX_GROUPS: gl.constexpr,
):
    """Set up stages and accumulators, then one role for each partition of warps."""
    x_bufs = buffers_for(x_desc, cfg.num_stages)
    y_bufs = buffers_for(y_desc, cfg.num_stages)
    x_sf_bufs = x_bufs
    y_sf_bufs = y_bufs
    factors = (0, 0)
    if cfg.sf_group > 0:
        x_sf_bufs = buffers_for(x_sf_desc, cfg.num_stages)
        y_sf_bufs = buffers_for(y_sf_desc, cfg.num_stages)
        factors = (factors_for(x_sf_desc, cfg), factors_for(y_sf_desc, cfg))
    shape: gl.constexpr = [cfg.num_accumulators, cfg.block_x, cfg.block_y]
    layout: gl.constexpr = TensorMemoryLayout((cfg.block_x, cfg.block_y), col_stride=1)
    accs = allocate_tensor_memory(gl.float32, shape, layout)
    stages = (x_bufs, y_bufs, x_sf_bufs, y_sf_bufs, barriers(cfg.num_stages), barriers(cfg.num_stages))
    accumulators = (accs, barriers(cfg.num_accumulators), barriers(cfg.num_accumulators))
    fence_async_shared()
    inputs = (x_desc, y_desc, x_sf_desc, y_sf_desc)
    sizes = (M, N, K, num_groups, num_whole)
    descs = (desc0, desc1, desc2, desc3)  # in a tuple the launcher doesn't take them
    scratch = (sums, counters, row_parts, row_counters)
    role_barrier()
    prefill(inputs, stages, sizes, offsets, cfg, GROUPED, MAX_GROUPS)
    # The tuples of arguments are written out: bound to a name, their constants would become tensors.
    gl.warp_specialize([
        (epilogue, (descs, accumulators, sizes, offsets, operands, outputs, scratch, cfg, code, GROUPED, MAX_GROUPS)),
        (producer, (inputs, stages, sizes, offsets, cfg, GROUPED, MAX_GROUPS)),
        (multiplier, (stages, accumulators, factors, sizes, offsets, cfg, GROUPED, MAX_GROUPS)),
    ], [1, 1], [cfg.role_registers, cfg.role_registers])  # fmt: skip
