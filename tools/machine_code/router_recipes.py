"""Recipes of the router: the kernel that a call would launch, taken from the host path itself, without a GPU.

case -> Call (of tensors without memory) -> host.hopper_arguments or portable_arguments -> recipe
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from envoi.moe.router import host
from envoi.moe.router.rules import Rule, preset
from tools.machine_code.compile import Recipe, recipe_of_call
from tools.machine_code.router_cases import RouterCase

NUM_SMS = 132
VOCABULARY = 1024
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Make = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


def without_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Make a meta tensor; the `make` argument of recipes."""
    return torch.empty(shape, dtype=dtype, device="meta")


@dataclass(frozen=True)
class Inputs:
    """Tensors of one call of `envoi.route`."""

    tokens: torch.Tensor
    gate: torch.Tensor
    expert_bias: torch.Tensor | None
    token_ids: torch.Tensor | None
    hash_table: torch.Tensor | None


def inputs(case: RouterCase, make: Make = without_memory) -> Inputs:
    """Return the inputs of a case.

    make: function of shape and dtype that returns a tensor; for an integer dtype, of ids of experts or tokens.
    """
    tokens, gate = (make((rows, case.hidden), DTYPES[case.dtype]) for rows in (case.M, case.N))
    if case.hashed:
        return Inputs(tokens, gate, None, make((case.M,), torch.int64), make((VOCABULARY, case.k), torch.int64))
    _, has_bias = rule_of(case)
    return Inputs(tokens, gate, make((case.N,), torch.float32) if has_bias else None, None, None)


def call_of(case: RouterCase, make: Make = without_memory) -> host.Call:
    """Return the call that `envoi.route` makes to the kernels for a case."""
    given, (rule, _) = inputs(case, make), rule_of(case)
    wanted = (case.everything,) * 3
    spec = host.spec_of(case.N, case.k, rule, None, given.expert_bias, case.hashed, wanted)
    return host.Call(
        given.tokens, given.gate, spec, 1.0, rule.routed_scale, None, given.expert_bias, given.token_ids,
        given.hash_table,
    )  # fmt: skip


def rule_of(case: RouterCase) -> tuple[Rule, bool]:
    """Return the rule, and whether its model has an expert bias."""
    if case.rule == "softmax":
        return Rule(), False
    chosen = preset(case.rule)
    return chosen.rule, chosen.has_expert_bias


def recipe(case: RouterCase, arch: str = "sm_90") -> Recipe:
    """Return the recipe of a case."""
    call = call_of(case)
    outputs = host.empty_outputs(call)
    if case.kernel == "triton":
        from envoi.moe.router.kernel_triton import router_kernel

        _, arguments, options = host.portable_arguments(call, outputs)
        return recipe_of_call(router_kernel, arguments, arch, **options)
    from envoi.moe.router.kernel_hopper import router_kernel

    _, arguments, options = host.hopper_arguments(call, outputs, NUM_SMS)
    # Launch attributes don't change the compiled code.
    options = {name: value for name, value in options.items() if name not in ("launch_cooperative_grid", "launch_pdl")}
    return recipe_of_call(router_kernel, arguments, arch, **options)
