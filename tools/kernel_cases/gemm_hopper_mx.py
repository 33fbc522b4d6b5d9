"""Practical calls of the Hopper GEMM for MX weights, and the kernels that they launch; see `gemm_hopper`."""

from functools import partial

import torch

from envoi.ops.gemm.backend import run_kernels
from envoi.runtime.program import Launch
from tools.kernel_cases import HOPPER, KernelCase
from tools.kernel_cases.gemm_hopper import Case, inputs
from tools.kernel_cases.planning import Layer, case_of, launch_of_call

CASES = tuple(
    case
    for name, format in (("mxfp4", "mxfp4_mxfp8"), ("mxfp8", "mxfp8"))
    for case in (
        Case(f"{name}-few", "store", 512, 4096, 4096, format, 32),
        Case(f"{name}-few-wild", "store", 512, 4096, 4096, format, 32, scales_at_most_2=False),
        Case(f"{name}-64", "store", 2048, 4096, 4096, format, 32),
        Case(f"{name}-many", "expert_l1_mxfp8", 12288, 4096, 4096, format, 32),
        Case(f"{name}-many-wild", "store", 12288, 4096, 2048, format, 32, scales_at_most_2=False),
        Case(f"{name}-plain", "swiglu", 16, 4096, 2048, format),
    )
)


def launch_of(case: Case) -> Launch:
    """Return the launch of a case on an H200."""
    given = inputs(case)
    sides, ir = (given.a, given.b, given.offsets), given.epilogue.ir
    call = partial(run_kernels, *sides, ir, torch.bfloat16, given.operands, given.grouping)
    return launch_of_call(call, "mx_kernel")


NOT_IN_TILES = 2080  # of 64, so that 4-bit weights are by rows
ABOUT_TOKENS = "MXFP8 tokens to bf16, in the order of K for weights of so many bits"
KERNELS = (
    *(
        KernelCase(case.title, f"GEMM on Hopper for MX weights: {case}", HOPPER, partial(launch_of, case))
        for case in CASES
    ),
    *(
        case_of(
            f"mx-tokens-{bits}", ABOUT_TOKENS, HOPPER, Layer(format, 512, intermediate=NOT_IN_TILES), "widen_kernel"
        )
        for bits, format in ((4, "mxfp4_mxfp8"), (8, "mxfp8"))
    ),
)
