"""Torch's own matmuls of each format: each function prepares torch's layout, outside the timing, and returns a call."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.nn import functional
from torch.nn.functional import ScalingType

from envoi.quant.formats import SCHEMES
from envoi.tune.problems import Inputs, in_scheme
from envoi.types import Matrix, QuantTensor

Product = Callable[[], torch.Tensor]
ROW = ScalingType.RowWise
BLOCKS = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
BF16 = torch.bfloat16


def product(a: Matrix, b: Matrix) -> Product:
    """Return a call of a @ b.T in bf16. Raises if torch has none on the device."""
    if not isinstance(a, QuantTensor) or not isinstance(b, QuantTensor):
        left, right = cast(torch.Tensor, a), cast(torch.Tensor, b).T
        return lambda: torch.mm(left, right)
    values, weights = a.values, b.values.T
    fast = a.sf.shape[1] == 1
    if fast:
        recipes, scales = (ROW, ROW), (a.sf, b.sf.T)
    else:  # a's scales of a block of K contiguous, b's padded to four blocks of K
        recipes = BLOCKS
        scales = a.sf.T.contiguous().T, functional.pad(b.sf, (0, -b.sf.shape[1] % 4)).T

    def public() -> torch.Tensor:
        return functional.scaled_mm(
            values, weights, scales[0], recipes[0], scales[1], recipes[1], output_dtype=BF16, use_fast_accum=fast
        )

    def older() -> torch.Tensor:
        return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            values, weights, *scales, out_dtype=BF16, use_fast_accum=fast
        )

    return _first_that_runs(public, older)


def grouped_operands(x: Inputs) -> tuple[Matrix, Matrix]:
    """Return torch's operands in place of x's: bf16, or on a GPU FP8 with row scales, all that torch supports."""
    formats_8 = isinstance(x.a, QuantTensor) and isinstance(x.b, QuantTensor) and not x.b.packed
    if not formats_8 or not x.wide_a.is_cuda:
        return x.wide_a, x.wide_b
    if cast(QuantTensor, x.a).sf.shape[1] == 1:
        return x.a, x.b
    return in_scheme(x.wide_a, SCHEMES["fp8_row"]), in_scheme(x.wide_b, SCHEMES["fp8_row"])


def grouped_product(a: Matrix, b: Matrix, ends: torch.Tensor) -> Product:
    """Return a call of each expert's rows times its weight, in bf16. Raises if torch has none on the device."""
    if not isinstance(a, QuantTensor) or not isinstance(b, QuantTensor):
        left, right = cast(torch.Tensor, a), cast(torch.Tensor, b).transpose(1, 2)
        return lambda: functional.grouped_mm(left, right, offs=ends)
    values, weights, scales = a.values, b.values.transpose(1, 2), (a.sf.squeeze(1), b.sf.squeeze(2))
    scaled: Any = getattr(functional, "scaled_grouped_mm", None)

    def public() -> torch.Tensor:
        return scaled(
            values, weights, scales[0], ROW, scales[1], ROW, offs=ends, output_dtype=BF16, use_fast_accum=True
        )

    def older() -> torch.Tensor:
        return torch._scaled_grouped_mm(  # pyright: ignore[reportPrivateImportUsage]
            values, weights, *scales, offs=ends, out_dtype=BF16, use_fast_accum=True
        )

    return _first_that_runs(public, older)


def _first_that_runs(public: Product, older: Product) -> Product:
    """Return the public function, or its predecessor if a release or a device has only that."""
    try:
        public()
    except Exception as error:
        try:
            older()
        except Exception:
            raise error from None
        return older
    return public
