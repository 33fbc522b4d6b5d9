"""Table of published models: its rows agree with transformers' defaults and with the router's presets."""

import pytest
import transformers

from bench.suites.models import MODELS, Attention, LatentAttention, Linear, linears
from envoi.ops.moe.router.presets import PRESETS

BY_NAME = {model.name: model for model in MODELS}
# Classes of transformers whose defaults are this model's config.json.
DEFAULTS = {
    "Llama-2-7B": "LlamaConfig",
    "Gemma-2-2B": "Gemma2Config",
    "Mixtral-8x7B": "MixtralConfig",
    "Phi-3.5-MoE": "PhimoeConfig",
    "Qwen1.5-MoE-A2.7B": "Qwen2MoeConfig",
    "Qwen3-30B-A3B": "Qwen3MoeConfig",
    "Qwen3-Next-80B-A3B": "Qwen3NextConfig",
    "gpt-oss-120b": "GptOssConfig",
    "Llama-4-Scout": "Llama4TextConfig",
    "DeepSeek-V3": "DeepseekV3Config",
    "DeepSeek-V4-Flash": "DeepseekV4Config",
    "GLM-5": "GlmMoeDsaConfig",
    "MiniMax-M2": "MiniMaxM2Config",
}


def test_there_are_enough_models_and_each_has_its_source():
    assert len(MODELS) == len(BY_NAME) >= 15
    assert all(model.source.count("/") == 1 for model in MODELS)


@pytest.mark.parametrize(("name", "config_name"), DEFAULTS.items())
def test_sizes_are_those_of_transformers(name, config_name):
    model, config = BY_NAME[name], getattr(transformers, config_name)()
    assert model.hidden == config.hidden_size
    experts = [getattr(config, key, 0) for key in ("num_experts", "num_local_experts", "n_routed_experts")]
    assert model.num_experts == max(experts)
    if model.num_experts:
        assert model.num_topk == config.num_experts_per_tok
        assert model.expert_intermediate == getattr(config, "moe_intermediate_size", config.intermediate_size)
    if model.intermediate:
        assert model.intermediate == config.intermediate_size
    if isinstance(model.attention, Attention):
        a = model.attention
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if name != "Qwen3-30B-A3B":  # the class leaves head_dim to the checkpoint
            assert a.head_dim == head_dim
        assert (a.num_heads, a.num_kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
    if isinstance(model.attention, LatentAttention):
        assert model.attention == LatentAttention(
            config.num_attention_heads, config.q_lora_rank, config.kv_lora_rank, config.qk_nope_head_dim,
            config.qk_rope_head_dim, config.v_head_dim,
        )  # fmt: skip


def test_routers_are_presets():
    for model in MODELS:
        if model.preset:
            preset = PRESETS[model.preset]
            assert (preset.num_experts, preset.num_topk) == (model.num_experts, model.num_topk)
    assert len({model.preset for model in MODELS}) > 10


def test_linear_layers():
    assert linears(BY_NAME["Llama-3.1-8B"]) == [
        Linear("qkv", 6144, 4096), Linear("o", 4096, 4096), Linear("gate_up", 28672, 4096), Linear("down", 4096, 14336),
    ]  # fmt: skip
    assert linears(BY_NAME["DeepSeek-V3"]) == [
        Linear("q_a_kv_a", 2112, 7168), Linear("q_b", 24576, 1536), Linear("kv_b", 32768, 512),
        Linear("o", 7168, 16384), Linear("gate_up", 36864, 7168), Linear("down", 7168, 18432),
        Linear("gate_up_shared", 4096, 7168), Linear("down_shared", 7168, 2048),
    ]  # fmt: skip
