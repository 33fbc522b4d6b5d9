"""Timelines: what a recorder gives to launches and reads back; kernels note moments only while they are traced."""

from types import SimpleNamespace

import pytest
import torch

from envoi.ops.moe.parallel.trace import ROLES
from envoi.runtime import launch as launches
from envoi.runtime import timeline
from envoi.runtime.program import Launch
from envoi.runtime.timeline import ROOM, UNTRACED, Recorder, Role, Slice
from tests.helpers.slow import mostly_slow
from tools.kernel_cases import kernel_cases
from tools.machine_code.compile import compile_launch

GEMM = Role("consumer", ("wait", "work")), Role("producer", ("load",))
PROGRAM = (Role("program", ("send", "wait", "place")),)
CPU = torch.device("cpu")


class Kernel:
    """Stand for a kernel of this name."""

    def __init__(self, name: str, *names: str):
        self.fn = SimpleNamespace(__name__=name)
        self.arg_names = names


TRACED, PLAIN = Kernel("gemm", "x", "trace"), Kernel("other", "x")


def recorder(**roles) -> Recorder:
    return Recorder(roles, CPU)


def note(records: torch.Tensor, program: int, role: int, event: int, sm: int, label: int, *moments: int) -> None:
    """Write an event as a kernel does."""
    row = records[program, role, event]
    row[0] = (sm << 32) + label + 1
    row[1 : 1 + len(moments)] = torch.tensor(moments)


def test_a_traced_launch_gets_memory_and_others_stay_as_they_are():
    made = recorder(gemm=GEMM)
    x, trace = made.joined(TRACED, (3, 2), (7, UNTRACED))
    assert x == 7
    assert trace.records.shape == (6, 2, ROOM, 8)
    assert (trace.num_roles, trace.room) == (2, ROOM)
    assert not trace.records.any()
    assert made.joined(PLAIN, (1,), (7,)) == (7,)
    assert made.joined(Kernel("gemm", "x"), (1,), (7,)) == (7,)  # another kernel of that name
    assert made.left_out == ["other", "gemm"]


def test_a_repeated_call_uses_the_same_memory():
    made = recorder(gemm=GEMM)
    first, second = (made.joined(TRACED, (4,), (UNTRACED,))[-1] for _ in range(2))
    assert first.records.data_ptr() != second.records.data_ptr()
    note(first.records, 0, 0, 0, 1, 2, 10, 11)
    made.rewind()
    again = made.joined(TRACED, (4,), (UNTRACED,))[-1]
    assert again.records is first.records
    with pytest.raises(RuntimeError, match="launch 1 was of gemm"):
        made.joined(TRACED, (5,), (UNTRACED,))
    made.clear()
    assert not first.records.any()


def test_slices_are_what_was_noted():
    made = recorder(gemm=GEMM, program=PROGRAM)
    gemm = made.joined(TRACED, (2,), (UNTRACED,))[-1].records
    note(gemm, 1, 0, 0, 131, 2**32 - 1, 100, 130, 190)
    note(gemm, 1, 0, 1, 131, 5, 200, 210, 290)
    note(gemm, 1, 1, 0, 131, 5, 90, 120)
    program = made.joined(Kernel("program", "trace"), (2, 2), (UNTRACED,))[-1].records
    note(program, 2, 0, 0, 3, 0, 10, 20, 0, 25)  # no wait
    note(program, 3, 0, 0, 4, 0, 10, 20, 30)  # no end
    found = [Slice(*row) for row in made.slices().tolist()]
    assert sorted(found) == [
        Slice(0, 0, 0, 1, 131, 5, 200, 210),
        Slice(0, 0, 0, 1, 131, 2**32 - 1, 100, 130),
        Slice(0, 0, 1, 1, 131, 5, 210, 290),
        Slice(0, 0, 1, 1, 131, 2**32 - 1, 130, 190),
        Slice(0, 1, 0, 1, 131, 5, 90, 120),
        Slice(1, 0, 0, 2, 3, 0, 10, 20),
        Slice(1, 0, 0, 3, 4, 0, 10, 20),
        Slice(1, 0, 1, 3, 4, 0, 20, 30),
        Slice(1, 0, 2, 2, 3, 0, 20, 25),
    ]
    assert not made.is_cut()
    note(gemm, 0, 0, ROOM - 1, 0, 0, 1, 2, 3)
    assert made.is_cut()


def test_launches_ask_the_recorder_of_their_thread(monkeypatch):
    launched = []
    monkeypatch.setattr(launches, "run", lambda kernel, grid, arguments, options: launched.append(arguments))
    made = recorder(gemm=GEMM)
    launches.launch(TRACED, (1,), (7, UNTRACED), {})
    with timeline.tracing(made):
        launches.launch(TRACED, (1,), (7, UNTRACED), {})
    launches.launch(TRACED, (1,), (7, UNTRACED), {})
    assert [arguments[-1] is UNTRACED for arguments in launched] == [True, False, True]
    assert launched[1][-1].records is made.strips[0].records


# Of each kernel that can be traced, a case; and how many moments it has at most, in all roles.
TRACEABLE = {
    "ep-stage-tokens-fp8-block128": 2, "ep-send-routing": 4, "ep-pull-bf16": 2,
    "ep-combine-barrier": 2, "ep-sum": 2, "ep-sum-ranks": 2, "ep-send-partial-sums": 2,
    "experts-quantize-fp8-block128": 2, "gemm-sm90-experts-l1-fp8-block128": 10, "experts-both-gemms-few": 18,
}  # fmt: skip


QUICK = ["ep-send-routing", "ep-pull-bf16", "ep-combine-barrier"]


@pytest.mark.parametrize("name", mostly_slow(TRACEABLE, QUICK))
def test_kernels_note_moments_only_while_they_are_traced(name):
    case = kernel_cases()[name].launch()
    made = Recorder(ROLES, torch.device("meta"))
    arguments = made.joined(case.kernel, case.grid, case.arguments)
    assert [strip.kernel for strip in made.strips] == [case.kernel.fn.__name__]
    traced = compile_launch(Launch(case.kernel, case.grid, arguments, case.options), "sm_90")
    plain = compile_launch(case, "sm_90")
    waits = plain.ptx.count("%globaltimer")  # bounded waits look at it too
    assert traced.ptx.count("%globaltimer") - waits == TRACEABLE[name]
    assert "%smid" in traced.ptx and "%smid" not in plain.ptx
    assert traced.stack_bytes == 0
