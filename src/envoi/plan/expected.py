"""What uniform random routing gives on average: each token chooses each expert with probability k / N."""

import math

from envoi.plan.layer import MoeLayer


def rows_per_expert(layer: MoeLayer) -> float:
    """Mean of the binomial distribution of an expert's rows."""
    return layer.num_all_tokens * layer.num_topk / layer.num_experts


def active_experts(layer: MoeLayer) -> float:
    """Experts of a rank that get at least one row, so that their weights are read."""
    return layer.num_local_experts * _any_row(layer)


def tiles_per_expert(layer: MoeLayer, block_m: int) -> float:
    """Tiles of block_m rows that an expert's rows fill or begin: sum over j >= 0 of P(rows > j * block_m).

    The tail beyond j = 0 is that of the normal distribution with the binomial's mean and variance.
    """
    mean = rows_per_expert(layer)
    deviation = math.sqrt(mean * (1 - layer.num_topk / layer.num_experts))
    if not deviation:
        return math.ceil(mean / block_m)
    tiles, limit = _any_row(layer), mean + 6 * deviation
    for most in range(block_m, math.ceil(limit), block_m):
        tiles += 0.5 * math.erfc((most + 0.5 - mean) / (deviation * math.sqrt(2)))
    return tiles


def _any_row(layer: MoeLayer) -> float:
    return 1 - (1 - layer.num_topk / layer.num_experts) ** layer.num_all_tokens
