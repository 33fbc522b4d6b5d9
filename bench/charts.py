"""SVG charts of the results. The same rows give the same bytes, and a digest of the rows is in the file."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.evidence import Measurement
from bench.libraries import label, version
from bench.pages import PICTURE_BASELINES, PICTURE_TOKENS, case_name, where
from bench.summary import compared
from envoi.table import number, ratio

OURS, THEIRS, BEHIND = "#1b6ca8", ("#e08e45", "#9a9a9a"), "#b8562f"
STYLE = {"svg.hashsalt": "envoi", "svg.fonttype": "none", "font.size": 10, "axes.spines.top": False,
         "axes.spines.right": False}  # fmt: skip


def ratio_rows(measurements: Sequence[Measurement]) -> list[tuple[str, str, float]]:
    """Row of a suite's chart: case, what it is compared to, the other's time over Envoi's."""
    return [(case_name(m), label(m.details, name), us / m.ours_us) for m, name, us in compared(measurements)]


def picture_rows(cases: Sequence[Measurement]) -> list[tuple[str, list[float]]]:
    """Series of the README's picture: a name, and times in us for each number of tokens."""
    others = [
        (" ".join(filter(None, (title, version(cases[0].details, name)))), [m.baselines[name] for m in cases])
        for name, title in PICTURE_BASELINES.items()
    ]
    return [("Envoi", [m.ours_us for m in cases]), *others]


def digest(rows: Sequence[Any]) -> str:
    """Return a name for rows, which the chart made of them carries."""
    return f"rows sha256:{hashlib.sha256(json.dumps(rows).encode()).hexdigest()}"


def draw_ratios(path: Path, title: str, measurements: Sequence[Measurement]) -> None:
    """Horizontal bars of each case's ratio to its best baseline, a line at 1."""
    rows = ratio_rows(measurements)
    with _figure(path, (8.5, 1.0 + 0.3 * len(rows)), digest(rows)) as axes:
        places = range(len(rows))
        values = [value for _, _, value in rows]
        axes.barh(places, values, 0.7, color=[OURS if value >= 1 else BEHIND for value in values])
        axes.axvline(1.0, color="black", linewidth=1)
        for place, (_, name, value) in enumerate(rows):
            axes.annotate(f" {ratio(value, 1.0)} {name}", (max(value, 1.0), place), va="center", fontsize=9)
        axes.set_yticks(places, [case for case, _, _ in rows])
        axes.set(ylim=(len(rows) - 0.4, -0.6), xlim=(0, max(1.0, *values) * 1.35))
        axes.set_xlabel("the other's time over Envoi's: above 1 Envoi is faster")
        axes.figure.suptitle(title, x=0.01, ha="left", fontsize=11)


def draw_picture(path: Path, cases: Sequence[Measurement]) -> None:
    """Grouped bars of one MoE layer's times over tokens a GPU, on a logarithmic scale, numbers on the bars."""
    rows = picture_rows(cases)
    with _figure(path, (8.5, 3.8), digest(rows)) as axes:
        width = 0.8 / len(rows)
        for place, ((title, times), colour) in enumerate(zip(rows, (OURS, *THEIRS), strict=True)):
            left = [at + (place - (len(rows) - 1) / 2) * width for at in range(len(times))]
            axes.bar(left, times, width * 0.94, label=title, color=colour)
            for at, time_us in zip(left, times, strict=True):
                axes.annotate(number(time_us), (at, time_us), ha="center", va="bottom", fontsize=9)
        axes.set_yscale("log")
        axes.set_ylim(100, 2 * max(max(times) for _, times in rows))
        axes.set_xticks(range(len(PICTURE_TOKENS)), [f"{tokens} tokens" for tokens in PICTURE_TOKENS])
        axes.set_ylabel("us, lower is better")
        axes.set_title(f"One MoE layer on {where(cases)}, by the tokens of each GPU", loc="left")
        axes.legend(frameon=False)


@contextmanager
def _figure(path: Path, inches: tuple[float, float], description: str) -> Iterator[Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style: dict[Any, Any] = {**matplotlib.rcParamsDefault, "backend": "Agg", **STYLE}
    with matplotlib.rc_context(style):
        figure, axes = plt.subplots(figsize=inches, layout="constrained")
        yield axes
        about = {"Date": None, "Creator": "envoi bench", "Description": description}
        figure.savefig(path, format="svg", metadata=about, facecolor="white")
        plt.close(figure)
