"""Timing methods. Collective calls have fixed repeat counts: ranks that chose by their own time would hang.

    rounds  several contenders, each called once per round: `envoi.tune.timing`
    calls   `rounds` of one
    replays like `rounds`, each contender a CUDA graph of 20 calls on enough inputs in turn to overflow the L2 cache,
            time / 20, the cache not emptied, an earlier replay ahead of each; on a CPU one call
    ranks   like `calls`, but the slowest rank counts, and a barrier and a one-element all-reduce align the ranks first;
            the all-reduce follows the reads that empty the cache, so that every rank's call is enqueued by then;
            `symmetric_barrier` in its place needs no NCCL

Only `ranks` may time calls that all ranks must make equally often: others repeat a call that began too early. A graph
replay never shows less than 4 to 5 us, so calls shorter than a launch are measured by `replays`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean

import torch
import torch.distributed as dist

from envoi.tune import timing
from envoi.tune.timing import (
    NUM_WARMUPS,
    K,
    Lead,
    Pair,
    Run,
    Timing,
    between_events,
    cache_bytes,
    larger_than_the_cache,
    summarize,
    summarize_pairs,
    wall_us,
    warm_up,
)

CALLS_PER_GRAPH = 20
MAX_FLUSHES = 8  # in `ranks`


def mean_timing(timings: Sequence[Timing]) -> Timing:
    """Return the mean of each percentile over workloads that were repeated equally often."""
    return Timing(
        mean(t.p50_us for t in timings), mean(t.p10_us for t in timings), mean(t.p90_us for t in timings), timings[0].n
    )


@dataclass(frozen=True)
class Clock(timing.Clock):
    """Timer on one device. meet: launches what aligns the ranks on their devices in `ranks`, None for an all-reduce."""

    meet: Run | None = None

    def calls(self, run: Run) -> Timing:
        """Time one contender, one call at a time."""
        return self.rounds({"": run})[""]

    def captured(self, runs: Sequence[Run]) -> Run:
        """Return a contender for `replays`: 20 calls, `runs` in turn; on a CPU the next of them."""
        return _in_turn(runs) if self.device.type != "cuda" else replay_of(self._capture(runs), runs)

    def replays(self, runs: Mapping[K, Run]) -> dict[K, Timing]:
        """Return the time of one call of each contender."""
        if self.device.type != "cuda":
            return self.rounds(runs)
        for run in runs.values():
            warm_up(run)
        timings = self.events(runs, self.repeat, {name: Lead(run) for name, run in runs.items()})
        return {name: _shared(timing, CALLS_PER_GRAPH) for name, timing in timings.items()}

    def ranks(self, run: Run, group: dist.ProcessGroup | None = None) -> Timing:
        """Time a call on every rank of a group; return the percentiles of the slowest rank. Collective."""
        token = torch.zeros(1, device=self.device)
        scratch = larger_than_the_cache(self.device) if self.device.type == "cuda" else token

        def align() -> None:
            dist.barrier(group=group)
            for _ in range(MAX_FLUSHES if self.device.type == "cuda" else 0):
                scratch.max()
            if self.meet is None:
                dist.all_reduce(token, group=group)
            else:
                self.meet()

        timing = self._one_by_one(run, align)
        where = torch.device("cpu") if dist.get_backend(group) == "gloo" else self.device
        slowest = torch.tensor([timing.p50_us, timing.p10_us, timing.p90_us], device=where, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        p50_us, p10_us, p90_us = slowest.tolist()
        return Timing(p50_us, p10_us, p90_us, timing.n)

    def num_inputs(self, num_bytes: int) -> int:
        """Return how many inputs of num_bytes a graph should cycle through so that none is still in the cache."""
        return max(1, min(CALLS_PER_GRAPH, -(-2 * cache_bytes(self.device) // max(num_bytes, 1))))

    def _one_by_one(self, run: Run, prepare: Run) -> Timing:
        """Time each call by itself after `prepare`, which isn't timed."""
        for _ in range(NUM_WARMUPS):
            run()
        times: list[float] = []
        pairs: list[Pair] = []
        for _ in range(self.repeat):
            prepare()
            if self.device.type == "cuda":
                pairs.append(between_events(run))
            else:
                times.append(wall_us(run))
        if not pairs:
            return summarize(times)
        torch.cuda.synchronize(self.device)
        return summarize_pairs(pairs)

    def graph(self, run: Run) -> Run:
        """Return a replay of one call from a CUDA graph; on a CPU the call itself."""
        return run if self.device.type != "cuda" else replay_of(self._capture([run], 1), run)

    def _capture(self, runs: Sequence[Run], num_calls: int = CALLS_PER_GRAPH) -> torch.cuda.CUDAGraph:
        turn = _in_turn(runs)
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):  # kernels that autotune at the first call do it here
            for _ in range(max(NUM_WARMUPS, len(runs))):
                turn()
        torch.cuda.current_stream(self.device).wait_stream(side)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(num_calls):
                turn()
        return graph


def symmetric_barrier(device: torch.device) -> Run:
    """Return a launch after which no rank's device goes on before all have come to it, in symmetric memory. Collective.

    On a CPU the ranks' processes meet.
    """
    if device.type != "cuda":
        return dist.barrier
    import torch.distributed._symmetric_memory as symmetric

    memory = symmetric.empty(1024, dtype=torch.int32, device=device)
    handle = symmetric.rendezvous(memory, group=dist.distributed_c10d._get_default_group())

    def meet(kept: torch.Tensor = memory) -> None:
        handle.barrier(channel=0)

    return meet


def replay_of(graph: torch.cuda.CUDAGraph, captured: object) -> Run:
    """Return a call that replays a graph. captured: the calls in it, which are kept with the tensors that they use."""
    return partial(_replay, graph, captured)


def _replay(graph: torch.cuda.CUDAGraph, captured: object) -> None:
    graph.replay()


def _shared(timing: Timing, calls: int) -> Timing:
    """Return the time of one of several calls."""
    return Timing(timing.p50_us / calls, timing.p10_us / calls, timing.p90_us / calls, timing.n)


def _in_turn(runs: Sequence[Run]) -> Run:
    calls = 0

    def turn() -> object:
        nonlocal calls
        calls += 1
        return runs[(calls - 1) % len(runs)]()

    return turn
