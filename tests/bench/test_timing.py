"""Timing: fixed counts, percentiles that were measured, roofs and errors."""

import math

import pytest
import torch

from bench.roof import Roof, kind_of, measure_roof
from bench.trial import Compiler, sample_rows, time_baselines, time_replays, time_rounds
from envoi.tune import timing
from envoi.tune.inputs import relative_error
from envoi.tune.timing import NUM_WARMUPS, Clock, Timing, mean_timing, summarize

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
    monkeypatch.setattr(timing, "_between_events", lambda run: (run(), Event(found.late(found.done)))[::-1])
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


def test_long_calls_are_repeated_less_often():
    def n(floor_us):
        return time_rounds(Clock(CPU, 100), lambda: None, {}, floor_us)[0].n

    assert (n(None), n(999.0), n(1000.0)) == (100, 100, 30)


def test_a_contender_that_fails_is_left_out_and_named():
    def broken():
        raise RuntimeError("no such\nscale")

    ours, theirs, missing = time_rounds(
        Clock(CPU, 2), lambda: None, {"eager": lambda: lambda: None, "cublas": broken, "copy": lambda: broken}
    )
    assert (ours.n, list(theirs)) == (2, ["eager"])
    assert missing == {"cublas": "RuntimeError: no such scale", "copy": "RuntimeError: no such scale"}


def test_compiling_stops_at_its_limit():
    x = torch.ones(2)
    with pytest.raises(RuntimeError, match="left out: 0 s of 0 for torch.compile"):
        Compiler(0.0).run(torch.relu, x)
    compiler = Compiler(5.0)
    compiler.spent_s = 5.1
    with pytest.raises(RuntimeError, match="left out"):
        compiler.run(torch.relu, x)


def test_a_graph_goes_around_its_inputs():
    seen = []
    clock = Clock(CPU, 5)
    timings = clock.replays({"ours": clock.captured([lambda: seen.append("a"), lambda: seen.append("b")])})
    assert timings["ours"].n == 5
    assert seen[:4] == ["a", "b", "a", "b"]


def test_mean_over_workloads():
    assert mean_timing([Timing(1, 0, 2, 3), Timing(3, 2, 4, 3)]) == Timing(2, 1, 3, 3)


def test_floor_is_the_higher_roof():
    roof = Roof(1000.0, {"bf16": 500.0})
    assert roof.floor_us(num_bytes=1e9) == pytest.approx(1000)
    assert roof.floor_us(1e6, flops=1e12, kind="bf16") == pytest.approx(2000)
    assert roof.floor_us(1e6, flops=1e12, kind="fp8") is None


def test_block_scales_have_a_roof_of_their_own_where_it_was_measured():
    assert [kind_of(format) for format in ("bf16", "fp8_row", "fp8_block128", "mxfp8")] == [
        "bf16", "fp8", "fp8_block128", "fp8",
    ]  # fmt: skip
    rates = {"bf16": 500.0, "fp8": 1000.0}
    assert Roof(1000.0, rates).floor_us(1e6, 1e12, "fp8_block128") == pytest.approx(1000)
    assert Roof(1000.0, rates | {"fp8_block128": 800.0}).floor_us(1e6, 1e12, "fp8_block128") == pytest.approx(1250)


def test_roofs_of_this_machine_are_numbers():
    roof = measure_roof(CPU)
    assert roof.gb_per_s > 0
    assert roof.tflops["bf16"] > 0


def test_relative_error():
    want = torch.tensor([3.0, 4.0])
    assert relative_error(want, want) == 0
    assert relative_error(torch.tensor([3.0, 4.5]), want) == pytest.approx(0.1)
    assert relative_error(torch.tensor([3.0, math.nan]), want) == 1
    assert relative_error(torch.tensor([1e9, 4.0]), want) == 1
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0


def test_sampled_rows_are_spread_and_distinct():
    assert sample_rows(3, CPU).tolist() == [0, 1, 2]
    rows = sample_rows(8192, CPU)
    assert (len(rows.unique()), int(rows[0]), int(rows[-1])) == (64, 0, 8191)


def test_a_baseline_that_fails_is_named_with_its_reason():
    def broken():
        raise RuntimeError("no kernel\nfor this")

    timings, missing = time_baselines({"eager": lambda: Timing(1, 1, 1, 1), "cublas": broken})
    assert list(timings) == ["eager"]
    assert missing == {"cublas": "RuntimeError: no kernel for this"}
    ours, timings, missing = time_replays(Clock(CPU, 2), [int], {"eager": lambda: [int], "cublas": broken})
    assert (ours.n, list(timings)) == (2, ["eager"])
    assert missing == {"cublas": "RuntimeError: no kernel for this"}
