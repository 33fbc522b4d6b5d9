"""Launches of the Blackwell GEMM, [4096, 7168] @ [4096, 7168].T. No call of the library makes one: it has never run."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from envoi.epilogues.api import Epilogue
from envoi.epilogues.ir import Operand
from envoi.epilogues.library import expert_l1, store, swiglu, swiglu_fp8
from envoi.epilogues.lower import lower
from envoi.epilogues.outputs import empty_outputs, rows_must_fit
from envoi.ops.gemm.blackwell.config import ROWS, BlackwellConfig
from envoi.ops.gemm.blackwell.kernel import gemm_kernel
from envoi.ops.gemm.hopper.host import Call, as_stored, epilogue_descriptors, max_experts, scratch, units
from envoi.runtime.math import cdiv
from envoi.runtime.program import Launch, without_memory
from envoi.runtime.tma import as_one_matrix, descriptor
from tools.kernel_cases import BLACKWELL, KernelCase, driver_for
from tools.kernel_cases.operands import operands_of

NUM_SMS = 148
SIZES = (4096, 4096, 7168)
SIDES = ("Tile", "HalfTile")
NVFP4_GROUP = 16
BF16, F8, U8 = torch.bfloat16, torch.float8_e4m3fn, torch.uint8


def launch_of(
    epilogue: Epilogue, config: BlackwellConfig, dtypes: Sequence[torch.dtype] = (BF16, BF16),
    sizes: tuple[int, int, int] = SIZES, num_experts: int = 0,
) -> Launch:  # fmt: skip
    """Return the launch with an epilogue. dtypes: of a and b; uint8 is FP4. num_experts: 0 = ungrouped."""
    with driver_for(BLACKWELL[0]):
        call = call_of(epilogue, config, dtypes, sizes, num_experts)
        num_units, num_split = units(*sizes[:2], config, NUM_SMS)
        grid = NUM_SMS if num_experts else min(num_units, NUM_SMS)
        return Launch(gemm_kernel, (grid,), arguments(call, config, num_split), {"num_warps": config.num_warps})


def call_of(
    epilogue: Epilogue, config: BlackwellConfig, dtypes: Sequence[torch.dtype], sizes: tuple[int, int, int],
    num_experts: int,
) -> Call:  # fmt: skip
    """Return a call whose tensors have no memory. Tiles are loaded and stored by TMA."""
    M, N, K = sizes
    ir = epilogue.ir
    sides = tuple(operand.name for operand in ir.operands if operand.kind in SIDES)
    code = lower(ir, BF16, "gluon", rows_must_fit(ir), True, frozenset(), sides)
    experts = (num_experts,) if num_experts else ()
    a, b = (
        without_memory((*rows, K // (2 if dtype == U8 else 1)), dtype)
        for rows, dtype in zip(((M,), (*experts, N)), dtypes, strict=True)
    )
    operands = operands_of(ir, M, N, (), _dtype_of)
    return Call(
        a, b, code, tuple(operands.values()), tuple(operands), empty_outputs(ir, BF16, M, N, a.device),
        without_memory((num_experts + 1,), torch.int32) if num_experts else None,
        _factors(config.sf_group, sizes, num_experts) if config.sf_group else None,
    )  # fmt: skip


def arguments(call: Call, config: BlackwellConfig, num_split: int) -> tuple:
    """Return the kernel's arguments. call.scales: packed scale factors of a and b along K, or None."""
    (M, columns), N, num_experts = call.a.shape, call.b.shape[-2], call.num_groups
    K = columns * (2 if call.a.dtype == U8 else 1)
    x, y = call.a, as_one_matrix(call.b)
    x_sf, y_sf = call.scales or (None, None)
    num_whole = cdiv(M, config.block_m) * cdiv(N, config.block_n) - num_split
    return (
        operand_descriptor(x, y, config.block_x, config.block_k),
        operand_descriptor(y, x, config.block_y, config.block_k),
        factors_descriptor(x_sf, config.block_x, config), factors_descriptor(y_sf, config.block_y, config),
        *epilogue_descriptors(call, config), call.operands or (0,), as_stored(call.outputs),
        call.offsets,
        *scratch(call, config, num_split), M, N, K, num_experts, num_whole, config, call.code, call.row_mode,
        max_experts(num_experts, call.grouping.write_tail),
    )  # fmt: skip


def operand_descriptor(x: torch.Tensor, other: torch.Tensor, rows: int, block_k: int) -> Any:
    """Return a TMA descriptor of a matrix in boxes of [rows, block_k]. FP4 beside FP8 takes a byte a number."""
    if x.dtype != U8:
        return descriptor(x, rows, block_k)
    box = [rows, block_k // 2]
    layout: Any = gl.NVMMASharedLayout.get_default_for(box, gl.uint8, fp4_padded=other.dtype != U8)
    return TensorDescriptor.from_tensor(x, box, layout)


def factors_descriptor(packed: torch.Tensor | None, rows: int, config: BlackwellConfig) -> Any:
    """Return a TMA descriptor of packed scale factors, in boxes with a stage's factors for `rows` rows, or None."""
    if packed is None:
        return None
    box = [1, rows // ROWS, config.block_k // (4 * config.sf_group), 2, 256]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8, rank=5)  # tcgen05_copy takes no swizzle
    return TensorDescriptor.from_tensor(packed[None], box, layout)


def _dtype_of(operand: Operand) -> torch.dtype:
    return BF16 if operand.kind in SIDES else torch.float32


def _factors(sf_group: int, sizes: tuple[int, int, int], num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed scale factors of a and b. Each expert's rows start a new block of rows, at most one more each."""
    M, N, K = sizes
    box = cdiv(K, 4 * sf_group), 2, 256
    dtype = F8 if sf_group == NVFP4_GROUP else U8
    of_a, of_b = cdiv(M, ROWS) + num_experts, cdiv(N, ROWS) * max(1, num_experts)
    return without_memory((of_a, *box), dtype), without_memory((of_b, *box), dtype)


EXPERT_L1 = expert_l1("swiglu_oai", 7.0, True, "mxfp8")
WIDE = BlackwellConfig(256, 64, 4, num_warps=8, epilogue_columns=256, num_store_buffers=1)

KERNELS = tuple(
    KernelCase(f"gemm-sm100{name}", about, BLACKWELL, partial(launch_of, *call, num_experts=num_experts))
    for name, about, num_experts, *call in (
        ("", "bf16, plain store", 0, store, BlackwellConfig(256, 64, 4)),
        ("-swiglu", "bf16, silu(gate) * up of interleaved columns", 0, swiglu, BlackwellConfig(256, 64, 4)),
        ("-swiglu-fp8", "bf16, SwiGLU, quantised with a scale per 1x128", 0, swiglu_fp8, WIDE),
        ("-grouped", "bf16, 64 experts", 64, store, BlackwellConfig(256, 64, 4)),
        ("-fp8", "FP8 without scale factors along K", 0, store, BlackwellConfig(256, 128, 4), (F8, F8)),
        ("-mxfp8", "MXFP8", 0, store, BlackwellConfig(128, 128, 4, sf_group=32), (F8, F8)),
        ("-mxfp8-mxfp4", "MXFP8 tokens, MXFP4 weights", 0, store, BlackwellConfig(128, 128, 4, sf_group=32), (F8, U8)),
        ("-mxfp4", "MXFP4", 0, store, BlackwellConfig(128, 256, 4, sf_group=32), (U8, U8)),
        ("-nvfp4", "NVFP4", 0, store, BlackwellConfig(128, 256, 4, sf_group=16), (U8, U8)),
        (
            "-experts", "L1 of 256 experts: MXFP8 rows, MXFP4 weights, bias, clamped SwiGLU, MXFP8 out", 256, EXPERT_L1,
            BlackwellConfig(128, 128, 4, sf_group=32), (F8, U8),
        ),
    )
)  # fmt: skip
