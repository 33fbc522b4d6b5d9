"""Routers as their models publish them: numbers typed from each config.json or its model's code, not from PRESETS."""

from typing import NamedTuple


class Published(NamedTuple):
    """Router of a model, in the words of its config.json.

    bias: "expert" for one that only selects (e_score_correction_bias), "logit" for one of the linear layer. logits:
    what its code multiplies them by.
    """

    num_experts: int
    num_experts_per_tok: int
    score: str
    norm_topk_prob: bool
    routed_scaling_factor: float = 1.0
    bias: str = ""
    n_group: int = 1
    topk_group: int = 1
    group_score: str = "max"
    logits: float = 1.0


PUBLISHED = {
    "mixtral": Published(8, 2, "softmax", True),
    "olmoe": Published(64, 8, "softmax", False),
    "qwen3-moe": Published(128, 8, "softmax", True),
    "qwen3-coder-480b": Published(160, 8, "softmax", True),
    "qwen3-next": Published(512, 10, "softmax", True),
    "qwen3.5-35b": Published(256, 8, "softmax", True),
    "qwen3.5-122b": Published(256, 8, "softmax", True),
    "qwen3.5-397b": Published(512, 10, "softmax", True),
    "qwen3.6-35b": Published(256, 8, "softmax", True),
    "gpt-oss-20b": Published(32, 4, "softmax_over_topk", False, bias="logit"),
    "gpt-oss-120b": Published(128, 4, "softmax_over_topk", False, bias="logit"),
    "llama4-scout": Published(16, 1, "sigmoid_of_topk", False),
    "llama4-maverick": Published(128, 1, "sigmoid_of_topk", False),
    "deepseek-v2": Published(160, 6, "softmax", False, 16.0, "", 8, 3, "max"),
    "deepseek-v2-lite": Published(64, 6, "softmax", False, 1.0),
    "deepseek-v3": Published(256, 8, "sigmoid", True, 2.5, "expert", 8, 4, "top2_sum"),
    "deepseek-v4-flash": Published(256, 6, "sqrt_softplus", True, 1.5, "expert"),
    "deepseek-v4-pro": Published(384, 6, "sqrt_softplus", True, 2.5, "expert"),
    "kimi-k2": Published(384, 8, "sigmoid", True, 2.827, "expert"),
    "kimi-k3": Published(896, 16, "sigmoid", True, 1.0, "expert"),
    "glm-4.5": Published(160, 8, "sigmoid", True, 2.5, "expert"),
    "glm-4.5-air": Published(128, 8, "sigmoid", True, 1.0, "expert"),
    "glm-4.7-flash": Published(64, 4, "sigmoid", True, 1.8, "expert"),
    "glm-5": Published(256, 8, "sigmoid", True, 2.5, "expert"),
    "glm-5.3-flash": Published(288, 8, "sigmoid", True, 2.5, "expert"),
    "minimax-m2": Published(256, 8, "sigmoid", True, 1.0, "expert"),
    "minimax-m3": Published(128, 4, "sigmoid", True, 2.0, "expert"),
    "nemotron-nano-v3": Published(128, 6, "sigmoid", True, 2.5, "expert"),
    "nemotron-super-v3": Published(512, 22, "sigmoid", True, 5.0, "expert"),
    "nemotron-ultra-v3": Published(512, 22, "sigmoid", True, 5.0, "expert"),
    "step-3.7": Published(288, 8, "sigmoid", True, 3.0, "expert"),
    "ling-3-flash": Published(512, 8, "sigmoid", True, 2.5, "expert", 8, 4, "top2_sum"),
    "ling-3-tiny": Published(128, 8, "sigmoid", True, 2.5, "expert", 8, 4, "top2_sum"),
    "hy-v3": Published(192, 8, "sigmoid", True, 2.826, "expert"),
    "hy-v4": Published(256, 8, "sigmoid", True, 2.827, "expert"),
    "mimo-v2-flash": Published(256, 8, "sigmoid", True, 1.0, "expert"),
    "mimo-v2.5-pro": Published(384, 8, "sigmoid", True, 1.0, "expert"),
    "dots3-note": Published(256, 8, "sigmoid", True, 1.0, "expert"),
    "solar-open-100b": Published(128, 8, "sigmoid", True, 1.0, "expert"),
    "kolibri-1": Published(384, 6, "sigmoid_of_topk", False, 1.0, "expert"),
    "longcat-flash": Published(512 + 256, 12, "softmax", False, 6.0, "expert"),
    "axk1": Published(192, 8, "sigmoid", True, 2.5, "expert", 8, 4, "top2_sum"),
    "beam": Published(256, 8, "sigmoid", True, 2.5, "expert", 8, 4, "top2_sum"),
    "flint": Published(256, 6, "sigmoid", True),
    "inkling-2-small": Published(384, 8, "sigmoid", True, 8.0, "expert"),
    "mistral-large-4": Published(128, 4, "softmax", True, 1.0),
    "muse-spark": Published(256, 8, "sigmoid", True, 1.0, "expert", logits=0.1767766952966369),
}
