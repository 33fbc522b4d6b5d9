"""GEMM by expert for few tokens: weights streamed through shared memory, tokens gathered once, any epilogue.

    acc[feature, token] = sum over steps of 128 bytes of K:  w[feature, step] @ x[step, token]

Reading weights takes the time, and everything else goes on meanwhile: two CTAs of four warps on each multiprocessor, no
roles. A CTA has a contiguous range of tiles, each 64 features of an expert by all of K, and keeps `num_stages` TMA
loads of weights under way, across tiles, epilogues and the wait for the previous launch:

    ids -> rows of experts -> slots of the first strip
    tokens    | request all of K                            | next strip: request, wait ..
    weights   | request all stages              request a stage again after its products  ..
    products                   wait for tokens | wait for a stage, wgmma, (scale factors) | .. | epilogue | ..

A strip is a tile of tokens: up to 8 rows of one expert. All its tiles have the same tokens. Tokens are requested before
weights: after megabytes of weights they would come last.

`full` of the ring's stages takes one arrival, TMA's with all bytes of a stage; all warps wait for it. There is no
`empty`: each warp waits for its products, all warps meet at a barrier of the CTA, and then the stage is
requested again.

Launches overlap: L1 -> L2 -> sum. L1 lets L2 start at once; L2 requests weights, and reads what L1 wrote after
`wait_for_grid`.

One token takes some 10 us, in which most code runs once, straight from memory: 100 instructions cost about 0.5 us.
Loops are rolled where a kernel for many tokens would unroll them.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from envoi.epilogues.chunk import ChunkBuffers, ChunkPosition
from envoi.epilogues.device import divide, e4m3, group_amax, maximum
from envoi.ops.gemm.hopper.mainloop import widened
from envoi.ops.gemm.hopper.run_epilogue import interleave_gate_up, to_token_major
from envoi.ops.moe.decode.bf16_fp8 import config
from envoi.ops.moe.decode.bf16_fp8.tile_scheduler import Schedule, Slots
from envoi.runtime.aggregate import Scalar, aggregate
from envoi.runtime.ring import Ring
from envoi.runtime.sync import let_next_start, wait_for_grid
from envoi.runtime.triton_compat import async_load, reinterpret, role_barrier, tma_load

E4M3_MAX = gl.constexpr(448.0)
FEATURES = gl.constexpr(config.FEATURES)
TOKENS = gl.constexpr(config.TOKENS)
SCALE_BLOCK = gl.constexpr(config.SCALE_BLOCK)


@aggregate
class Weights:
    """Weights of all experts in global memory, and the stages through which a CTA streams its tiles'.

    desc: boxes [64, step] of [num_experts * N, K], or with halves [2, 32, step] of [2 * num_experts, N / 2, K]: 32 rows
    of gate, then the 32 rows of up that belong to them.
    """

    desc: tma.tensor_descriptor
    stages: gl.shared_memory_descriptor  # boxes, stage_steps for each stage: [.., 64, step] or [.., 2, 32, step]
    ring: Ring  # without `empty`
    N: Scalar
    takes_halves: gl.constexpr
    cfg: gl.constexpr

    @staticmethod
    @gluon.jit
    def create(desc, N, takes_halves: gl.constexpr, cfg: gl.constexpr):
        """Allocate the stages and initialise their barriers."""
        shape: gl.constexpr = [cfg.num_stages * cfg.stage_steps] + desc.block_type.shape
        stages = gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
        ring = Ring.create(cfg.num_stages, 1, 0)
        fence_async_shared()
        role_barrier()
        return Weights(desc, stages, ring, N, takes_halves, cfg)

    @gluon.jit
    def request(self, expert, row_tile, k, stage, wanted):
        """Start loading a tile's weights from step k on into a stage, if wanted; past K they are zeros."""
        step: gl.constexpr = self.cfg.step
        stage_steps: gl.constexpr = self.cfg.stage_steps
        full = self.ring.full.index(stage)
        self.ring.expect(stage, stage_steps * self.desc.block_type.nbytes, wanted)
        for i in gl.static_range(stage_steps):
            if self.takes_halves:
                corner = [2 * expert, row_tile * (FEATURES // 2), (k + i) * step]
            else:
                corner = [expert * self.N + row_tile * FEATURES, (k + i) * step]
            tma_load(self.desc, corner, full, self.stages.index(stage * stage_steps + i), pred=wanted)

    @gluon.jit
    def of_step(self, stage, STEP: gl.constexpr):
        """Return the weights [64, step] of one of a stage's steps."""
        box = self.stages.index(stage * self.cfg.stage_steps + STEP)
        if self.takes_halves:
            return box.reshape((FEATURES, self.cfg.step))
        else:
            return box


@aggregate
class WeightFactors:
    """Scale factors of FP8 weights, [num_experts, N / 128, K / 128] in global memory, float32 or UE8M0 as uint8.

    A tile needs two for each step: those of its first 32 rows and of its last 32. They are in `held` while it is
    multiplied; those of the next tile are on their way to registers meanwhile.
    """

    sf: Scalar  # None without scales
    held: gl.shared_memory_descriptor | gl.constexpr  # float32 [2 * max_steps, 1]
    weights: Weights

    @staticmethod
    @gluon.jit
    def create(sf, weights):
        """Allocate the shared memory."""
        if weights.cfg.block_scaled:
            line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
            held = gl.allocate_shared_memory(gl.float32, [2 * weights.cfg.max_steps, 1], line)
        else:
            held: gl.constexpr = None
        return WeightFactors(sf, held, weights)

    @gluon.jit
    def request(self, tile, wanted):
        """Start loading a tile's factors, if wanted; return what `keep` takes."""
        cfg: gl.constexpr = self.weights.cfg
        if cfg.block_scaled:
            lay: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [2, gl.num_warps() // 2], [1, 0])
            k = gl.arange(0, cfg.max_steps, gl.SliceLayout(0, lay))[None, :]
            half = gl.arange(0, 2, gl.SliceLayout(1, lay))
            N = self.weights.N
            if self.weights.takes_halves:
                feature = half * (N // 2) + tile.row_tile * (FEATURES // 2)
            else:
                feature = tile.row_tile * FEATURES + half * 0
            block = (tile.expert * (N // SCALE_BLOCK) + feature // SCALE_BLOCK).to(gl.int64)
            at = self.sf + ((block * cfg.num_steps)[:, None] + k)
            return gl.load(at, mask=(k < cfg.num_steps) & wanted & (half[:, None] >= 0), other=0)
        else:
            return 0

    @gluon.jit
    def keep(self, requested):
        """Put a tile's factors where `of_step` finds them after a barrier."""
        if self.weights.cfg.block_scaled:
            plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
            shape: gl.constexpr = [1, 2, self.weights.cfg.max_steps]
            reinterpret(self.held, gl.float32, shape, plain).index(0).store(widened(requested))

    @gluon.jit
    def of_step(self, k, layout: gl.constexpr):
        """Return the factors of the tile's rows for step k."""
        row = gl.arange(0, FEATURES, layout)
        first, second = self.held.index(k).load(layout), self.held.index(k + self.weights.cfg.max_steps).load(layout)
        return gl.where(row < FEATURES // 2, first, second)


@aggregate
class Cursor:
    """Stage of weights that is requested next: from step k on of tile t, which is at (expert, row_tile)."""

    t: gl.tensor
    k: gl.tensor
    expert: gl.tensor
    row_tile: gl.tensor

    @gluon.jit
    def request(self, stage, end, weights, schedule):
        """Request the steps into a stage, if the tile is before `end`; return the cursor of the next stage."""
        weights.request(self.expert, self.row_tile, self.k, stage, self.t < end)
        t, k, expert, row_tile = self.t, self.k + weights.cfg.stage_steps, self.expert, self.row_tile
        if k >= weights.cfg.num_steps:
            t += 1
            k = 0
            tile = schedule.tile(t)
            expert = tile.expert
            row_tile = tile.row_tile
        return Cursor(t, k, expert, row_tile)


@aggregate
class Copy:
    """Copy of a strip's tokens that is under way: pointers to its first slab [slab, 8, step], and which rows it has."""

    at: gl.tensor
    is_row: gl.tensor


@aggregate
class Tokens:
    """Tokens in global memory, bf16 [rows, K], `stride` elements apart, and those of a strip in shared memory.

    Without scale factors they are copied to `steps`. With them they are copied to `copied` in chunks of slabs, two of
    them at a time, and from there quantised into `steps`.
    """

    values: gl.tensor
    stride: Scalar
    copied: gl.shared_memory_descriptor  # bf16 [room_slabs or 2 chunk_slabs, slab, 8, step]
    steps: gl.shared_memory_descriptor  # bf16 or E4M3 [room_slabs * slab, 8, step]
    factors: gl.shared_memory_descriptor | gl.constexpr  # float32 [room_slabs * slab, 8]; None without scales
    cfg: gl.constexpr

    @staticmethod
    @gluon.jit
    def create(values, stride, dtype: gl.constexpr, cfg: gl.constexpr):
        """Allocate shared memory for a strip's tokens."""
        step: gl.constexpr = cfg.step
        num_steps: gl.constexpr = cfg.room_slabs * cfg.slab
        bits: gl.constexpr = dtype.primitive_bitwidth
        layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)
        steps = gl.allocate_shared_memory(dtype, [num_steps, TOKENS, step], layout)
        if cfg.block_scaled:
            plain: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
            line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
            copied = gl.allocate_shared_memory(gl.bfloat16, [2 * cfg.chunk_slabs, cfg.slab, TOKENS, step], plain)
            factors = gl.allocate_shared_memory(gl.float32, [num_steps, TOKENS], line)
        else:
            by_slab: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=3)
            copied = reinterpret(steps, dtype, [cfg.room_slabs, cfg.slab, TOKENS, step], by_slab)
            factors: gl.constexpr = None
        return Tokens(values, stride, copied, steps, factors, cfg)

    @gluon.jit
    def start(self, rows, num_rows):
        """Start copying rows [8] of tokens, the first num_rows of them; the other rows become zeros."""
        cfg: gl.constexpr = self.cfg
        lanes: gl.constexpr = cfg.step // 8
        warps: gl.constexpr = gl.num_warps()
        lay: gl.constexpr = gl.BlockedLayout(
            [1, 1, 8], [1, 32 // lanes, lanes], [cfg.slab, warps // cfg.slab, 1], [2, 1, 0]
        )
        s = gl.arange(0, cfg.slab, gl.SliceLayout(1, gl.SliceLayout(2, lay)))[:, None, None]
        c = gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(2, lay)))[None, :, None]
        j = gl.arange(0, cfg.step, gl.SliceLayout(0, gl.SliceLayout(1, lay)))[None, None, :]
        row = gl.convert_layout(rows, gl.SliceLayout(0, gl.SliceLayout(2, lay)))[None, :, None]
        copy = Copy(self.values + (row.to(gl.int64) * self.stride + s * cfg.step + j), (c < num_rows) & (j >= 0))
        if cfg.block_scaled:
            for chunk in gl.static_range(2):
                self.copy_slabs(copy, chunk * cfg.chunk_slabs, cfg.chunk_slabs)
        else:
            self.copy_slabs(copy, 0, cfg.num_slabs)
        return copy

    @gluon.jit
    def copy_slabs(self, copy, first, COUNT: gl.constexpr):
        """Start copying COUNT slabs from `first` on, as one group; steps past K become zeros."""
        cfg: gl.constexpr = self.cfg
        room: gl.constexpr = self.copied.shape[0]
        slab: gl.constexpr = cfg.slab
        s = gl.arange(0, slab, gl.SliceLayout(1, gl.SliceLayout(2, copy.is_row.type.layout)))[:, None, None]
        for i in range(first, first + COUNT):
            inside = copy.is_row & (i * slab + s < cfg.num_steps)
            async_load(self.copied.index(i % room), copy.at + i * (slab * cfg.step), mask=inside)
        async_copy.commit_group()

    @gluon.jit
    def finish(self, copy):
        """Wait until everything is in shared memory, quantised if weights are."""
        cfg: gl.constexpr = self.cfg
        if cfg.block_scaled:
            chunk: gl.constexpr = cfg.chunk_slabs
            for first in range(0, cfg.num_slabs, chunk):
                async_copy.wait_group(1)
                role_barrier()
                for i in range(first, min(first + chunk, cfg.num_slabs)):
                    self.quantize(i)
                role_barrier()
                self.copy_slabs(copy, first + 2 * chunk, chunk)
        async_copy.wait_group(0)
        fence_async_shared()
        role_barrier()

    @gluon.jit
    def quantize(self, i):
        """Quantise slab i in groups of 128 elements, a step each, as `envoi.quant.quantize` does it."""
        cfg: gl.constexpr = self.cfg
        lay: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 2, 16], [2, gl.num_warps() // 2, 1], [2, 1, 0])
        swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=3)
        matrix: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        slabs: gl.constexpr = [cfg.room_slabs, cfg.slab, TOKENS, cfg.step]
        x = self.copied.index(i % (2 * cfg.chunk_slabs)).load(lay).to(gl.float32)
        amax = group_amax(gl.reduce(gl.abs(x), 2, maximum))
        x = e4m3(x * gl.expand_dims(divide(E4M3_MAX, amax), 2))
        reinterpret(self.steps, gl.float8e4nv, slabs, swizzled).index(i).store(x)
        factors = reinterpret(self.factors, gl.float32, [cfg.room_slabs, cfg.slab, TOKENS], matrix)
        factors.index(i).store(divide(amax, E4M3_MAX))

    @gluon.jit
    def of_step(self, k):
        """Return the tokens of step k, [step, 8]."""
        return self.steps.index(k).permute((1, 0))


@aggregate
class Rows:
    """Rows as L1 describes them for the launches after it: slot_to_pos [num_slots] int32, row_weights float32.

    topk_weights [num_slots]: the routing weights, which a row's weight is read from.
    """

    topk_weights: gl.tensor
    row_weights: gl.tensor
    slot_to_pos: gl.tensor

    @gluon.jit
    def load(self, tile, slots):
        """Return the routing weights of a tile's rows."""
        row = tile.row + gl.arange(0, TOKENS, slots.type.layout)
        return gl.load(self.topk_weights + slots, mask=row < tile.row_end, other=0.0)

    @gluon.jit
    def store(self, tile, slots, weights):
        """Store the weights of a tile's rows, and which row each slot has. Every CTA of the strip does, the same."""
        row = tile.row + gl.arange(0, TOKENS, slots.type.layout)
        gl.store(self.row_weights + row, weights.to(gl.float32), mask=row < tile.row_end)
        gl.store(self.slot_to_pos + slots, row, mask=row < tile.row_end)

    @gluon.jit
    def store_masked(self, slots):
        """Store -1 as the row of each slot that no expert has."""
        s, e = slots.load()
        gl.store(self.slot_to_pos + s, e, mask=(e < 0) & (s < slots.num_slots))


@aggregate
class Worker:
    """State of a CTA: weights, tokens and the order of its tiles."""

    weights: Weights
    factors: WeightFactors
    tokens: Tokens
    schedule: Schedule
    rows: Rows
    operands: gl.tuple  # of the epilogue
    outputs: gl.tuple
    code: gl.constexpr  # epilogues.lower.Lowered

    @gluon.jit
    def start_tokens(self, tile):
        """Start bringing a tile's tokens: in L1 those of its rows' slots, else the rows themselves.

        Return the copy, and in L1 the slots and their weights.
        """
        cfg: gl.constexpr = self.tokens.cfg
        num_rows = tile.row_end - tile.row
        if cfg.is_l1:
            slots = self.schedule.slots_of(tile)
            copy = self.tokens.start(slots // cfg.num_topk, num_rows)
            return copy, slots, self.rows.load(tile, slots)
        else:
            layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
            copy = self.tokens.start(tile.row + gl.minimum(gl.arange(0, TOKENS, layout), num_rows - 1), num_rows)
            return copy, 0, 0

    @gluon.jit
    def finish_tokens(self, tile, started):
        """Wait for a tile's tokens."""
        copy, slots, weights = started
        if self.tokens.cfg.is_l1:
            self.rows.store(tile, slots, weights)
        self.tokens.finish(copy)

    @gluon.jit
    def run(self, begin, end):
        """Multiply tiles begin to end, and run the epilogue on them."""
        cfg: gl.constexpr = self.tokens.cfg
        bits: gl.constexpr = self.weights.desc.dtype.primitive_bitwidth
        mma: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TOKENS, 256 // bits]
        )
        first = self.schedule.tile(begin)
        cursor = Cursor(begin, begin * 0, first.expert, first.row_tile)
        if not cfg.is_l1:
            cursor = self.fill(cursor, gl.to_tensor(cfg.num_stages), end)
            let_next_start()
            wait_for_grid()
        stage, turn, strip = begin * 0, begin * 0, begin * 0 - 1
        factors = self.factors.request(first, begin < end)
        for t in range(begin, end):
            tile = self.schedule.tile(t)
            if tile.strip != strip:
                started = self.start_tokens(tile)
                if cfg.is_l1:
                    # After the first tokens, which would have to wait for all these weights.
                    cursor = self.fill(cursor, gl.where(t == begin, cfg.num_stages, 0), end)
                self.finish_tokens(tile, started)
                strip = tile.strip
            acc = gl.zeros((FEATURES, TOKENS), gl.float32, mma)
            if cfg.block_scaled:
                self.factors.keep(factors)
                factors = self.factors.request(self.schedule.tile(t + 1), t + 1 < end)
                role_barrier()
            for k in range(0, cfg.num_steps, cfg.stage_steps):
                acc = self.multiply(acc, k, stage, turn)
                role_barrier()
                cursor = cursor.request(stage, end, self.weights, self.schedule)
                stage += 1
                if stage == cfg.num_stages:
                    stage = 0
                    turn += 1
            self.finish(acc, tile)

    @gluon.jit
    def fill(self, cursor, num_stages, end):
        """Request the first num_stages stages."""
        for stage in range(num_stages):
            cursor = cursor.request(stage, end, self.weights, self.schedule)
        return cursor

    @gluon.jit
    def multiply(self, acc, k, stage, turn):
        """Return acc plus the products of a stage's steps, from k on, complete. Past K both sides are zeros."""
        weights, tokens = self.weights, self.tokens
        stage_steps: gl.constexpr = tokens.cfg.stage_steps
        layout: gl.constexpr = acc.type.layout
        weights.ring.wait_round(stage, turn)
        if tokens.cfg.block_scaled:
            zero = gl.zeros_like(acc)
            products, scales = (), ()
            for i in gl.static_range(stage_steps):
                w, x = weights.of_step(stage, i), tokens.of_step(k + i)
                products = products + (warpgroup_mma(w, x, zero, use_acc=False, is_async=True),)
            for i in gl.static_range(stage_steps):
                scales = scales + (self.scales(k + i, layout),)
            products = warpgroup_mma_wait(num_outstanding=0, deps=products)
            for i in gl.static_range(stage_steps):
                acc += products[i] * scales[i]
            return acc
        else:
            for i in gl.static_range(stage_steps):
                acc = warpgroup_mma(weights.of_step(stage, i), tokens.of_step(k + i), acc, is_async=True)
            return warpgroup_mma_wait(num_outstanding=0, deps=(acc,))

    @gluon.jit
    def scales(self, k, layout: gl.constexpr):
        """Return the factors of step k's products, [64, 8]."""
        of_weights = self.factors.of_step(k, gl.SliceLayout(1, layout))
        of_tokens = self.tokens.factors.index(k).load(gl.SliceLayout(0, layout))
        return of_weights[:, None] * of_tokens[None, :]

    @gluon.jit
    def finish(self, acc, tile):
        """Run the epilogue on a tile."""
        cfg: gl.constexpr = self.tokens.cfg
        N = self.weights.N
        if self.code.takes_halves:
            acc = interleave_gate_up(acc, cfg)
        acc = to_token_major(acc, cfg)
        at = ChunkPosition(tile.row, tile.row_tile * FEATURES, tile.row_end, N)
        buffers = ChunkBuffers((None, None, None, None), (), (0, 0, 0), 0, ())
        operands = self.code.of_expert(self.operands, tile.expert, N)
        self.code.visit(acc, at, operands, self.outputs, buffers, True, cfg)


@gluon.jit
def few_kernel(
    w_desc, w_sf, values, stride, operands, outputs, topk_ids, topk_weights, row_weights, slot_to_pos, N,
    num_experts, num_slots, cfg: gl.constexpr, code: gl.constexpr,
):  # fmt: skip
    """Run one CTA's tiles. Grid: (any number of CTAs,).

    values, stride: of `Tokens`. operands, outputs: of the epilogue, whose Row operand "weight" is row_weights. The
    others are fields of `Weights`, `Slots` and `Rows`.
    """
    if cfg.is_l1:
        let_next_start()
    weights = Weights.create(w_desc, N, code.takes_halves, cfg)
    tokens = Tokens.create(values, stride, w_desc.dtype, cfg)
    slots = Slots(topk_ids, num_slots, num_experts, cfg)
    schedule = Schedule.create(slots, gl.cdiv(N, FEATURES))
    rows = Rows(topk_weights, row_weights, slot_to_pos)
    num_tiles = schedule.num_tiles()
    each, more = num_tiles // gl.num_programs(0), num_tiles % gl.num_programs(0)
    begin = gl.program_id(0) * each + gl.minimum(gl.program_id(0), more)
    end = begin + each + (gl.program_id(0) < more).to(gl.int32)
    if cfg.is_l1:
        if gl.program_id(0) == 0:
            rows.store_masked(slots)
    factors = WeightFactors.create(w_sf, weights)
    Worker(weights, factors, tokens, schedule, rows, operands, outputs, code).run(begin, end)
