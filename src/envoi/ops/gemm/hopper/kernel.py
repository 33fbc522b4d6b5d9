"""Hopper GEMM: persistent, TMA loads, warp-specialised wgmma, any epilogue.

One CTA on each SM. `gemm_kernel` allocates the pipeline, starts the first loads and then splits its warps into roles:

    role         warps    registers a thread       work
    consumer 0   4 or 8   all that remain          its share of each tile: mainloop, then epilogue
    others       4 or 8   see `worker_registers`   the same, where there are two consumers or three
    producer     1        see `worker_registers`   TMA loads of both operands

Timeline of a CTA whose two consumers share each tile, with 3 stages and 4 steps along K: steps 0 .. 3 are tile 0, steps
4 .. 7 are tile 1; step s uses stage s % 3. F1 waits on `full` of stage 1, E1 waits on `empty` of stage 1, e1 arrives on
it.

    time ---------------------------------------------------------------------------------------------------->
    all warps    load 0, 1, 2 (prefill)
    producer                                         E0 load 3    E1 load 4    E2 load 5    E0 load 6
    consumer 0               F0 wgmma 0  F1 wgmma 1  F2 wgmma 2   F0 wgmma 3  wait   epilogue of tile 0   F1 wgmma 4
                                               e0           e1           e2  e0
    consumer 1               as consumer 0, with its own rows of x and the same y

Two wgmma are in flight, so the plain mainloop releases a stage one step late. While the epilogue runs, the producer
fills the stages for the next tile. With `cfg.pingpong` each consumer has whole tiles to itself, and its epilogue runs
beside the other's mainloop: T waits on the consumer's own `turn`, t arrives on the other's once the tile's last wgmma
has been issued.

    consumer 0   T mainloop 0 t | epilogue 0           | T mainloop 2 t | epilogue 2           | T mainloop 4 t
    consumer 1                  | T mainloop 1 t       | epilogue 1     | T mainloop 3 t       | epilogue 3

    barrier   arrivals             who arrives                      who waits    parity awaited
    full      1                    TMA, with all bytes of a stage   consumers    see `Ring`
    empty     consumers_per_tile   each consumer, after its wgmma   producer     see `Ring`
    turn      1                    the other consumer               consumer r   (n & 1) ^ (1 - r), n = tiles multiplied
    loaded    1                    TMA, an epilogue operand         consumer     n & 1, n = chunks read

No barrier is reset: parities carry over from tile to tile. CTAs communicate only through arrival counters in global
memory (`runtime.sync.arrive`), for split-K and for row reductions; the last arrival resets them for the next launch.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from envoi.ops.gemm.hopper.consumer import ConsumerArgs, consumer
from envoi.ops.gemm.hopper.mainloop import SCALE_BLOCK, BlockScales
from envoi.ops.gemm.hopper.pipeline import Pipeline
from envoi.ops.gemm.hopper.problem import Problem
from envoi.ops.gemm.hopper.producer import ProducerArgs, prefill, producer
from envoi.ops.gemm.hopper.run_epilogue import EpilogueArgs, RowReductions
from envoi.ops.gemm.hopper.split_k import SplitK
from envoi.runtime.triton_compat import MORE_REGISTERS, role_barrier


@gluon.constexpr_function
def worker_registers(is_block_scaled, cfg):
    """Return the registers a thread of each consumer after the first, and of the producer.

    A multiprocessor has 512 for each thread of a warpgroup; all consumers and the producer, whose partition counts as
    a warpgroup, take 504 of them. Adding up blocks takes a second accumulator, hence more registers.
    """
    if cfg.num_consumers == 3:
        return [160, 160, 24]
    if cfg.num_warps == 8:
        return [112, 32]
    return [240, 24] if is_block_scaled or MORE_REGISTERS.value else [232, 40]


# Kernels for other divisors of these numbers, which vary from call to call, would have the same machine code.
@gluon.jit(do_not_specialize=["M", "num_whole_tiles"])
def gemm_kernel(
    x_desc, y_desc, desc0, desc1, desc2, desc3, operands, outputs, offsets, sums, counters, row_parts, row_counters,
    a_sf, b_sf, M, N, K, num_experts, num_whole_tiles, rest_desc,
    cfg: gl.constexpr, code: gl.constexpr, IS_BLOCK_SCALED: gl.constexpr, OVERLAP: gl.constexpr, ROW_MODE: gl.constexpr,
    MAX_EXPERTS: gl.constexpr, trace,
):  # fmt: skip
    """Set up the pipeline, then start one role for each partition of warps. Grid: (number of CTAs,).

    x_desc, y_desc: TMA descriptors of the operands. desc0, desc1: of outputs; desc2, desc3: of epilogue operands; None
    where there is none. rest_desc: of y in boxes of its second width, or of a narrowed tile's last rows, or None.
    OVERLAP: see `prefill`. The other arguments are fields of `Problem`, `EpilogueArgs`, `SplitK`, `RowReductions` and
    `BlockScales`, which document them. They are flat because a launch takes no descriptor within a tuple. trace: see
    `runtime.timeline_device`.
    """
    pipeline = Pipeline.create(x_desc, y_desc, rest_desc, code.takes_halves, cfg)
    fence_async_shared()
    problem = Problem(M, N, K, num_experts, num_whole_tiles, offsets, ROW_MODE, MAX_EXPERTS, cfg)
    scales = BlockScales(a_sf, b_sf, gl.cdiv(K, SCALE_BLOCK), gl.cdiv(N, SCALE_BLOCK))
    rows = RowReductions(row_parts, row_counters)
    descs = (desc0, desc1, desc2, desc3)
    epilogue = EpilogueArgs(descs, operands, outputs, rows, SplitK(sums, counters), problem, code)
    role_barrier()
    producer_args = ProducerArgs(x_desc, y_desc, rest_desc, pipeline, problem, trace)
    prefill(producer_args, OVERLAP)
    consumer_args = ConsumerArgs(pipeline, epilogue, scales, IS_BLOCK_SCALED, None, trace)
    # Role numbers are literals within the list: a tuple of arguments that is bound to a name first turns its integers
    # into run-time values.
    if cfg.num_consumers == 1:
        gl.warp_specialize([
            (consumer, (consumer_args, 0)),
            (producer, (producer_args,)),
        ], [1], [40])  # fmt: skip
    elif cfg.num_consumers == 2:
        gl.warp_specialize([
            (consumer, (consumer_args, 0)),
            (consumer, (consumer_args, 1)),
            (producer, (producer_args,)),
        ], [cfg.num_warps, 1], worker_registers(IS_BLOCK_SCALED, cfg))  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (consumer_args, 0)),
            (consumer, (consumer_args, 1)),
            (consumer, (consumer_args, 2)),
            (producer, (producer_args,)),
        ], [cfg.num_warps, cfg.num_warps, 1], worker_registers(IS_BLOCK_SCALED, cfg))  # fmt: skip
