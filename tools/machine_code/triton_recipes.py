"""Recipes of the GEMM in plain Triton, of tensors without memory."""

import torch

from envoi.epilogue.api import Epilogue
from envoi.epilogue.lower import lower
from envoi.epilogue.slots import empty_slots
from envoi.gemm.triton import host as triton_host
from envoi.gemm.triton.kernel import gemm_kernel, rows_kernel
from envoi.quant.formats import SCHEMES
from envoi.types import Matrix, QuantTensor
from tools.machine_code.compile import Recipe, recipe_of_call

M, N, K = 4096, 2880, 2880


def product(arch: str, epilogue: Epilogue, of_a: str = "bf16", of_b: str = "bf16", num_experts: int = 0) -> Recipe:
    """Return the recipe of the product with an epilogue. of_a, of_b: "bf16" or a scheme. num_experts: 0 = ungrouped."""
    experts = (num_experts,) if num_experts else ()
    a, b = _matrix(of_a, M, K), _matrix(of_b, *experts, N, K)
    offsets = _empty(num_experts + 1, dtype=torch.int32) if num_experts else None
    block_n = triton_host.tile_columns(epilogue.ir, N)
    code = lower(epilogue.ir, torch.bfloat16, "triton", False, False, frozenset())
    outputs = empty_slots(epilogue.ir, code.slots, M, N, a.device)
    _, arguments, options = triton_host.product_arguments(
        a, b, offsets, code, _operands(epilogue, experts), outputs, block_n
    )
    return recipe_of_call(gemm_kernel, arguments, arch, **options)


def rows(arch: str, epilogue: Epilogue) -> Recipe:
    """Return the recipe of an epilogue of whole rows, from accumulators in memory."""
    code = lower(epilogue.ir, torch.bfloat16, "triton", True, False, frozenset())
    acc = _empty(M, N, dtype=torch.float32)
    outputs = empty_slots(epilogue.ir, code.slots, M, N, acc.device)
    operands = _operands(epilogue, ())
    _, arguments, options = triton_host.rows_arguments(acc, epilogue.ir, code, operands, outputs, None)
    return recipe_of_call(rows_kernel, arguments, arch, **options)


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _matrix(kind: str, *shape: int) -> Matrix:
    if kind == "bf16":
        return _empty(*shape, dtype=torch.bfloat16)
    *lead, rows, columns = shape
    scheme = SCHEMES[kind]
    group = scheme.group_for(shape)
    values = _empty(*lead, rows, columns // 2 if scheme.values == torch.uint8 else columns, dtype=scheme.values)
    return QuantTensor(values, _empty(*lead, -(-rows // group[0]), columns // group[1], dtype=scheme.sf), group)


def _operands(epilogue: Epilogue, experts: tuple[int, ...]) -> tuple:
    """Return the epilogue's operands: a number for a Scalar, else a tensor without memory."""

    def shape(operand) -> tuple[int, ...]:
        columns = () if operand.shape.columns == "1" else (operand.shape.num_columns(N),)
        return (M, *columns) if operand.shape.rows == "M" else (*experts, *columns)

    return tuple(
        0.5 if operand.kind == "Scalar" else _empty(*shape(operand), dtype=torch.float32)
        for operand in epilogue.ir.operands
    )
