"""Rule of a router, and the constants that its kernels are compiled for. Rules of real models are in `presets`."""

from dataclasses import dataclass

from envoi.check import describe, expect_choice, expect_divisible, expect_float32, expect_int
from envoi.constant import Constant
from envoi.runtime.math import next_power_of_2

MAX_BLOCK = 1024
RANKED_BY_LOGITS = ("softmax_over_topk", "sigmoid_of_topk", "identity")  # whatever is added for selection
SCORES = ("softmax", "sigmoid", "sqrt_softplus", *RANKED_BY_LOGITS)
GROUP_SCORES = ("max", "top2_sum")


@dataclass(frozen=True)
class Rule:
    """Rule that turns scores into a selection and weights; `envoi.ops.moe.router.reference` has the order of the steps.

    score: "softmax" over all experts, "sigmoid", "sqrt_softplus" = sqrt(log(1 + e^x)); or top-k on the logits, then
        "softmax_over_topk" (softmax over the k), "sigmoid_of_topk" or "identity" (the logits themselves are the
        weights; only with renormalize=False, since they may add up to 0).
    num_groups, num_topk_groups: experts are cut into equal groups by id and only the best ones compete; 1 = no groups.
    group_score: a group's score is its best key ("max") or the sum of its two best ("top2_sum").
    renormalize: divide the k weights by (their sum + 1e-20), as DeepSeek-V3, GLM and Kimi do. They add up to 1 unless
        the sum is about as small: sigmoids of -50 for 8 experts that only expert_bias lifts give weights that add up
        to 0.13, where a model that divides by the sum alone (MiniMax-M2) has 1.
    routed_scale: multiplies the weights last.
    """

    score: str = "softmax"
    num_groups: int = 1
    num_topk_groups: int = 1
    group_score: str = "max"
    renormalize: bool = True
    routed_scale: float = 1.0

    def __post_init__(self):
        expect_choice("rule.score", self.score, SCORES)
        expect_choice("rule.group_score", self.group_score, GROUP_SCORES)
        expect_int("rule.num_groups", self.num_groups, 1)
        expect_int("rule.num_topk_groups", self.num_topk_groups, 1, self.num_groups, "at most num_groups")
        expect_float32("rule.routed_scale", self.routed_scale)
        if not isinstance(self.renormalize, bool):
            raise ValueError(f"rule.renormalize: expected True or False, got {describe(self.renormalize)}")
        if self.score == "identity" and self.renormalize:
            raise ValueError("rule.renormalize: expected False for 'identity', whose weights may add up to 0, got True")

    def check_num_experts(self, num_experts: int, k: int) -> None:
        """Raise ValueError unless the groups divide the experts and k experts are left in the kept groups."""
        if num_experts % self.num_groups:  # a traced size can't be printed, so the reason is only written for a refusal
            expect_divisible("gate.shape[0]", num_experts, self.num_groups, f"rule.num_groups is {self.num_groups}")
        size = num_experts // self.num_groups
        if self.num_groups > 1 and self.group_score == "top2_sum" and size < 2:
            raise ValueError(f"rule.group_score: expected groups of at least 2 experts for 'top2_sum', got {size}")
        if self.num_topk_groups * size < k:
            kept = f"{self.num_topk_groups} groups of {size} experts"
            raise ValueError(f"k: expected at most {self.num_topk_groups * size} ({kept} compete), got {k}")


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
    def contenders(self) -> int:
        """Slots of a tile's k best experts and the next: k + 1, rounded up to a power of two."""
        return next_power_of_2(self.k + 1)

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
