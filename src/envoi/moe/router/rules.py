"""Routing rules of real models: one frozen dataclass, and a table by model name."""

from dataclasses import dataclass

from envoi.check import describe, expect_choice, expect_divisible, expect_float32, expect_int

SCORES = ("softmax", "sigmoid", "sqrt_softplus", "softmax_over_topk", "sigmoid_of_topk")
GROUP_SCORES = ("max", "top2_sum")


@dataclass(frozen=True)
class Rule:
    """Rule that turns scores into a selection and weights; `envoi.moe.router.reference` has the order of the steps.

    score: "softmax" over all experts, "sigmoid", "sqrt_softplus" = sqrt(log(1 + e^x)); or top-k on the logits, then
        "softmax_over_topk" (softmax over the k) or "sigmoid_of_topk".
    num_groups, num_topk_groups: experts are cut into equal groups by id and only the best ones compete; 1 = no groups.
    group_score: a group's score is its best key ("max") or the sum of its two best ("top2_sum").
    renormalize: divide the k weights by their sum.
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


@dataclass(frozen=True)
class Preset:
    """Router of a model: its size, its rule, and which biases its checkpoint has."""

    num_experts: int
    num_topk: int
    rule: Rule
    has_expert_bias: bool = False
    has_logit_bias: bool = False


_SOFTMAX = Rule("softmax")
_SIGMOID = Rule("sigmoid")


def _deepseek_v2(num_groups: int, num_topk_groups: int, scale: float) -> Rule:
    return Rule("softmax", num_groups, num_topk_groups, "max", renormalize=False, routed_scale=scale)


PRESETS = {
    "mixtral": Preset(8, 2, _SOFTMAX),
    "olmoe": Preset(64, 8, Rule("softmax", renormalize=False)),
    "qwen3-moe": Preset(128, 8, _SOFTMAX),
    "qwen3-coder-480b": Preset(160, 8, _SOFTMAX),
    "qwen3-next": Preset(512, 10, _SOFTMAX),
    "gpt-oss-20b": Preset(32, 4, Rule("softmax_over_topk", renormalize=False), has_logit_bias=True),
    "gpt-oss-120b": Preset(128, 4, Rule("softmax_over_topk", renormalize=False), has_logit_bias=True),
    "llama4-scout": Preset(16, 1, Rule("sigmoid_of_topk", renormalize=False)),
    "llama4-maverick": Preset(128, 1, Rule("sigmoid_of_topk", renormalize=False)),
    "deepseek-v2": Preset(160, 6, _deepseek_v2(8, 3, 16.0)),
    "deepseek-v2-lite": Preset(64, 6, _deepseek_v2(1, 1, 1.0)),
    "deepseek-v3": Preset(256, 8, Rule("sigmoid", 8, 4, "top2_sum", routed_scale=2.5), has_expert_bias=True),
    "deepseek-v4-flash": Preset(256, 6, Rule("sqrt_softplus", routed_scale=1.5), has_expert_bias=True),
    "deepseek-v4-pro": Preset(384, 6, Rule("sqrt_softplus", routed_scale=1.5), has_expert_bias=True),
    "kimi-k2": Preset(384, 8, Rule("sigmoid", routed_scale=2.827), has_expert_bias=True),
    "kimi-k3": Preset(896, 8, Rule("sigmoid", routed_scale=2.827), has_expert_bias=True),
    "glm-4-moe": Preset(128, 8, _SIGMOID, has_expert_bias=True),
    "glm-5": Preset(256, 8, Rule("sigmoid", routed_scale=2.5), has_expert_bias=True),
    "minimax-m2": Preset(256, 8, _SIGMOID, has_expert_bias=True),
    "minimax-m3": Preset(128, 4, Rule("sigmoid", routed_scale=2.0), has_expert_bias=True),
    "nemotron-super-v3": Preset(512, 22, _SIGMOID, has_expert_bias=True),
    "step-3.7": Preset(288, 8, _SIGMOID, has_expert_bias=True),
}


def preset(model: str) -> Preset:
    """Return the router of a model. Raises ValueError that lists the names."""
    return PRESETS[expect_choice("model", model, PRESETS)]


def rule(model: str) -> Rule:
    """Return the rule of a model: `rule("deepseek-v3")`. Raises ValueError that lists the names."""
    return preset(model).rule
