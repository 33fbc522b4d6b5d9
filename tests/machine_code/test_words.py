"""Words that roles hand over by mbarriers: one lane arrives, behind a barrier, for what all of the role's lanes did.

racecheck doesn't follow mbarriers, so this holds the code of one launch to it.
"""

import re

import pytest

from envoi.cases import kernel_cases
from tools.machine_code.compile import compile_launch

ARRIVAL = re.compile(r"\bmbarrier\.arrive\.")
ACCESS = re.compile(r"\b(?:st|ld)\.(?:volatile\.)?shared\b")
BARRIER = re.compile(r"\bbar(?:rier)?\.(?:warp\.|cta\.)?sync\b")
LABEL = re.compile(r"\$L__BB\w+:")  # of a block; others are for debuggers


def unordered(ptx: str) -> list[str]:
    """Return shared accesses that no barrier orders before an arrival behind them, within straight code."""
    found, pending = [], []
    for line in ptx.splitlines():
        if LABEL.match(line) or BARRIER.search(line):
            pending = []
        elif ACCESS.search(line):
            pending.append(line.strip())
        elif ARRIVAL.search(line):
            found += [f"{access} before {line.strip()}" for access in pending]
    return found


@pytest.mark.compiles
@pytest.mark.parametrize("name", ["experts-both-gemms", "experts-both-gemms-few"])
def test_a_barrier_stands_before_each_arrival(name):
    ptx = compile_launch(kernel_cases()[name].launch(), "sm_90").ptx
    assert len(ARRIVAL.findall(ptx)) > 10
    assert unordered(ptx) == []


def test_an_access_without_a_barrier_is_found():
    words, arrival = "st.shared.b32 [%r1], %r2;\n", "mbarrier.arrive.shared.b64 _, [%r3];\n"
    assert unordered(words + arrival) == [f"{words.strip()} before {arrival.strip()}"]
    for barrier in ("bar.warp.sync -1;", "bar.sync 2, 128;", "barrier.sync 1, 128;"):
        assert unordered(f"{words}{barrier}\n{arrival}") == []
    assert unordered(f"{words}bar.warp.sync -1;\n{words}$L__tmp7:\n{arrival}") != []
