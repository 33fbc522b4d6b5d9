"""Picture of the README: one MoE layer's times over tokens a GPU."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.evidence import Measurement
from bench.libraries import version
from bench.pages import PICTURE_BASELINES, PICTURE_TOKENS, where
from envoi.table import number

COLOURS = "#1b6ca8", "#e08e45", "#9a9a9a"
# The same rows give the same bytes.
STYLE = {"svg.hashsalt": "envoi", "svg.fonttype": "none", "font.size": 10, "axes.spines.top": False,
         "axes.spines.right": False}  # fmt: skip


def picture_rows(cases: Sequence[Measurement]) -> list[tuple[str, list[float]]]:
    """Return the series of the picture: a name, and times in us for each number of tokens."""
    others = [
        (" ".join(filter(None, (title, version(cases[0].details, name)))), [m.baselines[name] for m in cases])
        for name, title in PICTURE_BASELINES.items()
    ]
    return [("Envoi", [m.ours_us for m in cases]), *others]


def draw_picture(path: Path, cases: Sequence[Measurement]) -> None:
    """Draw grouped bars on a logarithmic scale, numbers on the bars."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = picture_rows(cases)
    style: dict[Any, Any] = {**matplotlib.rcParamsDefault, "backend": "Agg", **STYLE}
    with matplotlib.rc_context(style):
        figure, axes = plt.subplots(figsize=(8.5, 3.8), layout="constrained")
        width = 0.8 / len(rows)
        for place, ((title, times), colour) in enumerate(zip(rows, COLOURS, strict=True)):
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
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": "bench"}, facecolor="white")
        plt.close(figure)
