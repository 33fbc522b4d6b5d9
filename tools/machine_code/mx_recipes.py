"""Recipes of the Hopper GEMM for MX weights: the kernel that a call would launch, taken from the host path."""

from dataclasses import replace
from typing import cast

import torch

from envoi.epilogue.lower import lower
from envoi.epilogue.slots import empty_slots, operand_tensors, slots
from envoi.gemm.hopper_mx import host
from envoi.gemm.hopper_mx import tokens as tokens_module
from envoi.gemm.hopper_mx.config import MxConfig, choose
from envoi.types import QuantTensor
from tools.machine_code import hopper_recipes
from tools.machine_code.compile import Recipe, recipe_of_call
from tools.machine_code.hopper_cases import Case
from tools.machine_code.hopper_recipes import NUM_SMS, Inputs, Make
from tools.machine_code.mx_cases import MxCase


def inputs(case: MxCase, make: Make = hopper_recipes.without_memory, offsets: torch.Tensor | None = None) -> Inputs:
    """Return the inputs of a case; see `hopper_recipes.inputs`."""
    plain = Case(case.name, case.epilogue, case.M, case.N, case.K, case.format, case.num_experts)
    given = hopper_recipes.inputs(plain, make, offsets)
    return replace(given, b=replace(cast(QuantTensor, given.b), tame=case.tame))


def planned(given: Inputs) -> tuple[tuple, MxConfig]:
    """Return the kernel's arguments for these inputs on an H200, and its config."""
    b, ir = cast(QuantTensor, given.b), given.epilogue.ir
    refusal = host.supports_mx(given.a, b, ir)
    if refusal:
        raise ValueError(f"epilogue {ir.name}: the Hopper kernel for MX weights doesn't take it: {refusal}")
    M, N, num_groups = given.a.shape[0], b.shape[-2], 0 if given.offsets is None else b.shape[0]
    tensors, pointers = operand_tensors(ir, given.operands, num_groups)
    code = lower(ir, torch.bfloat16, "gluon", False, False, pointers)
    config = choose(M, N, num_groups, NUM_SMS, code, 4 if b.packed else 8, b.tame)
    outputs = empty_slots(ir, slots(ir, torch.bfloat16), M, N, given.a.device)
    tokens = host.room_for_tokens(given.a)
    _, arguments = host.arguments(tokens, b, given.offsets, code, tensors, outputs, config, NUM_SMS)
    return arguments, config


def recipe(case: MxCase, arch: str = "sm_90") -> Recipe:
    """Return the recipe of a case."""
    from envoi.gemm.hopper_mx.kernel import mx_kernel

    arguments, config = planned(inputs(case))
    return recipe_of_call(mx_kernel, arguments, arch, num_warps=config.num_warps)


def tokens(bits: int, arch: str = "sm_90") -> Recipe:
    """Return the recipe of the kernel that widens the tokens, for weights of `bits` bits."""
    given = inputs(MxCase("tokens", "store", 512, 4096, 4096, "mxfp4_mxfp8", 32))
    arguments = host.tokens_arguments(given.a, bits, host.room_for_tokens(given.a), given.offsets)[1]
    return recipe_of_call(tokens_module.widen_kernel, arguments, arch)
