"""Flat outputs of GEMMs by torch: computed, where no kernel runs, or empty, for a tracer."""

from itertools import pairwise

import torch

from envoi.epilogues.ir import IR, Node
from envoi.epilogues.outputs import output_dtype
from envoi.epilogues.reference import evaluate
from envoi.ops.gemm import reference
from envoi.quant.formats import SCHEMES
from envoi.runtime.devices import expect_no_capture
from envoi.types import Matrix, QuantTensor


def compute(
    a: Matrix, b: Matrix, ir: IR, out_dtype: torch.dtype, operands: dict, tensors: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the flat outputs of a GEMM. operands: by name; tensors: those of them that are tensors."""
    return _flat(ir, evaluate(ir, reference.accumulate(a, b), operands), out_dtype, tensors)


def compute_groups(
    rows: Matrix, weights: Matrix, offsets: torch.Tensor, ir: IR, out_dtype: torch.dtype, operands: dict,
    tensors: list[torch.Tensor],
) -> list[torch.Tensor]:  # fmt: skip
    """Return the flat outputs of a grouped GEMM; arguments as in `compute`. ValueError if offsets don't ascend."""
    acc = reference.accumulate_groups(rows, weights, check_offsets(offsets, rows.shape[0]))
    spread_columns(ir, operands, offsets, rows.shape[0])
    return _flat(ir, evaluate(ir, acc, operands, offsets), out_dtype, tensors)


def check_offsets(offsets: torch.Tensor, num_rows: int) -> list[int]:
    """Return the offsets as numbers. ValueError if they don't ascend from 0 to at most num_rows.

    Raises RuntimeError while a CUDA graph is captured.
    """
    expect_no_capture("offsets", offsets.device, "since float32 runs on torch, which needs their values on the host")
    bounds = offsets.tolist()
    if bounds[0] != 0 or bounds[-1] > num_rows or any(last < first for first, last in pairwise(bounds)):
        raise ValueError(f"offsets: expected ascending values from 0 to at most {num_rows} rows, got {bounds}")
    return bounds


def spread_columns(ir: IR, operands: dict, offsets: torch.Tensor, num_rows: int) -> None:
    """Expand each Col [E, N] to [P, N] by the rows' experts; rows of no expert get the last expert's, or zeros."""
    positions = torch.arange(num_rows, device=offsets.device, dtype=torch.int32)
    expert = torch.searchsorted(offsets[1:].contiguous(), positions, right=True).clamp(max=len(offsets) - 2)
    for operand in ir.operands:
        if operand.shape.rows == "1" and operand.shape.spans_columns:
            values = operands[operand.name]
            operands[operand.name] = values[expert] if len(values) else values.new_zeros(num_rows, values.shape[1])


def _flat(ir: IR, outputs: list, out_dtype: torch.dtype, operands: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the outputs in their dtypes, contiguous; none aliases an operand or another output."""
    flat: list[torch.Tensor] = []
    for (_, position), output in zip(ir.outputs, outputs, strict=True):
        if isinstance(output, QuantTensor):
            flat += [output.values, output.sf]
        else:
            flat.append(output.to(output_dtype(ir.nodes[position], out_dtype)).contiguous())
    taken = {tensor.untyped_storage().data_ptr() for tensor in operands}
    for position, tensor in enumerate(flat):
        if tensor.untyped_storage().data_ptr() in taken:
            flat[position] = tensor.clone()
        taken.add(flat[position].untyped_storage().data_ptr())
    return flat


def empty(ir: IR, a: torch.Tensor, N: int, num_experts: int | None, out_dtype: torch.dtype) -> list[torch.Tensor]:
    """Return empty tensors of the flat outputs' shapes and dtypes; a [M, K] or [M, K / 2], N columns of b."""
    flat: list[torch.Tensor] = []
    for _, position in ir.outputs:
        node = ir.nodes[position]
        if node.op == "quantize":
            flat += _empty_quantised(node, a, node.shape.num_columns(N))
        else:
            shape = _output_shape(node, a.shape[0], N, num_experts)
            flat.append(a.new_empty(shape, dtype=output_dtype(node, out_dtype)))
    return flat


def _empty_quantised(node: Node, a: torch.Tensor, columns: int) -> list[torch.Tensor]:
    scheme = SCHEMES[node.attribute("scheme")]
    packed = columns // 2 if scheme.values == torch.uint8 else columns
    num_groups = columns // scheme.group_for((1, columns))[1]
    return [a.new_empty(a.shape[0], packed, dtype=scheme.values), a.new_empty(a.shape[0], num_groups, dtype=scheme.sf)]


def _output_shape(node: Node, M: int, N: int, num_experts: int | None) -> tuple[int, ...]:
    columns = node.shape.num_columns(N)
    if node.shape.rows == "M":
        return (M,) if node.shape.columns == "1" else (M, columns)
    if node.shape.columns == "1":
        return ()
    return (columns,) if num_experts is None else (num_experts, columns)
