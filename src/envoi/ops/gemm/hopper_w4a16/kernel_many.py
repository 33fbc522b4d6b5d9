"""GEMM by expert for many tokens: MXFP4 or NVFP4 weights widened to bf16 in registers, tokens by TMA, any epilogue.

One CTA on each SM, whose warps are split into roles:

    role         warps   registers a thread   work
    consumer 0   4       what the others leave    64 features of each tile: weights from memory, products, epilogue
    consumer 1   4       232                      the next 64 features, with the same tokens
    producer     1       24                       TMA loads of tokens

    acc += bf16(weights of a step) @ tokens of the step          64 of K; the scale factors are in the operand

Weights don't pass through shared memory: a consumer's threads load their own registers' bytes (`fragments`), a group of
`unroll` steps ahead, across tiles and epilogues. While the tensor cores multiply one step, the next one is widened.

Timeline of a CTA with 3 stages; F and E wait on `full` and `empty` of a stage, e arrives on `empty`:

    producer     E0 load 0   E1 load 1   E2 load 2         E0 load 3        E1 load 4
    consumer r   widen 0 | F0 wgmma 0, widen 1 | F1 wgmma 1, e0, widen 2 | F2 wgmma 2, e1, widen 3 | .. | epilogue

    barrier   arrivals                           who waits   parity awaited
    full      1: TMA, all bytes of a stage       consumers   n & 1, n = step // num_stages
    empty     2: a consumer after its products   producer    (n & 1) ^ 1
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from envoi.epilogues.tile_gluon import halves
from envoi.ops.gemm.hopper.problem import Problem
from envoi.ops.gemm.hopper.run_epilogue import EpilogueArgs, EpilogueBuffers, RowReductions, run_epilogue
from envoi.ops.gemm.hopper.tile_scheduler import Tile, TileScheduler
from envoi.ops.gemm.hopper_w4a16.fragments import NVFP4_UP, Step, Weights, Words, by_thread, either, is_nvfp4, to_bf16
from envoi.runtime.aggregate import aggregate
from envoi.runtime.barrier_setup import set_up_together
from envoi.runtime.triton_compat import MORE_REGISTERS, role_barrier, tma_load


@aggregate
class Stages:
    """Ring of stages: tokens of 64 of K each."""

    tokens: gl.shared_memory_descriptor  # bf16 [num_stages, block_y, 64]
    empty: gl.shared_memory_descriptor  # mbarriers [num_stages, 1]
    full: gl.shared_memory_descriptor
    num_stages: gl.constexpr

    @staticmethod
    @gluon.jit
    def create(x_desc, cfg: gl.constexpr):
        """Allocate the stages and initialise their barriers. The caller fences before any role uses them."""
        num_stages: gl.constexpr = cfg.num_stages
        shape: gl.constexpr = [cfg.num_stages] + x_desc.block_type.shape
        tokens = gl.allocate_shared_memory(x_desc.dtype, shape, x_desc.layout)
        empty = gl.allocate_shared_memory(gl.int64, [num_stages, 1], mbarrier.MBarrierLayout())
        full = gl.allocate_shared_memory(gl.int64, [num_stages, 1], mbarrier.MBarrierLayout())
        set_up_together()
        for i in gl.static_range(num_stages):
            mbarrier.init(empty.index(i), count=cfg.num_consumers)
            mbarrier.init(full.index(i), count=1)
        return Stages(tokens, empty, full, num_stages)

    @gluon.jit
    def fill(self, x_desc, step, token, k):
        """Producer: load block_y tokens from `token` on, 64 of K from k on, as the step-th since the kernel began."""
        stage = step % self.num_stages
        mbarrier.wait(self.empty.index(stage), ((step // self.num_stages) & 1) ^ 1)
        full = self.full.index(stage)
        mbarrier.expect(full, x_desc.block_type.nbytes)
        tma_load(x_desc, [token, k], full, self.tokens.index(stage))

    @gluon.jit
    def wait(self, step):
        """Consumer: return the tokens of a step [64, block_y], once they are there."""
        stage = step % self.num_stages
        mbarrier.wait(self.full.index(stage), (step // self.num_stages) & 1)
        return self.tokens.index(stage).permute((1, 0))

    @gluon.jit
    def release(self, step):
        """Consumer: give the stage of a step back. Products that read it must have completed."""
        mbarrier.arrive(self.empty.index(step % self.num_stages), count=1)


@gluon.jit
def producer(x_desc, stages, problem):
    """Role: fill the stages, tile after tile."""
    cfg: gl.constexpr = problem.cfg
    scheduler = TileScheduler.create(problem)
    step = 0
    for t in range(gl.program_id(0), scheduler.num_units, gl.num_programs(0)):
        tile = scheduler.tile(t)
        for k in range(cfg.padded_steps):
            stages.fill(x_desc, step, tile.y, k * cfg.block_k)
            step += 1


@gluon.jit
def place_of(tile, weights, R: gl.constexpr):
    """Return where a consumer's weights of a tile begin; after the last feature, the last ones again."""
    return weights.at(tile.expert, gl.minimum(tile.x // 64 + R, weights.num_row_tiles - 1), 0)


@gluon.jit
def consumer(stages, weights, epilogue, R: gl.constexpr):
    """Role: multiply 64 features of every tile, then the epilogue. R: which of the consumers."""
    problem = epilogue.problem
    cfg: gl.constexpr = problem.cfg
    U: gl.constexpr = cfg.unroll
    T: gl.constexpr = cfg.block_y
    num_groups: gl.constexpr = cfg.padded_steps // U
    nvfp4: gl.constexpr = is_nvfp4(weights.factors.dtype.element_ty)
    # A step that K lacks has tokens of 0, whose products with anything finite are 0: zeros do, and need no register.
    ZEROS: gl.constexpr = nvfp4 and cfg.padded_steps > cfg.num_steps
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, T, 16])
    dot: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=2)
    scheduler = TileScheduler.create(problem)
    buffers = EpilogueBuffers.create(epilogue, cfg)
    num_tiles = scheduler.num_units
    stride = gl.num_programs(0)
    step = 0
    tile = scheduler.tile(gl.program_id(0))
    if gl.program_id(0) < num_tiles:
        place = place_of(tile, weights, R)
        held = ()
        for i in gl.static_range(U):
            held = held + (place.load(min(i, cfg.num_steps - 1), 1),)
        for t in range(gl.program_id(0), num_tiles, stride):
            next_tile = scheduler.tile(gl.minimum(t + stride, num_tiles - 1))
            next_begin = place_of(next_tile, weights, R)
            acc = gl.full((64, T), 0.0, gl.float32, mma)
            for g in range(num_groups):
                is_last = g + 1 == num_groups
                place = either(is_last, next_begin, place.advance(U))
                next_group = gl.where(is_last, 0, g + 1)
                requested = ()
                for i in gl.static_range(U):
                    w = to_bf16(by_thread(held[i].words), held[i].factors, dot)
                    acc = warpgroup_mma(w, stages.wait(step), acc, is_async=True)
                    wanted = (next_group * U + i < cfg.num_steps).to(gl.int32)
                    got = place.load(i, wanted, ZEROS)
                    if cfg.padded_steps > cfg.num_steps and not ZEROS:
                        got = keep_finite(got, held[i], wanted)
                    requested = requested + (got,)
                    acc = warpgroup_mma_wait(num_outstanding=1 if i + 1 < U else 0, deps=(acc,))
                    if i > 0:
                        stages.release(step - 1)
                    step += 1
                stages.release(step - 1)
                held = requested
            share = Tile(tile.x + R * cfg.rows_per_consumer, tile.y, tile.row_end, tile.expert)
            if nvfp4:
                acc = acc * NVFP4_UP
            if share.x < problem.N:
                finish(acc, share, buffers, epilogue)
            tile = next_tile


@gluon.jit
def keep_finite(got, held, wanted):
    """Return what was loaded, or if nothing was, what was held before: a step that K doesn't have has tokens of 0."""
    new, old = got.words, held.words
    words = Words(
        gl.where(wanted != 0, new.k0_half0, old.k0_half0), gl.where(wanted != 0, new.k0_half1, old.k0_half1),
        gl.where(wanted != 0, new.k1_half0, old.k1_half0), gl.where(wanted != 0, new.k1_half1, old.k1_half1),
    )  # fmt: skip
    return Step(words, gl.where(wanted != 0, got.factors, held.factors))


@gluon.jit
def finish(acc, tile, buffers, epilogue):
    """Run the epilogue on a consumer's accumulator, at most 128 tokens at once. tile: its share's corner."""
    T: gl.constexpr = acc.shape[1]
    if T > 128:
        first, second = halves(acc)
        finish(first, tile, buffers, epilogue)
        if tile.y + T // 2 < tile.row_end:
            finish(second, Tile(tile.x, tile.y + T // 2, tile.row_end, tile.expert), buffers, epilogue)
    else:
        # Rows g and g + 8 of 16 are features 2 g and 2 g + 1.
        acc = acc.reshape([4, 2, 8, T]).permute([0, 2, 1, 3]).reshape([64, T])
        run_epilogue(acc, tile, 0, False, 0, buffers, epilogue)


# Kernels for other divisors of the number of rows, which varies from call to call, would have the same machine code.
@gluon.jit(do_not_specialize=["M"])
def many_kernel(
    x_desc, words, factors, operands, outputs, offsets, row_parts, row_counters, M, N, K, num_experts,
    cfg: gl.constexpr, code: gl.constexpr, ROW_MODE: gl.constexpr, MAX_EXPERTS: gl.constexpr,
):  # fmt: skip
    """Set up the stages, then start one role for each partition of warps. Grid: (number of SMs,).

    x_desc: TMA descriptor of bf16 tokens [M, K], boxes [block_y, 64]. words, factors: see `Weights`. The others are
    fields of `Problem`, `EpilogueArgs` and `RowReductions`; they are flat because a launch takes no descriptor within a
    tuple.
    """
    stages = Stages.create(x_desc, cfg)
    fence_async_shared()
    problem = Problem(M, N, K, num_experts, 0, offsets, ROW_MODE, MAX_EXPERTS, cfg)
    weights = Weights(words, factors, N // 64, cfg.num_steps)
    descs = (None, None, None, None)  # the epilogue loads and stores without TMA
    rows = RowReductions(row_parts, row_counters)
    epilogue = EpilogueArgs(descs, operands, outputs, rows, None, problem, code)
    role_barrier()
    gl.warp_specialize([
        (consumer, (stages, weights, epilogue, 0)),
        (consumer, (stages, weights, epilogue, 1)),
        (producer, (x_desc, stages, problem)),
    ], [4, 1], [240 if MORE_REGISTERS else 232, 24])  # fmt: skip
