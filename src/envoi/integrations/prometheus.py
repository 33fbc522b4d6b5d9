"""Load of experts as Prometheus metrics, by prometheus-client: `pip install "envoi[prometheus]"`."""

from collections.abc import Mapping, Sequence

import prometheus_client
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from envoi.check import describe
from envoi.ops.moe.parallel import ExpertParallel


class LoadMetrics(Collector):
    """Gauges of how many tokens each expert and each rank had: what an `ExpertParallel` counted in its last 128 calls.

        metrics = LoadMetrics({"layers.0": parallel})     # on one rank: all ranks have the same counts
        prometheus_client.start_http_server(9400)
        metrics.update()                                  # now and then, between two steps

    envoi_expert_tokens{layer, rank, expert}: tokens of those calls together. envoi_rank_tokens{layer, rank}: the same
    of all experts of a rank. envoi_load_imbalance{layer}: the busiest rank's tokens over the mean of all ranks,
    averaged over calls; 1 is even. Layers without a token yet have no samples, nor have places that experts have left.

    A scrape reads what the last `update` wrote. It does nothing on the GPU itself, since it comes from a thread of its
    own, at any time: a device synchronisation there would end a CUDA graph's capture. `update` waits for the device.
    The files of prometheus-client's multiprocess mode hold no samples of collectors, so there too the registry is
    scraped at a port of its own.
    layers: by name, read at each `update`. registry: where the gauges are registered, prometheus-client's own by
    default. Raises ValueError for layers that aren't such a mapping, and, from prometheus-client, if it has gauges of
    these names already.
    """

    def __init__(
        self,
        layers: Mapping[str, ExpertParallel],
        registry: prometheus_client.CollectorRegistry = prometheus_client.REGISTRY,
    ) -> None:
        if not isinstance(layers, Mapping):
            raise ValueError(f"layers: expected a mapping of names to ExpertParallel, got {describe(layers)}")
        for name, parallel in layers.items():
            if not isinstance(parallel, ExpertParallel):
                raise ValueError(f"layers[{name!r}]: expected an ExpertParallel, got {describe(parallel)}")
        self._layers = layers
        self._gauges = _gauges()
        registry.register(self)

    def describe(self) -> Sequence[GaugeMetricFamily]:
        """Return the gauges without samples, for the registry."""
        return _gauges()

    def collect(self) -> Sequence[GaugeMetricFamily]:
        """Return the gauges of the last `update`, for a scrape."""
        return self._gauges

    def update(self) -> None:
        """Write the present counts of all layers to the gauges; waits for the device."""
        expert_tokens, rank_tokens, imbalance = gauges = _gauges()
        for name, parallel in self._layers.items():
            load = parallel.load()
            busiest = load.busiest()
            if busiest is None:
                continue
            tokens = load.num_tokens_per_physical.cpu().clamp(min=0).sum(0).tolist()  # -1: calls that haven't been made
            experts = load.placement or range(len(tokens))
            counts: dict[tuple[int, int], int] = {}
            for rank, first in enumerate(load.expert_offsets[:-1]):
                here = slice(first, load.expert_offsets[rank + 1])
                for expert, count in zip(experts[here], tokens[here], strict=True):
                    if expert >= 0:  # else it is unused
                        counts[rank, expert] = counts.get((rank, expert), 0) + count
                rank_tokens.add_metric((name, str(rank)), sum(tokens[here]))
            for (rank, expert), count in counts.items():
                expert_tokens.add_metric((name, str(rank), str(expert)), count)
            imbalance.add_metric((name,), busiest.imbalance)
        self._gauges = gauges


def _gauges() -> tuple[GaugeMetricFamily, GaugeMetricFamily, GaugeMetricFamily]:
    """Return the gauges of experts, ranks and layers, without samples."""
    return (
        GaugeMetricFamily(
            "envoi_expert_tokens", "Tokens of an expert in the last calls", labels=("layer", "rank", "expert")
        ),
        GaugeMetricFamily(
            "envoi_rank_tokens", "Tokens of a rank's experts in the last calls", labels=("layer", "rank")
        ),
        GaugeMetricFamily(
            "envoi_load_imbalance", "Tokens of the busiest rank over the mean of ranks", labels=("layer",)
        ),
    )
