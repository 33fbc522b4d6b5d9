"""Experts in one launch, as `envoi.moe.one_launch` runs them, and whether it should.

    staged   pull, then L1 and L2: in one launch for few rows an expert and for many (`envoi.moe.one_launch`), else in
             two
    fused    the same, one after the other in one launch; L2's first tiles run beside L1's last round

The wait for all tokens takes about as long as the launch that it replaces, and what CTAs would idle for in L1's
last round is little: the others then have the memory, or the power, to themselves.
"""

from dataclasses import dataclass

from envoi.gemm.hopper.config import IN_LONG_TURNS, LONG_K
from envoi.plan.machines import H200
from envoi.runtime.math import cdiv

FORMAT = "fp8_block128"
# The kernel's own config: registers of a thread, stages of its tilings for few and for many rows an expert, the rows of
# an expert up to which the first is used, tokens of a tile of each, features of a unit of L1 and of a tile of L2.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24
STAGES_FEW, STAGES_MANY, FEW_ROWS = 4, 5, 64
MOST_ROWS, MANY_ROWS = 256, 768  # of an expert, up to which, and from which on, L1 and L2 are one launch
TOKENS_FEW, TOKENS_MANY, L1_FEATURES, L2_FEATURES = 64, 128, 256, 128
# What it takes longer than staged: for its pull and waits, and of its products' time. Measured on two H100s.
WAITS_US, SLOWER = 9.0, 0.02


@dataclass(frozen=True)
class FusedExperts:
    """Launch as it would run on a rank.

    consumer_registers, producer_registers: of a thread. num_consumers: of a tile of L1. num_stages: of both GEMMs.
    early_share: of L2's tiles, those that CTAs without a unit in L1's last round take meanwhile.
    saved_us: less time than staged, negative if more.
    """

    consumer_registers: int
    producer_registers: int
    num_consumers: int
    num_stages: int
    early_share: float
    saved_us: float


def fused_experts(
    hidden: int, intermediate: int, num_topk: int, num_tokens: int, num_ranks: int, num_experts: int
) -> FusedExperts:
    """Describe the launch on one of num_ranks ranks, in fp8_block128, by the config of its kernel."""
    rows = num_ranks * num_tokens * num_topk / num_experts
    few = rows <= (IN_LONG_TURNS if hidden > LONG_K else FEW_ROWS)
    tiles = num_experts // num_ranks * max(1, cdiv(round(rows), TOKENS_FEW if few else TOKENS_MANY))
    early = -tiles * cdiv(2 * intermediate, L1_FEATURES) % H200.num_sms
    behind = tiles * cdiv(hidden, L2_FEATURES)
    head = min(behind, early * max(1, round(2 * hidden / intermediate)))
    return FusedExperts(
        CONSUMER_REGISTERS, PRODUCER_REGISTERS, 1 if few else 2, STAGES_FEW if few else STAGES_MANY, head / behind,
        saved_us(hidden, intermediate, num_topk, num_tokens),
    )  # fmt: skip


def pays(hidden: int, intermediate: int, num_topk: int, max_tokens: int, format: str) -> bool:
    """Return whether pull and experts should be one launch, for max_tokens tokens per rank."""
    return format == FORMAT and saved_us(hidden, intermediate, num_topk, max_tokens) > 0.0


def saved_us(hidden: int, intermediate: int, num_topk: int, max_tokens: int) -> float:
    """Return how much less time one launch should take than staged, in us; negative if it takes more."""
    products = 6.0 * max_tokens * num_topk * hidden * intermediate
    return -WAITS_US - SLOWER * products / (H200.tflops[FORMAT] * 1e6)
