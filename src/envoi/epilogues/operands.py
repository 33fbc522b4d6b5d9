"""Checks of an epilogue's operands, shared by the reference and the GEMMs so that their errors agree."""

from collections.abc import Collection, Mapping
from numbers import Real
from typing import Any, TypeGuard

import torch

from envoi.check import expect_divisible, expect_tensor, fits_float32
from envoi.epilogues.ir import IR, Operand
from envoi.quant.formats import SCHEMES


def check_names(ir: IR, operands: Mapping[str, Any]) -> None:
    """Raise ValueError for a missing operand without a default, or an unknown one."""
    known = [operand.name for operand in ir.operands]
    for name in operands:
        if name not in known:
            raise ValueError(f"{name}: epilogue {ir.name} has no such operand; it takes {', '.join(known) or 'none'}")
    for operand in ir.operands:
        if operand.default is None and operands.get(operand.name) is None:
            raise ValueError(f"{operand.name}: epilogue {ir.name} needs this operand ({operand.kind}), got none")


def check_columns(ir: IR, N: int) -> None:
    """Raise ValueError if an accumulator of N columns can't be split, quantised or ranked as the epilogue does."""
    expect_divisible("N", N, ir.divisor, f"epilogue {ir.name} splits columns into pairs")
    for node in ir.nodes:
        columns = ir.nodes[node.args[0]].shape.num_columns(N) if node.args else N
        if node.scheme:
            scheme = SCHEMES[node.scheme]
            expect_divisible("N", columns, scheme.group_for((1, columns))[1], f"output columns, {scheme.name} groups")
        if node.op == "topk_values" and node.attribute("k") > columns:
            raise ValueError(f"N: expected at least k = {node.attribute('k')} columns for topk, got {columns}")


def check_operands(
    ir: IR, operands: Mapping[str, Any], sizes: Mapping[str, int], device: torch.device,
    dtypes: Collection[torch.dtype], num_experts: int | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:  # fmt: skip
    """Sort operands into tensors and numbers, each checked against its annotation. Raises ValueError.

    sizes: M and N of the accumulator. dtypes: allowed for tensors. num_experts: in a grouped GEMM, where a Col has a
    row for each expert; None in a dense one.
    """
    check_names(ir, operands)
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, float] = {}
    for operand in ir.operands:
        value = operands.get(operand.name)
        value = operand.default if value is None else value
        if operand.kind != "Scalar":
            shape = _operand_shape(operand, sizes, num_experts)
            tensors[operand.name] = expect_tensor(operand.name, value, dtypes, shape, device)
        elif isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise ValueError(f"{operand.name}: expected one element, got {list(value.shape)}")
            tensors[operand.name] = expect_tensor(operand.name, value, dtypes, device=device)
        elif is_number(value):
            if not fits_float32(value):
                raise ValueError(f"{operand.name}: expected a number that float32 can hold, got {value!r}")
            scalars[operand.name] = float(value)
        else:
            raise ValueError(f"{operand.name}: expected a number or a tensor of one, got {type(value).__name__}")
    return tensors, scalars


def is_number(value: Any) -> TypeGuard[float]:
    """Return True for Python's and NumPy's real numbers, but not for bools."""
    return isinstance(value, (int, float, Real)) and not isinstance(value, bool)


def _operand_shape(operand: Operand, sizes: Mapping[str, int], num_experts: int | None) -> tuple[int, ...]:
    if operand.shape.columns == "1":
        return (sizes["M"],)
    columns = operand.shape.num_columns(sizes["N"])
    if operand.shape.rows == "M":
        return (sizes["M"], columns)
    return (columns,) if num_experts is None else (num_experts, columns)
