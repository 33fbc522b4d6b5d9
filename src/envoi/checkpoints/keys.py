"""Keys of config.json that decide what an expert computes: a closed list.

A key whose name concerns the arithmetic of experts (`concerns_experts`) is read, or known to change nothing in them, or
an error that names it, so that a model with a setting that Envoi doesn't know isn't run without it. Keys of attention,
of the router, of shared experts and of training aren't looked at: `from_checkpoint` loads routed experts only.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act")
LIMIT, ALPHA, BETA = "swiglu_limit", "swiglu_alpha", "swiglu_beta"
# A number for each layer, 0 or null for none: Step-3.5 and 3.7 (their modeling code), Ling-3.0 (vLLM's and SGLang's).
LIMITS_AFTER = ("swiglu_limits", "expert_swiglu_limit_list")
SOFTCAPS = ("mlp_gate_softcap", "mlp_up_softcap")  # Inkling-2
SITU = ("activation_situ_beta", "activation_situ_linear_beta")  # Kimi-K3
# Hidden size of the routed experts where it isn't the model's: Nemotron-3, Kimi-K3.
LATENT = ("moe_latent_size", "routed_expert_hidden_size")

ON_INPUT = "tokens are multiplied by their weights before the experts, which Envoi does after them"
CONSTANTS = "some experts are constants instead of matrices, which Envoi doesn't have"
# What is refused unless it is off, and why.
REFUSED = {
    "moe_apply_router_weight_on_input": ON_INPUT,
    "apply_router_weight_on_input": ON_INPUT,
    "post_norm_eps": "each expert's output is normalised before it is weighted, which Envoi doesn't do",
    "approximate_experts": CONSTANTS,
    "expert_substitution": CONSTANTS,
}

READ = {*ACTIVATIONS, LIMIT, ALPHA, BETA, *LIMITS_AFTER, *SOFTCAPS, *SITU, *LATENT, *REFUSED}

# What looks like arithmetic of experts and isn't, by what it is about.
HARMLESS = {
    # the choice of experts and their weights
    "expert_selection_fn", "norm_expert_weight", "moe_gate", "moe_use_hard_gate", "moe_norm_min", "moe_renormalize",
    "moe_routed_scaling_factor", "rms_norm_eps_moe_gate",
    # LongCat's ids from n_routed_experts on, which have no weights: they add the token itself
    "zero_expert_num", "zero_expert_type",
    # the sum of the experts' outputs, what is done to it, and the residual stream
    "enable_moe_fp32_combine", "latent_moe_use_norm", "layernorm_mlp_alpha", "layernorm_mlp_beta", "mlp_alpha_factor",
    "mlp_beta_factor",
    # attention
    "linear_silu", "log_scaling_alpha",
    # sizes, and layers without experts
    "moe_hidden_size", "expert_ffn_hidden_size", "expert_hidden_dim", "ffn_hidden_size", "interleave_moe_layer_step",
    "moe_layer_num_skipped", "use_double_wide_mlp", "use_mixed_mlp_moe",
    "block_ffn_dim_multiplier", "block_use_swiglu",
}  # fmt: skip

EXPERT_WORDS = {"expert", "experts", "moe", "mlp", "mlps", "ffn", "feedforward"}
FUNCTION_WORDS = {
    "act", "acts", "activation", "activations", "silu", "swish", "relu", "gelu", "glu", "swiglu", "geglu", "reglu",
    "situ", "swigluoai", "limit", "limits", "clamp", "clamps", "clamped", "clamping", "clip", "clips", "clipped",
    "clipping", "cap", "caps", "capped", "softcap", "softcaps", "softcapped", "softcapping", "alpha", "alphas", "beta",
    "betas",
}  # fmt: skip
# Words of names that aren't about routed experts, whatever else they have.
APART = {
    "router", "routers", "routing", "route", "gating", "aux", "loss", "losses", "balance", "balancing", "jitter",
    "noise", "dropout", "drop", "dropping", "init", "initial", "initializer", "std", "shared", "share", "mtp", "nextn",
    "vision", "visual", "image", "video", "audio", "speech", "projector", "lora", "capacity", "dispatch", "orthogonal",
    "ep",
}  # fmt: skip
# Words of names that have a function's word and no expert's, and are about something else.
ELSEWHERE = {
    "attn", "attention", "att", "q", "k", "v", "qk", "kv", "qkv", "query", "head", "heads", "logit", "logits", "lm",
    "rope", "rotary", "yarn", "position", "embed", "embedding", "embeddings", "mamba", "ssm", "conv", "time", "dt",
    "gradient", "grad", "residual", "classifier", "pooler", "summary", "mla", "kda", "gdn", "length", "indexer",
    "vocab", "sampling", "rel", "projection", "mm",
}  # fmt: skip
# Words beside an expert's that say how many, how large, where, or how computed, and no arithmetic. Biases are tensors,
# which `from_checkpoint` looks for.
PLAIN = {
    "num", "n", "number", "count", "per", "tok", "token", "tokens", "top", "topk", "k", "layer", "layers", "freq",
    "frequency", "every", "period", "offset", "start", "end", "index", "indices", "idx", "id", "ids", "interval",
    "step", "only", "type", "types", "size", "sizes", "dim", "dims", "intermediate", "group", "groups", "grouped",
    "limited", "dtype", "parallel", "parallelism", "tensor", "tp", "world", "rank", "implementation", "impl", "kernel",
    "backend", "enable", "enabled", "use", "using", "is", "has", "local", "total", "routed", "block", "blocks", "bias",
    "biases", "decoder", "encoder", "ratio", "fused", "fuse", "overlap", "sparse", "dense", "enum", "residual", "res",
    "attn", "attention", "multimodal", "allgather", "alltoall",
}  # fmt: skip
ON_INPUTS = {"router", "routing", "route"}, {"input", "inputs", "before"}
GATING = {"gate", "gated", "glu", "swiglu", "geglu"}  # False in these names changes what is computed


def concerns_experts(key: str) -> bool:
    """Return True if a key's name is about the arithmetic of experts, as far as words show it."""
    words = set(re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", key))
    words = {word.lower() for word in words}
    if all(words & some for some in ON_INPUTS):
        return True
    if words & APART:
        return False
    if words & EXPERT_WORDS:
        return not words <= EXPERT_WORDS | PLAIN
    return bool(words & FUNCTION_WORDS) and not words & ELSEWHERE


def unknown(config: dict[str, Any]) -> Iterator[str]:
    """Yield the keys that concern experts, are set, and are neither read nor known to change nothing."""
    for key, value in config.items():
        off = value is None or (value is False and not set(key.split("_")) & GATING)
        if not off and key not in READ and key not in HARMLESS and concerns_experts(key):
            yield key


def check_keys(file: Path, config: dict[str, Any]) -> None:
    """Raise ValueError that names the file and the key for one that Envoi can't follow, or doesn't know."""
    for key, why in REFUSED.items():
        if config.get(key):
            raise ValueError(f"{file}: {key}: expected none, got {config[key]!r}: {why}")
    for key in unknown(config):
        raise ValueError(
            f"{file}: {key}: expected only keys that Envoi knows among those about experts' arithmetic, got "
            f"{config[key]!r}, which may change what they compute"
        )
