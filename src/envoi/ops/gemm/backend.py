"""Choice of a GEMM's implementation: torch, Triton's kernels, or one of Hopper's.

hopper        bf16, fp16, FP8 by row and by block
hopper_mx     MX weights by rows
widened       two matrices of other narrow numbers, made bf16 for "hopper"
w4a16, w4a8   4-bit weights in an order of fragments, for rows in bf16 and in FP8
"""

from importlib import import_module

import torch

from envoi import log
from envoi.epilogues.ir import IR
from envoi.ops.gemm.grouping import ALL_ROWS, Grouping
from envoi.quant.fp8_fragments import ORDER as FP8_ORDER
from envoi.runtime.devices import implementation, on_gpu
from envoi.types import Matrix, QuantTensor

# Module of each kind of kernels, with a function run_gemm; it is imported when it is needed.
HOSTS = {
    "hopper": "hopper.host", "hopper_mx": "hopper_mx.host", "widened": "widened", "triton": "triton.host",
    "w4a8": "hopper_w4a8.host", "w4a16": "hopper_w4a16.many",
}  # fmt: skip


def run_kernels(
    a: Matrix, b: Matrix, offsets: torch.Tensor | None, ir: IR, out_dtype: torch.dtype, operands: dict,
    grouping: Grouping = ALL_ROWS, kernels: str = "",
) -> list[torch.Tensor] | None:  # fmt: skip
    """Return the flat outputs of `envoi.gemm` or, with offsets, of `envoi.grouped_gemm`; None if torch should compute.

    kernels: as `kernels_for` names them, where a caller has asked it. float32 on a GPU runs on torch: it's faster.
    """
    kind = implementation(a.device)
    if kind == "torch" or (on_gpu(a.device) and isinstance(a, torch.Tensor) and a.dtype == torch.float32):
        log.gemm_by_torch(a, b)
        return None
    if isinstance(b, QuantTensor) and b.order != "rows" and offsets is None:
        raise ValueError("weights: expected them by rows for a GEMM without offsets, got them in fragment order")
    host = import_module(f"envoi.ops.gemm.{HOSTS[kernels or kernels_for(kind, a, b, ir, grouping)]}")
    return host.run_gemm(a, b, offsets, ir, out_dtype, operands, grouping=grouping)


def kernels_for(kind: str, a: Matrix, b: Matrix, ir: IR, grouping: Grouping = ALL_ROWS) -> str:
    """Return which kernels run a GEMM: "hopper", "hopper_mx", "widened", "triton", or those of an order of weights.

    kind: of the device, from `runtime.devices.implementation`. On Hopper, calls that its kernels refuse run on the
    Triton kernels. Weights in an order of fragments have one kernel, "w4a8" or "w4a16"; raises ValueError for what that
    can't run: packing chose it, and no other computes in its stead.
    """
    if isinstance(b, QuantTensor) and b.order != "rows":
        return _kernels_for_fragments(a, b, ir, grouping)
    if kind == "hopper":
        from envoi.ops.gemm.hopper import host as hopper

        if not hopper.why_not_hopper(a, b, ir):
            return "hopper"
        from envoi.ops.gemm.hopper_mx import host as hopper_mx

        if not hopper_mx.why_not_mx(a, b, ir):
            return "hopper_mx"
        from envoi.ops.gemm.widened import why_not_widened

        if not why_not_widened(a, b, ir):
            return "widened"
    return "triton"


def _kernels_for_fragments(a: Matrix, b: QuantTensor, ir: IR, grouping: Grouping) -> str:
    from envoi.ops.gemm.hopper_w4a8.host import why_not_w4a8
    from envoi.ops.gemm.hopper_w4a16.many import why_not_many

    for_fp8 = b.order == FP8_ORDER
    why = (why_not_w4a8 if for_fp8 else why_not_many)(a, b, ir, grouping)
    if why:
        raise ValueError(f"weights: expected them by rows for this GEMM, got them in fragment order ({why})")
    return "w4a8" if for_fp8 else "w4a16"
