"""Reference of every GEMM of the library, in torch, on any device.

    acc[m, n] = sum over k of a[m, k] * b[n, k]          (float32; b is [N, K], as nn.Linear stores it)

For block-scaled operands the sum is split where a scale factor changes, as on tensor cores:

    fp8_row, fp8_tensor:  acc = (sum of a.values * b.values) * a.sf[m] * b.sf[n]
    groups of 128 along K: acc = sum over blocks of (sum in the block of a.values * b.values) * (a.sf * b.sf)
    UE8M0 and E4M3 scales: operands are widened first, since such a scale times an element is exact in float32

Where no kernel runs, `compute` and `compute_groups` are what the operators return; `empty` is what a tracer needs.
"""

from itertools import pairwise

import torch

from envoi.epilogues.ir import IR, Node
from envoi.epilogues.operations import in_row_tiles
from envoi.epilogues.outputs import output_dtype
from envoi.epilogues.reference import evaluate
from envoi.quant.cast import decode_sf, decode_values, dequantize, expand_sf
from envoi.quant.formats import SCHEMES
from envoi.runtime.devices import expect_no_capture
from envoi.types import Matrix, QuantTensor

# BLAS libraries choose a kernel, and with it the order of the sum, by the number of rows. On CPUs they do so for a few
# rows only, so padding is enough there; cuBLAS always may, so it gets products of one shape.
ROW_TILE = 16


def accumulate(a: Matrix, b: Matrix) -> torch.Tensor:
    """Return the accumulators a [M, K] @ b [N, K].T, float32 [M, N]. Either operand may be a QuantTensor."""
    if a.shape[-1] == 0:
        return _zeros(a.shape[0], b.shape[0], a.device)
    block = block_k(a, b)
    if block is None:
        return _scaled_product(a, b)
    (a_values, a_sf), (b_values, b_sf) = _blocks(a, block), _blocks(b, block)
    acc = _zeros(a.shape[0], b.shape[0], a.device)
    for a_block, a_scale, b_block, b_scale in zip(a_values, a_sf, b_values, b_sf, strict=True):
        acc += _product(a_block, b_block) * (a_scale * b_scale.T)
    return acc


def _zeros(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Return float32 zeros [rows, columns], whatever torch's default dtype is."""
    return torch.zeros(rows, columns, dtype=torch.float32, device=device)


def accumulate_groups(rows: Matrix, weights: Matrix, offsets: list[int]) -> torch.Tensor:
    """Return rows [P, K] sorted by expert times weights [E, N, K], float32 [P, N]; zeros after offsets[-1]."""
    acc = _zeros(rows.shape[0], weights.shape[1], rows.device)
    for expert, (first, last) in enumerate(pairwise(offsets)):
        if last > first:
            acc[first:last] = accumulate(cut_rows(rows, first, last), pick_expert(weights, expert))
    return acc


def cut_rows(x: Matrix, first: int, last: int) -> Matrix:
    """Return rows first : last of a matrix; a scale factor must belong to a single row or to all."""
    if isinstance(x, torch.Tensor):
        return x[first:last]
    if x.sf.shape[0] == 1 and x.group[0] != 1:
        return QuantTensor(x.values[first:last], x.sf, (last - first, x.group[1]), x.scale)
    return QuantTensor(x.values[first:last], x.sf[first:last], x.group, x.scale)


def pick_expert(x: Matrix, expert: int) -> Matrix:
    """Return one expert's matrix [N, K] of [E, N, K]."""
    if isinstance(x, torch.Tensor):
        return x[expert]
    return QuantTensor(x.values[expert], x.sf[expert], x.group, x.scale, x.scales_at_most_2)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the float32 product of exactly widened operands; a row's bits don't depend on the number of rows."""
    rows, transposed = a.shape[0], b.float().T
    if a.is_cuda:
        return in_row_tiles(lambda tile: tile @ transposed, a.float())
    return (torch.nn.functional.pad(a.float(), (0, 0, 0, -rows % ROW_TILE)) @ transposed)[:rows]


def _scaled_product(a: Matrix, b: Matrix) -> torch.Tensor:
    """Return the scaled product: a single scale along K is applied after the sum, a power-of-two scale before it."""
    a_values, a_scale = _split_scale(a)
    b_values, b_scale = _split_scale(b)
    acc = _product(a_values, b_values)
    if a_scale is not None:
        acc = acc * a_scale
    return acc if b_scale is None else acc * b_scale.T


def _split_scale(x: Matrix) -> tuple[torch.Tensor, torch.Tensor | None]:
    if isinstance(x, torch.Tensor):
        return x, None
    if x.sf.shape[-1] == 1 and x.sf.dtype == torch.float32:
        return decode_values(x), _a_scale_a_row(x)
    return dequantize(x), None


def block_k(a: Matrix, b: Matrix) -> int | None:
    """Return the extent along K of a float32 scale factor if one changes along K, else None."""
    extents = {x.group[1] for x in (a, b) if isinstance(x, QuantTensor) and x.sf.dtype == torch.float32}
    extents -= {a.shape[-1]}
    if len(extents) > 1:
        raise ValueError(f"a, b: expected float32 scales over the same extent of K, got groups of {sorted(extents)}")
    return extents.pop() if extents else None


def _blocks(x: Matrix, block: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Cut [R, K] into [R, block] values and [R, 1] scales; values absorb a scale that changes within a block."""
    scaled = isinstance(x, QuantTensor) and (x.group[1] == block or x.sf.shape[-1] == 1)
    if isinstance(x, QuantTensor) and scaled:
        values, sf = decode_values(x).split(block, dim=-1), _a_scale_a_row(x)
        return values, sf.split(1, dim=-1) if x.group[1] == block else (sf,) * len(values)
    values = (x if isinstance(x, torch.Tensor) else dequantize(x)).split(block, dim=-1)
    ones = torch.ones(x.shape[0], 1, dtype=torch.float32, device=x.device)
    return values, (ones,) * len(values)


def _a_scale_a_row(x: QuantTensor) -> torch.Tensor:
    """Repeat scale factors [ceil(R / rows), G] to [R, G], one for each row."""
    sf = decode_sf(x)
    return expand_sf(sf, (x.group[0], sf.shape[-1]), (x.shape[0], sf.shape[-1])).expand(x.shape[0], -1)


# Outputs of the operators, flat


def compute(
    a: Matrix, b: Matrix, ir: IR, out_dtype: torch.dtype, operands: dict, tensors: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the flat outputs of a GEMM. operands: by name; tensors: those of them that are tensors."""
    return _flat(ir, evaluate(ir, accumulate(a, b), operands), out_dtype, tensors)


def compute_groups(
    rows: Matrix, weights: Matrix, offsets: torch.Tensor, ir: IR, out_dtype: torch.dtype, operands: dict,
    tensors: list[torch.Tensor],
) -> list[torch.Tensor]:  # fmt: skip
    """Return the flat outputs of a grouped GEMM; arguments as in `compute`. ValueError if offsets don't ascend."""
    acc = accumulate_groups(rows, weights, check_offsets(offsets, rows.shape[0]))
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
