"""Recipes of the router: the same kernel whether its tensors have memory or not, and the one that a call launches."""

import pytest
import torch
from tools.machine_code import registry, router_recipes
from tools.machine_code.router_cases import ROUTER_CASES

from envoi.moe.router import host, route
from envoi.moe.router.kernel_hopper import router_kernel as hopper_kernel
from envoi.moe.router.kernel_triton import router_kernel as triton_kernel
from envoi.runtime import triton_compat


def with_memory(shape, dtype):
    """Make an uninitialised tensor."""
    return torch.empty(shape, dtype=dtype)


def specialised(case, make):
    call = router_recipes.call_of(case, make)
    outputs = host.empty_outputs(call)
    if case.kernel == "triton":
        return triton_compat.specialize(triton_kernel, host.portable_arguments(call, outputs)[1], "sm_90")
    _, arguments, _ = host.hopper_arguments(call, outputs, router_recipes.NUM_SMS)
    return triton_compat.specialize(hopper_kernel, arguments, "sm_90")


@pytest.mark.parametrize("case", ROUTER_CASES, ids=lambda case: case.title)
def test_memory_makes_no_difference(case):
    assert specialised(case, with_memory) == specialised(case, router_recipes.without_memory)


def test_all_cases_are_registered_and_differ():
    assert {case.title for case in ROUTER_CASES} == {name for name in registry.KERNELS if name.startswith("router")}
    assert registry.find("router-sm90-one-token").about.startswith("Router on Hopper: top 8 of 256 experts by deepseek")
    kernels = {repr(router_recipes.recipe(case)) for case in ROUTER_CASES}
    assert len(kernels) == len(ROUTER_CASES), "two cases are one kernel"


def test_every_way_to_cut_the_work_occurs():
    cuts = []
    for case in (case for case in ROUTER_CASES if case.kernel == "sm90"):
        call = router_recipes.call_of(case)
        cuts.append(host.hopper_arguments(call, host.empty_outputs(call), router_recipes.NUM_SMS)[1][-2])
    for name in ("parts_n", "parts_k", "all_parts_wait", "polls_sums", "single_fill"):
        ways = {min(2, int(getattr(tiling, name))) for tiling in cuts}
        assert len(ways) == 2, f"{name} is {ways} in all cases: other sizes are needed"


def test_a_call_launches_it(monkeypatch):
    """Test that `envoi.route` passes to the kernel the call that the recipe is made of."""
    launched = []
    monkeypatch.setattr(host, "supported", lambda device, rule: True)
    monkeypatch.setattr(host, "implementation", lambda device: "hopper")
    monkeypatch.setattr(host, "_run_hopper", lambda call, outputs: launched.append((call, outputs)))
    for case in (case for case in ROUTER_CASES if case.kernel == "sm90"):
        want = router_recipes.call_of(case)
        given, wanted = router_recipes.inputs(case, with_memory), case.everything
        route(
            given.tokens, given.gate, case.k, rule=router_recipes.rule_of(case)[0], expert_bias=given.expert_bias,
            token_ids=given.token_ids, hash_table=given.hash_table,
            return_logits=wanted, return_dense=wanted, return_counts=wanted,
        )  # fmt: skip
        call, outputs = launched.pop()
        assert (call.spec, call.alpha, call.routed_scale) == (want.spec, want.alpha, want.routed_scale)
        assert [None if x is None else x.shape for x in (call.expert_bias, call.hash_table)] == [
            None if x is None else x.shape for x in (want.expert_bias, want.hash_table)
        ]
        assert outputs["ids"].shape == (case.M, case.k)
