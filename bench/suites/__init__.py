"""Suites, one file per stage: each builds inputs, ours, baselines, floor and error of its cases."""

from typing import Any

from bench.shapes import Case
from bench.trial import Bench, Trial

# Fewer for calls that take milliseconds, and for loops of calls; more for the host's time, which varies.
REPEATS = {
    "moe": 20, "moe_drawn": 20, "indexer_exact": 20, "indexer_fast": 20, "host": 200, "host_loop": 10,
    "model": 20,
}  # fmt: skip
DEFAULT_REPEAT = 100
CPU_REPEAT = 10


def measure(case: Case, bench: Bench) -> Trial:
    """Run a case through its suite."""
    return module_of(case.suite).measure(case, bench)


def repeat_of(suite: str, on_gpu: bool) -> int:
    """Return the default n."""
    return REPEATS.get(suite, DEFAULT_REPEAT) if on_gpu else CPU_REPEAT


def module_of(name: str) -> Any:
    """Return the module of a suite: measure(case, bench) -> Trial, and for some rehearse(case, device).

    One whose baselines torch.compile compiles has rehearse_compiled(case, device) for their calls.
    """
    if name.startswith("router"):
        from bench.suites import router as suite
    elif name in ("moe", "moe_drawn"):
        from bench.suites import moe as suite
    elif name.startswith("indexer"):
        from bench.suites import indexer as suite
    elif name in ("gemm_grouped", "gemm_weights", "grouped_drawn"):
        from bench.suites import grouped as suite
    elif name == "model":
        from bench.suites import model as suite
    elif name.startswith("host"):
        from bench.suites import host as suite
    else:
        from bench.suites import gemm as suite
    return suite
