"""How time is taken. Repeat counts are fixed beforehand: ranks that chose by their own time would disagree and hang.

    calls   CUDA events around each call, the L2 cache overwritten before it; on a CPU, perf_counter
    graph   a CUDA graph of 20 calls on enough inputs in turn to overflow the L2 cache, time / 20; on a CPU as `calls`
    ranks   as `calls`, but a barrier and a one-element all-reduce align the ranks first, and the slowest rank counts

A graph replay never shows less than 4 to 5 us, so kernels of that size are measured by `graph`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

import torch
import torch.distributed as dist

CALLS_PER_GRAPH = 20
NUM_WARMUPS = 3
CPU_CACHE_BYTES = 64 << 20

Run = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Microseconds a call: the median and the 10th and 90th percentile of n repeats."""

    p50_us: float
    p10_us: float
    p90_us: float
    n: int


def summarize(times_us: Sequence[float]) -> Timing:
    """The percentiles of at least one time, by nearest rank: no value that wasn't measured."""
    ranked = sorted(times_us)

    def at(share: float) -> float:
        return ranked[round(share * (len(ranked) - 1))]

    return Timing(at(0.5), at(0.1), at(0.9), len(ranked))


def mean_timing(timings: Sequence[Timing]) -> Timing:
    """The mean of each percentile over workloads that were repeated equally often."""
    return Timing(
        mean(t.p50_us for t in timings), mean(t.p10_us for t in timings), mean(t.p90_us for t in timings), timings[0].n
    )


@dataclass(frozen=True)
class Clock:
    """Takes times on one device. repeat: n of every Timing. cold: overwrite the L2 cache before each of `calls`."""

    device: torch.device
    repeat: int
    cold: bool = True

    def calls(self, run: Run) -> Timing:
        """One call at a time."""
        return self._calls(run, lambda: None)

    def graph(self, runs: Sequence[Run]) -> Timing:
        """Calls of a few microseconds: `runs` do the same work, each on inputs of its own."""
        if self.device.type != "cuda":
            return self._calls(_in_turn(runs), lambda: None)
        graph = self._capture(runs)
        timing = self._calls(graph.replay, lambda: None, flush=False)
        p50_us, p10_us, p90_us = (us / CALLS_PER_GRAPH for us in (timing.p50_us, timing.p10_us, timing.p90_us))
        return Timing(p50_us, p10_us, p90_us, timing.n)

    def ranks(self, run: Run, group: dist.ProcessGroup | None = None) -> Timing:
        """The same call on every rank of a group; the percentiles are the slowest rank's. Collective."""
        token = torch.zeros(1, device=self.device)

        def align() -> None:
            dist.barrier(group=group)
            dist.all_reduce(token, group=group)

        timing = self._calls(run, align, flush=False)
        slowest = torch.tensor([timing.p50_us, timing.p10_us, timing.p90_us], device=self.device, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        p50_us, p10_us, p90_us = slowest.tolist()
        return Timing(p50_us, p10_us, p90_us, timing.n)

    def num_inputs(self, num_bytes: int) -> int:
        """How many inputs of num_bytes `graph` should go around so that none is in the cache at its next turn."""
        return max(1, min(CALLS_PER_GRAPH, -(-2 * cache_bytes(self.device) // max(num_bytes, 1))))

    def _calls(self, run: Run, prepare: Run, flush: bool = True) -> Timing:
        for _ in range(NUM_WARMUPS):
            run()
        if self.device.type != "cuda":
            return summarize([_wall_us(run, prepare) for _ in range(self.repeat)])
        scratch = torch.empty(2 * cache_bytes(self.device), dtype=torch.int8, device=self.device)
        pairs = [(_event(), _event()) for _ in range(self.repeat)]
        torch.cuda.synchronize(self.device)
        for start, end in pairs:
            if self.cold and flush:
                scratch.zero_()
            prepare()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize(self.device)
        return summarize([start.elapsed_time(end) * 1e3 for start, end in pairs])

    def _capture(self, runs: Sequence[Run]) -> torch.cuda.CUDAGraph:
        turn = _in_turn(runs)
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):  # kernels that tune themselves at the first call do it here
            for _ in range(max(NUM_WARMUPS, len(runs))):
                turn()
        torch.cuda.current_stream(self.device).wait_stream(side)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS_PER_GRAPH):
                turn()
        return graph


def cache_bytes(device: torch.device) -> int:
    """The L2 cache of a GPU; of a CPU a guess at its last cache."""
    if device.type != "cuda":
        return CPU_CACHE_BYTES
    return torch.cuda.get_device_properties(device).L2_cache_size


def _in_turn(runs: Sequence[Run]) -> Run:
    calls = 0

    def turn() -> object:
        nonlocal calls
        calls += 1
        return runs[(calls - 1) % len(runs)]()

    return turn


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _wall_us(run: Run, prepare: Run) -> float:
    prepare()
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6
