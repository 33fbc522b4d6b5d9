"""Drawn calls of every operator: what is planned on meta is what the host path launches on real memory."""

from typing import Any

import pytest
import torch
import triton

import envoi
from envoi.runtime import program, shortcuts, workspace
from envoi.runtime.devices import Target
from envoi.runtime.launch import launch
from envoi.runtime.prepared import calls
from tests.fuzz.draw import Draw
from tests.helpers.observed import Account, difference, observe, plan_of, standing_for_gpu
from tests.runtime.drawn_calls import OPERATORS, TARGETS, Direct

QUICK, BLOCK, BLOCKS = 20, 100, 4  # 4,000 calls in all


def compared(operator: str, seed: int) -> list[tuple[str, Account]]:
    """Make a drawn call; return what differs between its launches and its plan, and what it does, if it is planned."""
    draw = Draw(f"plan {operator}", seed)
    target = draw.one(TARGETS)
    found: list[tuple[str, Account]] = []

    def run(
        self: Any, constants: tuple, tensors: Any, as_always: Any, planned: calls.Plannable, *given: Any
    ) -> None:  # fmt: skip
        one = observe(as_always, tensors, planned.owner)
        found.append((difference(one, plan_of(*planned[:3], tensors, target, planned.owner)), one))
        raise Compared

    with standing_for_gpu(target), pytest.MonkeyPatch.context() as patch, pytest.raises(Compared):
        patch.setattr(shortcuts, "ENABLED", True)
        patch.setattr(shortcuts, "PREPARED", True)
        patch.setattr(calls.Calls, "run", run)
        call = OPERATORS[operator](draw)
        if isinstance(call, Direct):
            function, arguments, tensors, owner = call
            given = arguments if owner is None else (owner, *arguments)
            run(None, (), tensors, lambda: function(*given), calls.Plannable(function, arguments, {}, owner))
        else:
            call()
    return found


class Compared(BaseException):
    """Ends a call once it is compared; no handler of errors takes it for one."""


def assert_same(operator: str, seeds: range) -> None:
    num_replayed = 0
    for seed in seeds:
        for said, account in compared(operator, seed):
            assert not said, f"{operator} seed {seed}: {said}"
            num_replayed += not account.refused
    assert num_replayed >= len(seeds) // 8, "nearly all are refused"


@pytest.mark.parametrize("operator", OPERATORS)
def test_plans_are_what_is_launched(operator):
    assert_same(operator, range(QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.parametrize("operator", OPERATORS)
def test_more_plans_are_what_is_launched(operator, block):
    assert_same(operator, range(BLOCK * block, BLOCK * (block + 1)))


@triton.jit
def some_kernel(a, out, count):
    pass


def some_call(a: torch.Tensor, fault: str) -> torch.Tensor:
    """Launch a kernel, planned with a fault."""
    if program.current() is None:
        fault = ""
    scratch, out = torch.empty(64, device=a.device), torch.empty(64, device=a.device)
    counters = workspace.counters(8, a.device)
    if fault == "operator":
        scratch.zero_()
    launch(some_kernel, (2 + (fault == "grid"),), (a, scratch, 3 + (fault == "number")), {"num_warps": 4})
    if fault != "one launch less":
        given = out[4:] if fault == "offset" else scratch if fault == "role" else out
        launch(some_kernel, (1,), (given, counters, 7), {"num_warps": 8 if fault == "options" else 4})
    return out[:32] if fault == "result" else out


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("", ""), ("grid", "grid: observed 2, planned 3"), ("number", "arguments"), ("offset", "arguments"),
        ("role", "arguments"), ("options", "options"), ("one launch less", "observed:"), ("operator", "refused:"),
        ("result", "refused:"),
    ],
)  # fmt: skip
def test_faults_are_noticed(fault, said):
    a, target = torch.empty(128), Target("sm_90")
    with standing_for_gpu(target):
        observed = observe(lambda: some_call(a, fault), (a,), None)
        found = difference(observed, plan_of(some_call, (a, fault), {}, (a,), target))
    assert len(observed.launches) == 2 and observed.launches[1].arguments[1].role == "kept"
    assert said in found if said else not found


def test_float32_is_left_to_torch():
    sides = torch.empty(64, 64), torch.empty(64, 64)
    planned = program.plan(envoi.gemm, sides, {}, sides, Target("sm_90"))
    assert not planned.launches and "between the launches" in planned.refusal
