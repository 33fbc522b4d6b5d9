"""Suites, one file per stage: each builds inputs, ours, baselines, floor and error of its cases."""

from typing import Any

from bench.evidence import SUITES
from bench.shapes import DEFAULTS, Case, Options, fixed_cases
from bench.trial import Bench, Trial

# Fewer for calls that take milliseconds, and for loops of calls; more for the host's time, which varies.
REPEATS = {
    "moe": 20, "moe_drawn": 20, "indexer_exact": 20, "indexer_fast": 20, "host": 200, "host_loop": 10,
    "model": 20, "engine": 4,
}  # fmt: skip
DEFAULT_REPEAT = 100
CPU_REPEAT = 10


def cases(suite: str, options: Options = DEFAULTS) -> list[Case]:
    """Return the cases of a suite in the order of their runs. Raises ValueError for a name that isn't in `SUITES`."""
    if suite not in SUITES:
        raise ValueError(f"suite: expected one of {', '.join(SUITES)}, got {suite!r}")
    if suite.endswith("_drawn"):
        from bench.suites import drawn

        return drawn.cases(suite, options)
    if suite.startswith("host"):
        from bench.suites import host

        return host.cases(suite)
    if suite == "model":
        from bench.suites import model

        return model.cases(options)
    if suite == "engine":
        from bench.suites import engine

        return engine.cases(options)
    return fixed_cases(suite)


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
    elif name == "engine":
        from bench.suites import engine as suite
    elif name.startswith("host"):
        from bench.suites import host as suite
    else:
        from bench.suites import gemm as suite
    return suite
