"""Errors of the GEMM suites' results against float64, and torch's form of their operands."""

from typing import Any

import torch

from bench.suites.endings import ENDINGS, EXACT
from bench.trial import sample_rows
from envoi.ops.gemm import reference
from envoi.ops.moe.reference import take_rows
from envoi.quant import dequantize
from envoi.quant.pack import deinterleave_gate_up
from envoi.tune.problems import GemmShape, GroupedShape, Inputs, in_format, relative_error
from envoi.types import Matrix
from tools.oracles.gemm import oracle


def for_torch(x: Inputs, shape: GemmShape) -> Inputs:
    """Return the inputs with gate and up concatenated, if the epilogue has them, in the same format."""
    if not ENDINGS[shape.epilogue].halves:
        return x
    return in_format(x.wide_a, deinterleave_gate_up(x.wide_b).contiguous(), shape.format)


def num_bytes(x: Matrix) -> int:
    """Return the bytes of values and scale factors."""
    tensors = (x,) if isinstance(x, torch.Tensor) else (x.values, x.sf)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def gemm_error(shape: GemmShape, a: Matrix, b: Matrix, operands: dict[str, Any], got: Any, halves: bool) -> float:
    """Return the error of sampled rows against float64 of these operands; a quantised output is dequantised first.

    halves: b's rows are gate, then up. Of several outputs the worst counts.
    """
    rows = sample_rows(a.shape[0], a.device)
    want = oracle(take_rows(a, rows), b)
    if ENDINGS[shape.epilogue].halves and not halves:
        want = torch.cat((want[:, 0::2], want[:, 1::2]), dim=1)
    kinds = ENDINGS[shape.epilogue].operands
    exact = {name: _double(value, rows, kinds[name]) for name, value in operands.items()}
    wants = EXACT[shape.epilogue](want, **exact)
    pairs = zip(_outputs(got), _outputs(wants), strict=True)
    return max(relative_error(_widen(take_rows(ours, rows)), exactly) for ours, exactly in pairs)


def _outputs(x: Any) -> tuple:
    return x if isinstance(x, tuple) else (x,)


def _double(value: Any, rows: torch.Tensor, kind: str | float) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return (value[rows] if kind == "Tile" else value).double()


def _widen(x: Matrix) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else dequantize(x)


def grouped_error(shape: GroupedShape, a: Matrix, b: Matrix, got: torch.Tensor) -> float:
    """Return the error of sampled rows against float64 of these operands."""
    rows = sample_rows(sum(shape.num_rows), got.device)
    bounds = torch.tensor(shape.num_rows, device=rows.device).cumsum(0)
    experts = torch.searchsorted(bounds, rows, right=True)
    want = []
    for expert in experts.unique().tolist():
        chosen = rows[experts == expert]
        want.append(oracle(take_rows(a, chosen), reference.pick_expert(b, expert)))
    return relative_error(got[rows], torch.cat(want))
