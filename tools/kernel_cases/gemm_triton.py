"""Launches of the GEMM in plain Triton."""

from dataclasses import replace
from functools import partial

import torch

import envoi
from envoi.epilogues.api import Epilogue
from envoi.epilogues.library import expert_l1, expert_l2, store, swiglu, swiglu_fp8
from envoi.runtime.program import without_memory
from tools.kernel_cases import BLACKWELL, EVERY_ARCH, HOPPER
from tools.kernel_cases.operands import operands_of
from tools.kernel_cases.planning import Layer, case_of, matrix

M, N, K = 4096, 2880, 2880


def _gemm(epilogue: Epilogue, M: int = M, N: int = N, K: int = K, kind: str = "") -> None:
    envoi.gemm(matrix(kind, M, K), matrix(kind, N, K), epilogue, **operands_of(epilogue.ir, M, N, ()))


def _experts(epilogue: Epilogue, of_rows: str, of_weights: str, num_experts: int) -> None:
    offsets = without_memory((num_experts + 1,), torch.int32)
    operands = operands_of(epilogue.ir, M, N, (num_experts,))
    envoi.grouped_gemm(matrix(of_rows, M, K), matrix(of_weights, num_experts, N, K), offsets, epilogue, **operands)


GPT_OSS = Layer("mxfp4_mxfp8", 4096, 2880, 2880, 32, 4, "swiglu_oai", has_bias=True, arch=BLACKWELL[0])
IN_ROWS = expert_l1("swiglu", None, False, "fp8_row")
KERNELS = (
    case_of(
        "gemm-triton", "GEMM in bf16, SwiGLU of interleaved columns", EVERY_ARCH, partial(_gemm, swiglu),
        "gemm_kernel", 0, BLACKWELL[0],
    ),
    case_of(
        "gemm-triton-nvfp4", "grouped GEMM of NVFP4 tokens and weights, 64 experts", EVERY_ARCH,
        partial(_experts, expert_l2(True), "nvfp4", "nvfp4", 64), "gemm_kernel", 0, BLACKWELL[0],
    ),
    case_of(
        "gemm-triton-mxfp4", "grouped GEMM of MXFP8 tokens and MXFP4 weights, 64 experts", BLACKWELL,
        partial(_experts, expert_l2(True), "mxfp8", "mxfp4", 64), "gemm_kernel", 0, BLACKWELL[0],
    ),
    case_of(
        "gemm-triton-mxfp4-l1", "L1 of MXFP8 tokens and MXFP4 weights: bias, clamped SwiGLU, MXFP8 out", BLACKWELL,
        GPT_OSS, "gemm_kernel", 0, BLACKWELL[0],
    ),
    case_of(
        "gemm-triton-mxfp4-few", "L1 of FP8 tokens with a scale each and MXFP4 weights, in tiles of 64 tokens",
        BLACKWELL, replace(GPT_OSS, format="mxfp4_fp8", num_tokens=16), "gemm_kernel", 0, BLACKWELL[0],
    ),
    *(
        case_of(
            f"gemm-widen-{kind}", f"{kind.upper()} made bf16 for a GEMM of two such matrices", HOPPER,
            partial(_gemm, store, kind=kind), "widen_kernel",
        )
        for kind in ("nvfp4", "mxfp4")
    ),
    case_of(
        "rows-triton", "epilogue of whole rows: the experts' SwiGLU, quantised with a scale per row", EVERY_ARCH,
        partial(_gemm, IN_ROWS), "rows_kernel", 0, BLACKWELL[0],
    ),
    case_of(
        "rows-quantise", "second part of an epilogue cut in two: float32 rows quantised, a scale per 1x128",
        HOPPER, partial(_gemm, swiglu_fp8, 16384, 4096, 8192), "rows_kernel",
    ),
)  # fmt: skip
