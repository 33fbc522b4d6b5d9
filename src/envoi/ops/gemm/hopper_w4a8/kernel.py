"""GEMM by expert: 4-bit weights widened in registers to E4M3 or bf16, tokens in FP8 or bf16, any epilogue.

Two or three CTAs on each SM: one's products hide another's epilogue. The warps of one are split into roles:

    role       warps   registers a thread       work
    consumer   4       what the other leaves    widening, products, epilogue
    producer   1       24, or more by experts   TMA loads of tokens, weights and factors

    acc += widened(weights of 64 of K) @ tokens of 64 of K    factors are in the operand, all else in the epilogue

    config.widened   weights           tokens   tiles along K in a stage   in the epilogue yet
    e4m3             MXFP4, by rows    E4M3     2                          2^r of the weights' row, the tokens' scales
    bf16             MXFP4             bf16     1
    nvfp4            NVFP4             bf16     1                          2^8, the weights' scale
    int4             INT4              bf16     1

While the tensor cores multiply 64 of K, the consumer widens the next: products of two steps are in flight. An expert's
last tile may be as narrow as its rows allow (`tile_scheduler`).

    barrier of `Ring`   arrivals                       who waits
    full                1: TMA, all bytes of a stage   consumer
    empty               1: consumer after products     producer
"""

from typing import Any, NamedTuple

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
)

from envoi.epilogues.chunk import ChunkBuffers, ChunkPosition
from envoi.epilogues.tile_gluon import halves
from envoi.ops.gemm.hopper.mainloop import waited
from envoi.ops.gemm.hopper.problem import Problem
from envoi.ops.gemm.hopper.run_epilogue import EpilogueArgs, EpilogueBuffers, RowReductions, of_tile, run_epilogue
from envoi.ops.gemm.hopper.tile_scheduler import Tile
from envoi.ops.gemm.hopper_w4a8.tile_scheduler import Tiles
from envoi.ops.gemm.hopper_w4a8.widening import by_block, operands, pairs_layout, words_layout, words_of_pairs
from envoi.ops.gemm.hopper_w4a16.fragments import NVFP4_UP, to_bf16
from envoi.ops.gemm.hopper_w4a16.int4 import int4_to_bf16
from envoi.runtime.aggregate import aggregate
from envoi.runtime.ring import Ring
from envoi.runtime.triton_compat import role_barrier, tma_load

EPILOGUE_TOKENS = gl.constexpr(64)  # of one run of the epilogue; half as many where it finds the largest of a group
GROUPED_COLUMNS = gl.constexpr(16)  # of a chunk, from which on it does


class Sources(NamedTuple):
    """TMA descriptors: of tokens in boxes of a whole tile and of an eighth of one, of weights, factors, zeros."""

    tokens: Any
    few_tokens: Any
    words: Any
    factors: Any
    zeros: Any


@aggregate
class Stages:
    """Ring of stages: 128 bytes of each token, and the weights for that part of K."""

    tokens: gl.shared_memory_descriptor  # E4M3 [num_stages, block_y, 128] or bf16 [num_stages, block_y, 64]
    words: gl.shared_memory_descriptor  # int32 [num_stages * row tiles, 2 * steps_per_stage, 256]
    factors: gl.shared_memory_descriptor  # int32 [num_stages * row tiles, steps_per_stage, factor_words]
    # int16 [num_stages * row tiles, 2, 32], every other row unused, as TMA writes to multiples of 128 bytes; or int32
    # [.., 1, 32]; factors again if there are no zero points.
    zeros: gl.shared_memory_descriptor
    ring: Ring
    cfg: gl.constexpr

    @staticmethod
    @gluon.jit
    def create(x_desc, w_desc, f_desc, z_desc, cfg: gl.constexpr):
        """Allocate the stages and initialise their barriers. The caller fences before any role uses them."""
        num_stages: gl.constexpr = cfg.num_stages
        num_tiles: gl.constexpr = cfg.num_stages * cfg.row_tiles
        tokens = gl.allocate_shared_memory(x_desc.dtype, [num_stages] + x_desc.block_type.shape, x_desc.layout)
        words = gl.allocate_shared_memory(gl.int32, [num_tiles] + w_desc.block_type.shape, w_desc.layout)
        factors = gl.allocate_shared_memory(gl.int32, [num_tiles] + f_desc.block_type.shape, f_desc.layout)
        if z_desc is None:
            zeros = factors
        else:
            rows: gl.constexpr = 2 // cfg.int4.per_step
            zeros = gl.allocate_shared_memory(z_desc.dtype, [num_tiles, rows, 32], z_desc.layout)
        return Stages(tokens, words, factors, zeros, Ring.create(num_stages, 1, cfg.num_consumers), cfg)

    @gluon.jit
    def fill(self, descs, step, tile, width, first_tile, k_stage):
        """Producer: load the k_stage-th part of K of a tile's tokens and of the row tiles from first_tile on.

        step: since the kernel began. Of row tiles after an expert's last one no product is used.
        """
        cfg: gl.constexpr = self.cfg
        stage = self.ring.stage(step)
        self.ring.wait_empty(step)
        if cfg.widths == 1:
            self.fill_tokens(descs, stage, tile.y, k_stage, 0)
        else:
            self.fill_by_width(descs, stage, tile.y, k_stage, width)
        row_tiles: gl.constexpr = cfg.row_tiles
        for r in gl.static_range(row_tiles):
            row_tile = (first_tile + r) * cfg.num_steps + k_stage * cfg.steps_per_stage
            slot = stage * row_tiles + r
            tma_load(descs.words, [row_tile * 2, 0], self.ring.full.index(stage), self.words.index(slot))
            tma_load(descs.factors, [row_tile, 0], self.ring.full.index(stage), self.factors.index(slot))
            if descs.zeros is not None:
                zeros = self.zeros.index(slot).slice(0, 1, 0)
                tma_load(descs.zeros, [row_tile, 0], self.ring.full.index(stage), zeros)

    @gluon.jit
    def fill_by_width(self, descs, stage, token, k_stage, width):
        """Producer: `fill_tokens` for a width that is known at run time."""
        if width == 0:
            self.fill_tokens(descs, stage, token, k_stage, 0)
        elif width == 1:
            self.fill_tokens(descs, stage, token, k_stage, 1)
        elif width == 2:
            self.fill_tokens(descs, stage, token, k_stage, 2)
        else:
            self.fill_tokens(descs, stage, token, k_stage, 3)

    @gluon.jit
    def fill_tokens(self, descs, stage, token, k_stage, WIDTH: gl.constexpr):
        """Producer: expect all bytes of a stage, and load its tokens: all, or as many boxes as a narrower tile has."""
        row_tiles: gl.constexpr = self.cfg.row_tiles
        full = self.ring.full.index(stage)
        tile_bytes: gl.constexpr = descs.words.block_type.nbytes + descs.factors.block_type.nbytes + self.cfg.zero_bytes
        self.ring.expect(stage, (descs.tokens.block_type.nbytes >> WIDTH) + tile_bytes * row_tiles)
        if WIDTH == 0:
            tma_load(descs.tokens, [token, k_stage * self.cfg.block_k], full, self.tokens.index(stage))
        else:
            box: gl.constexpr = descs.few_tokens.block_type.shape[0]
            for i in gl.static_range(8 >> WIDTH):
                to = self.tokens.index(stage).slice(i * box, box, 0)
                tma_load(descs.few_tokens, [token + i * box, k_stage * self.cfg.block_k], full, to)

    @gluon.jit
    def tokens_of(self, step, FIRST: gl.constexpr, COUNT: gl.constexpr, T: gl.constexpr):
        """Consumer: return the first T tokens of COUNT elements of K from FIRST on, [COUNT, T]."""
        tokens = self.tokens.index(self.ring.stage(step))
        return tokens.slice(0, T, 0).slice(FIRST, COUNT, 1).permute((1, 0))

    @gluon.jit
    def multiply(self, step, row_tile, acc, lut, PART: gl.constexpr, dot: gl.constexpr):
        """Consumer: widen a tile of weights, part PART of a stage along K, and start its products with the tokens."""
        T: gl.constexpr = acc.shape[1]
        slot = self.ring.stage(step) * self.cfg.row_tiles + row_tile
        words = self.words.index(slot).slice(2 * PART, 2, 0).load(words_layout)
        factors = self.factors.index(slot).slice(PART, 1, 0)
        if self.cfg.widened == "e4m3":
            a0, a1 = operands(words, factors.load(pairs_layout).reshape([32]), lut, self.cfg.looks_up, dot)
            acc = warpgroup_mma(a0, self.tokens_of(step, PART * 64, 32, T), acc, is_async=True)
            return warpgroup_mma(a1, self.tokens_of(step, PART * 64 + 32, 32, T), acc, is_async=True)
        else:
            w = self.widen_to_bf16(words, words_of_pairs(factors, self.cfg.factor_words), slot, dot)
            return warpgroup_mma(w, self.tokens_of(step, 0, 64, T), acc, is_async=True)

    @gluon.jit
    def widen_to_bf16(self, words, factors, slot, dot: gl.constexpr):
        """Consumer: return a tile's operand in bf16, from the words and factors of `slot`."""
        form: gl.constexpr = self.cfg.int4
        if form is None:
            return to_bf16(by_block(words), factors, dot)
        elif form.has_zeros:
            zeros = self.zeros.index(slot).slice(0, 1, 0).load(pairs_layout).reshape([32]).to(gl.int32)
            return int4_to_bf16(by_block(words), factors, zeros, dot, form.per_step, form.half)
        else:
            return int4_to_bf16(by_block(words), factors, None, dot, form.per_step, form.half)


@gluon.jit
def producer(x_desc, few_desc, w_desc, f_desc, z_desc, stages, problem):
    """Role: fill the stages, tile after tile."""
    cfg: gl.constexpr = problem.cfg
    tiles = Tiles.create(problem)
    num_row_tiles = problem.N // 64
    step = 0
    for t in range(gl.program_id(0), tiles.num_tiles, gl.num_programs(0)):
        tile, width = tiles.tile(t)
        first_tile = tile.expert * num_row_tiles + tile.x // 64
        for k in range(cfg.stages_of_k):
            stages.fill(Sources(x_desc, few_desc, w_desc, f_desc, z_desc), step, tile, width, first_tile, k)
            step += 1


@gluon.jit
def multiply(accs, stages, step, lut, STEPS: gl.constexpr, dot: gl.constexpr):
    """Return the accumulators of a tile's row tiles plus the products of STEPS times 64 of K, from `step` on.

    The products of one step are in flight while the next one is widened.
    """
    row_tiles: gl.constexpr = stages.cfg.row_tiles
    each: gl.constexpr = stages.cfg.steps_per_stage
    in_flight: gl.constexpr = row_tiles * each  # products of a step: of FP8 two for each row tile
    for i in gl.static_range(STEPS):
        if i % each == 0:
            stages.ring.wait_full(step + i // each)
        made = ()
        for r in gl.static_range(row_tiles):
            acc = stages.multiply(step + i // each, r, accs[r], lut, i % each, dot)
            made = made + (acc,)
        accs = waited(made, in_flight if i + 1 < STEPS else 0)
        if i > 0 and i % each == 0:
            stages.ring.release(step + i // each - 1)
    stages.ring.release(step + (STEPS - 1) // each)
    return accs


@gluon.jit
def consumer(stages, lut, epilogue):
    """Role: multiply every tile, then the epilogue."""
    problem = epilogue.problem
    cfg: gl.constexpr = problem.cfg
    tiles = Tiles.create(problem)
    buffers = EpilogueBuffers.create(epilogue, cfg)
    step = 0
    for t in range(gl.program_id(0), tiles.num_tiles, gl.num_programs(0)):
        tile, width = tiles.tile(t)
        if cfg.widths == 1:
            multiply_tile(stages, step, lut, tile, buffers, epilogue, cfg.block_y)
        else:
            multiply_by_width(stages, step, lut, tile, width, buffers, epilogue)
        step += cfg.stages_of_k


@gluon.jit
def multiply_by_width(stages, step, lut, tile, width, buffers, epilogue):
    """Run `multiply_tile` for a width that is known at run time."""
    block_y: gl.constexpr = stages.cfg.block_y
    if width == 0:
        multiply_tile(stages, step, lut, tile, buffers, epilogue, block_y)
    elif width == 1:
        multiply_tile(stages, step, lut, tile, buffers, epilogue, block_y // 2)
    elif width == 2:
        multiply_tile(stages, step, lut, tile, buffers, epilogue, block_y // 4)
    else:
        multiply_tile(stages, step, lut, tile, buffers, epilogue, block_y // 8)


@gluon.jit
def multiply_tile(stages, step, lut, tile, buffers, epilogue, T: gl.constexpr):
    """Multiply a tile of T tokens, whose stages begin at `step`, then run the epilogue."""
    problem = epilogue.problem
    cfg: gl.constexpr = problem.cfg
    row_tiles: gl.constexpr = cfg.row_tiles
    turn: gl.constexpr = cfg.stages_per_turn * cfg.steps_per_stage  # steps
    num_turns: gl.constexpr = cfg.num_steps // turn
    rest: gl.constexpr = cfg.num_steps - num_turns * turn
    k: gl.constexpr = 16 * cfg.steps_per_stage  # of an instruction
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, T, k])
    dot: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=2 * cfg.steps_per_stage)
    accs = ()
    for _r in gl.static_range(row_tiles):
        accs = accs + (gl.full((64, T), 0.0, gl.float32, mma),)
    for _i in range(num_turns):
        accs = multiply(accs, stages, step, lut, turn, dot)
        step += cfg.stages_per_turn
    if rest > 0:
        accs = multiply(accs, stages, step, lut, rest, dot)
    if tile.x < problem.N:
        if cfg.widened == "nvfp4":
            accs = times(accs, NVFP4_UP)
        if cfg.reduces_rows:
            finish_rows(accs, tile, buffers, epilogue)
        else:
            finish(accs, tile, buffers, epilogue)


@gluon.jit
def times(accs, factor: gl.constexpr):
    """Return the accumulators times a factor."""
    scaled = ()
    for r in gl.static_range(len(accs)):
        scaled = scaled + (accs[r] * factor,)
    return scaled


@gluon.jit
def finish_rows(accs, tile, buffers, epilogue):
    """Run an epilogue that reduces rows, through shared memory. tile: the first corner."""
    for r in gl.static_range(len(accs)):
        x = tile.x + r * 64
        if x < epilogue.problem.N:
            acc = gl.permute(by_token(accs[r]), (1, 0))
            run_epilogue((acc,), Tile(x, tile.y, tile.row_end, tile.expert), 0, False, 0, buffers, epilogue)


@gluon.constexpr_function
def features_first(tokens, features):
    """Return the layout [tokens, features] of `finish`: a thread's neighbouring features in neighbouring registers."""
    over_features = [[0, 1], *([[0, 64]] if features == 128 else [])]
    over_tokens = [[1, 0], *([8 << i, 0] for i in range((tokens // 8).bit_length() - 1))]
    lanes, warps = [[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]], [[0, 16], [0, 32]]
    return gl.DistributedLinearLayout([*over_features, *over_tokens], lanes, warps, [], [tokens, features])


@gluon.jit
def finish(accs, tile, buffers, epilogue):
    """Run the epilogue on a tile's features, some tokens at once, where the products are. tile: the first corner.

    A thread has two neighbouring features of every token that it has, gate and up where they are in turn: nothing has
    to be moved between threads, and 16 features of a warp are a whole sector of a row of bf16.
    """
    T: gl.constexpr = accs[0].shape[1]
    cfg: gl.constexpr = epilogue.problem.cfg
    most: gl.constexpr = EPILOGUE_TOKENS // 2 if epilogue.code.chunk_columns >= GROUPED_COLUMNS else EPILOGUE_TOKENS
    if most < T:
        firsts = ()
        seconds = ()
        for r in gl.static_range(len(accs)):
            first, second = halves(accs[r])
            firsts = firsts + (first,)
            seconds = seconds + (second,)
        finish(firsts, tile, buffers, epilogue)
        # Of few tokens the second half is never left out: with one more branch ptxas would wait after each product.
        if T <= EPILOGUE_TOKENS or tile.y + T // 2 < tile.row_end:
            finish(seconds, Tile(tile.x, tile.y + T // 2, tile.row_end, tile.expert), buffers, epilogue)
    else:
        x = by_token(accs[0])
        if len(accs) == 2:
            x = gl.join(x, by_token(accs[1])).permute([0, 2, 1]).reshape([T, 128])
        layout: gl.constexpr = features_first(T, x.shape[1])
        x = gl.convert_layout(x, layout, assert_trivial=True)
        own = of_tile(tile, epilogue)
        at = ChunkPosition(tile.y, tile.x, tile.row_end, epilogue.problem.N)
        nowhere = ChunkBuffers(epilogue.descs, buffers.stores, (buffers.loads, buffers.loaded, 0), 0, buffers.columns)
        epilogue.code.visit(x, at, own.operands, own.outputs, nowhere, True, cfg)


@gluon.jit
def by_token(acc):
    """Return an accumulator [64, T] as [T, 64], its features in order: rows g and g + 8 of 16 are 2 g and 2 g + 1."""
    return acc.reshape([4, 2, 8, acc.shape[1]]).permute([3, 0, 2, 1]).reshape([acc.shape[1], 64])


# Kernels for other divisors of the number of rows, which varies from call to call, would have the same machine code.
@gluon.jit(do_not_specialize=["M"])
def w4a8_kernel(
    x_desc, few_desc, w_desc, f_desc, z_desc, lut, operands, outputs, offsets, row_parts, row_counters, M, N, K,
    num_experts, cfg: gl.constexpr, code: gl.constexpr, ROW_MODE: gl.constexpr, MAX_EXPERTS: gl.constexpr,
):  # fmt: skip
    """Set up the stages, then start one role for each partition of warps. Grid: (number of SMs,).

    x_desc, few_desc: TMA descriptors of tokens [M, K], E4M3 or bf16, boxes of 128 bytes by block_y rows and, if an
    expert's last tile may be narrower, block_y / 8, else None. w_desc: of weights as int32 [2 * tiles, 256], boxes of a
    stage's tiles along K. f_desc: of factors as int32 [tiles, 32 or 64], likewise. z_desc: of INT4's zero points as
    int16 or int32 [tiles, 32], or None. lut: int64 [16], tables of
    `envoi.quant.fp8_fragments`, or None. The others are fields of `Problem`, `EpilogueArgs` and `RowReductions`; they
    are flat because a launch takes no descriptor within a tuple.
    """
    stages = Stages.create(x_desc, w_desc, f_desc, z_desc, cfg)
    fence_async_shared()
    problem = Problem(M, N, K, num_experts, 0, offsets, ROW_MODE, MAX_EXPERTS, cfg)
    descs = (None, None, None, None)  # the epilogue loads and stores without TMA
    rows = RowReductions(row_parts, row_counters)
    epilogue = EpilogueArgs(descs, operands, outputs, rows, None, problem, code)
    role_barrier()
    gl.warp_specialize([
        (consumer, (stages, lut, epilogue)),
        (producer, (x_desc, few_desc, w_desc, f_desc, z_desc, stages, problem)),
    ], [1], [cfg.producer_registers])  # fmt: skip
