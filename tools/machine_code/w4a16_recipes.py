"""Recipes of the Hopper kernels for 4-bit weights and bf16 tokens: what the host path would launch, without memory."""

import torch

from envoi.epilogue.library import expert_l1, expert_l2
from envoi.epilogue.lower import lower
from envoi.epilogue.slots import empty_slots, operand_tensors, slots
from envoi.gemm.hopper_w4a16 import few, many
from envoi.gemm.hopper_w4a16.many_config import many_config
from envoi.types import QuantTensor
from tools.machine_code.compile import Recipe, recipe_of_call
from tools.machine_code.w4a16_cases import W4A16Case

HIDDEN, INTERMEDIATE, NUM_EXPERTS, NUM_TOPK = 2880, 2880, 32, 4
ACTIVATION, LIMIT = "swiglu_oai", 7.0


def recipe(case: W4A16Case, arch: str = "sm_90") -> Recipe:
    """Return the recipe of a case."""
    return _many(case, arch) if case.launch.startswith("many") else _few(case, arch)


def _few(case: W4A16Case, arch: str) -> Recipe:
    layer = few.Layer(
        _weights(2 * INTERMEDIATE, HIDDEN), _weights(HIDDEN, INTERMEDIATE), _floats(NUM_EXPERTS, 2 * INTERMEDIATE),
        _floats(NUM_EXPERTS, HIDDEN), ACTIVATION, LIMIT,
    )  # fmt: skip
    tokens, ids = _meta(case.num_tokens, HIDDEN, dtype=torch.bfloat16), _slots(case, torch.int32)
    buffers = few.empty_buffers(tokens, ids, layer)
    if case.launch == "permute":
        found = few.permute_launch(tokens, _slots(case, torch.float32), ids, layer, buffers)
    elif case.launch == "sum":
        found = few.sum_launch(buffers)
    else:
        l1, l2 = few.configs_of(layer, ids.numel())
        found = few.gemm_launch(layer, buffers, ids, l1 if case.launch == "l1" else l2)
    kernel, _, arguments, options = found
    return recipe_of_call(kernel, arguments, arch, **{k: v for k, v in options.items() if k != "launch_pdl"})


def _many(case: W4A16Case, arch: str) -> Recipe:
    from envoi.gemm.hopper_w4a16.kernel_many import many_kernel

    is_l1, rows = case.launch == "many-l1", case.num_tokens * NUM_TOPK
    epilogue = expert_l1(ACTIVATION, LIMIT, True, None) if is_l1 else expert_l2(True)
    N, K = (2 * INTERMEDIATE, HIDDEN) if is_l1 else (HIDDEN, INTERMEDIATE)
    to = _meta(rows, dtype=torch.int64) if case.launch == "many-sent" else None
    ir, operands = epilogue.ir, {"weight": _floats(rows), "bias": _floats(NUM_EXPERTS, N)}
    tensors, pointers = operand_tensors(ir, operands, NUM_EXPERTS)
    code = lower(ir, torch.bfloat16, "gluon", False, False, pointers, sent=to is not None)
    outputs = empty_slots(ir, slots(ir, torch.bfloat16), rows, N, torch.device("meta"), to)
    tokens, offsets = _meta(rows, K, dtype=torch.bfloat16), _meta(NUM_EXPERTS + 1, dtype=torch.int32)
    config = many_config(K, rows, NUM_EXPERTS)
    arguments = many.arguments(tokens, _weights(N, K), offsets, code, tensors, outputs, config)
    return recipe_of_call(many_kernel, arguments, arch, num_warps=config.num_warps)


def _weights(N: int, K: int) -> QuantTensor:
    values = _meta(NUM_EXPERTS, N, K // 2, dtype=torch.uint8)
    sf = _meta(NUM_EXPERTS, N, K // 32, dtype=torch.float8_e8m0fnu)
    return QuantTensor(values, sf, (1, 32), tame=True, order="fragments")


def _slots(case: W4A16Case, dtype: torch.dtype) -> torch.Tensor:
    return _meta(case.num_tokens, NUM_TOPK, dtype=dtype)


def _floats(*shape: int) -> torch.Tensor:
    return _meta(*shape, dtype=torch.float32)


def _meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
