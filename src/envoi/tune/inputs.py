"""Random operands of a GEMM to measure, in its format, and the error of a result."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn import functional

from envoi.quant import format_named, quantize
from envoi.quant.bits import concatenate
from envoi.quant.formats import Scheme
from envoi.quant.pack import with_checked_scales
from envoi.tune.epilogues import OPERANDS
from envoi.tune.shapes import GemmShape, GroupedShape, Shape
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


def make(shape: Shape, device: torch.device) -> Inputs:
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
        for name, kind in OPERANDS.get(shape.epilogue, {}).items()
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


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return |got - want| / |want| in float64, over all elements together; NaN counts as 1."""
    difference = (got.double() - want.double()).nan_to_num(nan=torch.inf)
    norm = float(want.double().norm())
    error = float(difference.norm()) / norm if norm else float(difference.norm())
    return error if error < 1.0 else 1.0


def generator(device: torch.device, *seeds: int) -> torch.Generator:
    """Return a generator seeded by the case alone."""
    return torch.Generator(device).manual_seed(sum(seed * 1_000_003**place for place, seed in enumerate(seeds)) % 2**63)
