"""Inputs of the GEMM suites, and the errors of results against float64."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn import functional

from envoi.bench.shapes import GemmShape, GroupedShape
from envoi.bench.suites.endings import ENDINGS, EXACT
from envoi.bench.trial import generator, relative_error, sample_rows
from envoi.ops.gemm import reference
from envoi.ops.moe.reference_permute import take_rows
from envoi.quant import dequantize, format_named, quantize
from envoi.quant.bits import concatenate
from envoi.quant.formats import Scheme
from envoi.quant.pack import deinterleave_gate_up, with_checked_scales
from envoi.types import Matrix, QuantTensor

QUANTISE_AT_ONCE = 8  # experts; casts work in float32


@dataclass(frozen=True)
class Inputs:
    """Operands a [M, K] and b [N, K] (or [E, N, K]) in the case's format and in bf16; with offsets [E + 1], by expert.

    operands: the epilogue's.
    """

    a: Matrix
    b: Matrix
    wide_a: torch.Tensor
    wide_b: torch.Tensor
    operands: dict[str, Any] = field(default_factory=dict)
    offsets: torch.Tensor | None = None

    @property
    def ends(self) -> torch.Tensor:
        """Ends of the experts' rows, [E], in torch's form."""
        return self.offsets[1:] if self.offsets is not None else torch.empty(0)


def make(shape: GemmShape | GroupedShape, device: torch.device) -> Inputs:
    """Make random inputs that depend on the shape alone; on "meta", tensors without memory."""
    counts = shape.num_rows if isinstance(shape, GroupedShape) else ()
    num_rows = shape.m if isinstance(shape, GemmShape) else sum(counts)
    experts = (len(counts),) if isinstance(shape, GroupedShape) else ()
    source = None if device.type == "meta" else generator(device, num_rows, *experts, shape.n, shape.k)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=source, device=device, dtype=torch.bfloat16)

    scale = shape.k**-0.25  # for products of about 1
    weights = normal(*experts, shape.n, shape.k).mul_(scale)
    x = in_format(normal(num_rows, shape.k).mul_(scale), weights, shape.format)
    sizes = {"Col": (*experts, shape.n), "Tile": (num_rows, shape.n)}
    operands = {
        name: normal(*sizes[kind]) if isinstance(kind, str) else kind
        for name, kind in ENDINGS[shape.epilogue].operands.items()
    }
    ends = torch.tensor(counts, device=device, dtype=torch.int32).cumsum(0).to(torch.int32)
    return replace(x, operands=operands, offsets=functional.pad(ends, (1, 0)) if experts else None)


def in_format(a: torch.Tensor, b: torch.Tensor, name: str) -> Inputs:
    """Convert bf16 matrices to a format of `FORMATS`."""
    format = format_named(name)
    rows, weights = in_scheme(a, format.activations), in_scheme(b, format.weights)
    return Inputs(rows, with_checked_scales(weights) if isinstance(weights, QuantTensor) else weights, a, b)


def in_scheme(x: torch.Tensor, scheme: Scheme | None) -> Matrix:
    """Quantise a matrix, or matrices a few at a time; None leaves them as they are."""
    if scheme is None:
        return x
    if x.dim() == 2:
        return quantize(x, scheme)
    parts = [quantize(part, scheme) for part in x.split(QUANTISE_AT_ONCE)]
    return replace(parts[0], values=concatenate([q.values for q in parts]), sf=concatenate([q.sf for q in parts]))


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
    want = reference.oracle(take_rows(a, rows), b)
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
        want.append(reference.oracle(take_rows(a, chosen), reference.pick_expert(b, expert)))
    return relative_error(got[rows], torch.cat(want))
