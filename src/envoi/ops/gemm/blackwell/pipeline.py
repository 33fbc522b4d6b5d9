"""Shared-memory stages and tensor-memory accumulators of the Blackwell GEMM, with their barriers.

ring          barrier   arrivals   who arrives                            who waits
stages        full      1          TMA, with all bytes of a stage         multiplier
              empty     1          tcgen05, once a stage's product ends   producer
accumulators  full      1          tcgen05, once a tile's products end    epilogue
              empty     1          the epilogue role, having read it      multiplier
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    TensorMemoryScalesLayout,
    allocate_tensor_memory,
    mbarrier,
    tensor_memory_descriptor,
    tma,
)

from envoi.runtime.aggregate import aggregate
from envoi.runtime.ring import Ring, new_barriers
from envoi.runtime.triton_compat import role_barrier, tma_load


@aggregate
class Inputs:
    """TMA descriptors of the operands. `kernel.py` says how scale factors are packed; None without any."""

    x: tma.tensor_descriptor  # x [rows, K] in boxes [block_x, block_k]
    y: tma.tensor_descriptor  # y [rows, K] in boxes [block_y, block_k]
    x_sf: tma.tensor_descriptor | gl.constexpr  # [1, blocks, blocks along K, 2, 256]
    y_sf: tma.tensor_descriptor | gl.constexpr


@aggregate
class Pipeline:
    """Buffers and barriers of all stages."""

    x_bufs: gl.shared_memory_descriptor  # [num_stages, block_x, block_k]
    y_bufs: gl.shared_memory_descriptor  # [num_stages, block_y, block_k]
    x_sf_bufs: gl.shared_memory_descriptor | gl.constexpr  # packed scale factors of each stage; None without any
    y_sf_bufs: gl.shared_memory_descriptor | gl.constexpr
    ring: Ring
    cfg: gl.constexpr  # BlackwellConfig

    @gluon.jit
    def fill(self, inputs, stage, source, k):
        """Producer: start the TMA loads of step k along K of a tile into a free stage.

        source: a `Source`. `full` of the stage completes once all bytes have arrived.
        """
        full = self.ring.full.index(stage)
        num_bytes: gl.constexpr = inputs.x.block_type.nbytes + inputs.y.block_type.nbytes
        if self.cfg.sf_group > 0:
            self.ring.expect(stage, num_bytes + inputs.x_sf.block_type.nbytes + inputs.y_sf.block_type.nbytes)
            blocks: gl.constexpr = inputs.x_sf.block_type.shape[2]
            at = [0, source.x_block, k * blocks, 0, 0]
            tma_load(inputs.x_sf, at, full, self.x_sf_bufs.index(stage))
            at = [0, source.y_block, k * blocks, 0, 0]
            tma_load(inputs.y_sf, at, full, self.y_sf_bufs.index(stage))
        else:
            self.ring.expect(stage, num_bytes)
        # A box counts elements as they are stored: two FP4 numbers are one.
        at = [source.x, k * inputs.x.block_type.shape[1]]
        tma_load(inputs.x, at, full, self.x_bufs.index(stage))
        at = [source.y, k * inputs.y.block_type.shape[1]]
        tma_load(inputs.y, at, full, self.y_bufs.index(stage))


@aggregate
class StageFactors:
    """Tensor memory for the scale factors of one stage; None without any."""

    x: tensor_memory_descriptor | gl.constexpr
    y: tensor_memory_descriptor | gl.constexpr


@aggregate
class Accumulators:
    """Accumulators in tensor memory, used alternately: the epilogue of one overlaps the products of the next."""

    bufs: tensor_memory_descriptor  # float32 [num_accumulators, block_x, block_y]
    ring: Ring  # a step is one of this CTA's units


@gluon.jit
def create_pipeline(inputs, cfg: gl.constexpr):
    """Allocate stages, their scale factors' tensor memory and accumulators; initialise all barriers.

    Returns `Pipeline`, `StageFactors` and `Accumulators`. The caller fences before any role uses them.
    """
    x_bufs = buffers_for(inputs.x, cfg.num_stages)
    y_bufs = buffers_for(inputs.y, cfg.num_stages)
    if cfg.sf_group > 0:
        x_sf_bufs = buffers_for(inputs.x_sf, cfg.num_stages)
        y_sf_bufs = buffers_for(inputs.y_sf, cfg.num_stages)
        factors = StageFactors(factors_for(inputs.x_sf), factors_for(inputs.y_sf))
    else:
        x_sf_bufs: gl.constexpr = None
        y_sf_bufs: gl.constexpr = None
        factors = StageFactors(None, None)
    shape: gl.constexpr = [cfg.num_accumulators, cfg.block_x, cfg.block_y]
    layout: gl.constexpr = TensorMemoryLayout((cfg.block_x, cfg.block_y), col_stride=1)
    accs = allocate_tensor_memory(gl.float32, shape, layout)
    empty, full = new_barriers(cfg.num_stages, 1), new_barriers(cfg.num_stages, 1)
    stages = Ring(full, empty, cfg.num_stages)
    full, empty = new_barriers(cfg.num_accumulators, 1), new_barriers(cfg.num_accumulators, 1)
    accumulators = Accumulators(accs, Ring(full, empty, cfg.num_accumulators))
    return Pipeline(x_bufs, y_bufs, x_sf_bufs, y_sf_bufs, stages, cfg), factors, accumulators


@gluon.jit
def buffers_for(desc, COUNT: gl.constexpr):
    """Allocate a box of shared memory for each of COUNT stages."""
    return gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_type.shape, desc.layout)


@gluon.jit
def factors_for(desc):
    """Allocate tensor memory for an operand's scale factors of one stage."""
    shape: gl.constexpr = [desc.block_type.shape[1] * 128, desc.block_type.shape[2] * 4]
    return allocate_tensor_memory(desc.dtype, shape, TensorMemoryScalesLayout())


@gluon.jit
def release(free, pred):
    """Epilogue: tell the multiplier, once all warps have read an accumulator, that it is free. free: its `empty`."""
    role_barrier()
    mbarrier.arrive(free, count=1, pred=pred)
