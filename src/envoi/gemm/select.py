"""The GEMMs by the implementation that takes them."""

import torch

from envoi import log
from envoi.epilogue.ir import IR
from envoi.gemm.devices import implementation
from envoi.gemm.grouping import ALL_ROWS, Grouping
from envoi.types import Matrix


@log.choices
def run_kernels(
    a: Matrix, b: Matrix, offsets: torch.Tensor | None, ir: IR, out_dtype: torch.dtype, operands: dict,
    grouping: Grouping = ALL_ROWS,
) -> list[torch.Tensor] | None:  # fmt: skip
    """The flat outputs of `envoi.gemm` or, with offsets, of `envoi.grouped_gemm`; None where torch has to compute."""
    kind = implementation(a.device)
    if kind == "torch" or (a.device.type == "cuda" and isinstance(a, torch.Tensor) and a.dtype == torch.float32):
        return None
    from envoi.gemm import hopper, hopper_mx, portable

    if kind == "hopper" and not hopper.supports_hopper(a, b, ir):
        return hopper.run(a, b, offsets, ir, out_dtype, operands, grouping)
    if kind == "hopper" and not hopper_mx.supports_mx(a, b, ir):
        return hopper_mx.run(a, b, offsets, ir, out_dtype, operands, grouping=grouping)
    if offsets is None:
        return portable.gemm(a, b, ir, out_dtype, operands)
    return portable.grouped_gemm(a, b, offsets, ir, out_dtype, operands, grouping)
