"""Evaluation of an epilogue's IR in torch, node by node: the reference of every kernel that is lowered from it.

Each node is computed by the torch function that a call of the user's function on tensors runs: both agree bit for bit.
"""

from collections.abc import Mapping
from itertools import pairwise

import torch

from envoi.epilogues.ir import IR, Node, Operand
from envoi.epilogues.operations import OPERATIONS
from envoi.types import QuantTensor

Output = torch.Tensor | QuantTensor


def evaluate(
    ir: IR, acc: torch.Tensor, operands: Mapping[str, torch.Tensor | float], offsets: torch.Tensor | None = None
) -> list[Output]:
    """Run an IR on an accumulator [M, N]; return the outputs in order, row values as [M], column values as [N].

    acc: float32; a narrower accumulator is widened first, and a float64 one makes everything float64.
    operands: by name, in the shapes of their annotations: Row [M], Col [N], Tile [M, N], Scalar a number or a tensor
        of one; a Col may be [M, N] too, with its own values for each row (so a grouped GEMM passes each expert's).
    offsets [E + 1]: column reductions give [E, N], one row for the rows of each expert; total reductions exclude the
        rows after offsets[E].
    """
    acc = acc if acc.dtype == torch.float64 else acc.float()
    values: list[torch.Tensor | QuantTensor] = []
    for node in ir.nodes:
        values.append(_value(ir, node, values, acc, operands, offsets))
    return [as_returned(ir.nodes[position], values[position], offsets) for _, position in ir.outputs]


def _value(ir: IR, node: Node, values: list, acc: torch.Tensor, operands: Mapping, offsets: torch.Tensor | None):
    if node.op == "acc":
        return acc
    if node.op == "constant":
        return acc.new_full((1, 1), node.attribute("value"))
    if node.op == "load":
        operand = ir.operand(node.attribute("name"))
        return widen(operand, operands.get(operand.name), acc)
    operation, args = OPERATIONS[node.op], [values[arg] for arg in node.args]
    if node.step == "column" and offsets is not None:
        bounds = offsets.tolist()
        rows = [operation.torch(args[0][a:b]) for a, b in pairwise(bounds)]
        return torch.cat(rows) if rows else args[0].new_empty(0, args[0].shape[1])
    if node.step == "all" and offsets is not None:
        args = [args[0][: int(offsets[-1])]]
    return operation.torch(*args, **dict(node.attributes))


def widen(operand: Operand, value: torch.Tensor | float | None, acc: torch.Tensor) -> torch.Tensor:
    """Return an operand as the two-dimensional float tensor that broadcasts against the accumulator."""
    if value is None:
        value = operand.default
    if value is None:
        raise ValueError(f"{operand.name}: expected a value of this operand ({operand.kind}), got none")
    if not isinstance(value, torch.Tensor):
        return acc.new_full((1, 1), value)
    value = value.to(acc.dtype)
    if operand.kind == "Scalar":
        return value.reshape(1, 1)
    if operand.kind == "Row":
        return value.unsqueeze(1)
    return value.unsqueeze(0) if value.dim() == 1 else value


def as_returned(node: Node, value: Output, offsets: torch.Tensor | None) -> Output:
    """Return a value without the dimensions of size 1 that broadcasting needed."""
    if isinstance(value, QuantTensor):
        return value
    if node.shape.rows == "1":
        if node.shape.columns == "1":
            return value.reshape(())
        return value if offsets is not None else value.squeeze(0)
    return value.squeeze(1) if node.shape.columns == "1" else value
