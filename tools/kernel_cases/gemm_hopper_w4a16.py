"""Launches of the Hopper kernels for 4-bit weights and bf16 tokens, and for few FP8 tokens.

On a layer of gpt-oss-20b's sizes: 2880/2880, 32 experts, top-4, biases; the kernels for few tokens also on 4096/1536.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch

from envoi.epilogues.library import expert_l1, expert_l2
from envoi.epilogues.lower import lower
from envoi.epilogues.outputs import empty_outputs, operand_tensors, output_specs
from envoi.ops.gemm.hopper_few.sum import sum_launch
from envoi.ops.gemm.hopper_w4a16 import few, many
from envoi.ops.gemm.hopper_w4a16.kernel_many import many_kernel
from envoi.ops.gemm.hopper_w4a16.many_config import many_config
from envoi.quant.fp8_fragments import ORDER as FP8_ORDER
from envoi.runtime.kernel_case import HOPPER, NUM_SMS, KernelCase, Launch, without_memory
from envoi.types import QuantTensor
from tools.kernel_cases.operands import operands_of

HIDDEN, INTERMEDIATE, NUM_EXPERTS, NUM_TOPK = 2880, 2880, 32, 4
OTHER_SIZES = 4096, 1536  # in tiles of 16 tokens weights are requested in another way
LARGE_SIZES = 7168, 2048  # an SM has one CTA of 16 warps
ACTIVATION, LIMIT = "swiglu_oai", 7.0
BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32


@dataclass(frozen=True)
class Case:
    """One launch of the layer for so many tokens.

    kind: "permute", "l1", "l2" or "sum" of the kernels for few tokens; or "many-l1", "many-l2", "many-sent", which is
    L2 whose rows go to other places. nvfp4: of the weights; else they are MXFP4. sizes: hidden, intermediate.
    fp8: of the tokens, of the kernels for few of them; else they are bf16. looks_up: shifts of their weights are far
    apart.
    """

    name: str
    kind: str
    num_tokens: int
    nvfp4: bool = False
    sizes: tuple[int, int] = HIDDEN, INTERMEDIATE
    fp8: bool = False
    looks_up: bool = False

    @property
    def title(self) -> str:
        """Name of the kernel's case."""
        return f"w4a8-{self.name}" if self.fp8 else f"w4a16-{self.name}"


CASES = (
    Case("permute", "permute", 16),
    Case("few-l1-ids", "l1", 1),
    Case("few-l1", "l1", 16),
    Case("few-l2", "l2", 16),
    Case("few-l1-wide", "l1", 64),
    Case("few-l2-wide", "l2", 64),
    Case("few-l1-wide-4096", "l1", 64, sizes=OTHER_SIZES),
    Case("few-l2-wide-1536", "l2", 64, sizes=OTHER_SIZES),
    Case("sum", "sum", 16),
    Case("many-l1-64", "many-l1", 256),
    Case("many-l1-128", "many-l1", 512),
    Case("many-l1", "many-l1", 4096),
    Case("many-l2", "many-l2", 4096),
    Case("many-sent", "many-sent", 4096),
    Case("nvfp4-l1-16", "many-l1", 16, True),
    Case("nvfp4-l1-64", "many-l1", 256, True),
    Case("nvfp4-l1-128", "many-l1", 512, True),
    Case("nvfp4-l1", "many-l1", 4096, True),
    Case("nvfp4-l2", "many-l2", 4096, True),
    Case("permute", "permute", 16, fp8=True),
    Case("few-l1-ids", "l1", 1, fp8=True),
    Case("few-l2-ids", "l2", 1, fp8=True),
    Case("few-l1", "l1", 16, fp8=True),
    Case("few-l2", "l2", 16, fp8=True),
    Case("few-l1-16", "l1", 48, fp8=True),
    Case("few-l2-16", "l2", 48, fp8=True),
    Case("few-l1-16-7168", "l1", 48, sizes=LARGE_SIZES, fp8=True),
    Case("few-l2-16-2048", "l2", 48, sizes=LARGE_SIZES, fp8=True),
    Case("few-l1-tables", "l1", 16, fp8=True, looks_up=True),
)


def launch_of(case: Case) -> Launch:
    """Return the launch of a case on an H200."""
    return _many(case) if case.kind.startswith("many") else Launch(*_few(case))


def _few(case: Case) -> few.Launch:
    hidden, intermediate = case.sizes
    gate_up, down = _weights(2 * intermediate, hidden), _weights(hidden, intermediate)
    if case.fp8:
        gate_up, down = (_for_fp8(x, case.looks_up) for x in (gate_up, down))
    layer = few.Layer(
        gate_up, down,
        without_memory((NUM_EXPERTS, 2 * intermediate), FP32), without_memory((NUM_EXPERTS, hidden), FP32), ACTIVATION,
        LIMIT,
    )  # fmt: skip
    slots_of = (case.num_tokens, NUM_TOPK)
    tokens, ids = without_memory((case.num_tokens, hidden), BF16), without_memory(slots_of, INT32)
    buffers = few.empty_buffers(tokens, ids, layer)
    if case.kind == "permute":
        return few.permute_launch(tokens, without_memory(slots_of, FP32), ids, layer, buffers)
    if case.kind == "sum":
        return sum_launch(buffers.rows, buffers.slot_to_pos, buffers.out, early=True)
    l1, l2 = few.configs_of(layer, ids.numel())
    return few.gemm_launch(layer, buffers, ids, l1 if case.kind == "l1" else l2)


def _many(case: Case) -> Launch:
    is_l1, rows = case.kind == "many-l1", case.num_tokens * NUM_TOPK
    l1 = expert_l1(ACTIVATION, LIMIT, True, None, has_scale=case.nvfp4)
    epilogue = l1 if is_l1 else expert_l2(True, case.nvfp4)
    N, K = (2 * INTERMEDIATE, HIDDEN) if is_l1 else (HIDDEN, INTERMEDIATE)
    to = without_memory((rows,), torch.int64) if case.kind == "many-sent" else None
    ir = epilogue.ir
    tensors, pointers = operand_tensors(ir, operands_of(ir, rows, N, (NUM_EXPERTS,)), NUM_EXPERTS)
    code = lower(ir, BF16, "gluon", False, False, pointers, scattered=to is not None)
    outputs = empty_outputs(ir, output_specs(ir, BF16), rows, N, torch.device("meta"), to)
    tokens, offsets = without_memory((rows, K), BF16), without_memory((NUM_EXPERTS + 1,), INT32)
    config = many_config(K, rows, NUM_EXPERTS)
    arguments = many.arguments(tokens, _weights(N, K, case.nvfp4), offsets, code, tensors, outputs, config)
    return Launch(many_kernel, (NUM_SMS,), arguments, {"num_warps": config.num_warps})


def _weights(N: int, K: int, nvfp4: bool = False) -> QuantTensor:
    columns, kind = (16, torch.float8_e4m3fn) if nvfp4 else (32, torch.float8_e8m0fnu)
    values = without_memory((NUM_EXPERTS, N, K // 2), torch.uint8)
    sf = without_memory((NUM_EXPERTS, N, K // columns), kind)
    return QuantTensor(values, sf, (1, columns), scales_at_most_2=not nvfp4, order="fragments")


def _for_fp8(x: QuantTensor, looks_up: bool) -> QuantTensor:
    return replace(x, scale=without_memory(x.shape[:2], FP32), scales_at_most_2=not looks_up, order=FP8_ORDER)


ABOUT = "4-bit weights, bf16 or FP8 tokens on Hopper"
KERNELS = tuple(
    KernelCase(case.title, f"{ABOUT}: {case.kind} for {case.num_tokens} tokens", HOPPER, partial(launch_of, case))
    for case in CASES
)
