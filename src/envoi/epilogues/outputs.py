"""Tensors that a lowered epilogue writes, and the nodes that have to wait for whole rows."""

from dataclasses import dataclass

import torch

from envoi.epilogues.ir import IR, Node, Shape, kept_with_ir
from envoi.epilogues.operations import CAST_DTYPES
from envoi.quant.formats import SCHEMES

MAX_DESCS = 2
PARTIAL = ("row_sum", "row_max", "row_absmax")


@dataclass(frozen=True)
class OutputSpec:
    """Tensor that the kernel writes. kind: tile, row, column, scalar, topk, or sf (of the tile before it).

    position: of the node in the IR. columns: for a tile, the divisor of N; for a topk, k; for an sf, the scheme's
    columns that share a factor (0 = all). packed: two columns a byte.
    """

    kind: str
    dtype: torch.dtype
    position: int
    columns: int = 1
    packed: bool = False

    def shape(self, M: int, N: int, divisor: int = 1) -> tuple[int, ...]:
        """Return the tensor's shape for an accumulator [M, N]. divisor: N's, in the tile that an sf belongs to."""
        if self.kind == "tile":
            return (M, N // self.columns // (2 if self.packed else 1))
        if self.kind == "sf":
            width = N // divisor
            return (M, width // (self.columns or max(width, 1)))
        return {"row": (M,), "column": (N // self.columns,), "scalar": (), "topk": (M, self.columns)}[self.kind]


@kept_with_ir
def output_specs(ir: IR, out_dtype: torch.dtype) -> tuple[OutputSpec, ...]:
    """Return the tensors that an epilogue's kernel writes, in the order of its outputs."""
    found: list[OutputSpec] = []
    for _, position in ir.outputs:
        node = ir.nodes[position]
        if node.op == "quantize":
            scheme = SCHEMES[node.attribute("scheme")]
            found += [
                OutputSpec("tile", scheme.values, position, node.shape.divisor, scheme.values == torch.uint8),
                OutputSpec("sf", scheme.sf, position, scheme.group[1]),
            ]
        elif node.step in ("column", "all"):
            # Every row has to be known: the kernel stores the values unreduced, and another one reduces them.
            shape = ir.nodes[node.args[0]].shape
            found.append(OutputSpec(_kind(shape), torch.float32, node.args[0], _columns(shape)))
        else:
            found.append(OutputSpec(_kind(node.shape), output_dtype(node, out_dtype), position, _columns(node.shape)))
    return tuple(found)


def _kind(shape: Shape) -> str:
    if shape.spans_columns:
        return "tile" if shape.rows == "M" else "column"
    if shape.rows == "1":
        return "scalar"
    return "row" if shape.columns == "1" else "topk"


def _columns(shape: Shape) -> int:
    return shape.divisor if shape.spans_columns else shape.num_columns(1)


def output_dtype(node: Node, out_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of an output; out_dtype applies to tiles that aren't cast or quantised."""
    if node.op == "cast":
        return CAST_DTYPES[node.attribute("dtype")]
    if node.dtype == "i32":
        return torch.int32
    is_tile = node.shape.rows == "M" and node.shape.spans_columns
    return out_dtype if is_tile else torch.float32


@kept_with_ir
def deferred(ir: IR) -> frozenset[int]:
    """Return the nodes that wait for complete rows: the reductions over a row, and what depends on them."""
    found: set[int] = set()
    for position, node in enumerate(ir.nodes):
        if found.intersection(node.args) or _crosses_columns(ir, node):
            found.add(position)
    return frozenset(found)


def _crosses_columns(ir: IR, node: Node) -> bool:
    spans = bool(node.args) and ir.nodes[node.args[0]].shape.spans_columns
    return spans and (node.step == "row" or (node.op == "quantize" and node.attribute("scheme") == "fp8_row"))


@kept_with_ir
def scatters(ir: IR, specs: tuple[OutputSpec, ...]) -> bool:
    """Return True if the only output is a tile that depends on no other column, or one in FP8 in groups of 128."""
    if specs[0].kind != "tile" or specs[0].position in deferred(ir):
        return False
    node = ir.nodes[specs[0].position]
    return len(specs) == 1 or (len(specs) == 2 and node.op == "quantize" and node.attribute("scheme") == "fp8_1x128")


@kept_with_ir
def rows_must_fit(ir: IR) -> bool:
    """Return True if the epilogue can only run on chunks that hold whole rows."""
    return any(
        node.shape.columns != "1" or (_crosses_columns(ir, node) and node.op not in PARTIAL)
        for position, node in enumerate(ir.nodes)
        if position in deferred(ir)
    )


@kept_with_ir
def chunk_columns(ir: IR) -> int:
    """Return the number of columns that a chunk of the accumulator must have a multiple of."""
    need = ir.divisor
    for node in ir.nodes:
        if node.scheme:
            need = max(need, SCHEMES[node.scheme].group[1] * node.shape.divisor)
    return need


@kept_with_ir
def pairs_up(ir: IR) -> bool:
    """Return True if the only output is a tile of N / 2 columns rounded to bf16 and quantised to FP8 in groups of 128.

    Two neighbouring chunks, each with half of a group, can then be quantised together by who gets them in turn: what
    waits is stored in bf16 without loss.
    """
    outputs = [ir.nodes[position] for _, position in ir.outputs]
    if [node.op for node in outputs] != ["quantize"] or deferred(ir):
        return False
    source = ir.nodes[outputs[0].args[0]]
    return outputs[0].attribute("scheme") == "fp8_1x128" and source.op == "round_bf16" and source.shape.divisor == 2


@kept_with_ir
def reduces_rows(ir: IR) -> bool:
    """Return True if an output is a reduction over rows, which a second kernel finishes."""
    return any(ir.nodes[position].step in ("column", "all") for _, position in ir.outputs)


def operand_tensors(ir: IR, operands: dict, num_experts: int) -> tuple[tuple, frozenset[str]]:
    """Return the operands' values as kernels take them, in the IR's order, and the names of Scalars that are tensors.

    num_experts: 0 in a dense GEMM.
    """
    values = []
    for operand in ir.operands:
        value = operands[operand.name]
        if isinstance(value, torch.Tensor):
            value = value.contiguous()
            if value.shape[:1] == (0,) and operand.shape.rows == "1" and not num_experts:
                value = value.new_zeros(1, *value.shape[1:])  # a Col without experts
        values.append(value)
    names = (o.name for o, v in zip(ir.operands, values, strict=True) if o.kind == "Scalar" and torch.is_tensor(v))
    return tuple(values), frozenset(names)


def empty_outputs(
    ir: IR, out_dtype: torch.dtype, M: int, N: int, device: torch.device, to: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Return an uninitialised tensor for each of `output_specs`. to: addresses that rows are scattered to, instead."""
    if to is not None:
        return [to]
    written: list[torch.Tensor] = []
    for spec in output_specs(ir, out_dtype):
        divisor = ir.nodes[spec.position].shape.divisor
        written.append(torch.empty(spec.shape(M, N, divisor), dtype=spec.dtype, device=device))
    return written
