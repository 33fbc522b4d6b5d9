"""Load of experts as Prometheus metrics, by prometheus-client: `pip install "envoi[prometheus]"`."""

from collections.abc import Mapping

import prometheus_client

from envoi.ops.moe.parallel import ExpertParallel


class LoadMetrics:
    """Gauges of how many tokens each expert and each rank had: what an `ExpertParallel` counted in its last 128 calls.

        metrics = LoadMetrics({"layers.0": parallel})     # on one rank: all ranks have the same counts
        prometheus_client.start_http_server(9400)
        metrics.update()                                  # now and then, between two steps

    envoi_expert_tokens{layer, rank, expert}: tokens of those calls together. envoi_rank_tokens{layer, rank}: the same
    of all experts of a rank. envoi_load_imbalance{layer}: the busiest rank's tokens over the mean of all ranks,
    averaged over calls; 1 is even. Layers without a token yet have no samples.

    A scrape reads what the last `update` wrote. It does nothing on the GPU itself, since it comes from a thread of its
    own, at any time: a device synchronisation there would end a CUDA graph's capture. `update` waits for the device.
    registry: where the gauges are registered; the default is prometheus-client's own. Raises ValueError, from
    prometheus-client, if the registry has gauges of these names already.
    """

    def __init__(
        self,
        layers: Mapping[str, ExpertParallel],
        registry: prometheus_client.CollectorRegistry = prometheus_client.REGISTRY,
    ) -> None:
        self._layers = dict(layers)
        self._counted: dict[str, dict[tuple[int, int], int]] = {}
        self._expert = prometheus_client.Gauge(
            "envoi_expert_tokens", "Tokens of an expert in the last calls", ("layer", "rank", "expert"),
            registry=registry,
        )  # fmt: skip
        self._rank = prometheus_client.Gauge(
            "envoi_rank_tokens", "Tokens of a rank's experts in the last calls", ("layer", "rank"), registry=registry
        )
        self._imbalance = prometheus_client.Gauge(
            "envoi_load_imbalance", "Tokens of the busiest rank over the mean of ranks", ("layer",), registry=registry
        )

    def update(self) -> None:
        """Write the present counts of all layers to the gauges; waits for the device."""
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
                self._rank.labels(name, rank).set(sum(tokens[here]))
            for rank, expert in self._counted.get(name, counts).keys() - counts.keys():  # moved meanwhile
                self._expert.remove(name, rank, expert)
            for (rank, expert), count in counts.items():
                self._expert.labels(name, rank, expert).set(count)
            self._counted[name] = counts
            self._imbalance.labels(name).set(busiest.imbalance)
