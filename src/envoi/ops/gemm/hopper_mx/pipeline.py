"""Shared-memory pipeline of the Hopper GEMM for MX weights: one ring of stages with two producers.

    stage:  weights  int32 [block_x, words]   loaded as soon as the stage is free
            tokens   bf16 [block_y, block_k]  loaded once the kernel that widens them has ended
    span:   scale factors of 512 elements of K, int32 [block_x, 4]; loaded with the span's first stage

    barrier   arrivals        who arrives                          who waits        parity, n = step // num_stages
    full      2               TMA of weights, TMA of tokens        consumers        n & 1
    empty     num_consumers   each consumer, after its last wgmma  both producers   (n & 1) ^ 1

A span's factors need no barrier: they are part of its first stage's bytes, and there is room for as many spans as the
stages in flight can belong to.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from envoi.runtime.aggregate import aggregate
from envoi.runtime.barrier_setup import set_up_together

SPAN = gl.constexpr(512)  # elements along K whose scale factors are loaded at once: 16 bytes a row


@aggregate
class MxPipeline:
    """Buffers and barriers of all stages. `step` counts fills since the kernel began: stage = step % num_stages."""

    w_bufs: gl.shared_memory_descriptor  # int32 [num_stages, block_x, words]
    sf_bufs: gl.shared_memory_descriptor  # int32 [num_sf_spans, block_x, 4]
    x_bufs: gl.shared_memory_descriptor  # bf16 [num_stages, block_y, block_k]
    empty: gl.shared_memory_descriptor  # mbarriers [num_stages, 1]
    full: gl.shared_memory_descriptor  # mbarriers [num_stages, 1]
    cfg: gl.constexpr  # MxConfig

    @staticmethod
    @gluon.jit
    def create(w_desc, sf_desc, x_desc, cfg: gl.constexpr):
        """Allocate the stages and initialise their barriers. The caller fences before any role uses them."""
        w_shape: gl.constexpr = [cfg.num_stages] + w_desc.block_type.shape
        sf_shape: gl.constexpr = [cfg.num_sf_spans] + sf_desc.block_type.shape
        x_shape: gl.constexpr = [cfg.num_stages] + x_desc.block_type.shape
        w_bufs = gl.allocate_shared_memory(w_desc.dtype, w_shape, w_desc.layout)
        sf_bufs = gl.allocate_shared_memory(sf_desc.dtype, sf_shape, sf_desc.layout)
        x_bufs = gl.allocate_shared_memory(x_desc.dtype, x_shape, x_desc.layout)
        empty = gl.allocate_shared_memory(gl.int64, [cfg.num_stages, 1], mbarrier.MBarrierLayout())
        full = gl.allocate_shared_memory(gl.int64, [cfg.num_stages, 1], mbarrier.MBarrierLayout())
        num_stages: gl.constexpr = cfg.num_stages
        set_up_together()
        for i in gl.static_range(num_stages):
            mbarrier.init(empty.index(i), count=cfg.num_consumers)
            mbarrier.init(full.index(i), count=2)
        return MxPipeline(w_bufs, sf_bufs, x_bufs, empty, full, cfg)

    @gluon.jit
    def wait_full(self, step):
        """Consumer: wait until the stage's weights and tokens have been loaded."""
        num_stages: gl.constexpr = self.cfg.num_stages
        mbarrier.wait(self.full.index(step % num_stages), (step // num_stages) & 1)

    @gluon.jit
    def release(self, step):
        """Consumer: hand the stage back to both producers."""
        mbarrier.arrive(self.empty.index(step % self.cfg.num_stages), count=1)

    @gluon.jit
    def wait_empty(self, step):
        """Producer: wait until all consumers have released the stage's previous fill."""
        num_stages: gl.constexpr = self.cfg.num_stages
        mbarrier.wait(self.empty.index(step % num_stages), ((step // num_stages) & 1) ^ 1)
