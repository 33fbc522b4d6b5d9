"""Generated tables of a README: the text between `<!-- bench:SUITE:GPU -->` and `<!-- /bench -->`, from the results."""

import re
from collections.abc import Iterable
from pathlib import Path

from envoi.bench.evidence import BASELINES, SUITES, Measurement, load
from envoi.bench.published import beside
from envoi.bench.summary import baseline_names, means, of_roof
from envoi.table import number, ratio

START = re.compile(r"<!-- bench:([^\s:]*):([^\s:]*) -->\n")
END = "<!-- /bench -->"


def rewrite(path: Path, folder: Path) -> bool:
    """Write the tables of a file from the results in a folder; return True if that changed it."""
    text = path.read_text(encoding="utf-8")
    written = render(text, folder)
    if written != text:
        path.write_text(written, encoding="utf-8")
    return written != text


def render(text: str, folder: Path) -> str:
    """Return `text` with the text between its markers regenerated. Raises ValueError for an unknown marker."""
    results = load(folder)
    parts, rest = [], 0
    for start in START.finditer(text):
        suite, gpu = start.groups()
        if suite not in SUITES:
            raise ValueError(f"bench:{suite}:{gpu}: expected a suite of {', '.join(SUITES)}, got {suite!r}")
        if start.start() < rest:
            raise ValueError(f"bench:{suite}:{gpu}: expected {END} before the next marker, got none")
        end = text.find(END, start.end())
        if end < 0:
            raise ValueError(f"bench:{suite}:{gpu}: expected {END} after it, got none")
        found = [m for m in results.get(gpu, []) if m.suite == suite]
        parts += [text[rest : start.end()], section(suite, gpu, found)]
        rest = end
    return "".join(parts) + text[rest:]


def section(suite: str, gpu: str, measurements: list[Measurement]) -> str:
    """Return the text between two markers: provenance, a table, its geometric means, others' times."""
    if not measurements:
        return f"`{suite}` hasn't been measured on `{gpu}` yet.\n"
    text = f"{_provenance(suite, measurements)}\n\n{_table(measurements)}\n"
    mean = means(measurements)
    if mean:
        text += f"\nGeometric means of the ratios, the least in brackets: {mean}.\n"
    others = beside(suite, measurements)
    return f"{text}\n{others}" if others else text


def _provenance(suite: str, measurements: list[Measurement]) -> str:
    dates = sorted({m.date for m in measurements})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    names = baseline_names(measurements)
    line = (
        f"`{suite}`: {SUITES[suite]}. {_distinct(m.gpu for m in measurements)}, "
        f"torch {_distinct(m.torch for m in measurements)}, triton {_distinct(m.triton for m in measurements)}, "
        f"commit {_distinct(m.commit for m in measurements)}, {when}, n = {_distinct(m.n for m in measurements)}. "
        "Medians in us; a baseline's time is followed by its ratio to Envoi's. Baselines: "
    )
    return line + "; ".join(f"{name}: {BASELINES[name]}" for name in names) + "."


def _table(measurements: list[Measurement]) -> str:
    names = baseline_names(measurements)
    many = any(m.num_gpus > 1 for m in measurements)
    header = [
        "case",
        *(["GPUs"] if many else []),
        "Envoi",
        *names,
        "floor",
        "of roof",
        "TFLOP/s",
        "GB/s",
        "error",
        "torch's error",
    ]
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    lines += [_cells(m, names, many) for m in measurements]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cells(m: Measurement, names: list[str], many: bool) -> list[str]:
    others = (
        f"{number(m.baselines[name])} ({ratio(m.baselines[name], m.ours_us)})" if name in m.baselines else "-"
        for name in names
    )
    rates = (number(m.floor_us), of_roof(m.floor_us, m.ours_us), number(m.tflops), number(m.gb_per_s))
    errors = (f"{m.error[name]:.1e}" for name in ("ours", "torch"))
    return [m.case, *([str(m.num_gpus)] if many else []), number(m.ours_us), *others, *rates, *errors]


def _distinct(values: Iterable[object]) -> str:
    return ", ".join(str(value) for value in dict.fromkeys(values))
