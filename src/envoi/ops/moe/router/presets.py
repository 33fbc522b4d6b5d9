"""Routers of real models by name, with the source of each one's numbers; and names that are refused, with the reason.

Numbers of experts, k, groups, renormalisation and factor are those of the published config.json of the checkpoints
that `Preset.source` names on the Hugging Face hub, read in public copies of it, unless the source says otherwise.
What no config.json says (a score that is the only one in the model's code, whether there is a bias) is that code's.
Defaults of a configuration class are no source where a file could be read: they are one model's of a family at best.
"""

from dataclasses import dataclass

from envoi.check import expect_choice
from envoi.ops.moe.router.spec import Rule


@dataclass(frozen=True)
class Preset:
    """Router of a model: its size, its rule, and which biases its checkpoint has.

    num_experts, num_topk: rows of the gate, and k. alpha: what the logits are multiplied by first.
    source: the checkpoints that have these numbers, and where the numbers come from if not from config.json.
    """

    num_experts: int
    num_topk: int
    rule: Rule
    has_expert_bias: bool = False
    has_logit_bias: bool = False
    alpha: float = 1.0
    source: str = ""


_SOFTMAX = Rule("softmax")
_GPT_OSS = Rule("softmax_over_topk", renormalize=False)
_LLAMA4 = Rule("sigmoid_of_topk", renormalize=False)


def _unbiased(num_experts: int, num_topk: int, source: str, rule: Rule = _SOFTMAX) -> Preset:
    return Preset(num_experts, num_topk, rule, source=source)


def _biased(num_experts: int, num_topk: int, source: str, scale: float, score: str = "sigmoid") -> Preset:
    return Preset(num_experts, num_topk, Rule(score, routed_scale=scale), True, source=source)


def _grouped(num_experts: int, num_topk: int, source: str, scale: float) -> Preset:
    """Make a router of the eight groups of DeepSeek-V3, of which four compete."""
    rule = Rule("sigmoid", 8, 4, "top2_sum", routed_scale=scale)
    return Preset(num_experts, num_topk, rule, True, source=source)


def _defaults(config: str, checkpoint: str) -> str:
    """Name a source that isn't a file: the defaults that a class of transformers has for a checkpoint."""
    return f"{checkpoint}: defaults of {config} in transformers 5.23; its config.json wasn't read"


PRESETS = {
    "mixtral": _unbiased(8, 2, "mistralai/Mixtral-8x7B-v0.1, mistralai/Mixtral-8x22B-v0.1"),
    "olmoe": _unbiased(64, 8, "allenai/OLMoE-1B-7B-0924", Rule("softmax", renormalize=False)),
    "qwen3-moe": _unbiased(128, 8, "Qwen/Qwen3-30B-A3B, Qwen/Qwen3-235B-A22B, Qwen/Qwen3-VL-30B-A3B-Instruct"),
    "qwen3-coder-480b": _unbiased(160, 8, "Qwen/Qwen3-Coder-480B-A35B-Instruct"),
    "qwen3-next": _unbiased(512, 10, "Qwen/Qwen3-Next-80B-A3B-Thinking"),
    "qwen3.5-35b": _unbiased(256, 8, "Qwen/Qwen3.5-35B-A3B"),
    "qwen3.5-122b": _unbiased(256, 8, "Qwen/Qwen3.5-122B-A10B"),
    "qwen3.5-397b": _unbiased(512, 10, "Qwen/Qwen3.5-397B-A17B"),
    "qwen3.6-35b": _unbiased(256, 8, "nvidia/Qwen3.6-35B-A3B-NVFP4"),
    "gpt-oss-20b": Preset(32, 4, _GPT_OSS, has_logit_bias=True, source="openai/gpt-oss-20b"),
    "gpt-oss-120b": Preset(128, 4, _GPT_OSS, has_logit_bias=True, source="openai/gpt-oss-120b"),
    "llama4-scout": _unbiased(16, 1, "meta-llama/Llama-4-Scout-17B-16E-Instruct", _LLAMA4),
    "llama4-maverick": _unbiased(128, 1, "meta-llama/Llama-4-Maverick-17B-128E-Instruct", _LLAMA4),
    "deepseek-v2": _unbiased(
        160, 6, "deepseek-ai/DeepSeek-V2", Rule("softmax", 8, 3, "max", renormalize=False, routed_scale=16.0)
    ),
    "deepseek-v2-lite": _unbiased(64, 6, "deepseek-ai/DeepSeek-V2-Lite", Rule("softmax", renormalize=False)),
    "deepseek-v3": _grouped(
        256, 8, "deepseek-ai/DeepSeek-V3, deepseek-ai/DeepSeek-R1, deepseek-ai/DeepSeek-V3.2", 2.5
    ),
    "deepseek-v4-flash": _biased(256, 6, "deepseek-ai/DeepSeek-V4-Flash", 1.5, "sqrt_softplus"),
    "deepseek-v4-pro": _biased(384, 6, "deepseek-ai/DeepSeek-V4-Pro", 2.5, "sqrt_softplus"),
    "kimi-k2": _biased(384, 8, "moonshotai/Kimi-K2-Instruct, moonshotai/Kimi-K2.5, nvidia/Kimi-K2.6-NVFP4", 2.827),
    "kimi-k3": _biased(896, 16, "moonshotai/Kimi-K3", 1.0),
    "glm-4.5": _biased(160, 8, "zai-org/GLM-4.5, zai-org/GLM-4.7-FP8; slime's script of GLM-4.5", 2.5),
    "glm-4.5-air": _biased(128, 8, "zai-org/GLM-4.5-Air, zai-org/GLM-4.5V; slime's script of GLM-4.5-Air", 1.0),
    "glm-4.7-flash": _biased(64, 4, "zai-org/GLM-4.7-Flash; slime's script of it", 1.8),
    "glm-5": _biased(256, 8, "zai-org/GLM-5, zai-org/GLM-5.1, zai-org/GLM-5.2", 2.5),
    "glm-5.3-flash": _biased(288, 8, "zai-org/GLM-5.3-Flash", 2.5),
    "minimax-m2": _biased(256, 8, "MiniMaxAI/MiniMax-M2.5, MiniMaxAI/MiniMax-M2.7; slime's script of MiniMax-M2", 1.0),
    "minimax-m3": _biased(128, 4, "MiniMaxAI/MiniMax-M3", 2.0),
    "nemotron-nano-v3": _biased(128, 6, "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 2.5),
    "nemotron-super-v3": _biased(512, 22, "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8", 5.0),
    "nemotron-ultra-v3": _biased(512, 22, "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", 5.0),
    "step-3.7": _biased(288, 8, "stepfun-ai/Step-3.7-Flash", 3.0),
    "ling-3-flash": _grouped(512, 8, "inclusionAI/Ling-3.0-flash", 2.5),
    "ling-3-tiny": _grouped(128, 8, "inclusionAI/Ling-3.0-tiny", 2.5),
    "hy-v3": _biased(192, 8, "tencent/Hy3", 2.826),
    "hy-v4": _biased(256, 8, "tencent/Hy4-preview", 2.827),
    "mimo-v2-flash": _biased(256, 8, "XiaomiMiMo/MiMo-V2-Flash (a factor of null is 1)", 1.0),
    "mimo-v2.5-pro": _biased(384, 8, "XiaomiMiMo/MiMo-V2.5-Pro (a factor of null is 1)", 1.0),
    "dots3-note": _biased(256, 8, "dots-studio/dots3-note-prev", 1.0),
    "solar-open-100b": _biased(128, 8, "upstage/Solar-Open-100B", 1.0),
    "kolibri-1": Preset(
        384, 6, Rule("sigmoid_of_topk", renormalize=False), has_expert_bias=True, source="Aleph-Alpha/Kolibri-1"
    ),
    "longcat-flash": Preset(  # 512 experts and 256 that are the identity: `split_identity`
        768, 12, Rule("softmax", renormalize=False, routed_scale=6.0), has_expert_bias=True,
        source="meituan-longcat/LongCat-Flash-Chat; the factor: default of LongcatFlashConfig in transformers 5.23",
    ),
    "axk1": _grouped(192, 8, _defaults("AXK1Config", "skt/A.X-K1"), 2.5),
    "beam": _grouped(256, 8, _defaults("BeamConfig", "reflection/Beam-1.0-501B-A23B"), 2.5),
    "flint": _unbiased(256, 6, _defaults("FlintConfig", "RecursiveSI/flint"), Rule("sigmoid")),
    "inkling-2-small": _biased(
        384, 8, _defaults("Inkling2Config", "thinkingmachines/Inkling-2-Small-MXFP8"), 8.0
    ),
    "mistral-large-4": _unbiased(
        128, 4, _defaults("MistralLarge4TextConfig", "mistralai/Mistral-Large-4-1T-A52B")
    ),
    "muse-spark": Preset(
        256, 8, Rule("sigmoid"), has_expert_bias=True, alpha=32**-0.5,
        source=_defaults("MuseSparkTextConfig", "meta-models/Muse-Spark-Open-816B-A42B"),
    ),
}  # fmt: skip

REFUSED = {
    "glm-4-moe": "models of different numbers have this name: 'glm-4.5' (160 experts, factor 2.5; GLM-4.7 too) or "
    "'glm-4.5-air' (128 experts, no factor; GLM-4.5V too)",
    "deepseek-v4.1-flash": "its image tokens have an expert_bias of their own, and `route` takes one for all tokens: "
    "call it with each bias and a Rule of the model's numbers, and choose rows with torch.where",
    "inkling": "its weights are divided by a sum that includes its shared experts' scores: call `route` with "
    "Rule('sigmoid', renormalize=False) and return_logits=True, then `envoi.router.weigh_with_shared`",
}


def preset(model: str) -> Preset:
    """Return the router of a model. Raises ValueError that lists the names, or says why there is none by that name."""
    return named("model", model)


def rule(model: str) -> Rule:
    """Return the rule of a model: `rule("deepseek-v3")`. Raises ValueError as `preset` does.

    A few models need more than a rule: `preset(model).alpha` isn't 1 for all of them.
    """
    return preset(model).rule


def named(argument: str, model: str) -> Preset:
    """Return the preset of a name. Raises ValueError, about an argument of this name, for a name that has none."""
    if isinstance(model, str) and model in REFUSED:
        raise ValueError(f"{argument}: {model!r} has no preset: {REFUSED[model]}")
    return PRESETS[expect_choice(argument, model, PRESETS)]
