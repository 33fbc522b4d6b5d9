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
    assert "120 calls on 2 ranks by gathered and counted, bf16" in bits.text
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


def test_a_rank_that_fails_breaks_the_promise(monkeypatch):
    outcomes = [Outcome(found()), Outcome(error="PeerTimeout", text="dispatch: rank 0 is lost")]
    monkeypatch.setattr(soak, "run_ranks", lambda *_, **__: outcomes)
    (run,) = soak.run(options())
    assert run.wrong == run.count == 120
    assert "rank 1: PeerTimeout: dispatch: rank 0 is lost" in run.text


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


def test_times_are_compared_with_calls_like_them():
    part = Part(None, [])
    part.calls["eager", 0] = took([1.0] * 40 + [4.0])
    part.calls["graphs", 0] = took([0.1] * 40)
    part.calls["eager", 1] = took([9.0] * 3)  # too few to have a median
    ratios = times_of_medians(part)
    assert {kind: len(found) for kind, found in ratios.items()} == {"eager": 41, "graphs": 40}
    assert sum(ratio > soak.MOST_TIMES for ratio in ratios["eager"]) == 1


def test_a_call_pays_for_its_device_and_not_for_a_host_that_was_late():
    """A device that waited 4 ms longer for the last host, and one that took 4 ms longer by itself."""
    part = Part(None, [])
    part.calls["alone", 0] = [Took(1.0, 0.2, 0.1, 0.1)] * 40 + [Took(5.0, 4.2, 0.1, 0.1), Took(5.0, 0.2, 0.1, 0.1)]
    assert [round(ratio, 6) for ratio in times_of_medians(part)["alone"][-2:]] == [1.0, 5.0]


def test_a_host_is_compared_with_operators_of_torch():
    part = Part(None, [])
    slow, slow_other = Took(1.0, 0.2, 0.9, 0.2), Took(1.0, 0.2, 0.1, 0.9)
    without = [Took(1.0, 0.2, 0.9)] * 5
    part.calls["alone", 0] = [*[Took(1.0, 0.2, 0.1, 0.2)] * 40, slow, slow, slow_other, *without]
    assert [soak.judged([part])[kind][:2] for kind in (soak.HOST, soak.OF_TORCH)] == [(43, 2), (43, 1)]


class Busy:
    """Clock, and an object whose calls take 0.2 ms of it, every tenth one 8 ms."""

    def __init__(self):
        self.now, self.made = 100.0, 0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def moe(self, tokens, routing):
        self.made += 1
        self.now += 8e-3 if self.made % 10 == 0 else 2e-4
        return tokens

    def check(self):
        pass

    def launch_for(self, seconds: float, device: torch.device) -> float:
        self.now += seconds
        return seconds


def test_a_host_that_is_slow_now_and_then_is_found(monkeypatch):
    """What is beside a slow call is as long as usual."""
    busy, x = Busy(), torch.ones(2, 4)
    monkeypatch.setattr(soak, "SCENES", 1)
    monkeypatch.setattr(soak, "time", busy)
    monkeypatch.setattr(soak, "launch_for", busy.launch_for)
    monkeypatch.setattr(soak.dist, "barrier", lambda: None)
    monkeypatch.setattr(soak.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(soak.dist, "all_gather_object", lambda to, mine: to.__setitem__(0, mine))
    parts = [Part(busy, [soak.Scene(x, None, x)]) for _ in range(2)]
    for number in range(2):  # the first has nothing beside it, since it isn't known how long calls take
        soak.block(parts, soak.ALONE, 400, random.Random(number), CPU)
    found = soak.judged(parts)
    assert found[soak.HOST] == (400, 40, pytest.approx(40.0))
    assert found[soak.OF_TORCH] == (400, 0, pytest.approx(1.0))
    assert soak.more_often(40, 0) == 40


class Pausing(Busy):
    """Object whose calls of 1 ms some of these seconds are added to, by the number of the call, from 1."""

    def __init__(self, added: dict[int, float]):
        super().__init__()
        self.added = added

    def moe(self, tokens, routing):
        self.made += 1
        self.now += 1e-3 + self.added.get(self.made, 0.0)
        return tokens


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ({}, (33, 0, 0.0)),
        ({1: 9.0}, (33, 0, 0.0)),  # the first one compiles
        ({2: 0.004}, (33, 0, 0.004)),  # and the second is recorded
        ({2: 0.15}, (33, 1, 0.15)),
        ({20: 0.15, 34: 0.011}, (33, 2, 0.15)),  # after graphs were captured
        ({20: 0.009}, (33, 0, 0.009)),
    ],
)
def test_a_call_that_pauses_is_counted_but_for_the_first_of_its_scene(monkeypatch, added, expected):
    paused, x = Pausing(added), torch.ones(2, 4)
    monkeypatch.setattr(soak, "time", paused)
    monkeypatch.setattr(soak.dist, "barrier", lambda: None)
    part = Part(paused, [soak.Scene(x, None, x)])
    for count in (soak.EARLY_CALLS, soak.LATER_CALLS):
        soak.call_eagerly(part, count, CPU)
    assert soak.pauses([part]) == (*expected[:2], pytest.approx(expected[2], abs=1e-9))


def test_slow_hosts_are_wrong_if_chance_does_not_explain_them():
    assert [soak.more_often(*pair) for pair in ((0, 0), (60, 40), (40, 60), (10, 0))] == [0, 0, 0, 0]
    assert [soak.more_often(*pair) for pair in ((20, 0), (100, 40), (52, 5))] == [20, 100, 52]
