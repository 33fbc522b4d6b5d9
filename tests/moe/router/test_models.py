"""Presets against the routers of their models in transformers."""

import importlib
from types import SimpleNamespace

import pytest
import torch

from envoi.moe.router import PRESETS, preset, route

HIDDEN, TOKENS = 64, 2048


def config(name: str, **extra) -> SimpleNamespace:
    chosen = preset(name)
    n, k, rule = chosen.num_experts, chosen.num_topk, chosen.rule
    return SimpleNamespace(
        hidden_size=HIDDEN, num_experts_per_tok=k, num_local_experts=n, num_experts=n, n_routed_experts=n,
        norm_topk_prob=rule.renormalize, routed_scaling_factor=rule.routed_scale, n_group=rule.num_groups,
        topk_group=rule.num_topk_groups, vocab_size=100, **extra,
    )  # fmt: skip


def make(module: str, name: str, settings: SimpleNamespace) -> torch.nn.Module:
    router = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)(settings)
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in [*router.parameters(), *router.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=source) * (0.3 if tensor.dim() == 1 else 0.2))
    return router


def tokens() -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))


def assert_same_routing(ours, weights: torch.Tensor, ids: torch.Tensor) -> None:
    """Assert equal experts with equal weights, in whatever order the model lists them."""
    mine, theirs = ours.topk_ids.long().sort(1), ids.long().sort(1)
    assert torch.equal(mine.values, theirs.values)
    torch.testing.assert_close(
        ours.topk_weights.gather(1, mine.indices), weights.float().gather(1, theirs.indices), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(
    ("name", "module", "router"),
    [
        ("mixtral", "mixtral", "MixtralTopKRouter"),
        ("olmoe", "olmoe", "OlmoeTopKRouter"),
        ("qwen3-moe", "qwen3_moe", "Qwen3MoeTopKRouter"),
        ("qwen3-coder-480b", "qwen3_moe", "Qwen3MoeTopKRouter"),
        ("qwen3-next", "qwen3_next", "Qwen3NextTopKRouter"),
        ("deepseek-v3", "deepseek_v3", "DeepseekV3TopkRouter"),
        ("glm-4-moe", "glm4_moe", "Glm4MoeTopkRouter"),
        ("glm-5", "glm_moe_dsa", "GlmMoeDsaTopkRouter"),
        ("deepseek-v3", "deepseek_v32", "DeepseekV32TopkRouter"),
        ("kimi-k2", "deepseek_v3", "DeepseekV3TopkRouter"),
        ("kimi-k2", "kimi_linear", "KimiLinearTopkRouter"),
        ("kimi-k3", "kimi_linear", "KimiLinearTopkRouter"),
        ("step-3.7", "step3p7", "Step3p7TopKRouter"),
        ("nemotron-super-v3", "nemotron_h", "NemotronHTopkRouter"),
    ],
)
def test_routers_that_return_weights_and_ids(name, module, router):
    theirs = make(module, router, config(name))
    bias = getattr(theirs, "e_score_correction_bias", None)
    assert (bias is not None) == preset(name).has_expert_bias
    x = tokens()
    with torch.no_grad():
        _, weights, ids = theirs(x)
    assert_same_routing(
        route(x, theirs.weight.detach(), preset(name).num_topk, rule=name, expert_bias=bias), weights, ids
    )


@pytest.mark.parametrize(("name", "method"), [("deepseek-v2", "group_limited_greedy"), ("deepseek-v2-lite", "greedy")])
def test_deepseek_v2(name, method):
    theirs = make("deepseek_v2", "DeepseekV2TopkRouter", config(name, topk_method=method))
    x = tokens()
    with torch.no_grad():
        _, weights, ids = theirs(x)
    assert_same_routing(route(x, theirs.weight.detach(), preset(name).num_topk, rule=name), weights, ids)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b"])
def test_gpt_oss(name):
    theirs = make("gpt_oss", "GptOssTopKRouter", config(name))
    x = tokens()
    with torch.no_grad():
        _, weights, ids = theirs(x)
    bias = theirs.bias.detach()
    assert_same_routing(route(x, theirs.weight.detach(), 4, rule=name, logit_bias=bias), weights, ids)


@pytest.mark.parametrize("name", ["llama4-scout", "llama4-maverick"])
def test_llama4(name):
    theirs = make("llama4", "Llama4Router", config(name))
    x = tokens()
    with torch.no_grad():
        scores, _ = theirs(x)
    ours = route(x, theirs.weight.detach(), 1, rule=name, logit_bias=theirs.bias, return_dense=True)
    torch.testing.assert_close(ours.dense, scores.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "deepseek-v4-pro"])
def test_deepseek_v4(name):
    theirs = make("deepseek_v4", "DeepseekV4TopKRouter", config(name, scoring_func="sqrtsoftplus"))
    x = tokens()
    with torch.no_grad():
        _, weights, ids = theirs(x)
    bias = theirs.e_score_correction_bias
    assert_same_routing(route(x, theirs.weight.detach(), 6, rule=name, expert_bias=bias), weights, ids)


def test_deepseek_v4_hash():
    name = "deepseek-v4-flash"
    theirs = make("deepseek_v4", "DeepseekV4HashRouter", config(name, scoring_func="sqrtsoftplus"))
    source = torch.Generator().manual_seed(2)
    theirs.tid2eid.copy_(torch.stack([torch.randperm(256, generator=source)[:6] for _ in range(100)]))
    x, token_ids = tokens(), torch.randint(0, 100, (TOKENS,), generator=source)
    with torch.no_grad():
        _, weights, ids = theirs(x, token_ids)
    ours = route(x, theirs.weight.detach(), 6, rule=name, token_ids=token_ids, hash_table=theirs.tid2eid)
    assert torch.equal(ours.topk_ids.long(), ids)
    torch.testing.assert_close(ours.topk_weights, weights, rtol=1e-6, atol=1e-6)


def test_minimax_m2():
    theirs = make("minimax_m2", "MiniMaxM2TopKRouter", config("minimax-m2"))
    bias = torch.randn(256, generator=torch.Generator().manual_seed(3)) * 0.3
    x = tokens()
    with torch.no_grad():
        _, weights, ids = theirs(x, bias)
    assert_same_routing(route(x, theirs.weight.detach(), 8, rule="minimax-m2", expert_bias=bias), weights, ids)


def test_minimax_m3():
    """Check MiniMax M3, whose scale is applied to the experts' sum, which equals a scale of the weights."""
    theirs = make("minimax_m3_vl", "MiniMaxM3VLTopKRouter", config("minimax-m3"))
    x, bias = tokens(), theirs.e_score_correction_bias
    with torch.no_grad():
        _, weights, ids = theirs(x)
    ours = route(x, theirs.weight.detach(), preset("minimax-m3").num_topk, rule="minimax-m3", expert_bias=bias)
    assert_same_routing(ours, weights * preset("minimax-m3").rule.routed_scale, ids)


# Fields in which a configuration class's defaults differ from the checkpoints that the preset is named after.
OTHER_DEFAULTS = {"qwen3-moe": {"renormalize"}}


@pytest.mark.parametrize(
    ("name", "module", "settings"),
    [
        ("mixtral", "mixtral", "MixtralConfig"),
        ("olmoe", "olmoe", "OlmoeConfig"),
        ("qwen3-moe", "qwen3_moe", "Qwen3MoeConfig"),
        ("qwen3-next", "qwen3_next", "Qwen3NextConfig"),
        ("gpt-oss-120b", "gpt_oss", "GptOssConfig"),
        ("llama4-scout", "llama4", "Llama4TextConfig"),
        ("deepseek-v3", "deepseek_v3", "DeepseekV3Config"),
        ("deepseek-v3", "deepseek_v32", "DeepseekV32Config"),
        ("deepseek-v4-flash", "deepseek_v4", "DeepseekV4Config"),
        ("glm-4-moe", "glm4_moe", "Glm4MoeConfig"),
        ("glm-5", "glm_moe_dsa", "GlmMoeDsaConfig"),
        ("minimax-m2", "minimax_m2", "MiniMaxM2Config"),
        ("minimax-m3", "minimax_m3_vl", "MiniMaxM3VLTextConfig"),
        ("step-3.7", "step3p7", "Step3p7TextConfig"),
    ],
)
def test_defaults_of_the_models_own_configuration(name, module, settings):
    default = getattr(importlib.import_module(f"transformers.models.{module}.configuration_{module}"), settings)()
    chosen, rule = preset(name), preset(name).rule

    def first(*fields):
        return next((getattr(default, field) for field in fields if getattr(default, field, None) is not None), None)

    ours_and_theirs = {
        "num_experts": (chosen.num_experts, first("num_experts", "num_local_experts")),
        "num_topk": (chosen.num_topk, first("num_experts_per_tok")),
        "renormalize": (rule.renormalize, first("norm_topk_prob")),
        "routed_scale": (rule.routed_scale, first("routed_scaling_factor", "moe_router_scaling_factor")),
        "num_groups": (rule.num_groups, first("n_group")),
        "num_topk_groups": (rule.num_topk_groups, first("topk_group")),
    }
    different = {field for field, (ours, theirs) in ours_and_theirs.items() if theirs is not None and ours != theirs}
    assert different == OTHER_DEFAULTS.get(name, set())


def test_every_preset_is_usable():
    for name, chosen in PRESETS.items():
        chosen.rule.check_num_experts(chosen.num_experts, chosen.num_topk)
        gate = torch.randn(chosen.num_experts, HIDDEN)
        assert route(tokens()[:3], gate, chosen.num_topk, rule=name).topk_ids.shape == (3, chosen.num_topk)
