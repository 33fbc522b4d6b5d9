"""Suites host and host_loop: which calls they make, what their times are, and ranks."""

import time

import pytest
import torch

from bench.suites import cases, host, measure
from bench.trial import Bench
from envoi.tune.timing import Clock
from tests.helpers.ranks import run_ranks

from .test_suites import CPU, ROOF

DEVICE_S = 0.02


class Device:
    """Device that works for a while after each call has returned, and is waited for."""

    def __init__(self):
        self.ends, self.waits, self.busy = 0.0, 0, 0

    def run(self) -> None:
        self.busy += time.perf_counter() < self.ends
        self.ends = max(self.ends, time.perf_counter()) + DEVICE_S

    def synchronize(self, bench: Bench) -> None:
        self.waits += 1
        time.sleep(max(0.0, self.ends - time.perf_counter()))


@pytest.mark.parametrize("suite", ["host", "host_loop"])
def test_host_ends_when_the_call_returns_and_a_loop_when_the_device_is_done(suite, monkeypatch):
    device = Device()
    monkeypatch.setattr(host, "_synchronize", device.synchronize)
    bench = Bench(Clock(CPU, 4), ROOF)
    times = host._call_times if suite == "host" else host._loop_times
    timings = times({"envoi": device.run, "torch_mm": lambda: None}, bench)
    if suite == "host":
        assert timings["envoi"].p90_us < DEVICE_S * 1e6 / 2
        assert device.busy == 2  # of the warm-ups: every timed call found the device idle
    else:
        assert DEVICE_S * 1e6 <= timings["envoi"].p50_us < 3 * DEVICE_S * 1e6
        assert timings["torch_mm"].p50_us < DEVICE_S * 1e6 / 2
    assert timings["envoi"].n == 4


def measure_on_rank(rank: int, num_ranks: int, suite: str) -> tuple:
    (case,) = [case for case in cases(suite) if case.on_cpu and not case.alone]
    trial = measure(case, Bench(Clock(CPU, 2), ROOF, rank, num_ranks))
    return trial.ours, trial.error["ours"], list(trial.baselines), trial.missing


@pytest.mark.parametrize(("suite", "baseline"), [("host", "torch_mm"), ("host_loop", "graph")])
def test_ranks_measure_together_and_the_slowest_counts(suite, baseline):
    outcomes = run_ranks(2, measure_on_rank, suite)
    assert not any(outcome.error for outcome in outcomes), outcomes
    found = [outcome.value for outcome in outcomes]
    assert found[0][0] == found[1][0]
    for _, error, baselines, missing in found:
        assert error < 6e-3
        assert (baselines, missing) == ([baseline], {})


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gemm 64x4096x7168 bf16", "moe 2048/768/128/8 fp8_block128 tokens=1"])
def test_a_gpu_times_both(name):
    for suite in ("host", "host_loop"):
        (case,) = [case for case in cases(suite) if case.name == name]
        trial = measure(case, Bench(Clock(torch.device("cuda", 0), 5), ROOF))
        assert not trial.missing
        assert trial.error["ours"] < 0.1
