"""Summary of several cases in a line: geometric means of ratios."""

from collections.abc import Iterable
from math import exp, log

from envoi.bench.evidence import BASELINES, Measurement
from envoi.table import number


def baseline_names(measurements: Iterable[Measurement]) -> list[str]:
    """Return the baselines that occur, in the order of `BASELINES`."""
    found = {name for m in measurements for name in m.baselines}
    return [name for name in BASELINES if name in found]


def of_roof(floor_us: float | None, ours_us: float) -> str:
    """Return the fraction of the roof, "95 %"; "-" if there is none."""
    return "-" if floor_us is None else f"{100 * floor_us / ours_us:.0f} %"


def means(measurements: list[Measurement]) -> str:
    """Return, for each kind of case and each baseline, the geometric mean of its ratios and the least of them.

    "bf16: cublas 1.02x [0.97x] over 9; .." - "" for a single case.
    """
    groups: dict[str, list[Measurement]] = {}
    for m in measurements:
        groups.setdefault(_kind(m), []).append(m)
    parts = []
    for kind, members in groups.items():
        for name in baseline_names(members):
            ratios = [m.baselines[name] / m.ours_us for m in members if name in m.baselines]
            mean = exp(sum(map(log, ratios)) / len(ratios))
            label = f"{kind}: {name}" if kind else name
            parts.append(f"{label} {number(mean)}x [{number(min(ratios))}x] over {len(ratios)}")
    return "; ".join(parts) if len(measurements) > 1 else ""


def _kind(m: Measurement) -> str:
    """Return the format or epilogue at the end of a GEMM case's name; other suites have one kind, apart from ranks."""
    if m.suite.startswith("gemm"):
        return m.case.rpartition(" ")[2]
    return f"{m.num_gpus} GPUs" if m.num_gpus > 1 else ""
