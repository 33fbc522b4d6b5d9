"""Suites, one file per stage: each builds inputs, ours, baselines, floor and error of its cases."""

from collections.abc import Callable

from envoi.bench.shapes import Case
from envoi.bench.trial import Bench, Trial

REPEATS = {"moe": 20, "indexer_exact": 20, "indexer_fast": 20}  # calls that take milliseconds
DEFAULT_REPEAT = 100
CPU_REPEAT = 10


def measure(case: Case, bench: Bench) -> Trial:
    """Run a case through its suite."""
    return _suite(case.suite)(case, bench)


def repeat_of(suite: str, on_gpu: bool) -> int:
    """Return the default n."""
    return REPEATS.get(suite, DEFAULT_REPEAT) if on_gpu else CPU_REPEAT


def _suite(name: str) -> Callable[[Case, Bench], Trial]:
    if name.startswith("router"):
        from envoi.bench.suites import router as suite
    elif name == "moe":
        from envoi.bench.suites import moe as suite
    elif name.startswith("indexer"):
        from envoi.bench.suites import indexer as suite
    elif name in ("gemm_grouped", "gemm_weights"):
        from envoi.bench.suites import grouped as suite
    else:
        from envoi.bench.suites import gemm as suite
    return suite.measure
