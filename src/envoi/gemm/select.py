"""The GEMMs by the implementation that takes them."""

import torch

from envoi.epilogue.ir import IR
from envoi.gemm.devices import implementation
from envoi.gemm.grouping import ALL_ROWS, Grouping
from envoi.types import Matrix, QuantTensor


def run_kernels(
    a: Matrix, b: Matrix, offsets: torch.Tensor | None, ir: IR, out_dtype: torch.dtype, operands: dict,
    grouping: Grouping = ALL_ROWS,
) -> list[torch.Tensor] | None:  # fmt: skip
    """The flat outputs of `envoi.gemm` or, with offsets, of `envoi.grouped_gemm`; None where torch has to compute."""
    kind = implementation(a.device)
    if kind == "torch" or (a.device.type == "cuda" and isinstance(a, torch.Tensor) and a.dtype == torch.float32):
        return None
    from envoi.gemm import hopper, hopper_mx, portable

    if isinstance(b, QuantTensor) and b.order != "rows":
        return _run_fragments(a, b, offsets, ir, out_dtype, operands, grouping)
    if kind == "hopper" and not hopper.supports_hopper(a, b, ir):
        return hopper.run(a, b, offsets, ir, out_dtype, operands, grouping)
    if kind == "hopper" and not hopper_mx.supports_mx(a, b, ir):
        return hopper_mx.run(a, b, offsets, ir, out_dtype, operands, grouping=grouping)
    if offsets is None:
        return portable.gemm(a, b, ir, out_dtype, operands)
    return portable.grouped_gemm(a, b, offsets, ir, out_dtype, operands, grouping)


def _run_fragments(
    a: Matrix, b: QuantTensor, offsets: torch.Tensor | None, ir: IR, out_dtype: torch.dtype, operands: dict,
    grouping: Grouping,
) -> list[torch.Tensor]:  # fmt: skip
    """Only one kernel reads weights in fragment order, and packing asked it first; no other computes in its stead."""
    from envoi.gemm.hopper_w4a16 import many

    why = "no offsets" if offsets is None else many.supports_many(a, b, ir, grouping)
    if offsets is None or not isinstance(a, torch.Tensor) or why:
        raise ValueError(f"weights: expected them by rows for this GEMM, got them in fragment order ({why})")
    return many.run(a, b, offsets, ir, out_dtype, operands, grouping)
