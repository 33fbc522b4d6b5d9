"""Times of contenders that take turns: CUDA events around each call, the L2 cache emptied before it.

Contenders measured one after the other run at different clocks: a large GEMM is limited by power, and the same call
has changed by 20 %. In rounds all run at the same clocks, the order changes from round to round, and the host never
waits for the device in between.

The cache is emptied by reading a buffer larger than it. Overwriting would fill it with dirty lines, and the next call
would pay for their write-back: 33 us instead of 27 for a GEMM of 256x4096x7168, cuBLAS's or any other.

Work before a call also hides its launch: the read is repeated until the device gets to a call after the host has
enqueued all of it. Otherwise the gaps between its launches would count, and a shared host stalls for hundreds of
microseconds. A call that the device began too early is discarded and timed again after twice as much work (`Lead`).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

NUM_WARMUPS = 3
CPU_CACHE_BYTES = 64 << 20
FLUSH_CACHES = 4  # number of L2 sizes that are read: its halves may each keep a copy of a line
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
            pair = between_events(run)
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
    """Timer on one device. repeat: n of every Timing. cold: empty the L2 cache before each call."""

    device: torch.device
    repeat: int
    cold: bool = True

    def rounds(self, runs: Mapping[K, Run], n: int | None = None) -> dict[K, Timing]:
        """Time each contender once per round, n rounds (default: repeat); on a CPU by perf_counter."""
        n = n or self.repeat
        for run in runs.values():
            warm_up(run)
        if self.device.type != "cuda":
            times: dict[K, list[float]] = {name: [] for name in runs}
            for turn in range(n):
                for name in _rotated(list(runs), turn):
                    times[name].append(wall_us(runs[name]))
            return {name: summarize(found) for name, found in times.items()}
        scratch = larger_than_the_cache(self.device)
        return self.events(runs, n, {name: Lead(scratch.max if self.cold else run) for name, run in runs.items()})

    def events(self, runs: Mapping[K, Run], n: int, leads: Mapping[K, Lead]) -> dict[K, Timing]:
        """Time each contender once per round behind its lead, on a GPU."""
        pairs: dict[K, list[Pair]] = {name: [] for name in runs}
        torch.cuda.synchronize(self.device)
        for turn in range(n):
            for name in _rotated(list(runs), turn):
                pairs[name].append(leads[name].time(runs[name]))
        torch.cuda.synchronize(self.device)
        return {name: summarize_pairs(found) for name, found in pairs.items()}


def cache_bytes(device: torch.device) -> int:
    """Return the L2 cache's bytes of a GPU; for a CPU an estimate of its last-level cache."""
    if device.type != "cuda":
        return CPU_CACHE_BYTES
    return torch.cuda.get_device_properties(device).L2_cache_size


def larger_than_the_cache(device: torch.device) -> torch.Tensor:
    """Make what empties a device's cache when it is read."""
    return torch.zeros(FLUSH_CACHES * cache_bytes(device) // 4, dtype=torch.int32, device=device)


def _rotated(names: list[K], turn: int) -> list[K]:
    first = turn % max(1, len(names))
    return names[first:] + names[:first]


def warm_up(run: Run) -> None:
    """Make a call a few times."""
    for _ in range(NUM_WARMUPS):
        run()


def between_events(run: Run) -> Pair:
    """Make a call; return events before and after it."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    return start, end


def summarize_pairs(pairs: Sequence[Pair]) -> Timing:
    """Return the percentiles of what took place between events that have happened."""
    return summarize([start.elapsed_time(end) * 1e3 for start, end in pairs])


def wall_us(run: Run) -> float:
    """Return the microseconds of a call by the host's clock."""
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6
