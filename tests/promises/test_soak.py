"""Soak over gloo: right calls, growing memory and slow calls, and outputs that differ."""

import argparse
import random

import pytest
import torch

from tests.helpers.ranks import Outcome
from tests.promises import soak
from tests.promises.soak import Found, Part, Took, times_of_medians

CPU = torch.device("cpu")


def options(**changes) -> argparse.Namespace:
    return argparse.Namespace(**({"ranks": 2, "calls": 120, "format": "bf16", "seed": 0, "device": "cpu"} | changes))


def test_calls_over_gloo_are_right():
    bits, memory, pauses, replayed, times, *hosts = soak.run(options())
    assert (bits.promise, bits.wrong) == ("soak/bits", 0)
    assert bits.count >= 2 * 2 * 10  # both objects on both ranks after each of ten blocks
    assert "120 calls on 2 ranks by counted and counted, bf16" in bits.text
    assert (memory.promise, memory.wrong) == ("soak/memory", 0)
    assert (pauses.promise, pauses.count) == ("soak/pauses", 2 * 2 * soak.SCENES * 2)
    assert (replayed.promise, replayed.count, times.promise) == ("soak/times from graphs", 0, "soak/times")
    assert all(host.promise == "soak/host" and host.count for host in hosts), "none where too few calls are alike"


def took(times) -> list[Took]:
    return [Took(time) for time in times]


def found(**changes) -> Found:
    return Found(**({
        "calls": 100, "checked": 20, "wrong": 0, "times": {"alone": (50, 0, 1.5), "graphs": (50, 9, 9.0)},
        "grown": 0, "tokens": 9, "load": "", "exchange": ("memory", "memory"), "pauses": (60, 0, 1e-3),
    } | changes))  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "promise"),
    [
        ({"wrong": 1}, "soak/bits"),
        ({"grown": 100 << 20}, "soak/memory"),
        ({"pauses": (60, 1, 0.15)}, "soak/pauses"),
        ({"times": {soak.ALONE: (50, 2, 4.0)}}, "soak/times"),
        ({"times": {soak.REPLAYED: (50, 2, 4.0)}}, "soak/times from graphs"),
        ({"times": {soak.HOST: (50, 20, 4.0), soak.OF_TORCH: (50, 1, 4.0)}}, "soak/host"),
        ({"times": {soak.HOST: (50, 1, 101.0), soak.OF_TORCH: (50, 1, 4.0)}}, "soak/host"),
        ({"times": {soak.HOST: (50, 1, 101.0), soak.OF_TORCH: (50, 1, 102.0)}}, None),
    ],
)
def test_what_one_rank_finds_breaks_a_promise(monkeypatch, changes, promise):
    outcomes = [Outcome(found()), Outcome(found(**changes))]
    monkeypatch.setattr(soak, "run_ranks", lambda *_, **__: outcomes)
    broken = {run.promise: run for run in soak.run(options()) if run.wrong}
    assert set(broken) == ({promise} if promise else set())


def test_a_wrong_output_is_noticed(monkeypatch):
    """A block counts an output that differs from one rank's in one bit."""

    class Parallel:
        def moe(self, tokens, routing):
            return tokens + (len(tokens) == 3)

        def check(self):
            pass

    def scene(rows):
        x = torch.ones(rows, 4)
        return soak.Scene(x, None, x.clone())

    monkeypatch.setattr(soak.dist, "barrier", lambda: None)
    for rows, wrong in ((2, 0), (3, 2)):
        parts = [Part(Parallel(), [scene(rows)] * soak.SCENES) for _ in range(2)]
        assert soak.block(parts, "eager", 30, random.Random(0), CPU) == (2, wrong)


def test_a_call_pays_for_its_device_and_not_for_a_host_that_was_late():
    """A device that waited 4 ms longer for the last host, and one that took 4 ms longer by itself."""
    part = Part(None, [])
    part.calls["alone", 0] = [Took(1.0, 0.2, 0.1, 0.1)] * 40 + [Took(5.0, 4.2, 0.1, 0.1), Took(5.0, 0.2, 0.1, 0.1)]
    assert [round(ratio, 6) for ratio in times_of_medians(part)["alone"][-2:]] == [1.0, 5.0]
