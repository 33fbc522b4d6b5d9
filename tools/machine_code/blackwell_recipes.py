"""Recipes of the Blackwell GEMM: epilogue, config and dtypes, without a GPU and without memory for the operands."""

from collections.abc import Sequence

import torch

from envoi.epilogue.api import Epilogue
from envoi.epilogue.ir import Operand
from envoi.epilogue.lower import lower
from envoi.epilogue.slots import empty_slots, rows_must_fit
from envoi.gemm.blackwell import host, sf_layout
from envoi.gemm.blackwell.config import BlackwellConfig
from envoi.gemm.hopper.host import Call
from envoi.runtime import triton_compat
from tools.machine_code.compile import Recipe, recipe_of_call

NUM_SMS = 148
SIZES = (4096, 4096, 7168)
SIDES = ("Tile", "HalfTile")
BF16, F8, U8 = torch.bfloat16, torch.float8_e4m3fn, torch.uint8


def blackwell(
    arch: str,
    epilogue: Epilogue,
    config: BlackwellConfig,
    dtypes: Sequence[torch.dtype] = (BF16, BF16),
    sizes: tuple[int, int, int] = SIZES,
    num_experts: int = 0,
) -> Recipe:
    """Return the recipe of the Blackwell kernel with this epilogue.

    dtypes: of a and b; uint8 is FP4. num_experts: 0 = not grouped.
    """
    from envoi.gemm.blackwell.kernel import gemm_kernel

    with triton_compat.pretending(arch):
        _, arguments = host.arguments(call_of(epilogue, config, dtypes, sizes, num_experts), config, NUM_SMS)
    return recipe_of_call(gemm_kernel, arguments, arch, num_warps=config.num_warps)


def call_of(
    epilogue: Epilogue, config: BlackwellConfig, dtypes: Sequence[torch.dtype], sizes: tuple[int, int, int],
    num_experts: int,
) -> Call:  # fmt: skip
    """Return a launch whose tensors have no memory. Tiles are loaded and stored by TMA."""
    M, N, K = sizes
    ir = epilogue.ir
    sides = tuple(operand.name for operand in ir.operands if operand.kind in SIDES)
    code = lower(ir, BF16, "gluon", rows_must_fit(ir), True, frozenset(), sides)
    experts = (num_experts,) if num_experts else ()
    a, b = (
        _empty(*rows, K // (2 if dtype == U8 else 1), dtype=dtype)
        for rows, dtype in zip(((M,), (*experts, N)), dtypes, strict=True)
    )
    return Call(
        a, b, code, tuple(_operand(operand, M, N) for operand in ir.operands),
        tuple(operand.name for operand in ir.operands),
        empty_slots(ir, code.slots, M, N, a.device),
        _empty(num_experts + 1, dtype=torch.int32) if num_experts else None,
        _factors(config.sf_group, sizes, num_experts) if config.sf_group else None,
    )  # fmt: skip


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _operand(operand: Operand, M: int, N: int) -> torch.Tensor | float:
    if operand.kind == "Scalar":
        return 0.5
    if operand.kind == "Row":
        return _empty(M, dtype=torch.float32)
    columns = operand.shape.num_columns(N)
    if operand.shape.rows == "1":
        return _empty(columns, dtype=torch.float32)
    return _empty(M, columns, dtype=BF16)


def _factors(sf_group: int, sizes: tuple[int, int, int], num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed scale factors of a and b."""
    M, N, K = sizes
    steps = -(-K // (4 * sf_group))
    dtype = F8 if sf_group == host.NVFP4_GROUP else U8
    of_a, of_b = sf_layout.num_blocks(M, num_experts), sf_layout.num_blocks(N) * max(1, num_experts)
    return _empty(of_a, steps, 2, 256, dtype=dtype), _empty(of_b, steps, 2, 256, dtype=dtype)
