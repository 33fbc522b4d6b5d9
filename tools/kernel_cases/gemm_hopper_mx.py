"""Practical calls of the Hopper GEMM for MX weights, and the kernels that they launch; see `gemm.hopper.cases`."""

from functools import partial
from typing import cast

import torch

from envoi.epilogues.lower import lower
from envoi.epilogues.outputs import empty_outputs, operand_tensors, output_specs
from envoi.ops.gemm.hopper_mx import host
from envoi.ops.gemm.hopper_mx.config import default_config
from envoi.ops.gemm.hopper_mx.kernel import mx_kernel
from envoi.ops.gemm.hopper_mx.tokens import widen_kernel
from envoi.runtime.kernel_case import HOPPER, NUM_SMS, KernelCase
from envoi.runtime.program import Launch
from envoi.types import QuantTensor
from tools.kernel_cases.gemm_hopper import Case, inputs

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
    """Return the launch of a case on an H200. Raises ValueError if another backend takes it."""
    given = inputs(case)
    b, ir = cast(QuantTensor, given.b), given.epilogue.ir
    refusal = host.why_not_mx(given.a, b, ir)
    if refusal:
        raise ValueError(f"epilogue {ir.name}: the Hopper kernel for MX weights doesn't take it: {refusal}")
    M, N, num_groups = given.a.shape[0], b.shape[-2], 0 if given.offsets is None else b.shape[0]
    tensors, pointers = operand_tensors(ir, given.operands, num_groups)
    code = lower(ir, torch.bfloat16, "gluon", False, False, pointers)
    config = default_config(M, N, num_groups, NUM_SMS, code, 4 if b.packed else 8, b.scales_at_most_2)
    outputs = empty_outputs(ir, output_specs(ir, torch.bfloat16), M, N, given.a.device)
    tokens = host.room_for_tokens(given.a)
    grid, arguments = host.arguments(tokens, b, given.offsets, code, tensors, outputs, config, NUM_SMS)
    return Launch(mx_kernel, grid, arguments, {"num_warps": config.num_warps, "launch_pdl": True})


def widening(bits: int) -> Launch:
    """Return the launch that widens the first case's tokens, for weights of `bits` bits."""
    given = inputs(CASES[0])
    out = host.room_for_tokens(given.a)
    return Launch(widen_kernel, *host.tokens_arguments(given.a, bits, out, given.offsets), {})


ABOUT_TOKENS = "MXFP8 tokens to bf16, in the order of K for weights of so many bits"
KERNELS = (
    *(
        KernelCase(case.title, f"GEMM on Hopper for MX weights: {case}", HOPPER, partial(launch_of, case))
        for case in CASES
    ),
    *(KernelCase(f"mx-tokens-{bits}", ABOUT_TOKENS, HOPPER, partial(widening, bits)) for bits in (4, 8)),
)
