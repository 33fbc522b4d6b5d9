"""What uniform random routing gives on average: each token chooses each expert with probability k / N."""

import math

from envoi.gemm.config import expected_tiles
from envoi.plan.layer import MoeLayer


def rows_per_expert(layer: MoeLayer) -> float:
    """Mean of the binomial distribution of an expert's rows."""
    return layer.num_all_tokens * layer.num_topk / layer.num_experts


def active_experts(layer: MoeLayer) -> float:
    """Experts of a rank that get at least one row, so that their weights are read."""
    return layer.num_local_experts * _any_row(layer)


def pulled_tokens(layer: MoeLayer) -> float:
    """Tokens of other ranks that at least one expert of this rank takes; as many rows go back where those of a token
    are summed first."""
    missed = 1.0  # by all experts of this rank; a token's experts are distinct
    for i in range(layer.num_topk):
        missed *= max(0, layer.num_experts - layer.num_local_experts - i) / (layer.num_experts - i)
    return (layer.num_ranks - 1) * layer.num_tokens * (1 - missed)


def tiles_per_expert(layer: MoeLayer, block_m: int) -> float:
    """Tiles of block_m rows that an expert's rows fill or begin, by the binomial's mean and variance."""
    mean = rows_per_expert(layer)
    deviation = math.sqrt(mean * (1 - layer.num_topk / layer.num_experts))
    if not deviation:
        return math.ceil(mean / block_m)
    return expected_tiles(mean, deviation, _any_row(layer), block_m)


def _any_row(layer: MoeLayer) -> float:
    return 1 - (1 - layer.num_topk / layer.num_experts) ** layer.num_all_tokens
