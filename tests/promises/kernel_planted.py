"""Kernels with an error each, which the sanitizer's tools must find before they are believed."""

import triton
import triton.language as tl


@triton.jit
def outside_kernel(x, n):
    """Read far past a tensor: memcheck must find it."""
    tl.store(x, tl.load(x + n + tl.arange(0, 128) * 1024).to(tl.float32).sum())


@triton.jit
def racing_kernel(out):
    """Write one word of shared memory from several warps without a barrier: racecheck must find it."""
    i = tl.arange(0, 128)
    code: tl.constexpr = "{ .shared .align 4 .b32 word; st.shared.b32 [word], $1; ld.shared.b32 $0, [word]; }"
    tl.store(out + i, tl.inline_asm_elementwise(code, "=r,r", [i], tl.int32, False, 1))


@triton.jit
def diverging_kernel(out):
    """Let half of each warp pass a barrier: synccheck must find it."""
    i = tl.arange(0, 128)
    code: tl.constexpr = (
        "{ .reg .pred p; .reg .b32 t; and.b32 t, $1, 1; setp.eq.s32 p, t, 0; @p bar.sync 1, 64; mov.b32 $0, t; }"
    )
    tl.store(out + i, tl.inline_asm_elementwise(code, "=r,r", [i], tl.int32, False, 1))
