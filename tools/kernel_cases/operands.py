"""Operands of epilogues, for the cases of all kernels."""

from collections.abc import Callable
from typing import Any

import torch

from envoi.epilogues.ir import IR, Operand
from envoi.runtime.program import without_memory
from tools.kernel_cases import Make


def operands_of(
    ir: IR, M: int, N: int, experts: tuple[int, ...],
    dtype_of: Callable[[Operand], torch.dtype] = lambda operand: torch.float32, make: Make = without_memory,
) -> dict[str, Any]:  # fmt: skip
    """Return the operands by name: 0.5 for a Scalar, else a tensor. experts: (number of them,), or () if ungrouped."""

    def value(operand: Operand) -> torch.Tensor | float:
        if operand.kind == "Scalar":
            return 0.5
        columns = () if operand.shape.columns == "1" else (operand.shape.num_columns(N),)
        return make((M, *columns) if operand.shape.rows == "M" else (*experts, *columns), dtype_of(operand))

    return {operand.name: value(operand) for operand in ir.operands}
