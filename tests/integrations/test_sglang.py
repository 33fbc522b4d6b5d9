"""SGLang's integration without SGLang: on stand-ins that have the names of the supported release."""

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import envoi.integrations.sglang as integration
from envoi.integrations import engines, names
from envoi.integrations.sglang import experts
from envoi.integrations.sglang.used import ALL
from envoi.quant import fragments
from tests.helpers import fresh
from tests.helpers.accuracy import relative_error
from tests.integrations import sglang_stand_ins as stand_ins
from tests.integrations.sglang_stand_ins import (
    OWN,
    Backends,
    MoeRunnerConfig,
    StandardDispatchOutput,
    StandardTopKOutput,
    TritonMoeQuantInfo,
)
from tests.integrations.stand_ins import RECORD, install
from tests.integrations.test_engines import H, dense, expected, tensors
from tools.engines.facts import RELEASES

SGLANG = [f"sglang {release}" for release in RELEASES["sglang"]]
RUNNER = "sglang.srt.layers.moe.moe_runner.runner"
MXFP4 = "sglang.srt.layers.quantization.mxfp4"
WANTED = {"bf16": 0.008, "fp8_block128": 0.08, "fp8_row": 0.08}


@pytest.fixture
def sglang(monkeypatch):
    """Put stand-ins in SGLang's place."""
    found = stand_ins.modules()
    install(monkeypatch, found, integration)
    monkeypatch.setattr(experts, "_warm", set())
    monkeypatch.delenv("ENVOI_SGLANG", raising=False)
    return found["sglang"]


def load() -> None:
    """Load the plug-in as SGLang does."""
    integration.register()
    integration.register()
    stand_ins.apply_hooks(sys.modules["sglang"].hooks)


def name_envoi() -> None:
    """Do what SGLang does with `--moe-runner-backend envoi`."""
    load()
    utils = sys.modules["sglang.srt.layers.moe.utils"]
    sys.modules["sglang"].flags.backend = utils.resolve_moe_runner_backend("envoi")


def runner(config=None, backend=Backends.TRITON, **more):
    return sys.modules[RUNNER].MoeRunner(backend, config or MoeRunnerConfig(), **more)


def quantised(format: str, given: dict[str, torch.Tensor]) -> TritonMoeQuantInfo:
    found = TritonMoeQuantInfo(given["gate_up"], given["down"], given.get("gate_up_bias"), given.get("down_bias"))
    if format != "bf16":
        found.use_fp8_w8a8, found.w13_scale, found.w2_scale = True, given["gate_up_sf"], given["down_sf"]
        found.block_shape = [128, 128] if format == "fp8_block128" else None
    return found


def dispatched(top_k: int = 2, dtype: torch.dtype = torch.bfloat16) -> StandardDispatchOutput:
    x = torch.randn(6, H, generator=torch.Generator().manual_seed(5)).to(dtype)
    ids = torch.tensor([[0, 3], [1, 2], [3, 2], [0, 1], [2, -1], [1, 0]], dtype=torch.int32)[:, :top_k]
    return StandardDispatchOutput(x, None, StandardTopKOutput(torch.full(ids.shape, 0.5), ids.contiguous()))


def wanted(format: str, given: dict[str, torch.Tensor], routed: StandardDispatchOutput) -> torch.Tensor:
    return expected(format, given, routed.hidden_states, routed.topk_output.topk_ids)


def test_stand_ins_have_what_the_release_has(sglang):
    (release,) = SGLANG
    assert set(RECORD[release]) == {str(used) for used in ALL}
    for used in ALL:
        value = getattr(sys.modules[used.module], used.name)
        assert names.fact_of(used, value) == RECORD[release][str(used)], used


def test_nothing_is_imported_before_sglang_calls():
    found = fresh.run(
        "import sys\n"
        "import envoi.integrations.sglang\n"
        "unwanted = ('sglang', 'envoi.ops.moe.kernels', 'envoi.integrations.sglang.select')\n"
        "print([x for x in unwanted if x in sys.modules])"
    )
    assert found.stdout.strip() == "[]", found


def test_kernels_are_imported_once_a_layer_is_chosen():
    found = fresh.run(
        "import sys\n"
        "from tests.integrations import sglang_stand_ins\n"
        "sys.modules.update(modules := sglang_stand_ins.modules())\n"
        "from envoi.integrations.sglang import register\n"
        "register()\n"
        "sglang_stand_ins.apply_hooks(modules['sglang'].hooks)\n"
        "runner = sys.modules['sglang.srt.layers.moe.moe_runner.runner'].MoeRunner\n"
        "runner(sglang_stand_ins.Backends.TRITON, sglang_stand_ins.MoeRunnerConfig())\n"
        "print([x for x in ('envoi.ops.moe.kernels', 'envoi.integrations.sglang.experts') if x in sys.modules])"
    )
    assert found.stdout.strip() == "[]", found


@pytest.mark.parametrize("used", ALL, ids=str)
def test_a_name_that_moved_is_a_refusal(sglang, used, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    delattr(sys.modules[used.module], used.name)
    integration.register()
    monkeypatch.setenv("ENVOI_SGLANG", "1")
    integration.register()
    line = f"Envoi runs no MoE layers: MovedError: there is no {used}"
    assert [(x.levelno, x.getMessage()) for x in caplog.records] == [(logging.INFO, line), (logging.WARNING, line)]
    assert not (sglang.hooks or sglang.cores or sglang.flags.choices)


def test_a_switch_that_is_no_switch_is_a_line(sglang, caplog, monkeypatch):
    monkeypatch.setenv("ENVOI_SGLANG", "yes")
    integration.register()
    assert "ENVOI_SGLANG" in caplog.text and not sglang.hooks


def test_nothing_happens_unless_it_is_asked_for(sglang, caplog):
    caplog.set_level(logging.INFO)
    load()
    for config in (MoeRunnerConfig(), MoeRunnerConfig(activation="situ")):
        made = runner(config)
        assert made.runner_backend is Backends.TRITON and made.runner_core is None
    assert sglang.flags.choices == ["envoi"] and not caplog.records
    method = sys.modules[MXFP4].Mxfp4MoEMethod()
    method.runner = made
    method.process_weights_after_loading(SimpleNamespace())
    assert method.widened and method.apply(None, None).hidden_states == OWN


@pytest.mark.parametrize("one", [None, SimpleNamespace(), SimpleNamespace(runner_backend="triton")], ids=str)
def test_a_runner_of_another_kind_is_sglangs(sglang, one):
    load()
    method = sys.modules[MXFP4].Mxfp4MoEMethod()
    method.runner = one
    method.process_weights_after_loading(SimpleNamespace())
    assert method.widened and method.apply(None, None).hidden_states == OWN


def test_the_variable_takes_the_automatic_choice_alone(sglang, monkeypatch, caplog):
    monkeypatch.setenv("ENVOI_SGLANG", "1")
    load()
    assert runner().runner_backend.value == "envoi"
    sglang.flags.backend = Backends.TRITON
    assert runner().runner_backend is Backends.TRITON
    assert "--moe-runner-backend triton names them" in caplog.text


@pytest.mark.parametrize("format", WANTED)
def test_a_layer_computes_what_its_weights_mean(sglang, format, caplog):
    caplog.set_level(logging.INFO)
    name_envoi()
    given, routed = tensors(format), dispatched()
    made = [runner(backend=sglang.flags.backend), runner()]
    for one in made:
        assert one.runner_backend.is_triton() and one.runner_core.runner_backend is sglang.flags.backend
        found = one.run(routed, quantised(format, given)).hidden_states
        assert relative_error(found, wanted(format, given, routed)) < WANTED[format]
    layer = f"{format}, 4 experts of 256 x 128, top 2, swiglu"
    assert [x.getMessage() for x in caplog.records] == [f"Envoi runs the MoE layers in {layer}"]


def test_scales_of_the_router(sglang):
    name_envoi()
    given, routed = tensors("bf16"), dispatched()
    found = runner(MoeRunnerConfig(routed_scaling_factor=2.5)).run(routed, quantised("bf16", given)).hidden_states
    assert relative_error(found, 2.5 * wanted("bf16", given, routed)) < 0.008
    routed = dispatched(top_k=1)
    half = routed._replace(hidden_states=routed.hidden_states * 0.5)
    config = MoeRunnerConfig(apply_router_weight_on_input=True, top_k=1)
    found = runner(config).run(routed, quantised("bf16", given)).hidden_states
    assert relative_error(found, 2 * wanted("bf16", given, half)) < 0.008


REFUSED = {
    "LoRA is on": ({}, {"lora_enabled": True}),
    "Envoi has no activation situ": ({"activation": "situ"}, {}),
    "Envoi has no activation gelu without a gate": ({"activation": "gelu", "is_gated": False}, {}),
    "their limit follows SiLU": ({"gemm1_clamp_limit": 7.0}, {}),
    "adds 0.5 to up": ({"gemm1_alpha": 1.7, "gemm1_clamp_limit": 7.0, "gemm1_beta": 0.5}, {}),
    "clamped at None": ({"gemm1_alpha": 1.7}, {}),
    "activations are in torch.float16": ({"params_dtype": torch.float16}, {}),
    "the model sums a token's slots itself": ({"no_combine": True}, {}),
    "intermediate: expected a positive multiple of 8": ({"intermediate_size_per_partition": 100}, {}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_refused_gets_sglangs_own_runner(sglang, reason, caplog):
    name_envoi()
    changed, more = REFUSED[reason]
    for backend in (sglang.flags.backend, Backends.TRITON):
        made = runner(MoeRunnerConfig(**changed), backend, **more)
        assert made.runner_backend is Backends.TRITON and made.runner_core is None
    (record,) = caplog.records
    assert record.getMessage().startswith("SGLang's kernels run the MoE layers: ") and reason in record.getMessage()


def test_another_transport_or_choice_is_sglangs(sglang, caplog):
    name_envoi()
    assert runner(backend=Backends.DEEP_GEMM).runner_backend is Backends.DEEP_GEMM
    sglang.flags.transport = SimpleNamespace(value="deepep")
    assert runner().runner_backend is Backends.TRITON
    assert "SGLang has chosen deep_gemm" in caplog.text and "tokens come by deepep" in caplog.text


LATE = {
    "weights are quantised as Envoi's formats aren't": ("fp8_block128", {"block_shape": [64, 128]}, {}),
    "formats aren't": ("bf16", {"use_int4_w4a16": True}, {}),
    "activations have a scale from the checkpoint": ("fp8_row", {"a13_scale": torch.ones(1)}, {}),
    "SGLang has put gate's and up's rows in turn": ("bf16", {"fuse_swiglu_interleaved": True}, {}),
    "activations are in torch.float16": ("bf16", {}, {"dtype": torch.float16}),
}


@pytest.mark.parametrize("reason", LATE)
def test_what_weights_show_goes_to_sglangs_function(sglang, reason, caplog):
    name_envoi()
    format, changed, tokens = LATE[reason]
    quant = quantised(format, tensors(format))
    vars(quant).update(changed)
    made = runner()
    for _ in range(2):
        assert made.run(dispatched(**tokens), quant).hidden_states == OWN
    (record,) = caplog.records
    assert reason in record.getMessage()


def test_router_weights_on_input_of_several_experts_are_sglangs(sglang, caplog):
    name_envoi()
    made = runner(MoeRunnerConfig(apply_router_weight_on_input=True))
    assert made.run(dispatched(), quantised("bf16", tensors("bf16"))).hidden_states == OWN
    assert "what several experts read" in caplog.text


def test_an_error_of_ours_leaves_the_layer_to_sglang(sglang, monkeypatch, caplog):
    def fail(*arguments):
        raise AttributeError("a field that moved")

    name_envoi()
    made = runner()
    monkeypatch.setattr(engines, "pack_layer", fail)
    assert made.run(dispatched(), quantised("bf16", tensors("bf16"))).hidden_states == OWN
    monkeypatch.setattr(experts, "why_not_activation", fail)
    assert runner().runner_backend is Backends.TRITON
    assert caplog.text.count("AttributeError: a field that moved") == 1, "one line for both"


def test_kernels_that_cannot_be_built_leave_the_layer_to_sglang(sglang, monkeypatch, caplog):
    asked = []

    def why_unbuilt(layer, max_tokens):
        asked.append(max_tokens)
        return "no ptxas"

    monkeypatch.setattr(engines, "why_unbuilt", why_unbuilt)
    name_envoi()
    sglang.flags.dp = 2
    for chunk in (64, -1):
        sglang.flags.chunk = chunk
        assert runner().run(dispatched(), quantised("bf16", tensors("bf16"))).hidden_states == OWN
    assert asked == [128, 256] and "top 2, swiglu: no ptxas" in caplog.text


@pytest.mark.parametrize("format", WANTED)
def test_load_balancing(sglang, format, caplog):
    name_envoi()
    sglang.flags.eplb = True
    found = runner().run(dispatched(), quantised(format, tensors(format))).hidden_states
    assert (found is OWN) == (format == "fp8_row") == ("expert load balancing" in caplog.text)


def test_weights_in_other_memory_are_sglangs(sglang, caplog):
    name_envoi()
    made, given = runner(), tensors("bf16")
    assert made.run(dispatched(), quantised("bf16", given)).hidden_states is not OWN
    given["down"] = given["down"].clone()
    assert made.run(dispatched(), quantised("bf16", given)).hidden_states == OWN
    assert "their weights have moved" in caplog.text


@pytest.mark.parametrize(("format", "bias"), [("bf16", True), ("fp8_block128", False), ("fp8_row", False)])
def test_weights_written_in_place_are_followed(sglang, format, bias, packs_for_hopper):
    def loaded(seed: int) -> dict[str, torch.Tensor]:
        found = tensors(format, seed, bias)  # SGLang's biases are in float32
        return {name: x.float() if "bias" in name else x for name, x in found.items()}

    name_envoi()
    made, given, fresh, routed = runner(), loaded(0), loaded(9), dispatched()
    before = made.run(routed, quantised(format, given)).hidden_states
    for name, x in given.items():
        x.copy_(fresh[name])
    found = made.run(routed, quantised(format, given)).hidden_states
    assert torch.equal(found, runner().run(routed, quantised(format, fresh)).hidden_states)
    assert not torch.equal(found, before)


def test_nothing_is_packed_while_a_graph_is_captured_or_compiled(sglang, monkeypatch):
    name_envoi()
    made, quant = runner(), quantised("bf16", tensors("bf16"))
    with monkeypatch.context() as now:
        now.setattr(experts, "capturing", lambda device: True)
        assert made.run(dispatched(), quant).hidden_states == OWN
    assert made.run(dispatched(), quant).hidden_states is not OWN
    monkeypatch.setattr(experts, "capturing", lambda device: True)
    assert made.run(dispatched(), quant).hidden_states is not OWN, "what is packed is captured"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert made.run(dispatched(), quant).hidden_states == OWN


def test_batch_invariance_is_handed_on(sglang, monkeypatch):
    name_envoi()
    sglang.flags.invariant = True
    asked = []
    monkeypatch.setattr(experts.envoi, "moe", lambda *given, batch_invariant: asked.append(batch_invariant))
    runner().run(dispatched(), quantised("bf16", tensors("bf16")))
    assert asked == [True]


OSS: dict[str, Any] = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}


def mxfp4_layer(seed: int = 0):
    given = tensors("mxfp4", seed, bias=True)
    parts = {
        "gate_up": "w13_weight",
        "down": "w2_weight",
        "gate_up_sf": "w13_weight_scale",
        "down_sf": "w2_weight_scale",
    }
    parts |= {"gate_up_bias": "w13_weight_bias", "down_bias": "w2_weight_bias"}
    layer = SimpleNamespace(**{parts[name]: torch.nn.Parameter(x, requires_grad=False) for name, x in given.items()})
    return layer, {name: x.clone() for name, x in given.items()}


def mxfp4_method(**changed):
    method = sys.modules[MXFP4].Mxfp4MoEMethod()
    method.runner = runner(MoeRunnerConfig(**OSS | changed))
    return method


def gpt_oss(given: dict[str, torch.Tensor], routed: StandardDispatchOutput) -> torch.Tensor:
    gate_up, down = dense("mxfp4", given)
    want = torch.zeros(6, H, dtype=torch.float64)
    for token, slots in enumerate(routed.topk_output.topk_ids.tolist()):
        for e in slots:
            if e >= 0:
                h = gate_up[e] @ routed.hidden_states[token].double() + given["gate_up_bias"][e].double()
                gate, up = h[0::2].clamp(max=7), h[1::2].clamp(-7, 7)
                act = gate * torch.sigmoid(1.702 * gate) * (up + 1)
                want[token] += 0.5 * (down[e] @ act + given["down_bias"][e].double())
    return want


def test_mxfp4_stays_in_4_bits(sglang, caplog):
    caplog.set_level(logging.INFO)
    name_envoi()
    method, routed, (layer, _) = mxfp4_method(), dispatched(), mxfp4_layer()
    for seed in (0, 7):  # loaded, and loaded again into the same memory
        loaded, given = mxfp4_layer(seed)
        for name, x in vars(loaded).items():
            getattr(layer, name).data.copy_(x)
        method.process_weights_after_loading(layer)
        packed = method.runner.runner_core.packed
        assert not method.widened and packed.gate_up.values.data_ptr() == layer.w13_weight.data_ptr()
        found = method.apply(layer, routed).hidden_states
        assert relative_error(found, gpt_oss(given, routed)) < 0.008
    assert "Envoi runs the MoE layers in mxfp4, 4 experts of 256 x 128, top 2, swiglu_oai" in caplog.text


def test_mxfp4_that_is_refused_is_widened_by_sglang(sglang, caplog):
    name_envoi()
    sglang.flags.eplb = True
    method = mxfp4_method()
    layer, given = mxfp4_layer()
    method.process_weights_after_loading(layer)
    assert method.widened and torch.equal(layer.w13_weight, given["gate_up"])
    assert method.apply(layer, dispatched()).hidden_states == OWN
    assert "SGLang widens the MoE layers in MXFP4 to bf16: mxfp4, 4 experts" in caplog.text
    method = mxfp4_method(activation="situ")
    method.process_weights_after_loading(layer)
    assert method.widened


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("top_k", [None, 1, 2])
def test_mxfp4_with_the_routers_weights_on_input(sglang, bias, top_k, packs_for_hopper, caplog):
    name_envoi()
    method, (layer, given) = mxfp4_method(apply_router_weight_on_input=True, top_k=top_k), mxfp4_layer()
    if not bias:
        del layer.w13_weight_bias, layer.w2_weight_bias
    method.process_weights_after_loading(layer)
    assert method.widened == (bias or top_k != 1) == ("what several experts read" in caplog.text)
    assert method.widened == torch.equal(layer.w13_weight, given["gate_up"])


def failing(at: int) -> Any:
    """Return what puts a matrix into the kernels' order, running out of memory at the n-th, from 0."""
    inner, calls = fragments._values_to_fragments, iter(range(at))

    def values_to_fragments(values: torch.Tensor) -> torch.Tensor:
        if next(calls, None) is None:
            raise torch.OutOfMemoryError("no memory for a copy")
        return inner(values)

    return values_to_fragments


def test_mxfp4_that_cannot_be_packed_is_widened_by_sglang(sglang, monkeypatch, caplog, packs_for_hopper):
    name_envoi()
    method, (layer, given) = mxfp4_method(), mxfp4_layer()
    with monkeypatch.context() as now:
        now.setattr(fragments, "_values_to_fragments", failing(at=0))
        method.process_weights_after_loading(layer)
    assert method.widened and method.apply(layer, dispatched()).hidden_states == OWN
    assert torch.equal(layer.w13_weight, given["gate_up"]) and torch.equal(layer.w2_weight, given["down"])
    assert "SGLang widens the MoE layers in MXFP4 to bf16: OutOfMemoryError: no memory for a copy" in caplog.text
    method = mxfp4_method()
    del layer.w2_weight_scale
    method.process_weights_after_loading(layer)
    assert method.widened and "no attribute 'w2_weight_scale'" in caplog.text


@pytest.mark.parametrize("at", [1, 4], ids=["gate_up", "down"])
def test_mxfp4_reordered_in_part_is_an_error(sglang, monkeypatch, at, packs_for_hopper):
    name_envoi()
    monkeypatch.setattr(fragments, "PART_BYTES", 1)  # an expert at a time
    monkeypatch.setattr(fragments, "_values_to_fragments", failing(at))
    method, (layer, given) = mxfp4_method(), mxfp4_layer()
    with pytest.raises(torch.OutOfMemoryError, match="no memory for a copy"):
        method.process_weights_after_loading(layer)
    assert not method.widened and not torch.equal(layer.w13_weight, given["gate_up"])


def test_mxfp4_that_is_in_the_kernels_order_is_not_widened(sglang, monkeypatch):
    def fail(*arguments, **more):
        raise ValueError("not this time")

    name_envoi()
    for name in ("warm_up", "pack_layer", "why_not"):
        method, (layer, _) = mxfp4_method(), mxfp4_layer()
        if name != "warm_up":
            method.process_weights_after_loading(layer)
        with monkeypatch.context() as now, pytest.raises(ValueError, match="not this time"):
            now.setattr(engines, name, fail)
            method.process_weights_after_loading(layer)
        assert not method.widened
