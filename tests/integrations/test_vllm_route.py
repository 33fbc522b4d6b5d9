"""vLLM's gates on envoi.route without vLLM: a runner and routers that have what is relied on."""

import logging
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import envoi
import envoi.integrations.vllm as integration
from envoi.integrations import engines, names
from envoi.integrations.vllm import experts
from envoi.integrations.vllm.route import SKIP_PADDING
from envoi.integrations.vllm.used import ALL, EXPERTS, ROUTE, ROUTERS
from tests.helpers.accuracy import assert_same_bits
from tests.integrations.stand_ins import RECORD, install, modules
from tests.integrations.test_vllm import NEWEST, VLLM

N, H, K = 16, 64, 4
RUNNER = f"{EXPERTS.module.rpartition('.')[0]}.runner.moe_runner"


class Pluggable:
    """vLLM's base of layers whose class a plug-in may replace."""

    replaced: ClassVar[dict[str, type]] = {}

    def __new__(cls, *given: Any, **named: Any) -> Any:
        return object.__new__(cls.replaced.get(cls.__name__, cls))

    @classmethod
    def register_oot(cls, _decorated_layer_cls: Any = None, name: Any = None):
        cls.replaced[name] = _decorated_layer_cls


class Runner(Pluggable):
    """vLLM's runner as far as a layer's gate and router go."""

    def __init__(self, gate, router, **changed):
        ours = type("Ours", (experts.Experts,), {})
        config = {"dp_size": 1, "pcp_size": 1, "is_sequence_parallel": False}
        config["moe_parallel_config"] = SimpleNamespace(dp_size=1)
        self.gate, self.router, self.shared_expert_gate, self.routed_input_transform = gate, router, None, None
        self.routed_experts = SimpleNamespace(quant_method=SimpleNamespace(experts_cls=changed.pop("experts", ours)))
        self.moe_config = SimpleNamespace(**config | changed.pop("config", {}))
        vars(self).update(changed)

    def _forward_impl(self, hidden_states, router_logits, shared_experts_input, input_ids):
        logits, _ = self.gate(hidden_states)
        return self.router._compute_routing(hidden_states, logits, torch.int64, input_ids=input_ids)


class Gate(torch.nn.Module):
    def __init__(self, dtype=torch.bfloat16, bias=None):
        super().__init__()
        weight = torch.randn(N, H, generator=torch.Generator().manual_seed(1)).to(dtype)
        self.weight, self.bias = torch.nn.Parameter(weight), bias

    def forward(self, hidden_states):
        return "logits", None


@pytest.fixture(params=NEWEST)
def vllm(request, monkeypatch):
    found: dict[str, Any] = modules(RECORD[request.param], (*ALL, *ROUTE))
    install(monkeypatch, found, integration, "ENVOI_VLLM", "ENVOI_VLLM_ROUTE")
    monkeypatch.setattr(Pluggable, "replaced", {})
    found["vllm.model_executor.custom_op"].PluggableLayer = Pluggable
    found["vllm.envs"].environment_variables = {SKIP_PADDING: lambda: True}
    steps: list[Any] = []  # contexts, as vLLM's functions find them when they are called
    found["vllm.forward_context"].steps = steps
    found["vllm.forward_context"].is_forward_context_available = lambda: bool(steps)
    found["vllm.forward_context"].get_forward_context = lambda: steps[-1]
    found[RUNNER].MoERunner = type("MoERunner", (Runner,), {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(engines, "_remembered", lambda key, build: "")
    return found


def runner(found, made, gate=None, **changed):
    return found[RUNNER].MoERunner(gate or Gate(), made, **changed)


def named(found, name, **fields):
    kinds = {"FusedTopKRouter": "fused_topk_router", "FusedTopKBiasRouter": "fused_topk_bias_router"}
    module = kinds.get(name, "grouped_topk_router")
    made = getattr(found[f"{ROUTERS}.{module}"], name)()
    vars(made).update({"top_k": K, "renormalize": True, "scoring_func": "softmax"} | fields)
    made._compute_routing = lambda *given, **more: "vLLM's"
    return made


BIAS = torch.linspace(-0.5, 0.5, N)
GROUPED = {"scoring_func": "sigmoid", "num_expert_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
KNOWN: dict[str, tuple[str, dict[str, Any], envoi.router.Rule]] = {
    "qwen3-moe": ("FusedTopKRouter", {}, envoi.router.Rule("softmax")),
    "olmoe": ("FusedTopKRouter", {"renormalize": False}, envoi.router.Rule("softmax", renormalize=False)),
    "kimi-k2": (
        "FusedTopKBiasRouter",
        {"scoring_func": "sigmoid", "e_score_correction_bias": BIAS, "routed_scaling_factor": 2.827},
        envoi.router.Rule("sigmoid", routed_scale=2.827),
    ),
    "deepseek-v3": (
        "GroupedTopKRouter", GROUPED | {"e_score_correction_bias": BIAS},
        envoi.router.Rule("sigmoid", 4, 2, "top2_sum", True, 2.5),
    ),
    "deepseek-v2": (
        "GroupedTopKRouter", GROUPED | {"scoring_func": "softmax", "e_score_correction_bias": None},
        envoi.router.Rule("softmax", 4, 2, "max", True, 2.5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("vllm", VLLM, indirect=True)
@pytest.mark.parametrize("model", KNOWN)
def test_a_known_rule_is_one_call(vllm, model, caplog):
    caplog.set_level(logging.INFO)
    integration.register()
    kind, fields, rule = KNOWN[model]
    made = runner(vllm, named(vllm, kind, **fields))
    x = torch.randn(6, H, generator=torch.Generator().manual_seed(2)).bfloat16()
    weights, ids = made._forward_impl(x, x, None, None)
    bias = fields.get("e_score_correction_bias")
    want = envoi.route(x, made.gate.weight.detach(), K, rule=rule, expert_bias=bias)
    assert ids.dtype == torch.int64 and torch.equal(ids, want.topk_ids.long())
    assert_same_bits(weights, want.topk_weights)
    assert f"Envoi routes {N} experts, top {K}: score {rule.score}" in caplog.text


@pytest.mark.parametrize("kind", ["FusedTopKRouter", "GroupedTopKRouter"])
def test_padding_gets_no_expert(vllm, kind):
    integration.register()
    made = runner(vllm, named(vllm, kind, **KNOWN["deepseek-v2"][1]))
    x = torch.randn(3, H).bfloat16()

    def padded() -> list[bool]:
        return (made._forward_impl(x, x, None, None)[1] == -1).all(1).tolist()

    steps, envs = vllm["vllm.forward_context"].steps, vllm["vllm.envs"]
    assert padded() == [False] * 3, "outside of a step"
    steps.append(SimpleNamespace(is_padding=None))
    assert padded() == [False] * 3, "the runner marks none"
    steps.append(SimpleNamespace(is_padding=torch.tensor([False, True, True, True])))  # of the largest step
    assert padded() == [False, True, True]
    envs.environment_variables[SKIP_PADDING] = lambda: False  # the mask may be of another step
    assert padded() == [False] * 3


def test_a_setting_of_padding_that_moved_leaves_routing_to_vllm(vllm, caplog):
    vllm["vllm.envs"].environment_variables.clear()
    integration.register()
    assert "Envoi routes no MoE layers: MovedError: there is no vllm.envs.VLLM_MOE_SKIP_PADDING" in caplog.text
    assert not Pluggable.replaced


REFUSED: dict[str, dict[str, Any]] = {
    "the model computes the gate outside": {"gate": None},
    "vLLM's kernels run their experts": {"experts": object},
    "computed together with another layer": {"shared_expert_gate": object()},
    "logits are exchanged between ranks": {"config": {"dp_size": 2}},
    "a bias, or weights that aren't in bfloat16": {"gate": Gate(torch.float32)},
    "their gate has a bias": {"gate": Gate(bias=torch.zeros(N))},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_refused_stays_vllms(vllm, reason, caplog):
    caplog.set_level(logging.INFO)
    integration.register()
    changed = dict(REFUSED[reason])
    made = vllm[RUNNER].MoERunner(changed.pop("gate", Gate()), named(vllm, "FusedTopKRouter"), **changed)
    assert made.router._compute_routing() == "vLLM's" and reason in caplog.text
    assert made.gate is None or made.gate(None) == ("logits", None)


@pytest.mark.parametrize(
    "kind, fields, reason",
    [
        ("FusedTopKRouter", {"scoring_func": "tanh"}, "no rule for FusedTopKRouter with tanh"),
        ("FusedTopKBiasRouter", {"_hash_indices_table": BIAS, "routed_scaling_factor": 1.0}, "no rule for"),
        ("FusedTopKBiasRouter", {"bias_vl": BIAS, "routed_scaling_factor": 1.0}, "no rule for"),
        (
            "GroupedTopKRouter",
            GROUPED | {"e_score_correction_bias": None, "num_fused_shared_experts": 1},
            "no rule for",
        ),
        ("GroupedTopKRouter", GROUPED | {"e_score_correction_bias": None, "num_expert_group": 5}, "into 5 groups"),
        ("FusedTopKRouter", {"top_k": 17}, "k: expected"),
    ],
)
def test_another_rule_stays_vllms(vllm, kind, fields, reason, caplog):
    caplog.set_level(logging.INFO)
    integration.register()
    made = runner(vllm, named(vllm, kind, **fields))
    assert made.router._compute_routing() == "vLLM's" and reason in caplog.text


def test_off_unless_it_is_asked_for(vllm, monkeypatch):
    monkeypatch.setenv("ENVOI_VLLM_ROUTE", "0")
    integration.register()
    assert not Pluggable.replaced


@pytest.mark.parametrize("vllm", VLLM, indirect=True)
@pytest.mark.parametrize("used", [used for used in ROUTE if used not in ALL], ids=str)
def test_a_name_that_moved_leaves_routing_to_vllm(vllm, used, caplog):
    delattr(vllm[used.module], used.name)
    integration.register()
    assert [x.getMessage() for x in caplog.records] == [
        f"Envoi routes no MoE layers: MovedError: {names.missing(used, None)}"
    ]
    assert not Pluggable.replaced
