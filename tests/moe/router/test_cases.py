"""Cases of the router: the same kernel whether its tensors have memory or not, and the one that a call launches."""

import pytest
import torch

from envoi.ops.moe.router import host, route
from envoi.runtime.kernel_case import kernel_key
from tools.kernel_cases import kernel_cases
from tools.kernel_cases import router as cases
from tools.kernel_cases.router import CASES


def with_memory(shape, dtype):
    """Make an uninitialised tensor."""
    return torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_memory_makes_no_difference(case):
    assert kernel_key(*cases.launch_of(case, with_memory)) == kernel_key(*cases.launch_of(case))


def test_all_cases_are_listed_and_differ():
    listed = {name: case.about for name, case in kernel_cases().items() if name.startswith("router")}
    assert {case.title for case in CASES} == set(listed)
    assert listed["router-sm90-one-token"].startswith("router on Hopper: top 8 of 256 experts by deepseek")
    kernels = {kernel_key(*cases.launch_of(case)) for case in CASES}
    assert len(kernels) == len(CASES), "two cases are one kernel"


def test_every_way_to_cut_the_work_occurs():
    cuts = []
    for case in (case for case in CASES if case.kernel == "sm90"):
        cuts.append(cases.launch_of(case).arguments[-2])
    least_of = {
        "parts_n": 1,
        "parts_k": 1,
        "all_parts_wait": 0,
        "polls_sums": 0,
        "single_fill": 0,
        "turns": 1,
        "tile": 64,
        "rest_n": 0,
        "in_runs": 0,
    }
    for name, least in least_of.items():
        ways = {int(getattr(tiling, name)) > least for tiling in cuts}
        assert len(ways) == 2, f"{name} is {ways} in all cases: other sizes are needed"


def test_a_call_launches_it(monkeypatch):
    """Test that `envoi.route` passes to the kernel the call that the case is made of."""
    launched = []
    monkeypatch.setattr(host, "supported", lambda device, rule: True)
    monkeypatch.setattr(host, "implementation", lambda device: "hopper")
    monkeypatch.setattr(host, "_run_hopper", lambda call, outputs: launched.append((call, outputs)))
    for case in (case for case in CASES if case.kernel == "sm90"):
        want = cases.call_of(case)
        given, wanted = cases.inputs(case, with_memory), case.everything
        route(
            given.tokens, given.gate, case.k, rule=cases.rule_of(case.rule)[0], expert_bias=given.expert_bias,
            token_ids=given.token_ids, hash_table=given.hash_table,
            return_logits=wanted, return_dense=wanted, return_counts=wanted,
        )  # fmt: skip
        call, outputs = launched.pop()
        assert (call.spec, call.alpha, call.routed_scale) == (want.spec, want.alpha, want.routed_scale)
        assert [None if x is None else x.shape for x in (call.expert_bias, call.hash_table)] == [
            None if x is None else x.shape for x in (want.expert_bias, want.hash_table)
        ]
        assert outputs["ids"].shape == (case.M, case.k)
