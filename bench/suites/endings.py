"""Epilogues of the suites: Envoi's, and the equivalent torch code after a matmul."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from envoi.epilogues import Epilogue
from envoi.tune.problems import CAP, EPILOGUES, OPERANDS
from envoi.types import QuantTensor

FP8_GROUP = 128


@dataclass(frozen=True)
class Ending:
    """Epilogue of a product.

    name: in `envoi.tune.problems`.
    eager(y, **operands): in torch; y has Envoi's columns, or those of `halves`.
    out_bytes: written per element of the product, without the extra per row.
    halves: torch gets gate and up concatenated, the usual layout for it; Envoi interleaved.
    """

    name: str
    eager: Callable[..., Any]
    out_bytes: float = 2.0
    halves: bool = False

    @property
    def fused(self) -> Epilogue | None:
        """Envoi's epilogue; None: the product as it is."""
        return EPILOGUES[self.name]

    @property
    def operands(self) -> dict[str, str | float]:
        """Kinds of the operands by name: "Col" [N], "Tile" [M, N], or a number."""
        return OPERANDS.get(self.name, {})


def _swiglu(y: torch.Tensor) -> torch.Tensor:
    gate, up = y.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _quantise(y: torch.Tensor) -> QuantTensor:
    groups = y.float().unflatten(-1, (-1, FP8_GROUP))
    sf = groups.abs().amax(-1).clamp(min=1e-30) / 448.0
    values = (groups / sf.unsqueeze(-1)).to(torch.float8_e4m3fn)
    return QuantTensor(values.flatten(-2), sf, (1, FP8_GROUP))


def _scale_bias_relu(y: torch.Tensor, alpha: float, bias: torch.Tensor) -> torch.Tensor:
    return functional.relu(alpha * y + bias)


def _gelu_residual(y: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return functional.gelu(y + bias) + residual


def _absmax(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return y, y.abs().amax(-1)


def _capped_residual_max(y: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = CAP * torch.tanh(y / CAP) + residual
    return x, x.amax(-1)


def _logsumexp(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return y, y.to(torch.promote_types(y.dtype, torch.float32)).logsumexp(-1)


ENDINGS = {
    ending.name: ending
    for ending in (
        Ending("store", lambda y: y),
        Ending("swiglu", _swiglu, 1.0, halves=True),
        Ending("swiglu_fp8", lambda y: _quantise(_swiglu(y)), 0.5 + 2.0 / FP8_GROUP, halves=True),
        Ending("scale_bias_relu", _scale_bias_relu),
        Ending("gelu_residual", _gelu_residual),
        Ending("absmax", _absmax),
        Ending("capped_residual_max", _capped_residual_max),
        Ending("logsumexp", _logsumexp),
        Ending("logsumexp_of_max", _logsumexp),
    )
}
EXACT = {**{name: ending.eager for name, ending in ENDINGS.items()}, "swiglu_fp8": _swiglu}  # without rounding
