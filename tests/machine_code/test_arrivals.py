"""Accesses of shared memory that no barrier orders before an arrival."""

from dataclasses import replace

import pytest

from tests.machine_code.test_gate import NEEDS, RECORD
from tools.machine_code import gate
from tools.machine_code.arrivals import ARRIVAL, unordered
from tools.machine_code.compile import compile_launch

WORDS, ARRIVES = "st.shared.b32 [%r1], %r2;\n", "mbarrier.arrive.shared.b64 _, [%r3];\n"


def test_an_access_without_a_barrier_is_found():
    assert unordered(WORDS + ARRIVES) == (f"{WORDS.strip()} before {ARRIVES.strip()}",)
    for barrier in ("bar.warp.sync -1;", "bar.sync 2, 128;", "barrier.sync 1, 128;"):
        assert unordered(f"{WORDS}{barrier}\n{ARRIVES}") == ()
    assert unordered(f"{WORDS}bar.warp.sync -1;\n{WORDS}$L__tmp7:\n{ARRIVES}") != ()


def test_the_rules_hold_kernels_to_it_whose_roles_hand_over_words():
    found = replace(RECORD, unordered=unordered(WORDS + ARRIVES))
    assert gate.broken(found, "", NEEDS) == []
    (wrong,) = gate.broken(replace(found, kernel="experts-both-gemms-few"), "", NEEDS)
    assert wrong.startswith("no barrier orders shared memory before an arrival: st.shared.b32")
    assert all(any(name.startswith(start) for name in gate.cases()) for start in gate.HAND_OVER)


@pytest.mark.slow  # only another Triton writes them otherwise
def test_the_pattern_finds_a_kernels_arrivals():
    ptx = compile_launch(gate.cases()["experts-both-gemms-few"].launch(), "sm_90").ptx
    assert len(ARRIVAL.findall(ptx)) > 10
    assert unordered(ptx.replace("bar.warp.sync", "nop")) != ()
