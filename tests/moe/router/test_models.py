"""Presets against the numbers that models publish, and against the routers of transformers built from those numbers."""

import importlib
import re
from types import SimpleNamespace

import pytest
import torch

import envoi
from envoi.ops.moe.router import PRESETS, Rule, preset, route, rule, split_identity, weigh_with_shared
from envoi.ops.moe.router.presets import REFUSED
from envoi.types import Routing
from tests.moe.router.published import PUBLISHED

HIDDEN, TOKENS = 64, 2048


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_numbers(name):
    said, chosen = PUBLISHED[name], preset(name)
    assert (chosen.num_experts, chosen.num_topk) == (said.num_experts, said.num_experts_per_tok)
    assert chosen.rule == Rule(
        said.score, said.n_group, said.topk_group, said.group_score, said.norm_topk_prob, said.routed_scaling_factor
    )
    assert (chosen.has_expert_bias, chosen.has_logit_bias) == (said.bias == "expert", said.bias == "logit")
    assert chosen.alpha == pytest.approx(said.logits, rel=1e-15)


@pytest.mark.parametrize("name", REFUSED)
def test_names_without_one_router_are_refused_with_the_reason(name):
    assert name not in PRESETS
    for argument, look_up in (("model", preset), ("model", rule), ("rule", routed)):
        with pytest.raises(ValueError, match=f"^{argument}: '{re.escape(name)}' has no preset: .{{40}}"):
            look_up(name)


def routed(name: str) -> Routing:
    return route(tokens(), torch.zeros(8, HIDDEN), 2, rule=name)


def test_an_ambiguous_name_lists_what_to_choose_between():
    with pytest.raises(ValueError) as caught:
        rule("glm-4-moe")
    choices = re.findall(r"'([\w.-]+)' \((\d+) experts", str(caught.value))
    assert [(name, PUBLISHED[name].num_experts) for name, _ in choices] == [("glm-4.5", 160), ("glm-4.5-air", 128)]
    assert all(PUBLISHED[name].num_experts == int(n) for name, n in choices)


def config(name: str, **extra) -> SimpleNamespace:
    said = PUBLISHED[name]
    n = said.num_experts
    return SimpleNamespace(
        hidden_size=HIDDEN, num_experts_per_tok=said.num_experts_per_tok, num_local_experts=n, num_experts=n,
        n_routed_experts=n, norm_topk_prob=said.norm_topk_prob, routed_scaling_factor=said.routed_scaling_factor,
        router_scaling_factor=said.routed_scaling_factor, n_group=said.n_group, topk_group=said.topk_group,
        vocab_size=100, **extra,
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


def bias_of(name: str) -> torch.Tensor:
    return torch.randn(PUBLISHED[name].num_experts, generator=torch.Generator().manual_seed(3)) * 0.3


def routed_as(name: str, gate: torch.Tensor, **biases) -> Routing:
    """Route the tokens by a preset's rule, with the published k."""
    return route(tokens(), gate.detach(), PUBLISHED[name].num_experts_per_tok, rule=name, **biases)


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
        ("qwen3.5-397b", "qwen3_5_moe", "Qwen3_5MoeTopKRouter"),
        ("deepseek-v3", "deepseek_v3", "DeepseekV3TopkRouter"),
        ("deepseek-v3", "deepseek_v32", "DeepseekV32TopkRouter"),
        ("glm-4.5", "glm4_moe", "Glm4MoeTopkRouter"),
        ("glm-4.5-air", "glm4_moe", "Glm4MoeTopkRouter"),
        ("glm-4.7-flash", "glm4_moe_lite", "Glm4MoeLiteTopkRouter"),
        ("glm-5", "glm_moe_dsa", "GlmMoeDsaTopkRouter"),
        ("glm-5.3-flash", "glm5_next", "Glm5NextTextTopkRouter"),
        ("kimi-k2", "deepseek_v3", "DeepseekV3TopkRouter"),
        ("kimi-k3", "kimi_linear", "KimiLinearTopkRouter"),
        ("nemotron-nano-v3", "nemotron_h", "NemotronHTopkRouter"),
        ("nemotron-super-v3", "nemotron_h", "NemotronHTopkRouter"),
        ("hy-v4", "hy_v4", "HYV4TopkRouter"),
        ("mimo-v2-flash", "mimo_v2_flash", "MiMoV2FlashTopkRouter"),
        ("solar-open-100b", "solar_open", "SolarOpenTopkRouter"),
        ("axk1", "axk1", "AXK1TopkRouter"),
    ],
)
def test_routers_that_return_weights_and_ids(name, module, router):
    theirs = make(module, router, config(name))
    bias = getattr(theirs, "e_score_correction_bias", None)
    assert (bias is not None) == preset(name).has_expert_bias
    with torch.no_grad():
        _, weights, ids = theirs(tokens())
    assert_same_routing(routed_as(name, theirs.weight, expert_bias=bias), weights, ids)


@pytest.mark.parametrize(
    ("name", "module", "router"),
    [("minimax-m2", "minimax_m2", "MiniMaxM2TopKRouter"), ("hy-v3", "hy_v3", "HYV3TopKRouter")],
)
def test_routers_that_are_given_their_bias(name, module, router):
    theirs, bias = make(module, router, config(name)), bias_of(name)
    with torch.no_grad():
        _, weights, ids = theirs(tokens(), bias)
    assert_same_routing(routed_as(name, theirs.weight, expert_bias=bias), weights, ids)


@pytest.mark.parametrize(
    ("name", "module", "router"),
    [("minimax-m3", "minimax_m3_vl", "MiniMaxM3VLTopKRouter"), ("step-3.7", "step3p7", "Step3p7TopKRouter")],
)
def test_routers_whose_scale_is_applied_to_the_experts_sum(name, module, router):
    """Check that a scale of the weights, which equals a scale of their sum, is the published one."""
    theirs = make(module, router, config(name))
    with torch.no_grad():
        _, weights, ids = theirs(tokens())
    ours = routed_as(name, theirs.weight, expert_bias=theirs.e_score_correction_bias)
    assert_same_routing(ours, weights * PUBLISHED[name].routed_scaling_factor, ids)


@pytest.mark.parametrize(("name", "method"), [("deepseek-v2", "group_limited_greedy"), ("deepseek-v2-lite", "greedy")])
def test_deepseek_v2(name, method):
    theirs = make("deepseek_v2", "DeepseekV2TopkRouter", config(name, topk_method=method))
    with torch.no_grad():
        _, weights, ids = theirs(tokens())
    assert_same_routing(routed_as(name, theirs.weight), weights, ids)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b"])
def test_gpt_oss(name):
    theirs = make("gpt_oss", "GptOssTopKRouter", config(name))
    with torch.no_grad():
        _, weights, ids = theirs(tokens())
    assert_same_routing(routed_as(name, theirs.weight, logit_bias=theirs.bias.detach()), weights, ids)


@pytest.mark.parametrize("name", ["llama4-scout", "llama4-maverick"])
def test_llama4(name):
    theirs = make("llama4", "Llama4Router", config(name))
    with torch.no_grad():
        scores, _ = theirs(tokens())
    ours = routed_as(name, theirs.weight, logit_bias=theirs.bias, return_dense=True)
    torch.testing.assert_close(ours.dense, scores.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "deepseek-v4-pro"])
def test_deepseek_v4(name):
    theirs = make("deepseek_v4", "DeepseekV4TopKRouter", config(name, scoring_func="sqrtsoftplus"))
    with torch.no_grad():
        _, weights, ids = theirs(tokens())
    assert_same_routing(routed_as(name, theirs.weight, expert_bias=theirs.e_score_correction_bias), weights, ids)


def test_deepseek_v4_hash():
    name = "deepseek-v4-flash"
    theirs = make("deepseek_v4", "DeepseekV4HashRouter", config(name, scoring_func="sqrtsoftplus"))
    source = torch.Generator().manual_seed(2)
    theirs.tid2eid.copy_(torch.stack([torch.randperm(256, generator=source)[:6] for _ in range(100)]))
    token_ids = torch.randint(0, 100, (TOKENS,), generator=source)
    with torch.no_grad():
        _, weights, ids = theirs(tokens(), token_ids)
    ours = routed_as(name, theirs.weight, token_ids=token_ids, hash_table=theirs.tid2eid)
    assert torch.equal(ours.topk_ids.long(), ids)
    torch.testing.assert_close(ours.topk_weights, weights, rtol=1e-6, atol=1e-6)


def test_kolibri_ranks_logits_with_their_bias_and_weighs_by_sigmoids():
    name = "kolibri-1"
    gate = torch.randn(384, HIDDEN, generator=torch.Generator().manual_seed(0)) * 0.2
    bias = bias_of(name)
    logits = tokens() @ gate.T
    ids = (logits + bias).topk(6).indices
    assert_same_routing(routed_as(name, gate, expert_bias=bias), logits.gather(1, ids).sigmoid(), ids)


def test_muse_spark_scales_its_logits():
    """Check that a name brings its alpha, that an alpha of one's own replaces it, and that a Rule brings none."""
    gate, bias = torch.randn(256, HIDDEN, generator=torch.Generator().manual_seed(0)) * 0.2, bias_of("muse-spark")
    scores = (tokens() @ gate.T * 0.1767766952966369).sigmoid()
    ids = (scores + bias).topk(8).indices
    weights = scores.gather(1, ids)
    got = routed_as("muse-spark", gate, expert_bias=bias)
    assert_same_routing(got, weights / weights.sum(1, keepdim=True), ids)
    own = route(tokens(), gate, 8, 1.0, rule="muse-spark", expert_bias=bias)
    plain = route(tokens(), gate, 8, rule=rule("muse-spark"), expert_bias=bias)
    assert torch.equal(own.topk_weights, plain.topk_weights)
    assert not torch.equal(own.topk_weights, got.topk_weights)


class TestIdentities:
    def test_longcat_flash(self):
        """Check router and experts of LongCat-Flash against transformers, whose later experts are the identity."""
        name = "longcat-flash"
        settings = config(name, zero_expert_num=256, router_bias=False)
        settings.n_routed_experts = settings.num_local_experts = 512
        theirs = make("longcat_flash", "LongcatFlashTopkRouter", settings)
        bias = theirs.e_score_correction_bias.copy_(bias_of(name) * 0.01)
        with torch.no_grad():
            *_, weights, ids = theirs(tokens())
        got = routed_as(name, theirs.classifier.weight, expert_bias=bias)
        assert_same_routing(got, weights, ids)
        real, identity = split_identity(got, 512)
        torch.testing.assert_close(identity, (weights * (ids >= 512)).sum(1), rtol=1e-5, atol=1e-7)
        assert torch.equal(real.topk_ids >= 0, got.topk_ids < 512)
        assert 0 < int((real.topk_ids < 0).sum()) < real.topk_ids.numel()
        assert real.num_experts == 512

    def test_the_layer_is_that_of_the_real_experts_and_the_token_itself(self):
        source = torch.Generator().manual_seed(0)
        x = torch.randn(50, 128, generator=source).bfloat16()
        gate_up, down = (torch.randn(4, *size, generator=source) * 0.1 for size in ((256, 128), (128, 128)))
        routing = route(x, torch.randn(6, 128, generator=source).bfloat16(), 3, rule=Rule("softmax", renormalize=False))
        experts = envoi.experts.pack(gate_up.bfloat16(), down.bfloat16())
        real, identity = split_identity(routing, 4)
        got = envoi.moe(x, real, experts).double() + identity[:, None].double() * x.double()
        want = torch.zeros(50, 128, dtype=torch.float64)
        for token in range(50):
            for weight, e in zip(routing.topk_weights[token].tolist(), routing.topk_ids[token].tolist(), strict=True):
                row = x[token].double()
                if e < 4:
                    gate, up = (gate_up[e].bfloat16().double() @ row).chunk(2)
                    row = down[e].bfloat16().double() @ (torch.nn.functional.silu(gate) * up)
                want[token] += weight * row
        assert ((got - want).norm() / want.norm()) < 5e-3
        with pytest.raises(ValueError, match="expected all 6 experts of the routing, got 4; .*split_identity"):
            envoi.moe(x, routing, experts)


@pytest.mark.parametrize("step", [split_identity, weigh_with_shared])
def test_steps_after_a_route_need_its_routing(step):
    with pytest.raises(ValueError, match="routing: expected an envoi.Routing, got tuple"):
        step((torch.ones(2, 3), torch.zeros(2, 3)), 2)


class TestSharedInTheSum:
    SCALE = 8.0

    def given(self) -> tuple[torch.nn.Module, Routing]:
        settings = SimpleNamespace(
            n_routed_experts=256, n_shared_experts=2, hidden_size=HIDDEN, route_scale=self.SCALE, num_experts_per_tok=6
        )
        theirs = make("inkling", "InklingTopkRouter", settings)
        theirs.global_scale.data.fill_(1.0)
        bias = torch.cat((theirs.e_score_correction_bias, torch.full((2,), -torch.inf)))
        gate = theirs.weight.detach()
        return theirs, route(
            tokens(), gate, 6, rule=Rule("sigmoid", renormalize=False), expert_bias=bias, return_logits=True
        )

    def test_inkling(self):
        theirs, routing = self.given()
        with torch.no_grad():
            _, weights, ids, shared = theirs(tokens())
        got, of_shared = weigh_with_shared(routing, 2, self.SCALE)
        assert_same_routing(got, weights, ids)
        torch.testing.assert_close(of_shared, shared, rtol=1e-5, atol=1e-6)
        assert got.num_experts == 256

    def test_tiny_sigmoids_add_up_and_masked_slots_have_none(self):
        logits = torch.full((2, 6), -90.0)
        logits[0, 0], logits[1] = -88.0, 3.0
        ids = torch.tensor([[0, 1, 2], [3, -1, -1]], dtype=torch.int32)
        got, shared = weigh_with_shared(Routing(torch.ones(2, 3), ids, 6, logits=logits), 2, 5.0)
        wide = torch.tensor([[-88.0, -90, -90, -90, -90], [3, -torch.inf, -torch.inf, 3, 3]], dtype=torch.float64)
        want = torch.nn.functional.logsigmoid(wide).softmax(1) * 5.0
        torch.testing.assert_close(torch.cat((got.topk_weights, shared), 1).double(), want, rtol=1e-5, atol=0)
        assert got.topk_weights[1, 1:].tolist() == [0.0, 0.0]
