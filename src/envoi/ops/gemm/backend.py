"""Choice of a GEMM's implementation: Hopper's kernels, Hopper's for MX weights, the Triton kernels, or torch."""

import torch

from envoi import log
from envoi.epilogues.ir import IR
from envoi.ops.gemm.grouping import ALL_ROWS, Grouping
from envoi.runtime.devices import implementation
from envoi.types import Matrix, QuantTensor


@log.choices
def run_kernels(
    a: Matrix, b: Matrix, offsets: torch.Tensor | None, ir: IR, out_dtype: torch.dtype, operands: dict,
    grouping: Grouping = ALL_ROWS,
) -> list[torch.Tensor] | None:  # fmt: skip
    """Return the flat outputs of `envoi.gemm` or, with offsets, of `envoi.grouped_gemm`; None if torch should compute.

    On Hopper, calls that its two kernels refuse run on the Triton kernels. float32 on a GPU runs on torch: it's faster.
    """
    kind = implementation(a.device)
    if kind == "torch" or (a.device.type == "cuda" and isinstance(a, torch.Tensor) and a.dtype == torch.float32):
        return None
    if isinstance(b, QuantTensor) and b.order != "rows":
        return _run_fragments(a, b, offsets, ir, out_dtype, operands, grouping)
    if kind == "hopper":
        from envoi.ops.gemm.hopper import host as hopper

        if not hopper.why_not_hopper(a, b, ir):
            return hopper.run_gemm(a, b, offsets, ir, out_dtype, operands, grouping)
        from envoi.ops.gemm.hopper_mx import host as hopper_mx

        if not hopper_mx.why_not_mx(a, b, ir):
            return hopper_mx.run_gemm(a, b, offsets, ir, out_dtype, operands, grouping=grouping)
    from envoi.ops.gemm.triton import host as triton

    return triton.run_gemm(a, b, offsets, ir, out_dtype, operands, grouping)


def quantizes_in_l1(rows: Matrix, weights: Matrix, in_pairs: IR, in_bf16: IR, grouping: Grouping) -> bool:
    """Return True if the experts' L1 should quantise in groups of 128 itself; see `envoi.ops.gemm.hopper.pairs`."""
    if implementation(rows.device) != "hopper":
        return False
    from envoi.ops.gemm.hopper import pairs

    return pairs.quantizes_in_pairs(rows, weights, in_pairs, in_bf16, grouping)


def _run_fragments(
    a: Matrix, b: QuantTensor, offsets: torch.Tensor | None, ir: IR, out_dtype: torch.dtype, operands: dict,
    grouping: Grouping,
) -> list[torch.Tensor]:  # fmt: skip
    """Run the one kernel that reads weights in this order; packing chose it, and no other computes in its stead."""
    from envoi.ops.gemm.hopper_w4a8 import host as w4a8
    from envoi.ops.gemm.hopper_w4a16 import many

    takes = w4a8.why_not_w4a8 if isinstance(a, QuantTensor) else many.why_not_many
    why = "no offsets" if offsets is None else takes(a, b, ir, grouping)
    if offsets is None or why:
        raise ValueError(f"weights: expected them by rows for this GEMM, got them in fragment order ({why})")
    if isinstance(a, QuantTensor):
        return w4a8.run(a, b, offsets, ir, out_dtype, operands, grouping)
    return many.run(a, b, offsets, ir, out_dtype, operands, grouping)
