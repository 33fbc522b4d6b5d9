"""Room for the rows that a rank may get, and how many experts are worked on at a time."""

import math
from collections.abc import Sequence

IMBALANCE = 2  # tiles a wave should have for each SM, so that experts with many rows keep no SM waiting


def pool_capacity(
    num_ranks: int, max_tokens: int, num_topk: int, num_local_experts: int, block_ms: Sequence[int]
) -> int:
    """Rows of the pool that dispatch fills, whatever the routing and whichever of `block_ms` is used.

    max_tokens: of one rank. The worst case has every token of every rank here, at most once for each expert of this
    rank; each expert begins on a tile, and the whole is a multiple of every block_m.

    Example: 8 ranks of 256 tokens, top-8, 32 local experts, tiles of 8 to 192: 16384 + 32 * 191 = 22496 -> 22656.
    """
    rows = num_ranks * max_tokens * min(num_topk, num_local_experts)
    padding = num_local_experts * (max(block_ms) - 1)
    unit = math.lcm(*block_ms)
    return -(-(rows + padding) // unit) * unit


def experts_per_wave(
    rows_per_expert: float, intermediate: int, num_local_experts: int, block_m: int, block_n: int, num_sms: int
) -> int:
    """Local experts that go through L1 and L2 before the next ones: few, so that the wire starts early, but enough.

    Enough is IMBALANCE tiles of L1 for each SM; the count is rounded up to a divisor of num_local_experts. With less
    than one row an expert, all go at once.

    Example: 256 rows an expert, intermediate 2048, tiles of 128 x 128, 148 SMs, 32 experts: 64 tiles an expert, so 5,
    and 8 divides 32.
    """
    if rows_per_expert < 1:
        return num_local_experts
    tiles = -(-math.ceil(rows_per_expert) // block_m) * -(-2 * intermediate // block_n)
    experts = min(-(-IMBALANCE * num_sms // tiles), num_local_experts)
    return next(count for count in range(experts, num_local_experts + 1) if num_local_experts % count == 0)
