"""Epilogues of the suites: Envoi's, and the equivalent torch code after a matmul."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from envoi.epilogues import Epilogue, Tile, epilogue, exp, log, row_max, row_sum, tanh
from envoi.epilogues.library import absmax, gelu_residual, scale_bias_relu, swiglu, swiglu_fp8
from envoi.types import QuantTensor

FP8_GROUP = 128
CAP = 30.0


@dataclass(frozen=True)
class Ending:
    """Epilogue of a product.

    eager(y, **operands): in torch; y has Envoi's columns, or those of `halves`.
    out_bytes: written per element of the product, without the extra per row.
    operands: their kinds by name, "Col" [N], "Tile" [M, N], or a number.
    halves: torch gets gate and up concatenated, the usual layout for it; Envoi interleaved.
    """

    fused: Epilogue | None
    eager: Callable[..., Any]
    out_bytes: float = 2.0
    operands: dict[str, str | float] = field(default_factory=dict)
    halves: bool = False


@epilogue
def capped_residual_max(acc, residual: Tile):
    """Return cap * tanh(acc / cap) + residual, and the largest value of each row."""
    x = CAP * tanh(acc / CAP) + residual
    return x, row_max(x)


@epilogue
def logsumexp(acc):
    """Return the accumulator and the logarithm of each row's sum of exponentials; values stay below 88."""
    return acc, log(row_sum(exp(acc)))


@epilogue
def logsumexp_of_max(acc):
    """Return what `logsumexp` does, for values of any size: each row's largest is subtracted before exp.

    It is known once the row is complete, so that a second kernel reads the product again.
    """
    largest = row_max(acc)
    return acc, log(row_sum(exp(acc - largest))) + largest


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
    "store": Ending(None, lambda y: y),
    "swiglu": Ending(swiglu, _swiglu, 1.0, halves=True),
    "swiglu_fp8": Ending(swiglu_fp8, lambda y: _quantise(_swiglu(y)), 0.5 + 2.0 / FP8_GROUP, halves=True),
    "scale_bias_relu": Ending(scale_bias_relu, _scale_bias_relu, operands={"alpha": 0.5, "bias": "Col"}),
    "gelu_residual": Ending(gelu_residual, _gelu_residual, operands={"bias": "Col", "residual": "Tile"}),
    "absmax": Ending(absmax, _absmax),
    "capped_residual_max": Ending(capped_residual_max, _capped_residual_max, operands={"residual": "Tile"}),
    "logsumexp": Ending(logsumexp, _logsumexp),
    "logsumexp_of_max": Ending(logsumexp_of_max, _logsumexp),
}
EXACT = {**{name: ending.eager for name, ending in ENDINGS.items()}, "swiglu_fp8": _swiglu}  # without rounding
