"""Tokens of vLLM's data-parallel ranks exchanged by Envoi, without vLLM and without other ranks."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import envoi
import envoi.integrations.vllm as integration
from envoi.integrations import engines
from envoi.integrations.vllm import exchange, experts, loading
from envoi.integrations.vllm.used import ALL, EXCHANGE
from tests.integrations.stand_ins import OWN, RECORD, install, modules
from tests.integrations.test_engines import E, H, tensors
from tests.integrations.test_vllm import NEWEST, VLLM, called, fail, giving_way, made

RANKS = 2
PARALLEL = {
    "use_all2all_kernels": True, "all2all_backend": "allgather_reducescatter", "dp_size": RANKS, "ep_size": RANKS,
    "is_sequence_parallel": False,
}  # fmt: skip
X = torch.randn(3, H, generator=torch.Generator().manual_seed(2)).bfloat16()
IDS = torch.tensor([[0, 7], [1, 2], [6, 2]], dtype=torch.int32)


class Exchange:
    """What stands for an ExpertParallel of two ranks, and answers 7."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.given, self.calls, self.warmed, self.closed = (arguments, named), [], 0, False
        if arguments[0] is None:
            raise ValueError("experts: expected ExpertWeights, got NoneType")
        self.num_experts, self.transport, self.exchange, self.why = RANKS * E, "nvlink", "memory", "no links"

    def moe(self, tokens: torch.Tensor, routing: envoi.Routing, *, out: torch.Tensor) -> torch.Tensor:
        self.calls.append((tokens, routing))
        return out.fill_(7)

    def warm_up(self, progress: bool) -> None:
        self.warmed += 1

    def close(self) -> None:
        self.closed = True


@pytest.fixture(params=NEWEST)
def vllm(request, monkeypatch):
    found: dict[str, Any] = modules(RECORD[request.param], (*ALL, *EXCHANGE))
    install(monkeypatch, found, integration, "ENVOI_VLLM", "ENVOI_VLLM_EP")
    group = SimpleNamespace(device_group="ranks")
    found["vllm.distributed.parallel_state"].get_ep_group = lambda: group
    settings = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
        parallel_config=SimpleNamespace(expert_placement_strategy="linear"),
        model_config=SimpleNamespace(enable_sleep_mode=False),
    )
    found["vllm.config"].get_current_vllm_config_or_none = lambda: settings
    found["vllm"].settings = settings
    monkeypatch.setattr(experts, "_warm", set())
    monkeypatch.setattr(exchange, "_late", [])
    monkeypatch.setattr(envoi, "ExpertParallel", Exchange)
    experts.experts_class.cache_clear()
    yield found
    experts.experts_class.cache_clear()


class Layer:
    """What vLLM hands to the method of a layer, and its method, which makes a kernel each time."""

    def __init__(self, found: dict[str, Any], given: dict[str, torch.Tensor], **changed: Any) -> None:
        self.w13_weight, self.w2_weight, self.given = given["gate_up"], given["down"], given
        self.quant_method = method = SimpleNamespace()

        def process(layer: Any) -> None:
            ours = made(found, "bf16", given, parallel=PARALLEL | changed, num_experts=RANKS * E)
            impl = SimpleNamespace(prepare_finalize="vLLM's")
            method.moe_kernel = SimpleNamespace(fused_experts=ours, impl=impl)

        method.process_weights_after_loading = process
        loading.follow(self, {})
        self.load()

    def load(self) -> None:
        self.quant_method.process_weights_after_loading(self)

    @property
    def kernel(self) -> Any:
        return self.quant_method.moe_kernel


@pytest.mark.parametrize("vllm", VLLM, indirect=True)
def test_a_layer_sends_its_own_tokens(vllm, caplog):
    caplog.set_level(logging.INFO)
    layer = Layer(vllm, tensors("bf16"))
    ours = layer.kernel.fused_experts
    arguments, named = ours.exchange.given
    assert arguments[:2] == (ours.packed, "ranks") and named == {"max_tokens": 64, "num_topk": 2}
    assert layer.kernel.impl.prepare_finalize == OWN, "vLLM's step that exchanges nothing"
    expert_map = torch.tensor([-1] * E + list(range(E)), dtype=torch.int32)
    for _ in range(2):
        assert (called(ours, layer.given, X, IDS, expert_map=expert_map) == 7).all()
    for tokens, routing in ours.exchange.calls:
        assert tokens is X and routing.topk_ids is IDS and routing.num_experts == RANKS * E
    assert ours.exchange.warmed == 1 and "Envoi exchanges tokens of the MoE layers over nvlink" in caplog.text


def test_layers_of_a_kind_are_warmed_up_once(vllm):
    layers = [Layer(vllm, tensors("bf16")) for _ in range(2)]
    for layer in layers:
        called(layer.kernel.fused_experts, layer.given, X, IDS)
    assert [layer.kernel.fused_experts.exchange.warmed for layer in layers] == [1, 0]


def test_a_layer_that_is_loaded_anew_keeps_its_exchange(vllm):
    layer = Layer(vllm, tensors("bf16"))
    before = layer.kernel.fused_experts
    layer.load()
    after = layer.kernel.fused_experts
    assert after is not before and after.exchange is before.exchange and after.packed is before.packed
    assert layer.kernel.impl.prepare_finalize == OWN


REFUSED = {
    "ranks that share tokens": ({"ep_size": 4}, {}),
    "ranks that share tokens (tensor, sequence": ({"is_sequence_parallel": True}, {}),
    "experts are placed round_robin": (
        {}, {"parallel_config": SimpleNamespace(expert_placement_strategy="round_robin")}
    ),
    "sleep mode would free": ({}, {"model_config": SimpleNamespace(enable_sleep_mode=True)}),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_refused_is_left_to_vllms_exchange(vllm, reason, caplog):
    parallel, settings = REFUSED[reason]
    vars(vllm["vllm"].settings).update(settings)
    layer = Layer(vllm, tensors("bf16"), **parallel)
    assert layer.kernel.fused_experts.exchange is None and layer.kernel.impl.prepare_finalize == "vLLM's"
    (record,) = caplog.records
    assert record.getMessage().startswith("vLLM exchanges tokens of the MoE layers: ") and reason in record.getMessage()


def test_batch_invariance_is_left_to_vllms_exchange(vllm, monkeypatch, caplog):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert Layer(vllm, tensors("bf16")).kernel.fused_experts.exchange is None
    assert "VLLM_BATCH_INVARIANT" in caplog.text


@pytest.mark.parametrize("vllm", VLLM, indirect=True)
@pytest.mark.parametrize("used", [used for used in EXCHANGE if used not in ALL], ids=str)
def test_a_name_that_moved_is_left_to_vllms_exchange(vllm, used, caplog):
    integration.register()
    delattr(vllm[used.module], used.name)
    assert Layer(vllm, tensors("bf16")).kernel.impl.prepare_finalize == "vLLM's"
    assert f"MovedError: there is no {used}" in caplog.text


def test_ranks_that_dont_open_leave_tokens_to_vllms_exchange(vllm, monkeypatch, caplog):
    monkeypatch.setattr(envoi, "ExpertParallel", fail)
    assert Layer(vllm, tensors("bf16")).kernel.impl.prepare_finalize == "vLLM's"
    assert "RuntimeError: no such kernel" in caplog.text


def test_ranks_with_other_experts_leave_tokens_to_vllms_exchange(vllm, monkeypatch, caplog):
    opened = []

    class Smaller(Exchange):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.num_experts = E
            opened.append(self)

    monkeypatch.setattr(envoi, "ExpertParallel", Smaller)
    assert Layer(vllm, tensors("bf16")).kernel.impl.prepare_finalize == "vLLM's"
    assert opened[0].closed and f"{E} experts are on all ranks, and vLLM has {RANKS * E}" in caplog.text


def test_vllms_kernel_cant_take_over_from_an_exchange(vllm, monkeypatch):
    layer = Layer(vllm, tensors("bf16"))
    monkeypatch.setattr(Exchange, "moe", fail)
    with pytest.raises(RuntimeError, match="no such kernel"):
        called(layer.kernel.fused_experts, layer.given, X, IDS)
    assert layer.kernel.fused_experts.own is None


def test_another_value_of_the_switch_is_a_refusal_before_any_layer(vllm, monkeypatch, caplog):
    monkeypatch.setenv("ENVOI_VLLM_EP", "yes")
    integration.register()
    assert [record.getMessage() for record in caplog.records] == [
        "Envoi runs no MoE layers: ValueError: ENVOI_VLLM_EP: expected 0 or 1, got 'yes'"
    ]


@pytest.mark.parametrize("why", ["off", "one rank", "vLLM's kernel"])
def test_nothing_is_exchanged_unless_it_is_asked_for(vllm, why, monkeypatch, caplog):
    if why == "off":
        monkeypatch.setenv("ENVOI_VLLM_EP", "0")
    elif why == "vLLM's kernel":
        giving_way(vllm, monkeypatch, "bf16")
        monkeypatch.setattr(engines, "pack_layer", fail)
    layer = Layer(vllm, tensors("bf16"), use_all2all_kernels=why != "one rank")
    assert layer.kernel.fused_experts.exchange is None and layer.kernel.impl.prepare_finalize == "vLLM's"
    said = [record.getMessage() for record in caplog.records if "exchange" in record.getMessage()]
    assert bool(said) == (why == "vLLM's kernel") and exchange.TIMEOUT_S > 0


def test_a_rank_whose_layer_isnt_packed_says_so_to_its_peers(vllm, monkeypatch, caplog):
    """They would wait for it, and count their objects otherwise than it does."""
    giving_way(vllm, monkeypatch, "bf16")
    monkeypatch.setattr(engines, "pack_layer", fail)
    opened = []
    monkeypatch.setattr(envoi, "ExpertParallel", lambda *given, **named: opened.append(given[0]) or Exchange(*given))
    layer = Layer(vllm, tensors("bf16"))
    assert opened == [None] and layer.kernel.impl.prepare_finalize == "vLLM's"
    assert "exchanges tokens of the MoE layers: ValueError: experts: expected ExpertWeights" in caplog.text


def test_after_a_rank_that_didnt_come_no_layer_waits_for_one(vllm, monkeypatch, caplog):
    tried = []

    def late(*arguments: Any, **named: Any) -> None:
        tried.append(arguments)
        raise envoi.PeerTimeout([1], "opening the group", 300.0)

    monkeypatch.setattr(envoi, "ExpertParallel", late)
    layers = [Layer(vllm, tensors("bf16")) for _ in range(3)]
    assert len(tried) == 1 and all(layer.kernel.impl.prepare_finalize == "vLLM's" for layer in layers)
    assert "PeerTimeout: opening the group: rank 1 is lost" in caplog.text


def test_counted_rows_which_no_graph_holds_are_left_to_vllms_exchange(vllm, monkeypatch, caplog):
    opened = []

    class OverNccl(Exchange):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.transport, self.exchange = "nccl", "counted"
            opened.append(self)

    monkeypatch.setattr(envoi, "ExpertParallel", OverNccl)
    assert Layer(vllm, tensors("bf16")).kernel.impl.prepare_finalize == "vLLM's"
    assert opened[0].closed and "rows are counted, for which the host waits (no links)" in caplog.text


def test_an_exchange_isnt_joined_by_a_kernel_of_vllms_that_has_taken_over(vllm, monkeypatch):
    """vLLM may keep a kernel while it loads weights anew, which then can be packed."""
    giving_way(vllm, monkeypatch, "bf16")
    given = tensors("bf16")
    ours = made(vllm, "bf16", given, parallel=PARALLEL, num_experts=RANKS * E)
    layer = SimpleWeights(given)
    with monkeypatch.context() as failing:
        failing.setattr(engines, "pack_layer", fail)
        ours.take(layer)
    ours.take(layer)
    assert ours.own is not None and ours.packed is None


class SimpleWeights:
    """Weights of a layer of vLLM's."""

    def __init__(self, given: dict[str, torch.Tensor]) -> None:
        self.w13_weight, self.w2_weight = given["gate_up"], given["down"]
