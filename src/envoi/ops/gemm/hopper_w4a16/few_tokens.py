"""Tokens of the GEMMs for few of them in Gluon: a tile's, all of K, on their way to shared memory.

`Tokens` are bf16, split into two E4M3 or as they are, `Fp8Tokens` FP8 with a scale a token. Both `fetch` the tokens of
a tile.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared

from envoi.epilogues.device import divide, group_amax
from envoi.runtime.aggregate import Scalar, aggregate
from envoi.runtime.triton_compat import async_load, reinterpret, role_barrier

ROWS = gl.constexpr(8)  # of tokens that are quantised together
HELD = gl.constexpr(64)  # numbers of bf16 that a thread requests at once
E4M3_MAX = gl.constexpr(448.0)


@gluon.jit
def copy_slabs(values, slabs, tile, cfg: gl.constexpr, BYTES: gl.constexpr):
    """Start to copy the tokens of a tile to shared memory; a step of K has BYTES of them.

    values: pointer to bytes [rows, num_steps, BYTES]. slabs: [num_slabs, slab, tile_tokens, BYTES].
    """
    warps: gl.constexpr = gl.num_warps()
    lay: gl.constexpr = gl.BlockedLayout([1, 1, 16], [128 // BYTES, 4, BYTES // 16], [warps // 2, 2, 1], [2, 1, 0])
    slab: gl.constexpr = cfg.slab
    k = gl.arange(0, slab, gl.SliceLayout(1, gl.SliceLayout(2, lay)))[:, None, None]
    c = gl.arange(0, cfg.tile_tokens, gl.SliceLayout(0, gl.SliceLayout(2, lay)))[None, :, None]
    j = gl.arange(0, BYTES, gl.SliceLayout(0, gl.SliceLayout(1, lay)))[None, None, :]
    place = (tile.token + c) * (cfg.num_steps * BYTES) + (k * BYTES + j)  # rows are few: no more than 32 bits
    num_slabs: gl.constexpr = cfg.num_slabs
    for i in gl.static_range(num_slabs):
        step = k + i * slab
        mask = (tile.token + c < tile.token_end) & (step < cfg.num_steps) & (j >= 0)
        at = values + (place + i * (slab * BYTES))
        async_load(slabs.index(i), at, mask=mask)
    async_copy.commit_group()


@gluon.jit
def block_of_step(buffer, dtype: gl.constexpr, step, BLOCK: gl.constexpr, cfg: gl.constexpr):
    """Return block 0 or 1 [32, tile_tokens] of a step, of a buffer of room_steps steps [tile_tokens, 64]."""
    bits: gl.constexpr = dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=8 * bits, element_bitwidth=bits, rank=2)
    steps = reinterpret(buffer, dtype, [cfg.room_steps, cfg.tile_tokens, 64], layout)
    return steps.index(step).slice(32 * BLOCK, 32, 1).permute((1, 0))


@aggregate
class Tokens:
    """Tokens in global memory, sorted by expert, and those of a tile in shared memory: two E4M3 or bf16 for a number.

    values: E4M3 pointer [rows, K / 32, 2, 32], high and low, or to the bytes of bf16 [rows, K]. factors: float32
    pointer, [rows] for the first GEMM, [rows, groups_per_step * num_steps] for the second; None for bf16.
    """

    values: gl.tensor
    factors: Scalar
    steps: gl.shared_memory_descriptor  # E4M3 [room_steps, tile_tokens, 128]
    cfg: gl.constexpr

    @staticmethod
    @gluon.jit
    def create(values, factors, cfg: gl.constexpr):
        """Allocate shared memory for a tile's tokens: one piece, so that both GEMMs take as much."""
        layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
        steps = gl.allocate_shared_memory(gl.float8e4nv, [cfg.room_steps, cfg.tile_tokens, 128], layout)
        return Tokens(values, factors, steps, cfg)

    @gluon.jit
    def group_factors(self, layout: gl.constexpr):
        """Return the tokens' factors in shared memory, float32 [num_k_groups, tile_tokens], of the second GEMM."""
        cfg: gl.constexpr = self.cfg
        count: gl.constexpr = cfg.num_k_groups
        matrix: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        views = reinterpret(self.steps, gl.float32, [cfg.room_steps * 32 // count, count, cfg.tile_tokens], matrix)
        place: gl.constexpr = cfg.token_steps * 32 // count
        return reinterpret(views.index(place), gl.float32, [count, cfg.tile_tokens], layout)

    @gluon.jit
    def factor(self, step, GROUP: gl.constexpr, layout: gl.constexpr):
        """Return the factors of the tokens' numbers of a step of the second GEMM, of its group GROUP."""
        rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        return self.group_factors(rows).index(self.cfg.groups_per_step * step + GROUP).load(layout)

    @gluon.jit
    def fetch(self, tile):
        """Load the tokens of a tile, all of K. Columns past token_end are undefined: their sums are never read."""
        cfg: gl.constexpr = self.cfg
        layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=3)
        slabs = reinterpret(self.steps, gl.float8e4nv, [cfg.num_slabs, cfg.slab, cfg.tile_tokens, 128], layout)
        copy_slabs(self.values, slabs, tile, cfg, 128)
        if not cfg.tokens_unscaled:
            self.fetch_factors(tile)
        async_copy.wait_group(0)
        fence_async_shared()
        role_barrier()

    @gluon.jit
    def fetch_factors(self, tile):
        """Load the tokens' factors, K outermost."""
        cfg: gl.constexpr = self.cfg
        num_groups: gl.constexpr = cfg.groups_per_step * cfg.num_steps
        over_tokens: gl.constexpr = min(gl.num_warps(), 4)
        lay: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [gl.num_warps() // over_tokens, over_tokens], [0, 1])
        g = gl.arange(0, cfg.num_k_groups, gl.SliceLayout(1, lay))[:, None]
        token = tile.token + gl.arange(0, cfg.tile_tokens, gl.SliceLayout(0, lay))[None, :]
        mask = (token < tile.token_end) & (g < num_groups)
        x = gl.load(self.factors + token.to(gl.int64) * num_groups + g, mask=mask, other=0.0)
        self.group_factors(gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).store(x)

    @gluon.jit
    def part(self, step, BLOCK: gl.constexpr, LOW: gl.constexpr):
        """Return high or low [32, tile_tokens] of block 0 or 1 of a step."""
        return self.steps.index(step).slice(64 * BLOCK + 32 * LOW, 32, 1).permute((1, 0))

    @gluon.jit
    def bf16_part(self, step, BLOCK: gl.constexpr):
        """Return block 0 or 1 of a step of bf16 tokens, [32, tile_tokens]."""
        return block_of_step(self.steps, gl.bfloat16, step, BLOCK, self.cfg)


@aggregate
class Fp8Tokens:
    """Tokens in FP8 in global memory, sorted by expert, and those of a tile in shared memory.

    values: of the first GEMM E4M3 pointer [rows, K]; of the second bf16 pointer [rows, K], which `fetch` quantises,
    bit for bit as `envoi.quant.quantize`. largest: int32 pointer [rows], the bits of the largest magnitude of a row of
    the second GEMM. tables: what widens weights (`envoi.ops.gemm.hopper_w4a8.widening`), or None.
    """

    values: gl.tensor
    largest: gl.tensor
    tables: Scalar
    slabs: gl.shared_memory_descriptor  # E4M3 [room_steps / slab, slab, tile_tokens, 64]
    cfg: gl.constexpr

    @staticmethod
    @gluon.jit
    def create(values, largest, tables, cfg: gl.constexpr):
        """Allocate shared memory for a tile's tokens, as much for both GEMMs."""
        layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=3)
        shape: gl.constexpr = [cfg.room_steps // cfg.slab, cfg.slab, cfg.tile_tokens, 64]
        slabs = gl.allocate_shared_memory(gl.float8e4nv, shape, layout)
        return Fp8Tokens(values, largest, tables, slabs, cfg)

    @gluon.jit
    def fetch(self, tile):
        """Load the tokens of a tile, all of K. Columns past token_end are undefined: their sums are never read."""
        cfg: gl.constexpr = self.cfg
        few: gl.constexpr = gl.num_warps() // 2
        if cfg.is_l1:
            copy_slabs(self.values, self.slabs, tile, cfg, 64)
            async_copy.wait_group(0)
        else:
            if few < ROWS and tile.token_end - tile.token <= few:
                self.quantise(tile, 0, few)
            else:
                self.quantise(tile, 0, ROWS)
            tile_tokens: gl.constexpr = cfg.tile_tokens
            for first in gl.static_range(ROWS, tile_tokens, ROWS):
                if tile.token + first < tile.token_end:
                    self.quantise(tile, first, ROWS)
        fence_async_shared()
        role_barrier()

    @gluon.jit
    def quantise(self, tile, FIRST: gl.constexpr, COUNT: gl.constexpr):
        """Load COUNT tokens of a tile, quantise them, and store them as ROWS columns from FIRST on, some repeated."""
        cfg: gl.constexpr = self.cfg
        lay: gl.constexpr = quantising_layout(COUNT, gl.num_warps())
        slab: gl.constexpr = cfg.slab
        k = gl.arange(0, slab, gl.SliceLayout(1, gl.SliceLayout(2, lay)))[:, None, None]
        row = tile.token + FIRST + gl.arange(0, COUNT, gl.SliceLayout(0, gl.SliceLayout(2, lay)))[None, :, None]
        j = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, lay)))[None, None, :]
        inside = row < tile.token_end
        bits = gl.load(self.largest + row, mask=inside, other=0, cache_modifier=".cg")
        place = row * (cfg.num_steps * 64) + (k * 64 + j)  # rows are few: no more than 32 bits
        num_slabs: gl.constexpr = cfg.num_slabs
        amax = group_amax(bits.to(gl.float32, bitcast=True))
        factors = divide(gl.full(amax.shape, E4M3_MAX, gl.float32, amax.type.layout), amax)
        ahead: gl.constexpr = HELD * 32 * gl.num_warps() // (slab * 64 * COUNT)  # slabs
        held = ()
        for i in gl.static_range(num_slabs + ahead):
            if i >= ahead:
                x = (held[i - ahead].to(gl.float32) * factors).to(gl.float8e4nv)  # saturates
                self.slabs.index(i - ahead).slice(FIRST, ROWS, 1).store(copies(x))
            if i < num_slabs:
                mask = inside & (k + i * slab < cfg.num_steps) & (j >= 0)
                at = self.values + (place + i * (slab * 64))
                held += (gl.load(at, mask=mask, other=0.0, cache_modifier=".cg"),)

    @gluon.jit
    def part(self, step, BLOCK: gl.constexpr):
        """Return block 0 or 1 of a step, [32, tile_tokens]."""
        return block_of_step(self.slabs, gl.float8e4nv, step, BLOCK, self.cfg)


@gluon.constexpr_function
def quantising_layout(rows, warps):
    """Return the layout of a slab's part [slab, rows, 64] of bf16, rows a power of two: 16 neighbours a thread.

    A row's steps are neighbours, so that requests are of 256 bytes or more.
    """
    over_rows = min(rows, 4)
    warps_over_rows = min(rows // over_rows, warps // 2)
    over_warps = [warps // warps_over_rows, warps_over_rows, 1]
    return gl.BlockedLayout([1, 1, 16], [8 // over_rows, over_rows, 4], over_warps, [2, 1, 0])


@gluon.jit
def copies(x):
    """Repeat the rows of x [slab, rows, 64] until there are ROWS: no number is moved."""
    if x.shape[1] < ROWS:
        x = copies(gl.join(x, x).permute([0, 3, 1, 2]).reshape([x.shape[0], 2 * x.shape[1], x.shape[2]]))
    return x
