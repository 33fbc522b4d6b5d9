"""Best baseline of a case, and several cases in a line: geometric means of ratios, where they come from; tables."""

from collections.abc import Iterable, Sequence
from math import exp, log

from bench.evidence import BASELINES, Measurement
from envoi.table import number

OWN_FORMS = (
    "plain", "bf16", "dense", "launched", "counted", "staged", "graph", "concat", "interleaved", "batch_invariant",
    "not_batch_invariant", "as_busy", "unordered", "routed", "separate", "fp8_results",
)  # fmt: skip
# Envoi's own other forms, roofs, and a product without what the epilogue does.
NOT_THE_SAME_WORK = {*OWN_FORMS, "copy", "empty", "tokens", "cublas", "torch_mm"}
NEEDS_NVLINK = {"sgl_deep_gemm"}  # can't run where Envoi's tokens travel otherwise
# Suites in which one of them is what Envoi is compared to: the product is all of the work, or the host's time is.
COUNTS_IN = {"gemm": "cublas", "gemm_fp8": "cublas", "gemm_drawn": "cublas", "host": "torch_mm"}


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
            label = f"{kind}: {name}" if kind else name
            parts.append(f"{label} {mean_and_least(ratios)} over {len(ratios)}")
    return "; ".join(parts) if len(measurements) > 1 else ""


def _kind(m: Measurement) -> str:
    """Return the format or epilogue at the end of a GEMM case's name, the operator at the start of a host case's.

    Other suites have one kind, apart from ranks and how their tokens travel.
    """
    if m.suite.startswith("host"):
        return m.case.partition(" ")[0]
    if m.suite.startswith(("gemm", "grouped")):
        return m.case.rpartition(" ")[2]
    return f"{m.num_gpus} GPUs{' over NCCL' * _is_over_nccl(m)}" if m.num_gpus > 1 else ""


def _is_over_nccl(m: Measurement) -> bool:
    return m.details.get("transport") == "nccl"


def peers(m: Measurement) -> dict[str, float]:
    """Return the baselines of a measurement that do the same work as Envoi, in us."""
    unlike = NOT_THE_SAME_WORK - {COUNTS_IN.get(m.suite)} | (NEEDS_NVLINK if _is_over_nccl(m) else set())
    return {name: us for name, us in m.baselines.items() if name not in unlike}


def best_baseline(m: Measurement) -> tuple[str, float] | None:
    """Return the fastest baseline that does the same work, ("compile", 12.5 us); None if there is none."""
    return min(peers(m).items(), key=lambda item: item[1], default=None)


def own_form(m: Measurement) -> tuple[str, float] | None:
    """Return the fastest of Envoi's own other forms, ("dense", 5.3 us); None if none was measured."""
    found = {name: us for name, us in m.baselines.items() if name in OWN_FORMS}
    return min(found.items(), key=lambda item: item[1], default=None)


def compared(measurements: Iterable[Measurement]) -> list[tuple[Measurement, str, float]]:
    """Measurements with what each is compared to: its best baseline; where no case has one, its own other form."""
    found = list(measurements)
    choose = best_baseline if any(map(best_baseline, found)) else own_form
    chosen = ((m, choose(m)) for m in found)
    return [(m, *other) for m, other in chosen if other is not None]


def mean_and_least(ratios: list[float]) -> str:
    """Return the geometric mean of ratios and the least of them, "1.13x [1.04x]"."""
    return f"{number(exp(sum(map(log, ratios)) / len(ratios)))}x [{number(min(ratios))}x]"


def ratio(theirs_us: float, ours_us: float) -> str:
    """Format theirs / ours: "1.15x" means that Envoi is faster."""
    return f"{number(theirs_us / ours_us)}x"


def provenance(measurements: Sequence[Measurement]) -> str:
    """Hardware, versions, commits, dates and repeats, in a line."""
    dates = sorted({m.date for m in measurements})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return (
        f"{distinct(m.gpu for m in measurements)}, torch {distinct(m.torch for m in measurements)}, "
        f"triton {distinct(m.triton for m in measurements)}, commit {distinct(m.commit for m in measurements)}, "
        f"{when}, n = {distinct(m.n for m in measurements)}."
    )


def table(lines: list[list[str]]) -> str:
    """Return a Markdown table of a header and rows."""
    header, *body = lines
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, ["---", *["---:"] * (len(header) - 1)], *body])


def distinct(values: Iterable[object]) -> str:
    """Return the different values in a line, in the order in which they come."""
    return ", ".join(str(value) for value in dict.fromkeys(values))
