"""Expected loads under uniform random routing: each token chooses each expert with probability k / N."""

import math

from envoi.ops.gemm.hopper.time_model import expected_tiles
from envoi.plan.layer import MoeLayer


def rows_per_expert(layer: MoeLayer) -> float:
    """Return the mean of the binomial distribution of an expert's rows."""
    return layer.num_all_tokens * layer.num_topk / layer.num_experts


def active_experts(layer: MoeLayer) -> float:
    """Return the expected number of a rank's experts with at least one row, whose weights are read."""
    return layer.num_local_experts * _any_row(layer)


def taken_tokens(layer: MoeLayer) -> float:
    """Return the expected tokens, from all ranks, with an expert on this rank; as many as all ranks take of its own."""
    elsewhere = layer.num_experts - layer.num_local_experts
    missed = math.comb(elsewhere, layer.num_topk) / math.comb(layer.num_experts, layer.num_topk)
    return layer.num_all_tokens * (1 - missed)


def pulled_tokens(layer: MoeLayer) -> float:
    """Return the expected tokens this rank pulls from peers; with presum also the rows it sends back."""
    return taken_tokens(layer) * layer.remote_share


def tiles_per_expert(layer: MoeLayer, block_m: int) -> float:
    """Return the expected tiles of block_m rows, whole or partial, per expert, by the binomial's mean and variance."""
    mean = rows_per_expert(layer)
    deviation = math.sqrt(mean * (1 - layer.num_topk / layer.num_experts))
    if not deviation:
        return math.ceil(mean / block_m)
    return expected_tiles(mean, deviation, _any_row(layer), block_m)


def _any_row(layer: MoeLayer) -> float:
    return 1 - (1 - layer.num_topk / layer.num_experts) ** layer.num_all_tokens
