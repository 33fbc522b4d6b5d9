"""demo.png: expert load per layer as a heat map, of one layer by rank, stage times as bars."""

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from envoi.ops.moe.parallel.load import Load
from envoi.table import number

MOST_TICKS = 16  # on an axis of experts
MOST_NUMBERS = 32  # experts whose load is written into the heat map


def draw(path: Path, load: torch.Tensor, together: Load, stages: dict[str, dict[str, float]], title: str) -> None:
    """Draw what `figure` returns into a file."""
    figure(load, together, stages, title).savefig(path, dpi=120)


def figure(load: torch.Tensor, together: Load, stages: dict[str, dict[str, float]], title: str) -> Any:
    """Make the picture: load [layers, N], the fraction of slots; the load over ranks; {series: {stage: milliseconds}}.

    The stages of each series are in the order in which they run.
    """
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(17, 4.8), layout="constrained")
    heat, ranks, bars = drawn.subplots(1, 3, width_ratios=(3, 2, 2))
    drawn.colorbar(_heat_map(heat, load * load.shape[1]), ax=heat)
    _rank_bars(ranks, together)
    _stage_bars(bars, stages)
    drawn.suptitle(title, fontsize=10)
    return drawn


def _heat_map(axes: Any, relative: torch.Tensor) -> Any:
    """Draw the load over an even share [layers, N]; return what a colour bar explains."""
    num_layers, num_experts = relative.shape
    image = axes.imshow(relative.tolist(), aspect="auto", cmap="viridis", vmin=0)
    for layer, row in enumerate(relative.tolist() if num_experts <= MOST_NUMBERS else []):
        for expert, value in enumerate(row):
            colour = "w" if value < 0.6 * float(relative.max()) else "k"
            axes.text(expert, layer, f"{value:.1f}", ha="center", va="center", fontsize=7, color=colour)
    axes.set(title="Expert load, 1.0 = an even share", ylabel="layer", yticks=_ticks(num_layers))
    _count_experts(axes, num_experts)
    return image


def _rank_bars(axes: Any, load: Load) -> None:
    """Draw the last call's tokens of each expert, in a colour for each rank, and the mean of all experts."""
    tokens = load.num_tokens_per_expert[-1].clamp(min=0).tolist()
    for rank, (first, last) in enumerate(pairwise(load.expert_offsets)):
        label = f"rank {rank}: {sum(tokens[first:last])}"
        axes.bar(range(first, last), tokens[first:last], color=f"C{rank % 10}", label=label)
    axes.axhline(sum(tokens) / len(tokens), color="k", linestyle="--", linewidth=1, label="mean of an expert")
    found = load.busiest()
    bound = "" if found is None else f"; bound by rank {found.rank}, expert {found.expert}"
    axes.set_title(f"A layer over ranks{bound}", fontsize=11)
    axes.set(ylabel="tokens of the last call", xlim=(-0.6, len(tokens) - 0.4))
    _count_experts(axes, len(tokens))
    _explain(axes)


def _stage_bars(axes: Any, stages: dict[str, dict[str, float]]) -> None:
    """Draw the times of each stage, in the order in which they run, with a bar for each series."""
    names = merged(stages.values())
    width = 0.8 / len(stages)
    for position, (series, times) in enumerate(stages.items()):
        at = [names.index(name) + (position - (len(stages) - 1) / 2) * width for name in times]
        drawn = axes.bar(at, list(times.values()), width, label=series)
        axes.bar_label(drawn, [number(ms) for ms in times.values()], fontsize=8)
    axes.margins(y=0.1)
    axes.set_xticks(range(len(names)), names)
    axes.set(title="The layer, time per stage", ylabel="milliseconds")
    _explain(axes)


def merged(sequences: Iterable[Iterable[str]]) -> list[str]:
    """Return all names once; those of each sequence are in its order, unless two sequences contradict each other."""
    names: list[str] = []
    for sequence in sequences:
        place = 0
        for name in sequence:
            if name not in names:
                names.insert(place, name)
            place = names.index(name) + 1
    return names


def _count_experts(axes: Any, num_experts: int) -> None:
    axes.set(xlabel="expert", xticks=_ticks(num_experts))
    axes.tick_params(axis="x", labelsize=8)


def _ticks(count: int) -> range:
    """Return positions from 0 to below a count, all of them if they are few."""
    return range(0, count, -(-count // MOST_TICKS))


def _explain(axes: Any) -> None:
    """Put the legend below the axes, where it covers nothing."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, fontsize=8, frameon=False, columnspacing=1.0)
