"""Sweep of tensor-memory loads: one GEMM tile compiled with every shape and width of the load.

    for k in K: accumulator[block_m, 256] += a @ b.T            in tensor memory, float32
    for each sub-tile of `columns` columns:                     one load, or a few, of registers
        out = bf16(relu(scale * accumulator + bias))            straight to global memory

The sub-tile limits what the compiler can load at once, so it is the parameter. The kernel serves to inspect its machine
code: one stage, no overlap, no masks.
"""

# Gluon's constexpr variables hold the values assigned to them, which its annotations don't say.
# pyright: reportAssignmentType=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
)

from envoi.runtime.triton_compat import tma_load, tmem_layout
from tools.machine_code.compile import Recipe, descriptor_type

ARCHES = ("sm_100", "sm_103")
BLOCK_N, BLOCK_K = 256, 64
COLUMNS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@gluon.jit
def tmem_load_tile(
    a_desc, b_desc, bias, out, scale, K, out_stride,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, COLUMNS: gl.constexpr, SHAPE: gl.constexpr,
):  # fmt: skip
    """Compute one tile: products in tensor memory, then sub-tiles of COLUMNS columns, loaded in registers as SHAPE."""
    row, column = gl.program_id(0) * BLOCK_M, gl.program_id(1) * BLOCK_N
    whole: gl.constexpr = TensorMemoryLayout((BLOCK_M, BLOCK_N), col_stride=1)
    accumulator = allocate_tensor_memory(gl.float32, [BLOCK_M, BLOCK_N], whole)
    multiply(a_desc, b_desc, accumulator, row, column, K, BLOCK_K)

    part: gl.constexpr = TensorMemoryLayout((BLOCK_M, COLUMNS), col_stride=1)
    layout: gl.constexpr = tmem_layout(gl.float32, (BLOCK_M, COLUMNS), part, gl.num_warps(), SHAPE)
    rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    for begin in gl.static_range(0, BLOCK_N, COLUMNS):
        columns = column + begin + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
        acc = accumulator.slice(begin, COLUMNS).load(layout)
        result = gl.maximum(acc * scale + gl.load(bias + columns)[None, :], 0.0)
        gl.store(out + rows[:, None] * out_stride + columns[None, :], result.to(gl.bfloat16))


@gluon.jit
def multiply(a_desc, b_desc, accumulator, row, column, K, BLOCK_K: gl.constexpr):
    """Accumulate a[row:, :] @ b[column:, :].T over K, one stage at a time."""
    a = gl.allocate_shared_memory(a_desc.dtype, a_desc.block_type.shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, b_desc.block_type.shape, b_desc.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    multiplied = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(loaded, count=1)
    mbarrier.init(multiplied, count=1)
    fence_async_shared()
    phase = 0
    for k in range(0, K, BLOCK_K):
        mbarrier.expect(loaded, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        tma_load(a_desc, [row, k], loaded, a)
        tma_load(b_desc, [column, k], loaded, b)
        mbarrier.wait(loaded, phase)
        tcgen05_mma(a, b.permute((1, 0)), accumulator, use_acc=k > 0)
        tcgen05_commit(multiplied)
        mbarrier.wait(multiplied, phase)
        phase ^= 1


@dataclass(frozen=True)
class Case:
    """Access to the accumulator: `shape` is Gluon's `instr_variant`, `columns` the width of a sub-tile."""

    shape: str
    columns: int
    block_m: int = 128
    num_warps: int = 4


def cases(columns: Iterable[int] = COLUMNS) -> Iterator[Case]:
    """Yield all cases of these widths.

    splitn differs from 32x32b only if warps share rows, so both are included with 8 warps. Gluon chooses 16x32bx2 by
    itself for an accumulator of 64 rows and accepts no request for it; one case requests it, to show the error.
    """
    widths = tuple(columns)
    for shape in ("32x32b", "16x64b", "16x128b", "16x256b"):
        yield from (Case(shape, width) for width in widths)
    for shape in ("32x32b", "32x32b_splitn"):
        yield from (Case(shape, width, num_warps=8) for width in widths)
    yield from (Case("32x32b", width, block_m=64) for width in widths)
    yield Case("16x32bx2", widths[-1], block_m=64)


def recipe(case: Case) -> Recipe:
    """Return the recipe of a case."""
    blocks = (case.block_m, BLOCK_K), (BLOCK_N, BLOCK_K)
    layouts = [gl.NVMMASharedLayout.get_default_for(list(block), gl.bfloat16) for block in blocks]
    a_desc, b_desc = (descriptor_type("bf16", block, layout) for block, layout in zip(blocks, layouts, strict=True))
    signature = {
        "a_desc": a_desc, "b_desc": b_desc, "bias": "*fp32:16", "out": "*bf16:16", "scale": "fp32", "K": "i32:16",
        "out_stride": "i32:16",
    }  # fmt: skip
    constexprs = {
        "BLOCK_M": case.block_m, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K, "COLUMNS": case.columns, "SHAPE": case.shape,
    }  # fmt: skip
    return Recipe(tmem_load_tile, signature, constexprs, {"num_warps": case.num_warps})
