"""GEMM by expert for few tokens: MXFP4 weights streamed into FP8 wgmma, bound by reading them.

    acc[row, token] = sum over groups k of 32:  2^sf[row, k] * (w[row, k] @ high[k, token] + w[row, k] @ low[k, token])

bf16 has 8 significant bits, so a token is the sum of two E4M3 numbers, high and low, under a power of two (`tokens`):
exact for all that isn't 2^9 below the largest. E2M1 becomes E4M3 in five integer operations for eight weights. So 32 of
K are one wgmma m64n2Tk32 into a fresh accumulator, an addition and a multiply-add for each element: what the factor
costs.

Weights are the register operand, in fragment order, and reach registers through shared memory: TMA brings `unroll`
steps of a tile into one of `num_stages` stages, and each thread reads the 16 bytes of a step that are its own. Loaded
straight into registers they were never ahead: ptxas waits for all loads of a loop's turn at once, the next turn's too.
Tokens, all of K, are in shared memory, high and low side by side as columns of one product. There are no roles.

    barrier   arrivals                            who waits   parity awaited
    full      1: TMA, all bytes of a stage        all warps   n & 1, n = times the ring went round

There is no barrier `empty`: all warps meet at a barrier of the CTA after a stage's products, and it is requested again.

Work is shared out evenly in groups of `unroll` steps of 64 of K, numbered (expert, tile of tokens, tile of rows, K).
Worker i has one contiguous range. Timeline of one whose range begins inside tile 4 and ends inside tile 6:

    fetch tokens | end of 4 -> part, flag | all of 5, epilogue | beginning of 6 | wait for flags, add parts, epilogue
    weights: all stages requested, across tiles and epilogues; the first ones before the tokens are there

Of a tile that is cut, whoever has its beginning adds the others' parts in the order of K: bits don't depend on who was
first. It comes to that last, and they came to theirs first, so it rarely waits. Workers are numbered from the last CTA
down: a CTA waits for ones that were launched before it, so it doesn't matter how many fit the GPU at once.

    flag      set by                            reset by               meaning
    flags[i]  worker i, after its part          who adds that part     parts[i] can be read

Launches overlap: permute (`tokens`) -> L1 -> L2 -> sum. Each may start once all CTAs of the one in front have let it,
and requests weights; what the one in front writes is read after `wait_for_grid`. `offsets`, which permute writes, tells
where weights are. So L1 lets L2 start only after it has seen the end of permute itself, and either waits for that first
or, for few slots, finds from the ids where weights are.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from envoi.gemm.hopper_w4a16.few_epilogue import Outputs, finish_l1, finish_l2
from envoi.gemm.hopper_w4a16.fragments import TAME, pair_layout, row_factors, to_e4m3
from envoi.gemm.hopper_w4a16.tile_scheduler import Parts, Routing, Schedule
from envoi.runtime.aggregate import aggregate
from envoi.runtime.sync import let_next_start, wait_for_grid
from envoi.runtime.triton_compat import async_load, reinterpret, role_barrier, tma_load


@gluon.jit
def opaque(number: gl.constexpr):
    """Return a number as one that no compiler knows, so that none unrolls a loop of so many turns."""
    return number + gl.program_id(1)  # grids have one axis, so that this is 0


@aggregate
class Stream:
    """Weights of all experts in global memory, and the stages through which a CTA streams its tiles'.

    words: int32 [K / 64, row tiles of all experts, 16, 32] (`envoi.quant.fragments`), boxes of `unroll` steps of
    `num_row_tiles` tiles. factors: the scale factors [K / 64, row tiles, 32], the same boxes. A box fills a stage.
    """

    words: tma.tensor_descriptor
    factors: tma.tensor_descriptor
    stages: gl.shared_memory_descriptor  # int32 [num_stages, unroll, num_row_tiles, 16, 32]
    stage_factors: gl.shared_memory_descriptor  # int32 [num_stages, unroll, num_row_tiles, 32]
    full: gl.shared_memory_descriptor  # mbarriers [num_stages, 1]
    cfg: gl.constexpr

    @staticmethod
    @gluon.jit
    def create(words, factors, cfg: gl.constexpr):
        """Allocate the stages and initialise their barriers."""
        num_stages: gl.constexpr = cfg.num_stages
        stages = gl.allocate_shared_memory(gl.int32, [num_stages] + words.block_type.shape, words.layout)
        stage_factors = gl.allocate_shared_memory(gl.int32, [num_stages] + factors.block_type.shape, factors.layout)
        full = gl.allocate_shared_memory(gl.int64, [num_stages, 1], mbarrier.MBarrierLayout())
        for i in range(opaque(num_stages)):
            mbarrier.init(full.index(i), count=1)
        fence_async_shared()
        role_barrier()
        return Stream(words, factors, stages, stage_factors, full, cfg)

    @gluon.jit
    def request(self, expert, row_tile, group, stage, wanted):
        """Start loading a group of a tile's weights into a stage, if wanted; past K they are zeros.

        Row tiles past an expert's last are another's, whose products nobody reads.
        """
        full, row_tile = self.full.index(stage), expert * self.cfg.all_row_tiles + row_tile
        mbarrier.expect(full, self.words.block_type.nbytes + self.factors.block_type.nbytes, pred=wanted)
        step = group * self.cfg.unroll
        tma_load(self.words, [step, row_tile, 0, 0], full, self.stages.index(stage), pred=wanted)
        tma_load(self.factors, [step, row_tile, 0], full, self.stage_factors.index(stage), pred=wanted)

    @gluon.jit
    def wait(self, stage, turn):
        """Wait until a stage's weights are there."""
        mbarrier.wait(self.full.index(stage), turn & 1)

    @gluon.jit
    def load(self, stage, step):
        """Return the words [16 * num_row_tiles, 32] and factors [32 * num_row_tiles] of one of a stage's steps."""
        cfg: gl.constexpr = self.cfg
        U: gl.constexpr = cfg.unroll
        W: gl.constexpr = cfg.num_row_tiles
        num_steps: gl.constexpr = cfg.num_stages * cfg.unroll
        line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        matrix: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
        lay: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
        words = reinterpret(self.stages, gl.int32, [num_steps, 16 * W, 32], matrix)
        factors = reinterpret(self.stage_factors, gl.int32, [num_steps, 32 * W], line)
        at = stage * U + step
        return words.index(at).load(lay), factors.index(at).load(pair_layout(gl.num_warps()))


@aggregate
class Cursor:
    """Group of weights that is requested next: group `group` of tile t, which is at (expert, row_tile)."""

    t: gl.tensor
    group: gl.tensor
    left: gl.tensor  # groups that this worker has yet to request
    expert: gl.tensor
    row_tile: gl.tensor

    @gluon.jit
    def request(self, stage, stream, schedule):
        """Request the group into a stage, if one is left; return the cursor of the next."""
        stream.request(self.expert, self.row_tile, self.group, stage, self.left > 0)
        t, group, expert, row_tile = self.t, self.group + 1, self.expert, self.row_tile
        if group == stream.cfg.num_groups:
            t += 1
            group = 0
            tile = schedule.tile(t)
            expert = tile.expert
            row_tile = tile.row_tile
        return Cursor(t, group, self.left - 1, expert, row_tile)


@aggregate
class Tokens:
    """Tokens of the GEMM in global memory, sorted by expert, and those of a tile in shared memory.

    values: E4M3 pointer [rows, K / 64, 2, 64], high and low. factors: float32 pointer, [rows] for the first GEMM,
    [rows, groups_per_step * num_steps] for the second.
    """

    values: gl.tensor
    factors: gl.tensor
    slabs: gl.shared_memory_descriptor  # E4M3 [room_slabs, slab, 2 * tile_tokens, 64]: high of all tokens, then low
    group_factors: gl.shared_memory_descriptor  # float32 [num_k_groups, tile_tokens]; of the second GEMM
    cfg: gl.constexpr

    @staticmethod
    @gluon.jit
    def create(values, factors, cfg: gl.constexpr):
        """Allocate shared memory for a tile's tokens: one piece, so that both GEMMs take as much."""
        T: gl.constexpr = cfg.tile_tokens
        num_slabs: gl.constexpr = cfg.room_slabs
        num_steps: gl.constexpr = cfg.all_steps
        by_step: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)
        by_slab: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=3)
        rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        matrix: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        num_groups: gl.constexpr = cfg.num_k_groups
        steps = gl.allocate_shared_memory(gl.float8e4nv, [num_steps, 2 * T, 64], by_step)
        slabs = reinterpret(steps, gl.float8e4nv, [num_slabs, cfg.slab, 2 * T, 64], by_slab)
        views = reinterpret(steps, gl.float32, [num_steps * 32 // num_groups, num_groups, T], matrix)
        group_factors = reinterpret(views.index(cfg.factors_at), gl.float32, [num_groups, T], rows)
        return Tokens(values, factors, slabs, group_factors, cfg)

    @gluon.jit
    def fetch(self, tile):
        """Load the tokens of a tile, all of K. Columns past token_end are undefined: their sums are never read."""
        cfg: gl.constexpr = self.cfg
        T: gl.constexpr = cfg.tile_tokens
        warps: gl.constexpr = gl.num_warps()
        lay: gl.constexpr = gl.BlockedLayout([1, 1, 16], [1, 8, 4], [warps * 4 // T, T // 4, 1], [2, 1, 0])
        k = gl.arange(0, cfg.slab, gl.SliceLayout(1, gl.SliceLayout(2, lay)))[:, None, None]
        n = gl.arange(0, 2 * T, gl.SliceLayout(0, gl.SliceLayout(2, lay)))[None, :, None]
        j = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, lay)))[None, None, :]
        row = tile.token + n % T
        place = row * (cfg.num_steps * 128) + ((n // T) * 64 + k * 128 + j)  # rows are few: no more than 32 bits
        is_row = (row < tile.token_end) & (j >= 0)
        at = self.values + place
        num_slabs: gl.constexpr = cfg.num_slabs
        for i in range(opaque(num_slabs)):
            async_load(self.slabs.index(i), at + i * (cfg.slab * 128), mask=is_row & (i * cfg.slab + k < cfg.num_steps))
        async_copy.commit_group()
        if not cfg.is_l1:
            self.fetch_factors(tile)
        async_copy.wait_group(0)
        fence_async_shared()
        role_barrier()

    @gluon.jit
    def fetch_factors(self, tile):
        """Load the tokens' factors, K outermost."""
        cfg: gl.constexpr = self.cfg
        num_groups: gl.constexpr = cfg.groups_per_step * cfg.num_steps
        lay: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [gl.num_warps(), 1], [0, 1])
        g = gl.arange(0, cfg.num_k_groups, gl.SliceLayout(1, lay))[:, None]
        token = tile.token + gl.arange(0, cfg.tile_tokens, gl.SliceLayout(0, lay))[None, :]
        mask = (token < tile.token_end) & (g < num_groups)
        x = gl.load(self.factors + token * num_groups + g, mask=mask, other=0.0)
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        reinterpret(self.group_factors, gl.float32, [cfg.num_k_groups, cfg.tile_tokens], plain).store(x)

    @gluon.jit
    def block(self, step, BLOCK: gl.constexpr):
        """Return high and low [32, 2 * tile_tokens] of block 0 or 1 of a step."""
        cfg: gl.constexpr = self.cfg
        T: gl.constexpr = cfg.tile_tokens
        layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)
        steps = reinterpret(self.slabs, gl.float8e4nv, [cfg.room_slabs * cfg.slab, 2 * T, 64], layout)
        return steps.index(step).slice(32 * BLOCK, 32, 1).permute((1, 0))


@gluon.jit
def issue_step(words, tokens, step, zero):
    """Start the products of a step of 64 of K; return those of both blocks, with high and low side by side."""
    dot: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=zero.type.layout, k_width=4)
    w0, w1 = to_e4m3(words, dot)
    p0 = warpgroup_mma(w0, tokens.block(step, 0), zero, use_acc=False, is_async=True)
    p1 = warpgroup_mma(w1, tokens.block(step, 1), zero, use_acc=False, is_async=True)
    return p0, p1


@gluon.jit
def joined(product, layout: gl.constexpr):
    """Return the sum of the products with high and with low, [rows, tile_tokens]."""
    rows: gl.constexpr = product.shape[0]
    T: gl.constexpr = product.shape[1] // 2
    high, low = gl.split(product.reshape([rows, 2, T]).permute([0, 2, 1]))
    return gl.convert_layout(high + low, layout, assert_trivial=True)


@gluon.jit
def finish_step(acc, products, factors, tokens, step, NEWER: gl.constexpr):
    """Wait for a step's products, not for NEWER later ones; return acc plus them times their scale factors."""
    cfg: gl.constexpr = tokens.cfg
    mma: gl.constexpr = acc.type.layout
    rows: gl.constexpr = gl.SliceLayout(1, mma)
    columns: gl.constexpr = gl.SliceLayout(0, mma)
    f0, f1 = row_factors(factors, 0, rows), row_factors(factors, 2, rows)
    if cfg.is_l1:
        p0, p1 = warpgroup_mma_wait(num_outstanding=NEWER, deps=products)
        acc += joined(p0, mma) * f0[:, None]
        acc += joined(p1, mma) * f1[:, None]
    elif cfg.groups_per_step == 1:
        t = tokens.group_factors.index(step).load(columns)
        p0, p1 = warpgroup_mma_wait(num_outstanding=NEWER, deps=products)
        acc += (joined(p0, mma) * f0[:, None] + joined(p1, mma) * f1[:, None]) * t[None, :]
    else:
        t0 = tokens.group_factors.index(2 * step).load(columns)
        t1 = tokens.group_factors.index(2 * step + 1).load(columns)
        p0, p1 = warpgroup_mma_wait(num_outstanding=NEWER, deps=products)
        acc += joined(p0, mma) * (f0[:, None] * t0[None, :])
        acc += joined(p1, mma) * (f1[:, None] * t1[None, :])
    return acc


@gluon.jit
def start_step(stream, tokens, stage, group, zero, step):
    """Start the products of one of a stage's steps; return them, its factors and where it is along K."""
    cfg: gl.constexpr = tokens.cfg
    words, factors = stream.load(stage, step)
    step += group * cfg.unroll
    if cfg.num_steps % cfg.unroll:
        step = gl.minimum(step, cfg.num_steps - 1)  # after the last one, weights are zeros
    return issue_step(words, tokens, step, zero), factors + TAME, step


@gluon.jit
def multiply_group(acc, stream, tokens, stage, group):
    """Return acc with a group of steps added, which is in a stage."""
    cfg: gl.constexpr = tokens.cfg
    U: gl.constexpr = cfg.unroll
    T: gl.constexpr = cfg.tile_tokens
    warps: gl.constexpr = gl.num_warps()
    num_rows: gl.constexpr = 16 * warps
    num_columns: gl.constexpr = 2 * T
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, 2 * T, 32])
    zero = gl.zeros((num_rows, num_columns), gl.float32, mma)
    if cfg.order == "rolled":
        for i in range(gl.minimum(cfg.num_steps - group * U, U)):
            products, factors, step = start_step(stream, tokens, stage, group, zero, i)
            acc = finish_step(acc, products, factors, tokens, step, 0)
    elif cfg.order == "ahead":
        products, factors, step = start_step(stream, tokens, stage, group, zero, 0)
        for i in gl.static_range(U - 1):
            products2, factors2, step2 = start_step(stream, tokens, stage, group, zero, i + 1)
            acc = finish_step(acc, products, factors, tokens, step, 2)
            products, factors, step = products2, factors2, step2
        acc = finish_step(acc, products, factors, tokens, step, 0)
    else:
        for i in gl.static_range(U):
            products, factors, step = start_step(stream, tokens, stage, group, zero, i)
            acc = finish_step(acc, products, factors, tokens, step, 0)
    return acc


@gluon.jit
def few_kernel(
    values, factors, words, sf, bias, row_weights, out, out_factors, offsets, topk_ids, sums, flags, num_experts,
    num_slots, cfg: gl.constexpr,
):  # fmt: skip
    """Run one worker. Grid: (any number of CTAs,).

    Arguments are fields of `Tokens`, `Stream`, `Outputs`, `Routing` and `Parts`, which say what they are.
    """
    if cfg.waits_first:
        wait_for_grid()
    if cfg.overlaps and not cfg.reads_ids:
        let_next_start()
    loaded = Routing(offsets, topk_ids, num_slots, num_experts).load(cfg)
    tokens = Tokens.create(values, factors, cfg)
    stream = Stream.create(words, sf, cfg)
    schedule = Schedule.create(loaded, num_experts, cfg)
    units = schedule.num_units()
    if cfg.overlaps and cfg.reads_ids and units == 0:
        wait_for_grid()  # all CTAs would end at once otherwise, and L2 would start and read `offsets` too early
    workers = gl.maximum(gl.minimum(gl.num_programs(0), units), 1)
    parts = Parts(sums, flags, units // workers, units % workers)
    worker = workers - 1 - gl.program_id(0)
    if worker >= 0:
        begin, end = parts.begin_of(worker), parts.begin_of(worker + 1)
        if begin < end:
            outputs = Outputs(bias, row_weights, out, out_factors, factors, cfg)
            work(tokens, stream, outputs, schedule, parts, worker, begin, end)


@gluon.jit
def work(tokens, stream, outputs, schedule, parts, worker, begin, end):
    """Multiply units begin to end."""
    cfg: gl.constexpr = tokens.cfg
    warps: gl.constexpr = gl.num_warps()
    num_groups: gl.constexpr = cfg.num_groups
    num_rows: gl.constexpr = 16 * warps
    T: gl.constexpr = cfg.tile_tokens
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, T, 32])
    first, last = begin // num_groups, gl.cdiv(end, num_groups)
    tile = schedule.tile(first)
    cursor = Cursor(first, begin - first * num_groups, end - begin, tile.expert, tile.row_tile)
    for stage in range(gl.minimum(cfg.num_stages, end - begin)):
        cursor = cursor.request(stage, stream, schedule)
    if cfg.overlaps and not cfg.waits_first:
        wait_for_grid()
    if cfg.overlaps and cfg.reads_ids:
        let_next_start()
    stage, turn, strip = begin * 0, begin * 0, begin * 0 - 1
    for t in range(first, last):
        if tile.strip != strip:
            tokens.fetch(tile)
            strip = tile.strip
        low = gl.maximum(begin - t * num_groups, 0)
        high = gl.minimum(end - t * num_groups, num_groups)
        acc = gl.zeros((num_rows, T), gl.float32, mma)
        for g in range(low, high):
            stream.wait(stage, turn)
            acc = multiply_group(acc, stream, tokens, stage, g)
            role_barrier()
            cursor = cursor.request(stage, stream, schedule)
            stage += 1
            if stage == cfg.num_stages:
                stage = 0
                turn += 1
        if low > 0:
            parts.store(worker, acc)
        else:
            acc = parts.add(worker, acc, num_groups - high, (t + 1) * num_groups)
            if cfg.is_l1:
                finish_l1(acc, tile, outputs)
            else:
                finish_l2(acc, tile, outputs)
        tile = schedule.tile(t + 1)
