"""Choice whether L1 pulls its tokens from peers itself, while it multiplies, or a kernel before it does.

    staged   all tokens, then L1                                pull + L1
    fused    the tokens of the first tiles, then the others     pull * first + L1 + pull * COST

For R ranks with M tokens of h bytes each, k slots a token, E experts, links of B bytes/s:

    pull  = (R - 1) M h p / B            p = 1 - (1 - 1/R)^k: a rank has one of the k
    first = (1 - (1 - w/E)^k) / p        w: experts whose rows the first tiles of all CTAs have
"""

import math
from dataclasses import dataclass

from envoi.plan.machines import H200

# How much longer L1 takes beside movers, as a share of the pull's time. Fitted to `envoi bench moe --case fused` on two
# H200s, 18 cases of commits 97e76e0e78d3 to 62a287bafa6f, of which it misses none by more than 2 % of a call. What is
# hidden is paid for: with these movers L1 that pulls is never the faster one.
COST = 1.03
TILE = 128 * 256  # of L1, rows times features: one for each CTA
FORMAT = "fp8_block128"  # of experts whose L1 can pull
# The kernel's own config: movers of a CTA, registers of a mover's thread and of a consumer's.
MOVERS, MOVER_REGISTERS, CONSUMER_REGISTERS = 3, 40, 232


@dataclass(frozen=True)
class FusedL1:
    """L1 that pulls its tokens, as it would run on a rank.

    num_movers: of a CTA; mover_registers, consumer_registers: of a thread. num_stages: of L1's pipeline.
    first_share: of the tokens that this rank pulls, those without which the first round of tiles can't begin.
    pull_us: of all of them by a kernel of their own. saved_us: less time than a pull and L1 take, negative if more.
    """

    num_movers: int
    mover_registers: int
    consumer_registers: int
    num_stages: int
    first_share: float
    pull_us: float
    saved_us: float


def fused_l1(
    hidden: int, intermediate: int, num_topk: int, num_tokens: int, num_ranks: int, num_experts: int, num_stages: int
) -> FusedL1:
    """Describe L1 that pulls the tokens of num_ranks ranks, in fp8_block128, by the config of its kernel."""
    sizes = hidden, intermediate, num_topk, num_tokens, num_ranks, num_experts
    roles = MOVERS, MOVER_REGISTERS, CONSUMER_REGISTERS
    return FusedL1(*roles, num_stages, *_pull(*sizes), saved_us(*sizes))


def pays(
    hidden: int, intermediate: int, num_topk: int, max_tokens: int, num_ranks: int, num_experts: int, format: str
) -> bool:
    """Return whether L1 should pull its tokens, for max_tokens tokens per rank; num_experts: of all ranks."""
    return format == FORMAT and saved_us(hidden, intermediate, num_topk, max_tokens, num_ranks, num_experts) > 0.0


def saved_us(hidden: int, intermediate: int, num_topk: int, max_tokens: int, num_ranks: int, num_experts: int) -> float:
    """Return how much less time L1 that pulls should take than a pull and L1, in us; negative if it takes more."""
    first, pull_us = _pull(hidden, intermediate, num_topk, max_tokens, num_ranks, num_experts)
    return pull_us * (1 - first - COST)


def _pull(
    hidden: int, intermediate: int, num_topk: int, max_tokens: int, num_ranks: int, num_experts: int
) -> tuple[float, float]:
    """Return `first` and `pull`, in us."""
    needed = 1 - (1 - 1 / num_ranks) ** num_topk
    token_bytes = hidden + hidden / 128 * 4  # with its scale factors
    pull_us = (num_ranks - 1) * max_tokens * token_bytes * needed / (H200.pull_gb_per_s * 1e3)
    rows_per_expert = max_tokens * num_ranks * num_topk / num_experts
    first_rows = H200.num_sms * TILE / (2 * intermediate)
    # Token tiles run fastest: of an expert that has begun all rows are needed.
    first_experts = min(num_experts / num_ranks, math.ceil(first_rows / rows_per_expert)) if rows_per_expert else 0
    return (1 - (1 - first_experts / num_experts) ** num_topk) / needed, pull_us
