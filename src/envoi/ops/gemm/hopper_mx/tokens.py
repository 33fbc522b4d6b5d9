"""Kernel that widens tokens to bf16 for the GEMMs with MX weights, with K in the order of their threads' weights."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents


@triton.jit(do_not_specialize=["M"])
def widen_kernel(
    values, sf, out, num_used, M, K, values_stride, sf_stride, out_stride, SCALED: tl.constexpr, BITS: tl.constexpr,
    ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write values [M, K] times 2^(sf - 127) as bf16 to out [M, K rounded up to 128], 0 from K on.

    Position 2 t in the new order is the first half of thread t's first register in the first instruction, 2 t + 1 its
    upper half, and so on. BITS: of a weight. With 4, the element whose k has the bits (t1 t0 w1 w0 b i h) in its 128
    is stored at position (w1 w0 i h t1 t0 b); with 8, (t1 t0 w1 w0 b i) in its 64 at (w1 w0 i t1 t0 b); 0: K in order.

    num_used: pointer to the number of rows that belong to an expert; None = all M. Other rows are not written.
    OVERLAP: the next kernel may start at once; its `wait_for_grid` waits for the end of this one.
    """
    if OVERLAP:
        gdc_launch_dependents()
    if num_used is not None:
        M = tl.load(num_used)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * 512 + tl.arange(0, 512)
    inside = (rows < M)[:, None] & (k < K)[None, :]
    x = tl.load(values + rows[:, None].to(tl.int64) * values_stride + k[None, :], mask=inside, other=0.0)
    x = x.to(tl.float32)
    if SCALED:
        group = tl.program_id(1) * 16 + tl.arange(0, 16)
        known = (rows < M)[:, None] & (group < K // 32)[None, :]
        byte = tl.load(sf + rows[:, None].to(tl.int64) * sf_stride + group[None, :], mask=known, other=0).to(tl.int32)
        bits = tl.where(byte == 0, 0x00400000, byte << 23)
        factor = tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
        x = tl.reshape(tl.reshape(x, (ROWS, 16, 32)) * factor[:, :, None], (ROWS, 512))
    x = x.to(tl.bfloat16)
    if BITS == 4:
        x = tl.permute(tl.reshape(x, (ROWS * 4, 4, 4, 2, 2, 2)), (0, 2, 4, 5, 1, 3))
    elif BITS == 8:
        x = tl.permute(tl.reshape(x, (ROWS * 8, 4, 4, 2, 2)), (0, 2, 4, 1, 3))
    x = tl.reshape(x, (ROWS, 512))
    at = out + rows[:, None].to(tl.int64) * out_stride + k[None, :]
    tl.store(at, x, mask=(rows < M)[:, None] & (k < out_stride)[None, :])
