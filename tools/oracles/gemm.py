"""Oracle of a product: float64, each operand widened exactly; tests and error columns compare with it."""

import torch

from envoi.quant.cast import dequantize
from envoi.types import Matrix


def oracle(a: Matrix, b: Matrix) -> torch.Tensor:
    """Return the product a @ b.T in float64."""
    wide = [x.double() if isinstance(x, torch.Tensor) else dequantize(x, torch.float64) for x in (a, b)]
    return wide[0] @ wide[1].T
