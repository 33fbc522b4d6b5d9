"""What uniform random routing gives on average: each token chooses each expert with probability k / N."""

import math

from envoi.gemm.hopper.config import expected_tiles
from envoi.plan.layer import MoeLayer


def rows_per_expert(layer: MoeLayer) -> float:
    """Mean of the binomial distribution of an expert's rows."""
    return layer.num_all_tokens * layer.num_topk / layer.num_experts


def active_experts(layer: MoeLayer) -> float:
    """Experts of a rank that get at least one row, so that their weights are read."""
    return layer.num_local_experts * _any_row(layer)


def taken_tokens(layer: MoeLayer) -> float:
    """Tokens of all ranks that at least one expert of this rank takes; as many as the ranks take of its own."""
    elsewhere = layer.num_experts - layer.num_local_experts
    missed = math.comb(elsewhere, layer.num_topk) / math.comb(layer.num_experts, layer.num_topk)
    return layer.num_all_tokens * (1 - missed)


def pulled_tokens(layer: MoeLayer) -> float:
    """Those of other ranks; as many rows go back where those of a token are summed first."""
    return taken_tokens(layer) * layer.remote_share


def tiles_per_expert(layer: MoeLayer, block_m: int) -> float:
    """Tiles of block_m rows that an expert's rows fill or begin, by the binomial's mean and variance."""
    mean = rows_per_expert(layer)
    deviation = math.sqrt(mean * (1 - layer.num_topk / layer.num_experts))
    if not deviation:
        return math.ceil(mean / block_m)
    return expected_tiles(mean, deviation, _any_row(layer), block_m)


def _any_row(layer: MoeLayer) -> float:
    return 1 - (1 - layer.num_topk / layer.num_experts) ** layer.num_all_tokens
