"""Host side of the Blackwell GEMM: descriptors, arguments, grid. Compiled for sm_100 and sm_103, never run yet."""

from typing import Any

import torch

from envoi.ops.gemm.blackwell.config import BlackwellConfig, BlackwellProblem, why_not
from envoi.ops.gemm.hopper.host import Call, as_stored, epilogue_descriptors, max_experts, scratch, units
from envoi.runtime.math import cdiv
from envoi.runtime.tma import as_one_matrix, descriptor

NVFP4_GROUP, MX_GROUP = 16, 32


def problem_of(call: Call) -> BlackwellProblem:
    """Return the sizes that the choice of a config depends on. Matrices of uint8 hold two FP4 numbers a byte."""
    return BlackwellProblem(
        call.a.shape[0],
        call.b.shape[-2],
        call.a.shape[1] * (2 if call.a.dtype == torch.uint8 else 1),
        _shared_bits(call.a, call.b),
        _shared_bits(call.b, call.a),
        call.num_groups,
        _factor_group(call),
        call.tma_operand_bytes,
        (call.a.dtype == torch.uint8) != (call.b.dtype == torch.uint8),
    )


def arguments(call: Call, config: BlackwellConfig, num_sms: int) -> tuple[tuple[int], tuple]:
    """Return the grid and the kernel's arguments. Raises ValueError for a config that can't run this.

    call.scales: scale factors of a and b along K, each from `sf_layout.pack_sf`, or None.
    """
    problem = problem_of(call)
    reason = why_not(problem, config, call.code)
    if reason:
        raise ValueError(f"config: {reason} ({config.label()})")
    M, N, num_experts = problem.M, problem.N, problem.num_groups
    x, y = call.a, as_one_matrix(call.b)
    num_units, num_split = units(M, N, config, num_sms)
    num_whole = cdiv(M, config.block_m) * cdiv(N, config.block_n) - num_split
    x_sf, y_sf = call.scales or (None, None)
    return (num_sms if call.row_mode.is_grouped else min(num_units, num_sms),), (
        operand_descriptor(x, y, config.block_x, config.block_k),
        operand_descriptor(y, x, config.block_y, config.block_k),
        factors_descriptor(x_sf, config.block_x, config), factors_descriptor(y_sf, config.block_y, config),
        *epilogue_descriptors(call, config), call.operands or (0,), as_stored(call.outputs),
        call.offsets,
        *scratch(call, config, num_split), M, N, problem.K, num_experts, num_whole, config, call.code, call.row_mode,
        max_experts(num_experts, call.grouping.write_tail),
    )  # fmt: skip


def operand_descriptor(x: torch.Tensor, other: torch.Tensor, rows: int, block_k: int) -> Any:
    """Return a TMA descriptor of a matrix in boxes of [rows, block_k]. FP4 beside FP8 takes a byte a number."""
    if x.dtype != torch.uint8:
        return descriptor(x, rows, block_k)
    import triton.experimental.gluon.language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    box = [rows, block_k // 2]
    layout: Any = gl.NVMMASharedLayout.get_default_for(box, gl.uint8, fp4_padded=other.dtype != torch.uint8)
    return TensorDescriptor.from_tensor(x, box, layout)


def factors_descriptor(packed: torch.Tensor | None, rows: int, config: BlackwellConfig) -> Any:
    """Return a TMA descriptor of packed scale factors, in boxes with a stage's factors for `rows` rows, or None."""
    if packed is None:
        return None
    import triton.experimental.gluon.language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    box = [1, rows // 128, config.block_k // (4 * config.sf_group), 2, 256]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8, rank=5)  # tcgen05_copy takes no swizzle
    return TensorDescriptor.from_tensor(packed[None], box, layout)


def _factor_group(call: Call) -> int:
    if call.scales is None:
        return 0
    return NVFP4_GROUP if call.scales[0].dtype == torch.float8_e4m3fn else MX_GROUP


def _shared_bits(x: torch.Tensor, other: torch.Tensor) -> int:
    """Return the bits of an element of x in shared memory."""
    if x.dtype == torch.uint8:
        return 4 if other.dtype == torch.uint8 else 8
    return 8 * x.itemsize
