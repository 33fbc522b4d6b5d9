"""Timing: fixed counts, percentiles that were measured, roofs and errors."""

import math

import pytest
import torch

from bench.timing import NUM_WARMUPS, Clock, Timing, summarize
from envoi.tune import timing
from envoi.tune.problems import relative_error

CPU = torch.device("cpu")


def test_percentiles_are_measured_values():
    assert summarize([5.0]) == Timing(5.0, 5.0, 5.0, 1)
    assert summarize([float(i) for i in reversed(range(101))]) == Timing(50.0, 10.0, 90.0, 101)


def test_the_number_of_calls_is_fixed():
    calls = []
    found = Clock(CPU, 7).calls(lambda: calls.append(1))
    assert (found.n, len(calls)) == (7, 7 + NUM_WARMUPS)
    assert found.p10_us <= found.p50_us <= found.p90_us


def test_rounds_take_turns():
    seen = []
    runs = {"a": lambda: seen.append("a"), "b": lambda: seen.append("b"), "c": lambda: seen.append("c")}
    timings = Clock(CPU, 7).rounds(runs, 4)
    assert {name: timing.n for name, timing in timings.items()} == {"a": 4, "b": 4, "c": 4}
    assert "".join(seen[3 * NUM_WARMUPS :]) == "abcbcacababc"
    assert Clock(CPU, 7).rounds(runs)["b"].n == 7


class Event:
    """CUDA event that has happened, or not."""

    def __init__(self, happened):
        self.happened = happened

    def query(self):
        return self.happened


@pytest.fixture
def host(monkeypatch):
    """Replace the host: host.late is asked after each call; done and fillers are counted."""

    class Host:
        done = fillers = 0

        def call(self):
            self.done += 1

        def fill(self):
            self.fillers += 1

    found = Host()
    monkeypatch.setattr(timing, "between_events", lambda run: (run(), Event(found.late(found.done)))[::-1])
    return found


def test_a_call_that_the_host_enqueued_too_late_is_timed_again(host):
    host.late = lambda call: call <= 2
    lead = timing.Lead(host.fill)
    lead.time(host.call)
    assert (host.done, host.fillers) == (3, 1 + 2 + 4)
    lead.time(host.call)
    assert (host.done, host.fillers) == (4, 7 + 4)


def test_stalls_now_and_then_dont_add_up(host):
    host.late = lambda call: call % 20 == 1
    lead = timing.Lead(host.fill)
    for _ in range(400):
        lead.time(host.call)
    assert not lead.hopeless
    assert lead.count < timing.MAX_FILLERS
    assert host.done == 400 + 400 // 19 + 1


def test_a_call_that_waits_for_the_device_itself_is_taken_as_it_is(host):
    host.late = lambda call: True
    lead = timing.Lead(host.fill)
    lead.time(host.call)
    assert (lead.hopeless, lead.count, host.done) == (True, 1, timing.TRIES)
    lead.time(host.call)
    assert host.done == timing.TRIES + 1


def test_relative_error():
    want = torch.tensor([3.0, 4.0])
    assert relative_error(want, want) == 0
    assert relative_error(torch.tensor([3.0, 4.5]), want) == pytest.approx(0.1)
    assert relative_error(torch.tensor([3.0, math.nan]), want) == 1
    assert relative_error(torch.tensor([1e9, 4.0]), want) == 1
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0
