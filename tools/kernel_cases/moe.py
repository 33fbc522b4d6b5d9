"""Launches of the kernels around the experts' GEMMs: 2048 tokens, 6 of 32 experts each."""

from typing import cast

import torch

from envoi.ops.gemm.grouping import EXPERTS_ROWS
from envoi.ops.moe import kernels, permute
from envoi.ops.moe.launches import Launch
from envoi.ops.moe.one_launch import host as one_launch
from envoi.ops.moe.one_launch.config import NUM_COUNTERS
from envoi.ops.moe.one_launch.kernel import fused_kernel
from envoi.ops.moe.permute import RowMap, combine_arguments
from envoi.quant import quantize
from envoi.quant.formats import SCHEMES
from envoi.runtime.kernel_case import EVERY_ARCH, HOPPER, NUM_SMS, case_of
from envoi.runtime.program import without_memory
from envoi.types import ExpertWeights, QuantTensor

M, NUM_TOPK, NUM_EXPERTS, HIDDEN, INTERMEDIATE = 2048, 6, 32, 4096, 2048
P = M * NUM_TOPK
BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32


def _row_map() -> RowMap:
    return RowMap(without_memory((NUM_EXPERTS + 1,), INT32), without_memory((M, NUM_TOPK), INT32))


def _sort() -> Launch:
    return permute.sort_arguments(_row_map().slot_to_pos, _row_map())


def _gather(scheme: str | None) -> Launch:
    rows = permute.empty_rows(P, HIDDEN, SCHEMES[scheme] if scheme else None, torch.device("meta"))
    tokens, weights = without_memory((M, HIDDEN), BF16), without_memory((M, NUM_TOPK), FP32)
    return permute.gather_arguments(tokens, weights, _row_map(), rows, without_memory((P,), FP32))


def _quantize(scheme: str) -> Launch:
    out = permute.empty_rows(P, INTERMEDIATE, SCHEMES[scheme], torch.device("meta"))
    if not isinstance(out, QuantTensor):
        raise ValueError(f"scheme: expected one that quantises, got {scheme!r}")
    return permute.quantize_arguments(without_memory((P, INTERMEDIATE), BF16), _row_map().offsets, out)


def _combine() -> Launch:
    return combine_arguments(
        without_memory((P, HIDDEN), BF16), _row_map().slot_to_pos, without_memory((M, HIDDEN), BF16)
    )


def _one_launch(num_tokens: int) -> Launch:
    rows = permute.empty_rows(num_tokens * NUM_TOPK, HIDDEN, SCHEMES["fp8_1x128"], torch.device("meta"))
    gate_up = quantize(without_memory((NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN), BF16), "fp8_128x128")
    down = quantize(without_memory((NUM_EXPERTS, HIDDEN, INTERMEDIATE), BF16), "fp8_128x128")
    weights, offsets = without_memory((num_tokens * NUM_TOPK,), FP32), _row_map().offsets
    experts = ExpertWeights(gate_up, down, "fp8_block128")
    planned = one_launch.plan(cast(QuantTensor, rows), weights, offsets, experts, EXPERTS_ROWS, NUM_SMS)
    return one_launch.arguments(planned, without_memory((NUM_COUNTERS,), INT32), NUM_SMS)


# Name, description, kernel, function of the arguments, and what it is called with.
LAUNCHES = (
    ("sort", "rows of the slots, sorted by expert", kernels.sort_kernel, _sort),
    ("gather", "tokens to the rows of their slots, in bf16", kernels.gather_kernel, _gather, None),
    ("gather-fp8-row", "quantised with a scale a row", kernels.gather_kernel, _gather, "fp8_row"),
    ("gather-fp8-block128", "quantised with a scale per 1x128", kernels.gather_kernel, _gather, "fp8_1x128"),
    ("gather-mxfp8", "quantised to MXFP8", kernels.gather_kernel, _gather, "mxfp8"),
    ("quantize-fp8-row", "L1's rows, with a scale a row", kernels.quantize_kernel, _quantize, "fp8_row"),
    ("quantize-fp8-block128", "with a scale per 1x128", kernels.quantize_kernel, _quantize, "fp8_1x128"),
    ("combine", "sums of the rows of each token's slots", kernels.combine_kernel, _combine),
)
ON_HOPPER = (
    ("both-gemms", "L1 and L2 in one launch, in fp8_block128", fused_kernel, _one_launch, M),
    ("both-gemms-few", "with 48 rows an expert", fused_kernel, _one_launch, M // 8),
)
KERNELS = tuple(
    case_of(f"experts-{name}", about, arches, *launch)
    for arches, launches in ((EVERY_ARCH, LAUNCHES), (HOPPER, ON_HOPPER))
    for name, about, *launch in launches
)
