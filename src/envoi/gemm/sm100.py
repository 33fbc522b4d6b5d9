"""Launching the Blackwell kernel: descriptors, arguments, grid. Compiled for sm_100 and sm_103, never run yet."""

from typing import Any

import torch

from envoi.gemm.config_sm100 import BlackwellConfig, BlackwellProblem, supports
from envoi.gemm.sm90 import Call, as_stored, below_each_other, descriptor, epilogue_descriptors, max_groups, scratch
from envoi.triton_compat import FP_FUSION

NVFP4_GROUP, MX_GROUP = 16, 32


def problem_of(call: Call) -> BlackwellProblem:
    """What the choice of a config depends on. Matrices of uint8 hold two FP4 numbers a byte."""
    return BlackwellProblem(
        call.a.shape[0],
        call.b.shape[-2],
        call.a.shape[1] * (2 if call.a.dtype == torch.uint8 else 1),
        _shared_bits(call.a, call.b),
        _shared_bits(call.b, call.a),
        call.num_groups,
        _factor_group(call),
        call.side_bytes,
        (call.a.dtype == torch.uint8) != (call.b.dtype == torch.uint8),
    )


def arguments(call: Call, config: BlackwellConfig, num_sms: int) -> tuple[tuple[int], tuple]:
    """The grid, and the kernel's arguments. Raises ValueError for a config that can't run this.

    call.scales: scale factors of a and b along K, each as `sf_layout.pack` packs them, or None.
    """
    problem = problem_of(call)
    reason = supports(problem, config, call.code)
    if reason:
        raise ValueError(f"config: {reason} ({config})")
    M, N, groups = problem.M, problem.N, problem.num_groups
    x, y = call.a, below_each_other(call.b)
    tiles = -(-M // config.block_m) * -(-N // config.block_n)
    num_cut = tiles % num_sms if config.split_k > 1 else 0
    units = tiles + num_cut * (config.split_k - 1)  # the tiles of the last, unfilled wave are cut
    grouped = 0 if call.offsets is None else 2 if call.grouping.behind else 1
    x_sf, y_sf = call.scales or (None, None)
    cut: Any = config  # has what Hopper's has
    return (num_sms if grouped else min(units, num_sms),), (
        operand_descriptor(x, y, config.block_x, config.block_k),
        operand_descriptor(y, x, config.block_y, config.block_k),
        factors_descriptor(x_sf, config.block_x, config), factors_descriptor(y_sf, config.block_y, config),
        *epilogue_descriptors(call, cut, N), call.operands or (0,), as_stored(call.outputs),
        call.offsets,
        *scratch(call, cut, M, N, num_cut), M, N, problem.K, groups, tiles - num_cut, config, call.code, grouped,
        max_groups(groups, call.grouping.behind),
    )  # fmt: skip


def operand_descriptor(x: torch.Tensor, other: torch.Tensor, rows: int, block_k: int) -> Any:
    """Of a matrix, in boxes of [rows, block_k]. FP4 beside FP8 gets a byte a number in shared memory."""
    if x.dtype != torch.uint8:
        return descriptor(x, rows, block_k)
    import triton.experimental.gluon.language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    box = [rows, block_k // 2]
    layout: Any = gl.NVMMASharedLayout.get_default_for(box, gl.uint8, fp4_padded=other.dtype != torch.uint8)
    return TensorDescriptor.from_tensor(x, box, layout)


def factors_descriptor(packed: torch.Tensor | None, rows: int, config: BlackwellConfig) -> Any:
    """Of packed scale factors, in boxes of what a stage needs for so many rows."""
    if packed is None:
        return None
    import triton.experimental.gluon.language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    box = [1, rows // 128, config.block_k // (4 * config.sf_group), 2, 256]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8, rank=5)  # a copy takes no swizzle
    return TensorDescriptor.from_tensor(packed[None], box, layout)


def launch(call: Call, config: BlackwellConfig, num_sms: int) -> None:
    """Run it."""
    from envoi.gemm.kernel_sm100 import gemm_kernel

    grid, args = arguments(call, config, num_sms)
    kernel: Any = gemm_kernel
    kernel[grid](*args, num_warps=config.num_warps, **FP_FUSION)


def _factor_group(call: Call) -> int:
    if call.scales is None:
        return 0
    return NVFP4_GROUP if call.scales[0].dtype == torch.float8_e4m3fn else MX_GROUP


def _shared_bits(x: torch.Tensor, other: torch.Tensor) -> int:
    """Of an element in shared memory."""
    if x.dtype == torch.uint8:
        return 4 if other.dtype == torch.uint8 else 8
    return 8 * x.itemsize
