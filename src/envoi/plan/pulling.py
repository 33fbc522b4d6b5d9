"""Choice whether L1 pulls its tokens from peers itself, while it multiplies, or a kernel before it does.

    staged   all tokens, then L1                                 pull
    fused    the tokens of the first tiles, then L1 and the others     pull * first + LOST_US

For R ranks with M tokens of h bytes each, k slots a token, E experts, links of B bytes/s:

    pull  = (R - 1) M h p / B            p = 1 - (1 - 1/R)^k: a rank has one of the k
    first = (1 - (1 - w/E)^k) / p        w: experts whose rows the first tiles of all CTAs have
"""

import math

from envoi.plan.machines import H200

# What is lost besides, measured on two H200s with 2048 tokens and more: 24 us, once 50, of which the launch that orders
# rows is 7.
LOST_US = 30.0
LEAST_GAIN = 0.025  # of the products' time, about 2 % of a call's
# Numbers of ranks on which L1 that pulls was measured to be faster. On two it takes 1 to 4 % longer, on more it is yet
# to run.
MEASURED_RANKS: tuple[int, ...] = ()
TILE = 128 * 256  # of L1, rows times features: one for each CTA


def pays(
    hidden: int, intermediate: int, num_topk: int, max_tokens: int, num_ranks: int, num_experts: int, format: str
) -> bool:
    """Return whether L1 should pull its tokens, for max_tokens tokens per rank; num_experts: of all ranks."""
    if num_ranks not in MEASURED_RANKS or format != "fp8_block128":
        return False
    products_us = 6 * hidden * intermediate * max_tokens * num_topk / (H200.gemm_tflops(format, 128) * 1e6)
    return saved_us(hidden, intermediate, num_topk, max_tokens, num_ranks, num_experts) > LEAST_GAIN * products_us


def saved_us(hidden: int, intermediate: int, num_topk: int, max_tokens: int, num_ranks: int, num_experts: int) -> float:
    """Return how much less time L1 that pulls should take than a pull and L1, in us; negative if it takes more."""
    needed = 1 - (1 - 1 / num_ranks) ** num_topk
    token_bytes = hidden + hidden / 128 * 4  # with its scale factors
    pull_us = (num_ranks - 1) * max_tokens * token_bytes * needed / (H200.pull_gb_per_s * 1e3)
    rows_per_expert = max_tokens * num_ranks * num_topk / num_experts
    first_rows = H200.num_sms * TILE / (2 * intermediate)
    # Token tiles run fastest: of an expert that has begun all rows are needed.
    first_experts = min(num_experts / num_ranks, math.ceil(first_rows / rows_per_expert)) if rows_per_expert else 0
    first = (1 - (1 - first_experts / num_experts) ** num_topk) / needed
    return pull_us * (1 - first) - LOST_US
