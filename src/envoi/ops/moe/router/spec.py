"""Constants that a router kernel is compiled for."""

from dataclasses import dataclass

from envoi.constant import Constant
from envoi.ops.moe.router.rules import Rule
from envoi.runtime.math import next_power_of_2

MAX_BLOCK = 1024


def block_sum(hidden: int) -> int:
    """Return the length of the blocks along K in which products are summed; the blocks are added in their order.

    Depends on hidden alone, not on how the work is divided. A long K has a multiple of four blocks, so that two or
    four CTAs have equal parts of it.
    """
    if hidden < 4 * MAX_BLOCK:
        return MAX_BLOCK
    return -(-hidden // (4 * -(-hidden // (4 * MAX_BLOCK)) * 128)) * 128


@dataclass(frozen=True)
class Spec(Constant):
    """Rule and sizes of a router kernel. rule.routed_scale is 1 in here: the scale is an argument.

    by_score: experts are ranked by score + expert_bias, else by logits (+ expert_bias). has_*: which inputs there are;
    want_*: which outputs. gluon: the dialect that the shared functions are compiled in.
    """

    num_experts: int
    k: int
    rule: Rule
    by_score: bool = False
    has_logit_bias: bool = False
    has_expert_bias: bool = False
    hashed: bool = False
    want_logits: bool = False
    want_dense: bool = False
    want_counts: bool = False
    gluon: bool = False

    @property
    def columns(self) -> int:
        """Columns of a tile: num_experts, rounded up to a power of two; at least 16."""
        return max(16, next_power_of_2(self.num_experts))

    @property
    def slots(self) -> int:
        """Slots of a tile: k, rounded up to a power of two."""
        return next_power_of_2(self.k)

    @property
    def group_size(self) -> int:
        """Number of experts in a group."""
        return self.num_experts // self.rule.num_groups

    @property
    def group_slots(self) -> int:
        """Groups of a tile: rule.num_groups, rounded up to a power of two."""
        return next_power_of_2(self.rule.num_groups)

    @property
    def groups_fill(self) -> bool:
        """Return True if numbers of groups and of experts in each are powers of two: a reshape separates them."""
        size = self.group_size
        return self.columns == self.num_experts and size & (size - 1) == 0

    @property
    def whole_softmax(self) -> bool:
        """Return True if the softmax over all experts is needed, not only its ratios.

        Ratios suffice where the largest logit is among the chosen: a table may choose experts far below it.
        """
        return self.rule.score == "softmax" and (self.by_score or self.hashed or not self.rule.renormalize)
