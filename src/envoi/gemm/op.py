"""Custom operators of `envoi.gemm` and `envoi.grouped_gemm`, on flat tensors and plain values."""

from itertools import pairwise

import torch

from envoi.epilogue.api import for_graph, with_key
from envoi.epilogue.evaluate import evaluate
from envoi.epilogue.ir import IR, Node
from envoi.epilogue.outputs import output_dtype
from envoi.gemm import reference
from envoi.gemm.backend import run_kernels
from envoi.gemm.batch import batch_rows
from envoi.gemm.grouping import ALL_ROWS, INVARIANT_ROWS
from envoi.quant.formats import SCHEMES
from envoi.runtime.custom_op import operator
from envoi.types import Matrix, QuantTensor


def split(x: Matrix) -> tuple[torch.Tensor, torch.Tensor | None, list[int]]:
    """Split a matrix into an operator's arguments: values, factors, [rows and columns of a group, the promise]."""
    return (x, None, []) if isinstance(x, torch.Tensor) else (x.values, x.sf, [*x.group, int(x.scales_at_most_2)])


def join(values: torch.Tensor, sf: torch.Tensor | None, group: list[int]) -> Matrix:
    """Join an operator's arguments to a matrix; inverse of `split`."""
    return values if sf is None else QuantTensor(values, sf, (group[0], group[1]), scales_at_most_2=bool(group[2]))


def num_columns(values: torch.Tensor) -> int:
    """Return the number of elements in a row; a byte of uint8 holds two."""
    return values.shape[-1] * (2 if values.dtype == torch.uint8 else 1)


def name_operands(tensors: list[torch.Tensor], scalars: list[float], names: str) -> dict[str, torch.Tensor | float]:
    """Return operands by name. names: of the tensors, then of the numbers, separated by commas."""
    values = [*tensors, *scalars]
    return dict(zip(names.split(",") if values else [], values, strict=True))


def common_block(a: QuantTensor, b: QuantTensor) -> None:
    """Raise ValueError if float32 scale factors of a and b change at different positions along K."""
    reference.block_k(a, b)


def _gemm_fake(
    a, a_sf, a_group, b, b_sf, b_group, epilogue, out_dtype, tensors, scalars, names, batch_invariant=False
):  # fmt: skip
    return _empty_outputs(for_graph(epilogue), a, b.shape[0], None, out_dtype)


def _gemm_flops(a, a_sf, a_group, b, *arguments):
    return 2 * a.shape[0] * num_columns(a) * b.shape[0]


@operator("gemm", _gemm_fake, _gemm_flops, batch_rows)
def product(
    a: torch.Tensor, a_sf: torch.Tensor | None, a_group: list[int],
    b: torch.Tensor, b_sf: torch.Tensor | None, b_group: list[int],
    epilogue: str, out_dtype: torch.dtype,
    tensors: list[torch.Tensor], scalars: list[float], names: str, batch_invariant: bool = False,
) -> list[torch.Tensor]:  # fmt: skip
    """Return the flat outputs of a GEMM."""
    ir, operands = with_key(epilogue), name_operands(tensors, scalars, names)
    sides = join(a, a_sf, a_group), join(b, b_sf, b_group)
    outputs = run_kernels(*sides, None, ir, out_dtype, operands, INVARIANT_ROWS if batch_invariant else ALL_ROWS)
    if outputs is not None:
        return outputs
    acc = reference.accumulate(*sides)
    return _flat_outputs(ir, evaluate(ir, acc, operands), out_dtype, tensors)


def _grouped_fake(
    rows, rows_sf, rows_group, weights, weights_sf, weights_group, offsets, epilogue, out_dtype,
    tensors, scalars, names, batch_invariant=False,
):  # fmt: skip
    return _empty_outputs(for_graph(epilogue), rows, weights.shape[1], weights.shape[0], out_dtype)


def _grouped_flops(rows, rows_sf, rows_group, weights, *arguments):
    return 2 * rows.shape[0] * num_columns(rows) * weights.shape[1]


@operator("grouped_gemm", _grouped_fake, _grouped_flops)
def grouped_product(
    rows: torch.Tensor, rows_sf: torch.Tensor | None, rows_group: list[int],
    weights: torch.Tensor, weights_sf: torch.Tensor | None, weights_group: list[int],
    offsets: torch.Tensor, epilogue: str, out_dtype: torch.dtype,
    tensors: list[torch.Tensor], scalars: list[float], names: str, batch_invariant: bool = False,
) -> list[torch.Tensor]:  # fmt: skip
    """Return the flat outputs of a grouped GEMM."""
    ir, operands = with_key(epilogue), name_operands(tensors, scalars, names)
    sides = join(rows, rows_sf, rows_group), join(weights, weights_sf, weights_group)
    bounds = _check_offsets(offsets, rows.shape[0]) if rows.device.type == "cpu" else None
    outputs = run_kernels(*sides, offsets, ir, out_dtype, operands, INVARIANT_ROWS if batch_invariant else ALL_ROWS)
    if outputs is not None:
        return outputs
    acc = reference.accumulate_groups(*sides, bounds or _check_offsets(offsets, rows.shape[0]))
    _spread_columns(ir, operands, offsets, rows.shape[0])
    return _flat_outputs(ir, evaluate(ir, acc, operands, offsets), out_dtype, tensors)


def _check_offsets(offsets: torch.Tensor, num_rows: int) -> list[int]:
    bounds = offsets.tolist()
    if bounds[0] != 0 or bounds[-1] > num_rows or any(last < first for first, last in pairwise(bounds)):
        raise ValueError(f"offsets: expected ascending values from 0 to at most {num_rows} rows, got {bounds}")
    return bounds


def _spread_columns(ir: IR, operands: dict, offsets: torch.Tensor, num_rows: int) -> None:
    """Expand each Col [E, N] to [P, N] by the rows' experts; rows of no expert get the last expert's, or zeros."""
    positions = torch.arange(num_rows, device=offsets.device, dtype=torch.int32)
    expert = torch.searchsorted(offsets[1:].contiguous(), positions, right=True).clamp(max=len(offsets) - 2)
    for operand in ir.operands:
        if operand.shape.rows == "1" and operand.shape.spans_columns:
            values = operands[operand.name]
            operands[operand.name] = values[expert] if len(values) else values.new_zeros(num_rows, values.shape[1])


def _flat_outputs(ir: IR, outputs: list, out_dtype: torch.dtype, operands: list[torch.Tensor]) -> list[torch.Tensor]:
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


def _empty_outputs(
    ir: IR, a: torch.Tensor, N: int, num_experts: int | None, out_dtype: torch.dtype
) -> list[torch.Tensor]:
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
