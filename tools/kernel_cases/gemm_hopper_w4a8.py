"""Launches of the Hopper kernel for MXFP4 weights and FP8 tokens, on a layer of gpt-oss-20b's sizes.

2880/2880, 32 experts, top-4, biases.
"""

from dataclasses import dataclass
from functools import partial

import torch

from envoi.epilogues.api import Epilogue
from envoi.epilogues.library import expert_l1, expert_l2
from envoi.epilogues.lower import lower
from envoi.epilogues.outputs import empty_outputs, operand_tensors, output_specs
from envoi.ops.gemm.hopper_w4a8 import host
from envoi.ops.gemm.hopper_w4a8.config import w4a8_config
from envoi.ops.gemm.hopper_w4a8.kernel import w4a8_kernel
from envoi.quant.fp8_fragments import ORDER
from envoi.runtime.kernel_case import HOPPER, NUM_SMS, KernelCase, Launch, without_memory
from envoi.types import QuantTensor
from tools.kernel_cases.operands import operands_of

HIDDEN, INTERMEDIATE, NUM_EXPERTS, NUM_TOPK = 2880, 2880, 32, 4
ACTIVATION, LIMIT = "swiglu_oai", 7.0


@dataclass(frozen=True)
class Case:
    """One launch of the layer for so many tokens.

    kind: "l1", "l2", or "sent", which is L2 whose rows go to other places. looks_up: shifts are far
    apart.
    """

    name: str
    kind: str
    num_tokens: int
    looks_up: bool = False
    num_experts: int = NUM_EXPERTS

    @property
    def title(self) -> str:
        """Name of the kernel's case."""
        return f"w4a8-{self.name}"

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows and columns of the weights, N and K."""
        return (2 * INTERMEDIATE, HIDDEN) if self.kind == "l1" else (HIDDEN, INTERMEDIATE)

    @property
    def epilogue(self) -> Epilogue:
        """Epilogue of the GEMM."""
        if self.kind == "l1":
            return expert_l1(ACTIVATION, LIMIT, True, None, has_scale=True)
        return expert_l2(True, True)


CASES = (
    Case("l1-16", "l1", 16),
    Case("l1-64", "l1", 320),
    Case("l1-128", "l1", 512),
    Case("l2-128", "l2", 512),
    Case("l1", "l1", 4096),
    Case("l2", "l2", 4096),
    Case("sent", "sent", 4096),
    Case("l1-512-experts", "l1", 65536, num_experts=512),
    Case("l1-tables", "l1", 4096, looks_up=True),
)


def launch_of(case: Case) -> Launch:
    """Return the launch of a case on an H200."""
    rows, (N, K), E = case.num_tokens * NUM_TOPK, case.sizes, case.num_experts
    to = without_memory((rows,), torch.int64) if case.kind == "sent" else None
    ir = host.with_token_scale(case.epilogue.ir)
    tensors, pointers = operand_tensors(ir, operands_of(ir, rows, N, (E,)), E)
    code = lower(ir, torch.bfloat16, "gluon", False, False, pointers, scattered=to is not None)
    outputs = empty_outputs(ir, output_specs(ir, torch.bfloat16), rows, N, torch.device("meta"), to)
    offsets = without_memory((E + 1,), torch.int32)
    config = w4a8_config(N, K, rows, E, NUM_SMS, case.looks_up)
    given = _rows(rows, K), _weights(E, N, K), offsets, code, tensors, outputs, config
    return Launch(w4a8_kernel, (NUM_SMS * config.ctas,), host.arguments(*given), config.options)


def _rows(count: int, columns: int) -> QuantTensor:
    values = without_memory((count, columns), torch.float8_e4m3fn)
    return QuantTensor(values, without_memory((count, 1), torch.float32), (1, columns))


def _weights(E: int, N: int, K: int) -> QuantTensor:
    values = without_memory((E, N, K // 2), torch.uint8)
    sf = without_memory((E, N, K // 32), torch.float8_e8m0fnu)
    return QuantTensor(values, sf, (1, 32), without_memory((E, N), torch.float32), order=ORDER)


ABOUT = "MXFP4 weights, FP8 tokens on Hopper"
KERNELS = tuple(
    KernelCase(case.title, f"{ABOUT}: {case.kind} for {case.num_tokens} tokens", HOPPER, partial(launch_of, case))
    for case in CASES
)
