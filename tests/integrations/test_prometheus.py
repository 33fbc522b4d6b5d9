"""`integrations.prometheus`: what a scrape reads, of layers that have counted and of one that hasn't."""

from collections.abc import Callable
from typing import Any, cast

import prometheus_client
import pytest
import torch

from envoi import ExpertParallel
from envoi.integrations.prometheus import LoadMetrics
from envoi.ops.moe.parallel.load import Load, empty_history, forget, load_of, note
from envoi.ops.moe.parallel.placement import Placed


def loaded(load: Callable[[], Load]) -> Any:
    """Make an `ExpertParallel` that has a load alone."""
    parallel = cast(Any, object.__new__(ExpertParallel))
    parallel.load = load
    return parallel


def counting(offsets: list[int]) -> tuple[Any, Any]:
    """Make what stands for an `ExpertParallel`, whose `load` counts as the real one does, and the function to count."""
    history = empty_history(offsets[-1], torch.device("cpu"))
    return loaded(lambda: load_of(history, offsets)), lambda *tokens: note(
        history, torch.tensor(tokens, dtype=torch.int32)
    )


def scrape(registry: prometheus_client.CollectorRegistry) -> dict[str, float]:
    lines = prometheus_client.generate_latest(registry).decode().splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


def test_a_scrape_has_the_counts_of_the_last_update():
    registry = prometheus_client.CollectorRegistry()
    (first, count), (second, _) = counting([0, 1, 3]), counting([0, 2, 4])
    metrics = LoadMetrics({"layers.0": first, "layers.1": second}, registry)
    assert scrape(registry) == {}
    count(2, 1, 1)
    count(6, 0, 2)
    assert scrape(registry) == {}  # nothing is read from the device by a scrape
    metrics.update()
    of = {  # layers.1 has no tokens: no samples
        'envoi_expert_tokens{expert="0",layer="layers.0",rank="0"}': 8.0,
        'envoi_expert_tokens{expert="1",layer="layers.0",rank="1"}': 1.0,
        'envoi_expert_tokens{expert="2",layer="layers.0",rank="1"}': 3.0,
        'envoi_rank_tokens{layer="layers.0",rank="0"}': 8.0,
        'envoi_rank_tokens{layer="layers.0",rank="1"}': 4.0,
        'envoi_load_imbalance{layer="layers.0"}': (2 / 2 + 6 / 4) / 2,
    }
    assert scrape(registry) == of
    count(0, 4, 0)
    metrics.update()
    assert scrape(registry)['envoi_expert_tokens{expert="1",layer="layers.0",rank="1"}'] == 5.0


def test_a_placement_has_samples_of_experts_where_they_are():
    registry, history = prometheus_client.CollectorRegistry(), empty_history(4, torch.device("cpu"))
    placement = [0, 1, 1, -1]
    placed = Placed.on(torch.device("cpu"), placement, 2, 0)
    parallel = loaded(lambda: load_of(history, [0, 2, 4], placed, tuple(placement)))
    metrics = LoadMetrics({"layers.0": parallel}, registry)

    def tokens() -> dict[str, float]:
        note(history, torch.tensor([5, 2, 3, 0], dtype=torch.int32))
        metrics.update()
        found = scrape(registry)
        return {name[len("envoi_expert_tokens") :]: n for name, n in found.items() if "expert_tokens" in name}

    label = '{{expert="{}",layer="layers.0",rank="{}"}}'.format
    assert tokens() == {label(0, 0): 5.0, label(1, 0): 2.0, label(1, 1): 3.0}
    placement[:] = [1, 1, 0, 0]
    placed.update(placement)
    forget(history)
    metrics.update()
    assert scrape(registry) == {}, "samples of the placement before, when nothing is counted of the new one"
    assert tokens() == {label(1, 0): 7.0, label(0, 1): 3.0}
    assert scrape(registry)['envoi_rank_tokens{layer="layers.0",rank="1"}'] == 3.0


def test_layers_are_those_of_the_last_update():
    registry, layers = prometheus_client.CollectorRegistry(), cast(Any, {})
    metrics = LoadMetrics(layers, registry)
    (layers["layers.0"], count), (fewer, count_fewer) = counting([0, 1, 2, 3]), counting([0, 3])
    count(1, 2, 3)
    metrics.update()
    assert scrape(registry)['envoi_rank_tokens{layer="layers.0",rank="2"}'] == 3.0
    layers["layers.0"] = fewer  # as after `without`
    count_fewer(4, 5, 6)
    metrics.update()
    ranks = {name: n for name, n in scrape(registry).items() if "rank_tokens" in name}
    assert ranks == {'envoi_rank_tokens{layer="layers.0",rank="0"}': 15.0}
    del layers["layers.0"]
    metrics.update()
    assert scrape(registry) == {}


def test_a_second_exporter_needs_a_registry_of_its_own():
    registry = prometheus_client.CollectorRegistry()
    LoadMetrics({}, registry)
    with pytest.raises(ValueError, match="Duplicated"):
        LoadMetrics({}, registry)


def test_layers_that_are_none_are_refused_before_the_registry_has_gauges():
    registry, (parallel, _) = prometheus_client.CollectorRegistry(), counting([0, 2])
    for layers, message in (
        ([parallel], "^layers: expected a mapping of names to ExpertParallel, got list"),
        ({"a": parallel, "b": None}, r"^layers\['b'\]: expected an ExpertParallel, got NoneType"),
    ):
        with pytest.raises(ValueError, match=message):
            LoadMetrics(cast(Any, layers), registry)
    LoadMetrics({"a": parallel}, registry)
