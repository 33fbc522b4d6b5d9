"""Launches of the GEMM in plain Triton."""

import torch

from envoi.epilogues.api import Epilogue
from envoi.epilogues.cut import cut
from envoi.epilogues.ir import IR
from envoi.epilogues.library import expert_l1, expert_l2, swiglu, swiglu_fp8
from envoi.epilogues.lower import lower
from envoi.epilogues.outputs import empty_outputs
from envoi.ops.gemm.triton import host
from envoi.ops.gemm.triton.kernel import gemm_kernel, rows_kernel
from envoi.quant.formats import SCHEMES
from envoi.runtime.kernel_case import EVERY_ARCH, HOPPER, case_of
from envoi.runtime.program import without_memory
from envoi.types import Matrix, QuantTensor
from tools.kernel_cases.operands import operands_of

M, N, K = 4096, 2880, 2880
META = torch.device("meta")


def _product(epilogue: Epilogue, of_a: str = "", of_b: str = "", num_experts: int = 0) -> tuple:
    """of_a, of_b: a scheme, "" for bf16. num_experts: 0 = ungrouped."""
    experts = (num_experts,) if num_experts else ()
    offsets = without_memory((num_experts + 1,), torch.int32) if num_experts else None
    code = lower(epilogue.ir, torch.bfloat16, "triton", False, False, frozenset())
    operands = tuple(operands_of(epilogue.ir, M, N, experts).values())
    return host.product_arguments(
        _matrix(of_a, M, K), _matrix(of_b, *experts, N, K), offsets, code, operands,
        empty_outputs(epilogue.ir, code.output_specs, M, N, META), host.tile_columns(epilogue.ir, N),
    )  # fmt: skip


def _rows(ir: IR, columns: int, overlap: bool) -> tuple:
    code = lower(ir, torch.bfloat16, "triton", True, False, frozenset())
    acc, outputs = without_memory((M, columns), torch.float32), empty_outputs(ir, code.output_specs, M, columns, META)
    operands = tuple(operands_of(ir, M, columns, ()).values())
    return host.rows_arguments(acc, ir, code, operands, outputs, None, overlap=overlap)


def _matrix(kind: str, *shape: int) -> Matrix:
    if not kind:
        return without_memory(shape, torch.bfloat16)
    *lead, rows, columns = shape
    scheme = SCHEMES[kind]
    group = scheme.group_for(shape)
    width = columns // 2 if scheme.values == torch.uint8 else columns
    sf = without_memory((*lead, -(-rows // group[0]), columns // group[1]), scheme.sf)
    return QuantTensor(without_memory((*lead, rows, width), scheme.values), sf, group)


KERNELS = (
    case_of("gemm-triton", "GEMM in bf16, SwiGLU of interleaved columns", EVERY_ARCH, gemm_kernel, _product, swiglu),
    case_of(
        "gemm-triton-mxfp4", "grouped GEMM of MXFP8 tokens and MXFP4 weights, 64 experts", EVERY_ARCH, gemm_kernel,
        _product, expert_l2(True), "mxfp8", "mxfp4", 64,
    ),
    case_of(
        "rows-triton", "epilogue of whole rows: the experts' SwiGLU, quantised with a scale per row", EVERY_ARCH,
        rows_kernel, _rows, expert_l1("swiglu", None, False, "fp8_row").ir, N, False,
    ),
    case_of(
        "rows-quantise", "second part of an epilogue cut in two: float32 rows quantised, a scale per 1x128",
        HOPPER, rows_kernel, _rows, cut(swiglu_fp8.ir).second, 2048, True,
    ),
)  # fmt: skip
