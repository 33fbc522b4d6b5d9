"""demo.png: expert load per layer as a heat map, stage times as bars."""

from pathlib import Path

import torch


def draw(path: Path, load: torch.Tensor, stages: dict[str, dict[str, float]], title: str) -> None:
    """Draw load [layers, N], the fraction of slots, and stages, {series: {stage: milliseconds}}."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (heat, bars) = plt.subplots(1, 2, figsize=(12, 4.2), width_ratios=(3, 2), layout="constrained")
    relative = load * load.shape[1]  # 1 = an even share
    image = heat.imshow(relative, aspect="auto", cmap="viridis", vmin=0)
    for (layer, expert), value in ((index, float(relative[index])) for index in _indices(load)):
        dark = value < 0.6 * float(relative.max())
        heat.text(expert, layer, f"{value:.1f}", ha="center", va="center", fontsize=7, color="w" if dark else "k")
    heat.set(title="Expert load, 1.0 = an even share", xlabel="expert", ylabel="layer", yticks=range(load.shape[0]))
    heat.set_xticks(range(load.shape[1]))
    figure.colorbar(image, ax=heat)
    _stage_bars(bars, stages)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _indices(load: torch.Tensor) -> list[tuple[int, int]]:
    return [(layer, expert) for layer in range(load.shape[0]) for expert in range(load.shape[1])]


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
