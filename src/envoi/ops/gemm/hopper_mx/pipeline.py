"""Shared-memory pipeline of the Hopper GEMM for MX weights: one ring of stages with two producers.

    stage:  weights  int32 [block_x, words]   loaded as soon as the stage is free
            tokens   bf16 [block_y, block_k]  loaded once the kernel that widens them has ended
    span:   scale factors of 512 elements of K, int32 [block_x, 4]; loaded with the span's first stage

    barrier of `Ring`   arrivals        who arrives                          who waits
    full                2               TMA of weights, TMA of tokens        consumers
    empty               num_consumers   each consumer, after its last wgmma  both producers

A span's factors need no barrier: they are part of its first stage's bytes, and there is room for as many spans as the
stages in flight can belong to.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from envoi.runtime.aggregate import aggregate
from envoi.runtime.ring import Ring

SPAN = gl.constexpr(512)  # elements along K whose scale factors are loaded at once: 16 bytes a row


@aggregate
class MxPipeline:
    """Buffers and barriers of all stages."""

    w_bufs: gl.shared_memory_descriptor  # int32 [num_stages, block_x, words]
    sf_bufs: gl.shared_memory_descriptor  # int32 [num_sf_spans, block_x, 4]
    x_bufs: gl.shared_memory_descriptor  # bf16 [num_stages, block_y, block_k]
    ring: Ring
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
        return MxPipeline(w_bufs, sf_bufs, x_bufs, Ring.create(cfg.num_stages, 2, cfg.num_consumers), cfg)
