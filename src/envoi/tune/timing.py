"""Timing methods. Collective calls have fixed repeat counts: ranks that chose by their own time would hang.

    rounds  several contenders, each called once per round: CUDA events around the call, the L2 cache emptied before it;
            on a CPU, perf_counter
    calls   `rounds` of one
    replays like `rounds`, each contender a CUDA graph of 20 calls on enough inputs in turn to overflow the L2 cache,
            time / 20, the cache not emptied; on a CPU one call
    ranks   like `calls`, but the slowest rank counts, and a barrier and a one-element all-reduce align the ranks first;
            the all-reduce follows the reads that empty the cache, so that every rank's call is enqueued by then;
            `symmetric_barrier` in its place needs no NCCL

Contenders measured one after the other run at different clocks: a large GEMM is limited by power, and the same call
has changed by 20 %. In rounds all run at the same clocks, the order changes from round to round, and the host never
waits for the device in between.

The cache is emptied by reading a buffer larger than it. Overwriting would fill it with dirty lines, and the next call
would pay for their write-back: 33 us instead of 27 for a GEMM of 256x4096x7168, cuBLAS's or any other.

Work before a call also hides its launch: the read is repeated (of a graph: an earlier replay) until the device gets to
a call after the host has enqueued all of it. Otherwise the gaps between its launches would count, and a shared host
stalls for hundreds of microseconds. A call that the device began too early is discarded and timed again after twice as
much work (`Lead`); so only `ranks` may time calls that all ranks must make equally often.

A graph replay never shows less than 4 to 5 us, so calls shorter than a launch are measured by `replays`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import TypeVar

import torch
import torch.distributed as dist

CALLS_PER_GRAPH = 20
NUM_WARMUPS = 3
CPU_CACHE_BYTES = 64 << 20
FLUSH_CACHES = 4  # number of L2 sizes that are read: its halves may each keep a copy of a line
MAX_FLUSHES = 8  # in `ranks`
MAX_FILLERS = 64
TRIES = 8  # per call: from one filler to the most
PATIENCE = 16  # calls on time before the fillers are halved

K = TypeVar("K")
Run = Callable[[], object]
Pair = tuple[torch.cuda.Event, torch.cuda.Event]


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: the median and the 10th and 90th percentile of n repeats."""

    p50_us: float
    p10_us: float
    p90_us: float
    n: int


def summarize(times_us: Sequence[float]) -> Timing:
    """Return the percentiles of at least one time, by nearest rank: only measured values."""
    ranked = sorted(times_us)

    def at(share: float) -> float:
        return ranked[round(share * (len(ranked) - 1))]

    return Timing(at(0.5), at(0.1), at(0.9), len(ranked))


def mean_timing(timings: Sequence[Timing]) -> Timing:
    """Return the mean of each percentile over workloads that were repeated equally often."""
    return Timing(
        mean(t.p50_us for t in timings), mean(t.p10_us for t in timings), mean(t.p90_us for t in timings), timings[0].n
    )


@dataclass
class Lead:
    """Filler work before each call of a contender, enough that the host has enqueued the call by its end.

    Doubled after a late call, halved after several on time. A call that is late after any amount of work waits for the
    device itself, or takes the host too long: its host's time counts.
    """

    filler: Run
    count: int = 1
    on_time: int = 0
    hopeless: bool = False

    def time(self, run: Run) -> Pair:
        """Return the events around a call."""
        for _ in range(TRIES):
            for _ in range(self.count):
                self.filler()
            pair = _between_events(run)
            if self.hopeless:
                return pair
            if not pair[0].query():
                self._came_in_time()
                return pair
            self.count, self.on_time = min(2 * self.count, MAX_FILLERS), 0
        self.count, self.hopeless = 1, True
        return pair

    def _came_in_time(self) -> None:
        self.on_time += 1
        if self.on_time == PATIENCE:
            self.count, self.on_time = max(1, self.count // 2), 0


@dataclass(frozen=True)
class Clock:
    """Timer on one device. repeat: n of every Timing. cold: empty the L2 cache before each call.

    meet: launches what aligns the ranks on their devices in `ranks`, None for an all-reduce.
    """

    device: torch.device
    repeat: int
    cold: bool = True
    meet: Run | None = None

    def rounds(self, runs: Mapping[K, Run], n: int | None = None) -> dict[K, Timing]:
        """Time each contender once per round, n rounds (default: repeat)."""
        n = n or self.repeat
        for run in runs.values():
            _warm_up(run)
        if self.device.type != "cuda":
            times: dict[K, list[float]] = {name: [] for name in runs}
            for turn in range(n):
                for name in _rotated(list(runs), turn):
                    times[name].append(_wall_us(runs[name]))
            return {name: summarize(found) for name, found in times.items()}
        scratch = _larger_than_the_cache(self.device)
        return self._events(runs, n, {name: Lead(scratch.max if self.cold else run) for name, run in runs.items()})

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
            _warm_up(run)
        timings = self._events(runs, self.repeat, {name: Lead(run) for name, run in runs.items()})
        return {name: _shared(timing, CALLS_PER_GRAPH) for name, timing in timings.items()}

    def ranks(self, run: Run, group: dist.ProcessGroup | None = None) -> Timing:
        """Time a call on every rank of a group; return the percentiles of the slowest rank. Collective."""
        token = torch.zeros(1, device=self.device)
        scratch = _larger_than_the_cache(self.device) if self.device.type == "cuda" else token

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

    def _events(self, runs: Mapping[K, Run], n: int, leads: Mapping[K, "Lead"]) -> dict[K, Timing]:
        pairs: dict[K, list[Pair]] = {name: [] for name in runs}
        torch.cuda.synchronize(self.device)
        for turn in range(n):
            for name in _rotated(list(runs), turn):
                pairs[name].append(leads[name].time(runs[name]))
        torch.cuda.synchronize(self.device)
        return {name: _summarize_pairs(found) for name, found in pairs.items()}

    def _one_by_one(self, run: Run, prepare: Run) -> Timing:
        """Time each call by itself after `prepare`, which isn't timed."""
        for _ in range(NUM_WARMUPS):
            run()
        times: list[float] = []
        pairs: list[Pair] = []
        for _ in range(self.repeat):
            prepare()
            if self.device.type == "cuda":
                pairs.append(_between_events(run))
            else:
                times.append(_wall_us(run))
        if not pairs:
            return summarize(times)
        torch.cuda.synchronize(self.device)
        return _summarize_pairs(pairs)

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


def cache_bytes(device: torch.device) -> int:
    """Return the L2 cache's bytes of a GPU; for a CPU an estimate of its last-level cache."""
    if device.type != "cuda":
        return CPU_CACHE_BYTES
    return torch.cuda.get_device_properties(device).L2_cache_size


def _larger_than_the_cache(device: torch.device) -> torch.Tensor:
    return torch.zeros(FLUSH_CACHES * cache_bytes(device) // 4, dtype=torch.int32, device=device)


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


def _rotated(names: list[K], turn: int) -> list[K]:
    first = turn % max(1, len(names))
    return names[first:] + names[:first]


def _warm_up(run: Run) -> None:
    for _ in range(NUM_WARMUPS):
        run()


def _between_events(run: Run) -> Pair:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    return start, end


def _summarize_pairs(pairs: Sequence[Pair]) -> Timing:
    return summarize([start.elapsed_time(end) * 1e3 for start, end in pairs])


def _wall_us(run: Run) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6
