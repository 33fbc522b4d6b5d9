# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
"""Router kernel for Blackwell, in Gluon: TMA, tcgen05, experts chosen out of tensor memory. Compiled, never run yet.

    for each CTA: 128 rows, all columns (experts), all of K                        one role of four warps
        for each step along K:
            tokens[rows, step], gate[all, step]                                    TMA -> stage
            acc += tokens[rows, step] @ gate[all, step].T                          tcgen05 -> tensor memory
        choose_running(acc, a chunk of columns at a time)                          a thread has a row

Accumulators: `num_sets` of each column, one after the other along K, are added in their order as they are loaded.

Barriers, one of each for a stage: `full` (TMA's bytes arrive) and `empty` (tcgen05 arrives once the stage's products
have ended). The one role waits for both: to load and to start products is a thread's work, and the tensor cores have
the next step's products before it waits for the last one's.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    tcgen05_commit,
    tcgen05_mma,
    tensor_memory_descriptor,
    tma,
)

from envoi.ops.gemm.blackwell.run_epilogue import chunk_layout
from envoi.ops.moe.router.device_types import Args, Outputs, Positions, Scalars, Tables
from envoi.ops.moe.router.kernel_hopper import Counts, finish_counts
from envoi.ops.moe.router.running_choice import choose_running
from envoi.runtime.aggregate import Scalar, aggregate
from envoi.runtime.ring import Ring
from envoi.runtime.triton_compat import reinterpret, role_barrier, tma_load


@aggregate
class Stages:
    """Descriptors, buffers and barriers of all stages."""

    x_desc: tma.tensor_descriptor  # tokens, in boxes [128, block_k]
    y_desc: tma.tensor_descriptor  # gate, in boxes [width, block_k]
    x: gl.shared_memory_descriptor  # [num_stages, 128, block_k]
    y: gl.shared_memory_descriptor  # [num_stages * num_tiles, width, block_k]
    ring: Ring
    num_steps: Scalar
    tiling: gl.constexpr

    @gluon.jit
    def fill(self, row, step):
        """Start the TMA loads of a step along K of rows from `row` on into its stage, which is free."""
        tiling: gl.constexpr = self.tiling
        num_tiles: gl.constexpr = tiling.num_tiles
        stage = self.ring.stage(step)
        full = self.ring.full.index(stage)
        self.ring.expect(stage, self.x_desc.block_type.nbytes + num_tiles * self.y_desc.block_type.nbytes)
        tma_load(self.x_desc, [row, step * tiling.block_k], full, self.x.index(stage))
        for t in gl.static_range(num_tiles):
            at = [t * tiling.width, step * tiling.block_k]
            tma_load(self.y_desc, at, full, self.y.index(stage * num_tiles + t))

    @gluon.jit
    def multiply(self, step, accs):
        """Start the products of a step, once it is loaded: they add to its set of accumulators, or begin it."""
        tiling: gl.constexpr = self.tiling
        num_tiles: gl.constexpr = tiling.num_tiles
        self.ring.wait_full(step)
        stage = self.ring.stage(step)
        for t in gl.static_range(num_tiles):
            y = self.y.index(stage * num_tiles + t).permute((1, 0))
            acc = accs.index(step // tiling.steps_in_set * num_tiles + t)
            tcgen05_mma(self.x.index(stage), y, acc, use_acc=step % tiling.steps_in_set > 0)
        tcgen05_commit(self.ring.empty.index(stage))


@gluon.jit
def create_stages(x_desc, y_desc, hidden, tiling: gl.constexpr):
    """Allocate the stages and initialise their barriers. The caller fences before they are used."""
    x = gl.allocate_shared_memory(x_desc.dtype, [tiling.num_stages] + x_desc.block_type.shape, x_desc.layout)
    y_shape: gl.constexpr = [tiling.num_stages * tiling.num_tiles] + y_desc.block_type.shape
    y = gl.allocate_shared_memory(y_desc.dtype, y_shape, y_desc.layout)
    ring = Ring.create(tiling.num_stages, 1, 1)
    return Stages(x_desc, y_desc, x, y, ring, gl.cdiv(hidden, tiling.block_k), tiling)


@aggregate
class Products:
    """Accumulators whose products have ended, cut into chunks."""

    chunks: tensor_memory_descriptor  # float32 [num_sets * num_chunks, 128, chunk]
    tiling: gl.constexpr


@gluon.jit
def load_products(products, i):
    """Load the products [128, chunk] of chunk i: the sets added in their order."""
    tiling: gl.constexpr = products.tiling
    layout: gl.constexpr = chunk_layout(128, tiling.chunk, gl.num_warps())
    total = products.chunks.index(i).load(layout)
    sets: gl.constexpr = tiling.num_sets
    for s in gl.static_range(1, sets):
        total += products.chunks.index(s * tiling.num_chunks + i).load(layout)
    return total


@gluon.jit
def multiply_all(stages, accs, row):
    """Multiply the rows from `row` on with the gate; return when all products have ended.

    A stage is filled again as soon as its products end, while those of the next step run.
    """
    num_steps = stages.num_steps
    num_stages: gl.constexpr = stages.tiling.num_stages
    for step in range(gl.minimum(num_stages, num_steps)):
        stages.fill(row, step)
    for step in range(num_steps):
        stages.multiply(step, accs)
        again = step - 1 + num_stages
        if step > 0 and again < num_steps:
            stages.ring.wait_empty(again)
            stages.fill(row, again)
    stages.ring.wait_empty(num_steps - 1 + num_stages)  # the last step's products, and with them all before


@gluon.jit
def router_kernel(
    x_desc, y_desc, num_tokens, hidden, alpha, routed_scale, logit_bias, expert_bias, weights, ids, logits, dense,
    histogram, counts, offsets, counter, tiling: gl.constexpr, spec: gl.constexpr,
):  # fmt: skip
    """Multiply 128 rows, then choose their experts; the last CTA of all stores the counts. Grid: (blocks of rows,)."""
    row = gl.program_id(0) * 128
    stages = create_stages(x_desc, y_desc, hidden, tiling)
    shape: gl.constexpr = [tiling.num_sets * tiling.num_tiles, 128, tiling.width]
    accs = allocate_tensor_memory(gl.float32, shape, TensorMemoryLayout((128, tiling.width), col_stride=1))
    fence_async_shared()
    role_barrier()
    multiply_all(stages, accs, row)
    cut: gl.constexpr = [tiling.num_sets * tiling.num_chunks, 128, tiling.chunk]
    chunks = reinterpret(accs, gl.float32, cut, TensorMemoryLayout((128, tiling.chunk), col_stride=1))
    layout: gl.constexpr = chunk_layout(128, tiling.chunk, gl.num_warps())
    slots: gl.constexpr = gl.BlockedLayout([1, spec.slots], [32, 1], [gl.num_warps(), 1], [1, 0])
    rows = row + gl.arange(0, 128, gl.SliceLayout(1, layout))
    columns = gl.arange(0, tiling.chunk, gl.SliceLayout(0, layout))[None, :]
    positions = Positions(columns, gl.arange(0, spec.slots, gl.SliceLayout(0, slots))[None, :], None)
    tables = Tables(logit_bias, expert_bias, None, None, 0)
    args = Args(Scalars(alpha, routed_scale, spec.k), tables, Outputs(weights, ids, logits, dense, histogram))
    products = Products(chunks, tiling)
    choose_running(products, rows, rows < num_tokens, positions, args, load_products, tiling.num_chunks, spec)
    finish_counts(histogram, Counts(counts, offsets, counter), spec)
