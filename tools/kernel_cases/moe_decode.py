"""Launches of the Hopper kernel for few tokens, on the layer of Qwen3-30B-A3B: 2048/768, 128 experts, top-8."""

from dataclasses import dataclass
from functools import partial

import torch

from envoi.ops.gemm.hopper_w4a16.sum import sum_launch
from envoi.ops.moe.decode.bf16_fp8 import host
from envoi.runtime.kernel_case import HOPPER, KernelCase
from envoi.runtime.program import Launch, without_memory
from envoi.types import ExpertWeights, Matrix, QuantTensor

HIDDEN, INTERMEDIATE, NUM_EXPERTS, NUM_TOPK = 2048, 768, 128, 8
BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32


@dataclass(frozen=True)
class Case:
    """One launch of the layer. kind: "l1", "l2" or "sum". format: "bf16" or "fp8_block128"."""

    name: str
    kind: str
    format: str
    num_tokens: int
    layout: str = "concat"
    has_bias: bool = False

    @property
    def title(self) -> str:
        """Name of the kernel's case."""
        return f"few-{self.name}"


CASES = (
    Case("l1", "l1", "bf16", 1),
    Case("l2", "l2", "bf16", 1),
    Case("l1-64", "l1", "bf16", 64),
    Case("l1-interleaved-bias", "l1", "bf16", 16, "interleaved", True),
    Case("l2-bias", "l2", "bf16", 16, "interleaved", True),
    Case("l1-fp8-block128", "l1", "fp8_block128", 16),
    Case("l2-fp8-block128", "l2", "fp8_block128", 16),
    Case("sum", "sum", "bf16", 16),
)


def launch_of(case: Case) -> Launch:
    """Return the launch of a case on an H200."""
    experts, shape = experts_of(case), (case.num_tokens, NUM_TOPK)
    tokens, ids = without_memory((case.num_tokens, HIDDEN), BF16), without_memory(shape, INT32)
    buffers, routed = host.empty_buffers(tokens, ids, experts), host.Routed(without_memory(shape, FP32), ids)
    if case.kind == "sum":
        return Launch(*sum_launch(buffers.rows, buffers.slot_to_pos, buffers.out))
    l1, l2 = host.configs_of(experts, *shape)
    if case.kind == "l1":
        return Launch(*host.l1_launch(tokens, routed, experts, buffers, l1))
    return Launch(*host.l2_launch(routed, experts, buffers, l2))


def experts_of(case: Case) -> ExpertWeights:
    """Return the case's experts, without memory."""

    def weights(N: int, K: int) -> Matrix:
        if case.format == "bf16":
            return without_memory((NUM_EXPERTS, N, K), BF16)
        factors = without_memory((NUM_EXPERTS, N // 128, K // 128), FP32)
        return QuantTensor(without_memory((NUM_EXPERTS, N, K), torch.float8_e4m3fn), factors, (128, 128))

    def bias(N: int) -> torch.Tensor | None:
        return without_memory((NUM_EXPERTS, N), FP32) if case.has_bias else None

    gate_up, down = weights(2 * INTERMEDIATE, HIDDEN), weights(HIDDEN, INTERMEDIATE)
    biases = bias(2 * INTERMEDIATE), bias(HIDDEN)
    return ExpertWeights(gate_up, down, case.format, "swiglu", None, *biases, case.layout)


ABOUT = "few tokens on Hopper"
KERNELS = tuple(
    KernelCase(
        case.title, f"{ABOUT}: {case.kind} of {case.format} for {case.num_tokens} tokens", HOPPER,
        partial(launch_of, case),
    )
    for case in CASES
)  # fmt: skip
