"""Which implementation of the GEMMs runs where: the only place that decides. Whatever knows of devices asks here."""

from functools import cache

import torch

from envoi import env
from envoi.epilogue.ir import IR
from envoi.gemm.grouping import ALL_ROWS, Grouping
from envoi.types import Matrix


@cache
def implementation(device: torch.device) -> str:
    """ "hopper" on an sm_90 GPU, "triton" on other GPUs and on a CPU if Triton's interpreter is on, else "torch".

    What the Hopper kernels don't take runs on the Triton kernels there too (`hopper.supports_hopper` and
    `hopper_mx.supports_mx` say what), but for float32, where torch is faster.
    """
    if device.type == "cpu":
        return "triton" if env.interpreting() else "torch"
    if device.type != "cuda":
        return "torch"
    return "hopper" if torch.cuda.get_device_capability(device) == (9, 0) else "triton"


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors; without a GPU those of an H200, as recipes want them, or one."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 132 if device.type == "meta" else 1


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
