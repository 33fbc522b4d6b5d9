"""vLLM's integration without vLLM: on stand-ins that have the recorded names of each supported release."""

import inspect
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import envoi
import envoi.integrations.vllm as integration
from envoi.integrations import engines, names
from envoi.integrations.vllm import experts, loading, select
from envoi.integrations.vllm.used import ALL, EXCHANGE, EXPERTS, ROUTE, SELECTORS
from tests.helpers import fresh
from tests.helpers.accuracy import relative_error
from tests.helpers.slow import mostly_slow
from tests.integrations.stand_ins import OWN, RECORD, function, install, modules
from tests.integrations.test_engines import E, H, I, expected, tensors
from tools.engines.facts import RELEASES, problems

VLLM = [f"vllm {release}" for release in RELEASES["vllm"]]
# Releases differ in names and parameters; what Envoi does with them is tried on the newest.
NEWEST = mostly_slow(VLLM, [VLLM[-1]])
KEYS = {
    "bf16": ("unquantized", ()),
    "fp8_block128": ("fp8", ("kFp8Static128BlockSym", "kFp8Dynamic128Sym")),
    "fp8_row": ("fp8", ("kFp8StaticChannelSym", "kFp8DynamicTokenSym")),
    "mxfp8": ("mxfp8", ()),
    "mxfp4": ("mxfp4", ()),
    "nvfp4": ("nvfp4", ("kNvfp4Static", None)),
}


@pytest.fixture(params=NEWEST)
def vllm(request, monkeypatch):
    """Put a release's stand-ins in vLLM's place."""
    found = modules(RECORD[request.param], ALL)
    install(monkeypatch, found, integration, "ENVOI_VLLM")
    experts.experts_class.cache_clear()
    yield found
    experts.experts_class.cache_clear()


def activation(found: dict[str, Any], name: str) -> Any:
    return found[f"{EXPERTS.module.rpartition('.')[0]}.activation"].MoEActivation[name]


def config(found: dict[str, Any], **changed: Any) -> SimpleNamespace:
    parallel = {
        "use_all2all_kernels": False, "all2all_backend": "naive", "dp_size": 1, "enable_eplb": False,
        "use_batched_activation_format": False,
    } | changed.pop("parallel", {})  # fmt: skip
    given = {
        "moe_backend": "auto", "moe_parallel_config": SimpleNamespace(**parallel), "hidden_dim": H,
        "intermediate_size_per_partition": I, "num_local_experts": E, "experts_per_token": 2,
        "in_dtype": torch.bfloat16, "has_bias": False, "is_lora_enabled": False, "swiglu_limit": None,
        "swiglu_alpha": None, "swiglu_beta": None,
    }  # fmt: skip
    given["activation"] = activation(found, changed.pop("activation", "SILU"))
    return SimpleNamespace(**given | changed)


def selector(found: dict[str, Any], oracle: str) -> Any:
    return getattr(found[SELECTORS[oracle].module], SELECTORS[oracle].name)


@pytest.mark.parametrize("release", RECORD)
def test_supported_releases_have_all_names(release):
    engine = release.split()[0]
    assert not problems(engine, RECORD[release])


def test_the_record_is_of_the_supported_releases():
    assert set(RECORD) == {f"{engine} {release}" for engine, releases in RELEASES.items() for release in releases}
    assert all(set(RECORD[release]) == {str(used) for used in (*ALL, *ROUTE, *EXCHANGE)} for release in VLLM)


@pytest.mark.parametrize("vllm", VLLM, indirect=True)
def test_stand_ins_have_what_releases_have(vllm):
    for used in ALL:
        assert not names.missing(used, names.fact_of(used, getattr(vllm[used.module], used.name)))


def test_nothing_happens_unless_it_is_asked_for():
    found = fresh.run(
        "import sys\n"
        "from envoi.integrations.vllm import register\n"
        "register()\n"
        "print([x for x in ('vllm', 'envoi.ops.moe.kernels', 'envoi.integrations.vllm.select') if x in sys.modules])"
    )
    assert found.stdout.strip() == "[]", found


@pytest.mark.parametrize("vllm", VLLM, indirect=True)
@pytest.mark.parametrize("used", ALL, ids=str)
def test_a_name_that_moved_is_a_refusal(vllm, used, caplog):
    before = {oracle: selector(vllm, oracle) for oracle in SELECTORS if SELECTORS[oracle] is not used}
    delattr(vllm[used.module], used.name)
    integration.register()
    assert [record.getMessage() for record in caplog.records] == [
        f"Envoi runs no MoE layers: MovedError: there is no {used}"
    ]
    assert all(selector(vllm, oracle) is old for oracle, old in before.items())


@pytest.mark.parametrize("vllm", VLLM, indirect=True)
@pytest.mark.parametrize("change", ["parameter", "abstract", "member"])
def test_a_changed_class_is_a_refusal(vllm, change, caplog):
    base = getattr(vllm[EXPERTS.module], EXPERTS.name)
    if change == "parameter":
        base.apply = function([*inspect.signature(base.apply).parameters, "lora_state"])
    elif change == "abstract":
        base.__abstractmethods__ = frozenset({*base.__abstractmethods__, "quantize"})
    else:
        del base.g1_alphas
    integration.register()
    (record,) = caplog.records
    assert {"parameter": "lora_state", "abstract": "wants quantize", "member": "has no g1_alphas"}[
        change
    ] in record.getMessage()


@pytest.mark.parametrize("vllm", VLLM, indirect=True)
@pytest.mark.parametrize("format", KEYS)
def test_envoi_is_chosen(vllm, format, caplog):
    caplog.set_level(logging.INFO)
    oracle, keys = KEYS[format]
    holder = vllm["vllm.model_executor"]
    holder.__name__ = "vllm.model_executor"
    setattr(holder, SELECTORS[oracle].name, selector(vllm, oracle))  # a module that imported the function by name
    integration.register()
    integration.register()
    assert getattr(holder, SELECTORS[oracle].name) is selector(vllm, oracle)
    backend, chosen = selector(vllm, oracle)(config(vllm), *keys)
    assert backend.name == select.BACKENDS[oracle][1] and chosen.format == format
    assert issubclass(chosen, getattr(vllm[EXPERTS.module], EXPERTS.name)) and not chosen.__abstractmethods__
    selector(vllm, oracle)(config(vllm), *keys)
    assert [record.getMessage() for record in caplog.records] == [
        f"Envoi runs the MoE layers in {format}, 4 experts of 256 x 128, top 2, swiglu"
    ]


def test_a_layer_is_chosen_in_the_sizes_that_vllm_pads_it_to(vllm, caplog):
    caplog.set_level(logging.INFO)
    integration.register()
    backend, chosen = selector(vllm, "mxfp4")(config(vllm, intermediate_size_per_partition=I - 24))
    assert (backend.name, chosen.format) == ("XPU", "mxfp4"), caplog.text
    assert "4 experts of 256 x 128" in caplog.text


def test_deepseek_v4s_experts_are_chosen(vllm, caplog):
    caplog.set_level(logging.INFO)
    integration.register()
    v4 = config(vllm, swiglu_limit=10.0)
    backend, chosen = selector(vllm, "mxfp4 of DeepSeek-V4")(v4)
    assert backend.name == "XPU" and chosen.format == "mxfp4"
    assert experts.layer_of(v4, "mxfp4", v4.activation).limit == 10.0
    assert "Envoi runs the MoE layers in mxfp4" in caplog.text
    assert selector(vllm, "mxfp4 of DeepSeek-V4")(config(vllm, moe_backend="marlin")) == OWN


REFUSED = {
    "--moe-backend triton names them": {"moe_backend": "triton"},
    "LoRA is on": {"is_lora_enabled": True},
    "activations are in torch.float16": {"in_dtype": torch.float16},
    "tokens come batched by expert": {"parallel": {"use_batched_activation_format": True}},
    "tokens come by deepep_v2": {"parallel": {"use_all2all_kernels": True, "all2all_backend": "deepep_v2"}},
    "the activation adds None to up": {"activation": "SWIGLUOAI_UNINTERLEAVE"},
    "intermediate: expected a positive multiple of 8": {"intermediate_size_per_partition": 100},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_refused_goes_to_vllm(vllm, reason, caplog):
    caplog.set_level(logging.INFO)
    integration.register()
    assert selector(vllm, "unquantized")(config(vllm, **REFUSED[reason])) == OWN
    (record,) = caplog.records
    assert record.getMessage().startswith("vLLM's kernels run") and reason in record.getMessage()


def test_scales_of_activations_from_a_checkpoint_are_refused(vllm, caplog):
    caplog.set_level(logging.INFO)
    integration.register()
    assert selector(vllm, "fp8")(config(vllm), "kFp8StaticTensorSym", "kFp8StaticTensorSym") == OWN
    assert "activations have a scale from the checkpoint" in caplog.text


@pytest.mark.parametrize("format", KEYS)
def test_weights_that_processes_share_arent_reordered(vllm, format, caplog):
    caplog.set_level(logging.INFO)
    settings = SimpleNamespace(
        load_config=SimpleNamespace(load_format=select.SHARED),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8),
    )
    vllm["vllm.config"].get_current_vllm_config_or_none = lambda: settings
    integration.register()
    oracle, keys = KEYS[format]
    own = selector(vllm, oracle)(config(vllm), *keys) == OWN
    assert own == (format not in engines.VIEWED) == ("are shared with other processes" in caplog.text)


@pytest.mark.parametrize(("module", "ours"), [(f"{select.LAYERS}quantization.fp8", True), ("vllm.models.muse", False)])
def test_a_models_own_method_gets_vllms_kernels(vllm, module, ours, caplog):
    class Method:
        __module__ = module

        def __init__(self) -> None:
            self.chosen = selector(vllm, "unquantized")(config(vllm))

    caplog.set_level(logging.INFO)
    integration.register()
    assert (Method().chosen != OWN) == ours
    assert ("Method chooses among them itself" in caplog.text) == (not ours)


@pytest.mark.parametrize("asked", [None, "kMxfp8Dynamic"])
def test_activations_that_are_asked_for_win(vllm, asked, caplog):
    quantization = SimpleNamespace(moe=SimpleNamespace(activation=asked), linear=None)
    settings = SimpleNamespace(
        model_config=SimpleNamespace(quantization_config=quantization),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8),
    )
    vllm["vllm.config"].get_current_vllm_config_or_none = lambda: settings
    caplog.set_level(logging.INFO)
    integration.register()
    assert (selector(vllm, "mxfp4")(config(vllm)) == OWN) == (asked is not None)
    assert ("activations in kMxfp8Dynamic are asked for" in caplog.text) == (asked is not None)


@pytest.mark.parametrize(
    ("format", "name"),
    [
        ("fp8_block128", "VLLM_USE_DEEP_GEMM"), ("fp8_block128", "VLLM_MOE_USE_DEEP_GEMM"),
        ("fp8_block128", "VLLM_TEST_FORCE_FP8_MARLIN"), ("nvfp4", "VLLM_TEST_FORCE_FP8_MARLIN"),
    ],
)  # fmt: skip
def test_a_variable_that_names_a_kernel_wins(vllm, format, name, monkeypatch):
    integration.register()
    oracle, keys = KEYS[format]
    monkeypatch.setenv(name, "0")
    assert selector(vllm, oracle)(config(vllm), *keys) != OWN
    monkeypatch.setenv(name, "1")
    assert selector(vllm, oracle)(config(vllm), *keys) == OWN


def test_kernels_that_cannot_be_built_leave_the_layer_to_vllm(vllm, monkeypatch, caplog):
    monkeypatch.setattr(engines, "why_unbuilt", lambda layer, max_tokens: "its kernels can't be built: no ptxas")
    integration.register()
    assert selector(vllm, "unquantized")(config(vllm)) == OWN
    assert "no ptxas" in caplog.text


@pytest.mark.parametrize("asked", ["0", "1"])
def test_kernels_are_built_as_batch_invariant_as_calls_are(vllm, asked, monkeypatch):
    seen = []
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", asked)
    monkeypatch.setattr(engines, "why_unbuilt", lambda layer, max_tokens: seen.append(layer.batch_invariant) or "")
    integration.register()
    assert selector(vllm, "unquantized")(config(vllm)) != OWN and seen == [asked == "1"]


def test_a_layer_of_another_make_is_left_alone(vllm):
    integration.register()
    kind = vllm["vllm.model_executor.layers.fused_moe.routed_experts"].RoutedExperts
    assert not hasattr(kind(), "quant_method")
    kind.quant_method = SimpleNamespace(apply=None)
    assert not hasattr(kind().quant_method, "process_weights_after_loading")


def test_an_error_of_ours_leaves_the_layer_to_vllm(vllm, monkeypatch, caplog):
    def fail(*arguments):
        raise AttributeError("a field that moved")

    integration.register()
    monkeypatch.setattr(experts, "layer_of", fail)
    assert selector(vllm, "unquantized")(config(vllm)) == OWN
    assert "AttributeError: a field that moved" in caplog.text


def made(found: dict[str, Any], format: str, given: dict[str, Any], **changed: Any) -> Any:
    """Return Envoi's class for a format as vLLM makes it, with the tensors of a layer."""
    integration.register()
    oracle, keys = KEYS[format]
    _, chosen = selector(found, oracle)(config(found, **changed), *keys)
    quant = SimpleNamespace(gemm1_alpha=None, gemm1_beta=None, gemm1_clamp_limit=None)
    layer = chosen(moe_config=config(found, **changed), quant_config=quant)
    layer.w1_scale, layer.w2_scale = given.get("gate_up_sf"), given.get("down_sf")
    layer.w1_bias, layer.w2_bias = given.get("gate_up_bias"), given.get("down_bias")
    layer.g1_alphas, layer.g2_alphas = given.get("gate_up_scale"), given.get("down_scale")
    return layer


def called(layer: Any, given: dict[str, Any], x: torch.Tensor, ids: torch.Tensor, **changed: Any) -> torch.Tensor:
    """Call as vLLM does, with memory for the output, and return that."""
    M = len(x)
    *_, shape = layer.workspace_shapes(M, 2 * I, H, 2, E, E, None, layer.moe_config.activation)
    out = torch.full(shape, torch.nan, dtype=torch.bfloat16)
    named = dict.fromkeys(inspect.signature(layer.apply).parameters) | {
        "output": out, "hidden_states": x, "w1": given["gate_up"], "w2": given["down"], "topk_ids": ids,
        "topk_weights": torch.full(ids.shape, 0.5), "activation": layer.moe_config.activation,
        "apply_router_weight_on_input": False,
    }  # fmt: skip
    assert layer.apply(**named | changed) is None
    return out


@pytest.mark.parametrize("vllm", VLLM, indirect=True)
@pytest.mark.parametrize("format", KEYS)
def test_a_layer_computes_what_its_weights_mean(vllm, format):
    given = tensors(format)
    x = torch.randn(6, H, generator=torch.Generator().manual_seed(5)).bfloat16()
    ids = torch.tensor([[0, 3], [1, 2], [3, 2], [0, 1], [2, -1], [1, 0]], dtype=torch.int32)
    layer = made(vllm, format, given)
    assert layer.expects_unquantized_inputs
    want = expected(format, given, x, ids)
    assert relative_error(called(layer, given, x, ids), want) < (
        0.008 if format in ("bf16", "mxfp4", "nvfp4") else 0.08
    )
    expert_map = torch.tensor([-1, 0, 1, -1, 2, 3], dtype=torch.int32)  # ids of six experts, four of them here
    far = torch.where(ids >= 0, torch.tensor([1, 2, 4, 5], dtype=torch.int32)[ids.long()], ids)
    assert relative_error(called(layer, given, x, far, expert_map=expert_map), want) < 0.08
    ones = called(layer, given, x, ids, apply_router_weight_on_input=True)
    assert relative_error(ones, 2 * want) < 0.08, "vLLM has multiplied the tokens by the weights"


def processed(
    found: dict[str, Any], format: str, given: dict[str, Any], *, keeps: bool = False, **changed: Any
) -> Any:  # fmt: skip
    """Return vLLM's layer of these tensors after its method has processed them; keeps: a kernel once it has one."""
    method = SimpleNamespace(moe_kernel=None)

    def process(layer: Any) -> None:
        if getattr(layer, loading.DONE, False):
            return
        if method.moe_kernel is None or not keeps:
            method.moe_kernel = SimpleNamespace(fused_experts=made(found, format, layer.given, **changed))

    method.process_weights_after_loading = process
    integration.register()
    kind = found["vllm.model_executor.layers.fused_moe.routed_experts"].RoutedExperts
    kind.quant_method = method
    layer = kind()
    process_again(layer, given)
    return layer


def process_again(layer: Any, given: dict[str, Any]) -> None:
    layer.given, layer.w13_weight, layer.w2_weight = given, given["gate_up"], given["down"]
    for name, theirs in experts.HELD.items():
        if name in given:
            setattr(layer, theirs[-1], given[name])
    layer.quant_method.process_weights_after_loading(layer)


def kernel(layer: Any) -> Any:
    return layer.quant_method.moe_kernel.fused_experts


@pytest.mark.parametrize("format", KEYS)
def test_a_layer_is_packed_when_its_weights_are_processed(vllm, format):
    found = kernel(processed(vllm, format, tensors(format)))
    assert found.packed.format == format and found.own is None and not found.works


def test_a_layer_that_vllm_doesnt_process_again_isnt_packed_again(vllm, packs_for_hopper):
    given = tensors("mxfp4")
    layer = processed(vllm, "mxfp4", given)
    want = called(kernel(layer), given, X, IDS)
    setattr(layer, loading.DONE, True)  # weights are fragments now, which mustn't be taken for rows
    layer.quant_method.process_weights_after_loading(layer)
    assert torch.equal(called(kernel(layer), given, X, IDS), want)


def test_other_kernels_of_vllm_are_left_alone(vllm, caplog):
    integration.register()
    kind = vllm["vllm.model_executor.layers.fused_moe.routed_experts"].RoutedExperts
    own = SimpleNamespace()
    for more in ({}, {"moe_kernel": None}, {"moe_kernel": SimpleNamespace(fused_experts=own)}):
        seen: list[Any] = []
        kind.quant_method = SimpleNamespace(process_weights_after_loading=seen.append, **more)
        layer = kind()
        layer.quant_method.process_weights_after_loading(layer)
        assert seen == [layer] and not vars(own)
        line = "when they are loaded: SimpleNamespace has no moe_kernel: what is loaded anew may not reach"
        assert (line in caplog.text) == (not more)
        caplog.clear()


X = torch.randn(3, H, generator=torch.Generator().manual_seed(2)).bfloat16()
IDS = torch.tensor([[0, 3], [1, 2], [3, 2]], dtype=torch.int32)


def with_biases(format: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a layer's tensors, where the format's layers have biases in practice with those."""
    given = tensors(format, seed=seed)
    if format in ("bf16", "mxfp4"):
        source = torch.Generator().manual_seed(seed)
        given |= {
            "gate_up_bias": torch.randn(E, 2 * I, generator=source).bfloat16(),
            "down_bias": torch.randn(E, H, generator=source).bfloat16(),
        }
    return given


@pytest.mark.parametrize("keeps", [False, True], ids=["new kernel", "kernel kept"])
@pytest.mark.parametrize("moved", [False, True], ids=["in place", "by layers"])
@pytest.mark.parametrize("format", KEYS)
def test_weights_that_are_loaded_anew_go_into_the_same_memory(vllm, format, moved, keeps, packs_for_hopper):
    given, fresh = with_biases(format), with_biases(format, seed=9)
    copies = {name: y.clone() for name, y in fresh.items()}
    want = called(kernel(processed(vllm, format, copies, has_bias="down_bias" in given)), copies, X, IDS)
    layer = processed(vllm, format, given, keeps=keeps, has_bias="down_bias" in given)
    packed = kernel(layer).packed
    if keeps and format == "nvfp4":  # which vLLM writes to then
        kernel(layer).g1_alphas.copy_(fresh["gate_up_scale"])
        kernel(layer).g2_alphas.copy_(fresh["down_scale"])
    if moved:  # vLLM loads into tensors of its own, and copies what has become of them over the parameters
        process_again(layer, fresh)
    for name, y in given.items():
        y.copy_(fresh[name])
    if not moved:
        process_again(layer, given)
    got = envoi.moe(X, envoi.Routing(torch.full(IDS.shape, 0.5), IDS, E), packed)  # as a captured graph does
    assert torch.equal(got, want) and kernel(layer).packed is packed
    assert torch.equal(called(kernel(layer), given, X, IDS), want)
    if format == "mxfp4":
        assert packed.gate_up.values.data_ptr() == given["gate_up"].data_ptr(), "held once"


class Own:
    """What vLLM's own kernel is asked for, which tests see."""

    def __init__(self, quant_dtype: torch.dtype | None) -> None:
        self.calls: list[dict[str, Any]] = []
        self.quant_dtype, self.a1_scale, self.per_act_token_quant, self.block_shape = quant_dtype, None, True, None
        self.expects_unquantized_inputs = False

    def workspace_shapes(self, M, N, K, topk, *rest):
        return (M, topk, max(N, K)), (M, topk, N + 1), (M, K)

    def apply(self, output, hidden_states, *given):
        self.calls.append({"x": hidden_states, "scale": given[7], "workspaces": given[9:11], "weights": given[2]})
        output.fill_(7)


def giving_way(found: dict[str, Any], monkeypatch: pytest.MonkeyPatch, format: str) -> Own:
    """Put a kernel of vLLM's in place that answers 7, and return it."""
    own = Own(torch.float8_e4m3fn if format.startswith("fp8") else None)
    kind = found["vllm.model_executor.layers.fused_moe.experts.triton_moe"].TritonExperts
    monkeypatch.setattr(kind, "__new__", lambda cls, *given: own)
    monkeypatch.setattr(found["vllm.model_executor.layers.fused_moe.utils"], "moe_kernel_quantize_input", quantized)
    return own


def quantized(A, A_scale, quant_dtype, per_act_token_quant, block_shape):
    return A.to(quant_dtype), torch.ones(len(A), 1)


def fail(*arguments: Any, **named: Any) -> None:
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize("format", engines.VIEWED)
@pytest.mark.parametrize("place", ["packing", "warming up", "first call"])
def test_a_failure_after_loading_gives_way_to_vllms_kernel(vllm, format, place, monkeypatch, caplog):
    own = giving_way(vllm, monkeypatch, format)
    if place == "packing":
        monkeypatch.setattr(engines, "pack", fail)
    elif place == "warming up":
        monkeypatch.setattr(engines, "warm_up", fail)
        monkeypatch.setattr(experts, "_warm", set())
    else:
        monkeypatch.setattr(envoi, "moe", fail)
    given = tensors(format)
    found = kernel(processed(vllm, format, given))
    shape = {"workspace13": torch.empty(0), "workspace2": torch.empty(0)}  # made for Envoi's call
    for _ in range(2):
        assert (called(found, given, X, IDS, **shape) == 7).all()
        shape = dict(
            zip(shape, map(torch.empty, found.workspace_shapes(3, 2 * I, H, 2, E, E, None, None)), strict=False)
        )
    assert not found.expects_unquantized_inputs and found.packed is None
    for call in own.calls:
        assert call["x"].dtype == (own.quant_dtype or torch.bfloat16) and (call["scale"] is None) == (format == "bf16")
        assert [tuple(x.shape) for x in call["workspaces"]] == [(3, 2, max(2 * I, H)), (3, 2, 2 * I + 1)]
    (record,) = (x for x in caplog.records if x.levelno >= logging.WARNING)
    assert record.getMessage().startswith(f"vLLM's kernels run the MoE layers in {format}")
    assert "RuntimeError: no such kernel" in record.getMessage()


@pytest.mark.parametrize("place", ["packing", "first call"])
def test_weights_that_only_envoi_reads_say_what_to_do(vllm, place, monkeypatch):
    monkeypatch.setattr(*((engines, "pack", fail) if place == "packing" else (envoi, "moe", fail)))
    given = tensors("mxfp4")
    with pytest.raises(RuntimeError, match=r"in mxfp4, .* start with ENVOI_VLLM=0; RuntimeError: no such kernel"):
        called(kernel(processed(vllm, "mxfp4", given)), given, X, IDS)


def test_an_error_after_the_first_call_is_an_error(vllm, monkeypatch):
    given = tensors("bf16")
    found = kernel(processed(vllm, "bf16", given))
    called(found, given, X, IDS)
    monkeypatch.setattr(envoi, "moe", fail)
    with pytest.raises(RuntimeError, match="no such kernel"):
        called(found, given, X, IDS)
    assert found.own is None


def test_numbers_of_the_activation(vllm):
    layer = experts.layer_of
    assert layer(config(vllm, activation="SWIGLUOAI"), "bf16", activation(vllm, "SWIGLUOAI")).limit == 7.0
    given = config(vllm, swiglu_limit=3, swiglu_alpha=1.5, swiglu_beta=1)
    found = layer(given, "bf16", activation(vllm, "SWIGLUOAI_UNINTERLEAVE"))
    assert (found.activation, found.gate_up_layout, found.limit, found.alpha) == ("swiglu_oai", "concat", 3.0, 1.5)
    quant = SimpleNamespace(gemm1_alpha=1.25, gemm1_beta=1.0, gemm1_clamp_limit=5.0)
    found = layer(config(vllm), "mxfp4", activation(vllm, "SWIGLUOAI"), quant)
    assert (found.gate_up_layout, found.limit, found.alpha) == ("interleaved", 5.0, 1.25)
    assert layer(given, "bf16", activation(vllm, "GELU")).limit is None and envoi.__version__
