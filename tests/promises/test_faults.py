"""Faults over gloo, one of each kind, and the judge of what ranks were told."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.helpers.ranks import Outcome
from tests.promises.faults import Setting, Told, judge, run_one

TIMEOUT_S = 6.0
SOME = [
    ("killed", "experts", "counted"), ("late", "dispatch", "counted"), ("wrong arguments", "call", "counted"),
]  # fmt: skip


def test_over_gloo():
    """Ranks mostly wait for a lost one, so all faults happen at once."""
    tried = [Setting(*one, TIMEOUT_S, "cpu") for one in SOME]
    with ThreadPoolExecutor(len(tried)) as pool:
        found = list(pool.map(lambda setting: run_one(setting, 3), tried))
    for setting, count, wrong, text, _ in found:
        assert (wrong, text) == (0, ""), setting.name
        assert count == (2 if setting.fault == "killed" else 3), setting.name


NAMED = Told("PeerTimeout", "dispatch: rank 1 is lost", (1,), None, 3.0, True)
RIGHT = Told(right=True, again=True)
SHORT = replace(NAMED, text="opening the group: rank 1 failed: NCCL Error 1; 48 MiB of its GPU's memory were free")
REFUSED = Told("ValueError", right=True, again=True)


@pytest.mark.parametrize(
    ("fault", "told", "said"),
    [
        ("killed", NAMED, ""),
        ("killed", RIGHT, "expected a PeerTimeout that names rank 1"),
        ("killed", replace(NAMED, ranks=(0,)), "expected a PeerTimeout that names rank 1"),
        ("stopped", replace(NAMED, seconds=7.5), "expected the error or the answer within 7 s, got"),
        ("stopped", replace(NAMED, again=False), "expected the right answer of a new object"),
        ("late", RIGHT, ""),
        ("late", replace(RIGHT, right=False), "expected the right answer, got"),
        ("late", NAMED, "expected the right answer, got"),
        ("wrong arguments", REFUSED, ""),
        ("wrong arguments", replace(REFUSED, right=False), "expected a ValueError for each mistake"),
        ("wrong arguments", RIGHT, "expected a ValueError for each mistake"),
        ("out of memory", RIGHT, ""),
        ("out of memory", SHORT, ""),
        ("out of memory", replace(RIGHT, right=False), "expected the right answer or, in time, that rank 1"),
        ("out of memory", replace(SHORT, text="the exchange failed"), "expected the right answer or, in time"),
        ("out of memory", replace(SHORT, text=SHORT.text.replace("48", "140000")), "expected the right answer or, in"),
        ("out of memory", replace(SHORT, text="rank 1 failed: CUDA out of memory"), ""),
        ("out of memory", replace(SHORT, ranks=(0,)), "expected the right answer or, in time, that rank 1 lacks"),
        ("out of memory", replace(SHORT, seconds=7.5), "expected the right answer or, in time, that rank 1 lacks"),
    ],
)
def test_judge(fault, told, said):
    victim = Outcome(error="died") if fault == "killed" else Outcome(replace(told, again=True))
    outcomes = [Outcome(told), victim, Outcome(RIGHT if fault == "late" else told)]
    count, wrong, text = judge(Setting(fault, "call", "memory", TIMEOUT_S, "cuda"), outcomes)
    assert count == (2 if fault == "killed" else 3)
    assert (wrong > 0) == bool(said)
    assert said in text
