"""demo.png: expert load per layer as a heat map, of one layer by rank, stage times as bars."""

from itertools import pairwise
from pathlib import Path

import torch

from envoi.moe.parallel.load import Load


def draw(path: Path, load: torch.Tensor, together: Load, stages: dict[str, dict[str, float]], title: str) -> None:
    """Draw load [layers, N], the fraction of slots; the load over ranks; stages, {series: {stage: milliseconds}}."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (heat, ranks, bars) = plt.subplots(
        1, 3, figsize=(17, 4.2), width_ratios=(3, 2, 2), layout="constrained"
    )  # fmt: skip
    relative = load * load.shape[1]  # 1 = an even share
    image = heat.imshow(relative, aspect="auto", cmap="viridis", vmin=0)
    for (layer, expert), value in ((index, float(relative[index])) for index in _indices(load)):
        dark = value < 0.6 * float(relative.max())
        heat.text(expert, layer, f"{value:.1f}", ha="center", va="center", fontsize=7, color="w" if dark else "k")
    heat.set(title="Expert load, 1.0 = an even share", xlabel="expert", ylabel="layer", yticks=range(load.shape[0]))
    heat.set_xticks(range(load.shape[1]))
    figure.colorbar(image, ax=heat)
    _rank_bars(ranks, together)
    _stage_bars(bars, stages)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _indices(load: torch.Tensor) -> list[tuple[int, int]]:
    return [(layer, expert) for layer in range(load.shape[0]) for expert in range(load.shape[1])]


def _rank_bars(axes, load: Load) -> None:
    """Draw the last call's tokens of each expert, in a colour for each rank, and the mean of all experts."""
    tokens = load.num_tokens_per_expert[-1].clamp(min=0).tolist()
    for rank, (first, last) in enumerate(pairwise(load.expert_offsets)):
        label = f"rank {rank}: {sum(tokens[first:last])}"
        axes.bar(range(first, last), tokens[first:last], color=f"C{rank % 10}", label=label)
    axes.axhline(sum(tokens) / len(tokens), color="k", linestyle="--", linewidth=1)
    found = load.busiest()
    bound = "" if found is None else f"; bound by rank {found.rank}, expert {found.expert}"
    axes.set(title=f"One MoE layer over ranks{bound}", xlabel="expert", ylabel="tokens of the last call")
    axes.legend()


def _stage_bars(axes, stages: dict[str, dict[str, float]]) -> None:
    names = list(dict.fromkeys(name for times in stages.values() for name in times))
    width = 0.8 / len(stages)
    for number, (series, times) in enumerate(stages.items()):
        at = [names.index(name) + (number - (len(stages) - 1) / 2) * width for name in times]
        drawn = axes.bar(at, list(times.values()), width, label=series)
        axes.bar_label(drawn, fmt="%.2g", fontsize=8)
    axes.set_xticks(range(len(names)), names)
    axes.set(title="One MoE layer, time per stage", ylabel="milliseconds")
    axes.legend()
