"""Capacity of the pool that dispatch fills, and the number of experts per wave."""

import math
from collections.abc import Sequence

IMBALANCE = 2  # tiles per SM and wave, so that experts with many rows don't stall the other SMs


def pool_capacity(
    num_ranks: int, max_tokens: int, num_topk: int, num_local_experts: int, block_ms: Sequence[int]
) -> int:
    """Return the rows of the pool that dispatch fills, enough for any routing and for each of `block_ms`.

    max_tokens: per rank. Worst case: every token of every rank arrives here, at most once for each expert of this
    rank; each expert begins on a tile boundary, and the total is a multiple of every block_m.

    Example: 8 ranks of 256 tokens, top-8, 32 local experts, tiles of 8 to 192: 16384 + 32 * 191 = 22496 -> 22656.
    """
    rows = num_ranks * max_tokens * min(num_topk, num_local_experts)
    padding = num_local_experts * (max(block_ms) - 1)
    unit = math.lcm(*block_ms)
    return -(-(rows + padding) // unit) * unit


def experts_per_wave(
    rows_per_expert: float, intermediate: int, num_local_experts: int, block_m: int, block_n: int, num_sms: int
) -> int:
    """Return the number of local experts per wave: small, so that transfers start early, but with enough tiles.

    Enough is IMBALANCE tiles of L1 for each SM; the count is rounded up to a divisor of num_local_experts. With less
    than one row per expert, all experts form one wave.

    Example: 256 rows per expert, intermediate 2048, tiles of 128 x 128, 148 SMs, 32 experts: 64 tiles per expert, so 5,
    and 8 divides 32.
    """
    if rows_per_expert < 1:
        return num_local_experts
    tiles = -(-math.ceil(rows_per_expert) // block_m) * -(-2 * intermediate // block_n)
    experts = min(-(-IMBALANCE * num_sms // tiles), num_local_experts)
    return next(count for count in range(experts, num_local_experts + 1) if num_local_experts % count == 0)
