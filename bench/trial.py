"""Input and result of a suite, and the helpers that all suites share."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from bench.roof import Roof
from bench.timing import Clock, Run, Timing

MAX_ERROR_ROWS = 64  # float64 is slow: errors are taken on this many rows, spread evenly
LONG_US = 1000.0  # calls of at least that are repeated less often
LONG_REPEAT = 30
OURS = "envoi"
T = TypeVar("T")
COMPILE_MODE = "max-autotune-no-cudagraphs"


class Compiler:
    """torch.compile as a baseline, with a limit on the total seconds of compilation; None: no limit."""

    def __init__(self, limit_s: float | None = None):
        self.limit_s, self.spent_s = limit_s, 0.0

    @property
    def left_out(self) -> bool:
        """Return True if torch.compile is no baseline at all."""
        return self.limit_s == 0

    def run(self, fn: Callable, *args: torch.Tensor) -> Run:
        """Return a call of fn(*args), compiled and tuned. Raises RuntimeError once the limit is reached."""
        self._check_limit()
        from torch._inductor import config

        start = time.monotonic()
        if hasattr(config, "autotune_num_choices_displayed"):
            config.autotune_num_choices_displayed = 0  # its tables would hide ours
        fast = compiled(fn, COMPILE_MODE)
        fast(*args)
        self.spent_s += time.monotonic() - start
        return lambda: fast(*args)

    def whole(self, fn: Callable, first: Callable[[Callable], object]) -> Callable:
        """Return fn compiled as one graph without tuning; first: makes the call that compiles it.

        Raises RuntimeError once the limit is reached.
        """
        self._check_limit()
        start = time.monotonic()
        fast = torch.compile(fn, fullgraph=True, dynamic=False, mode=None)
        try:
            first(fast)
        finally:
            self.spent_s += time.monotonic() - start
        return fast

    def _check_limit(self) -> None:
        if self.limit_s is not None and self.spent_s >= self.limit_s:
            raise RuntimeError(f"left out: {self.spent_s:.0f} s of {self.limit_s:.0f} for torch.compile were spent")


@dataclass(frozen=True)
class Bench:
    """Environment of a suite. num_ranks: processes that share the work of a case; this is one of them.

    peer_versions: by distribution, of libraries that don't say their own.
    """

    clock: Clock
    roof: Roof
    rank: int = 0
    num_ranks: int = 1
    compiler: Compiler = field(default_factory=Compiler)
    peer_versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Device of the inputs."""
        return self.clock.device

    @property
    def on_gpu(self) -> bool:
        """Return True if the device has CUDA graphs and a compiler worth comparing with."""
        return self.device.type == "cuda"


@dataclass(frozen=True)
class Trial:
    """Result of one case. flops and num_bytes are ideal: each operand read once, each result written once.

    Both are 0 where the time isn't the device's.
    kind: the kind of matmul whose roof counts, of `roof.Roof`. missing: failed baselines, with reasons.
    details: of `evidence.Measurement`.
    """

    ours: Timing
    baselines: dict[str, Timing]
    error: dict[str, float]
    num_bytes: float
    flops: float = 0.0
    kind: str = "bf16"
    missing: dict[str, str] = field(default_factory=dict)
    details: dict[str, str | float] = field(default_factory=dict)


def time_baselines(candidates: Mapping[str, Callable[[], Timing]]) -> tuple[dict[str, Timing], dict[str, str]]:
    """Return the times of the baselines that run here, and the reason for each that doesn't."""
    return those_that_run(candidates)


def time_rounds(
    clock: Clock, ours: Run, candidates: Mapping[str, Callable[[], Run]], floor_us: float | None = None
) -> tuple[Timing, dict[str, Timing], dict[str, str]]:
    """Time Envoi and its baselines in rounds; fewer of them if the call takes long.

    candidates: each makes its own inputs, outside the timed part, and returns the call.
    floor_us: of the case; decides how often it is repeated. Returns also the reason for each that doesn't run.
    """

    def tried(make: Callable[[], Run]) -> Callable[[], Run]:
        def attempt() -> Run:
            run = make()
            run()
            if clock.device.type == "cuda":
                torch.cuda.synchronize(clock.device)  # a failing kernel reports its error here
            return run

        return attempt

    runs, missing = those_that_run({name: tried(make) for name, make in candidates.items()})
    long = (floor_us or 0.0) >= LONG_US
    timings = clock.rounds({OURS: ours, **runs}, min(clock.repeat, LONG_REPEAT) if long else None)
    return timings.pop(OURS), timings, missing


def time_replays(
    clock: Clock, ours: Sequence[Run], candidates: Mapping[str, Callable[[], Sequence[Run]]]
) -> tuple[Timing, dict[str, Timing], dict[str, str]]:
    """Time contenders in graphs, see `time_rounds`: calls of a few microseconds, each run on inputs of its own."""
    ours_captured = clock.captured(ours)
    runs, missing = those_that_run(
        {name: lambda make=make: clock.captured(make()) for name, make in candidates.items()}
    )
    timings = clock.replays({OURS: ours_captured, **runs})
    return timings.pop(OURS), timings, missing


def those_that_run(candidates: Mapping[str, Callable[[], T]]) -> tuple[dict[str, T], dict[str, str]]:
    """Return what the candidates make, and the reason for each that raises."""
    found, missing = {}, {}
    for name, take in candidates.items():
        try:
            found[name] = take()
        except Exception as error:  # third-party code, on hardware that it may not know
            missing[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return found, missing


def compiled(fn: Callable, mode: str | None = None) -> Callable:
    """Compile by torch.compile for one shape. Drops earlier compilations: over its limit it falls back to eager."""
    torch._dynamo.reset()
    return torch.compile(fn, dynamic=False, mode=mode)


def copy_of(num_bytes: float, device: torch.device) -> Run:
    """Return a device copy that reads and writes so many bytes together."""
    source = torch.ones(int(num_bytes) // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def sample_rows(num_rows: int, device: torch.device, at_most: int = MAX_ERROR_ROWS) -> torch.Tensor:
    """Return int64 positions of at most `at_most` rows, spread evenly."""
    return torch.linspace(0, num_rows - 1, min(num_rows, at_most), device=device).round().long()
