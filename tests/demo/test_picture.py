"""The demo's picture: nothing covers anything, axes count what there is, labels are plain numbers."""

import re
from functools import cache
from itertools import pairwise

import pytest
import torch

from envoi.ops.moe.parallel.load import Load
from examples.demo.picture import draw, figure, merged

ONE = {"route": 0.0421, "permute": 67.6, "experts": 1102.0, "combine": 69.7}
MANY = {"route": 13.3, "dispatch": 34.3, "experts": 124.0, "combine": 144.7}


@cache
def pictured(num_layers: int, num_experts: int, num_ranks: int):
    load = torch.rand(num_layers, num_experts, generator=torch.Generator().manual_seed(0)) + 0.5
    offsets = tuple(num_experts * rank // num_ranks for rank in range(num_ranks + 1))
    tokens = (1000 * load[:1]).int()
    stages = {"1 rank": ONE, f"{num_ranks} ranks": MANY}
    drawn = figure(load / load.sum(1, keepdim=True), Load(tokens, offsets), stages, "a model on a device")
    drawn.savefig("/dev/null", format="png")  # which places everything
    return drawn


@pytest.fixture(params=[(4, 16, 4), (2, 60, 8), (48, 128, 16), (1, 2, 2)], ids=str)
def sizes(request):
    return request.param


def texts(axes) -> list[str]:
    found = [*axes.texts, *axes.get_xticklabels(), *axes.get_yticklabels(), axes.title]
    return [text.get_text() for text in found if text.get_text()]


def test_every_axis_counts_what_there_is(sizes):
    num_layers, num_experts, _ = sizes
    heat, ranks, bars, _ = pictured(*sizes).axes
    for axes in (heat, ranks):
        ticks = axes.get_xticks()
        assert ticks[0] == 0 and ticks[-1] < num_experts and all(tick == int(tick) for tick in ticks)
        assert len(ticks) == min(num_experts, 16) or 8 <= len(ticks) <= 16
    assert heat.get_yticks()[-1] < num_layers
    assert [text.get_text() for text in bars.get_xticklabels()] == merged([ONE, MANY])


def test_labels_are_plain_numbers(sizes):
    heat, ranks, bars, _ = pictured(*sizes).axes
    for axes in (heat, ranks, bars):
        assert not [text for text in texts(axes) if re.search(r"\de[+-]?\d", text)]
    assert {"0.04", "67.6", "1102", "124", "145"} <= set(texts(bars))


def test_nothing_covers_anything(sizes):
    drawn = pictured(*sizes)
    _, ranks, bars, _ = drawn.axes
    for axes in (ranks, bars):
        legend = axes.get_legend().get_window_extent()
        assert not legend.overlaps(axes.get_window_extent())
        assert not legend.overlaps(axes.xaxis.get_tightbbox())
        assert legend.y0 >= 0 and legend.x1 <= drawn.bbox.x1
    for axes in drawn.axes[:3]:
        labels = [label.get_window_extent() for label in axes.get_xticklabels()]
        assert all(left.x1 < right.x0 for left, right in pairwise(labels))
    titles = [axes.title.get_window_extent() for axes in drawn.axes[:3]]
    assert all(left.x1 < right.x0 for left, right in pairwise(titles))
    legends = [axes.get_legend().get_window_extent() for axes in (ranks, bars)]
    assert legends[0].x1 < legends[1].x0


def test_stages_are_in_the_order_of_each_path():
    assert merged([ONE, MANY]) == ["route", "dispatch", "permute", "experts", "combine"]
    assert merged([MANY, ONE]) == ["route", "permute", "dispatch", "experts", "combine"]
    assert merged([["b"], ["a", "b", "c"]]) == ["a", "b", "c"]


def test_the_file_is_of_the_kind_that_its_name_says(tmp_path):
    load = Load(torch.full((1, 4), -1, dtype=torch.int32), (0, 2, 4))  # no call was made
    for name, beginning in (("a.png", b"\x89PNG"), ("a.pdf", b"%PDF"), ("a.svg", b"<?xml")):
        draw(tmp_path / name, torch.full((1, 4), 0.25), load, {"1 rank": ONE}, "title")
        assert (tmp_path / name).read_bytes().startswith(beginning)
