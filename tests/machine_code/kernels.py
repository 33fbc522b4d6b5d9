"""Small kernels whose machine code is known well enough to be counted."""

import torch
import triton
import triton.language as tl

from envoi.runtime.program import Launch


@triton.jit
def product(a_desc, b_desc, out_desc, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Compute a tile of a GEMM: tensor cores, TMA loads and stores."""
    row, column = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        acc = tl.dot(a_desc.load([row, k]), b_desc.load([column, k]).T, acc)
    out_desc.store([row, column], acc.to(tl.bfloat16))


@triton.jit
def crowded(x, out, BLOCK: tl.constexpr):
    """Keep many values alive across a row sum: spills with few registers."""
    at = tl.arange(0, BLOCK)
    values = tl.load(x + at)
    tl.store(out + at, values * tl.sum(values))


def crowded_launch(size: int, **options) -> Launch:
    x = torch.zeros(size)
    return Launch(crowded, (1,), (x, x, size), options)
