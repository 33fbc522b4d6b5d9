"""Models of transformers with their experts by Envoi, against transformers' own code."""

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers.activations import ACT2FN

from envoi.integrations.transformers import (
    implementation_name,
    is_experts,
    packed_experts,
    recognise_activation,
    unserved,
)  # fmt: skip
from envoi.quant import FORMATS
from tests.helpers.accuracy import relative_error
from tests.helpers.transformers_models import COMMON, MODELS, build, expert_modules, logits

pytestmark = pytest.mark.usefixtures("registered")


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_as_good_as_eager(name):
    model = build(name)
    ids = torch.randint(3, 64, (2, 40), generator=torch.Generator().manual_seed(1))
    oracle = logits(copy.deepcopy(model).double(), ids)
    eager = logits(model, ids)
    model.set_experts_implementation("envoi")
    ours = logits(model, ids)
    assert relative_error(ours, oracle) <= 2 * relative_error(eager, oracle)
    assert not torch.equal(ours, eager)  # or Envoi wasn't used


@pytest.mark.parametrize("format", [name for name in FORMATS if name != "bf16"])
def test_every_format_stays_close(format):
    model = build("mixtral")
    ids = torch.randint(3, 64, (1, 40), generator=torch.Generator().manual_seed(1))
    eager = logits(model, ids)
    model.set_experts_implementation(implementation_name(format))
    assert relative_error(logits(model, ids), eager) < (0.12 if format.startswith("mxfp4") else 0.05)


def test_gpt_oss_in_formats_that_take_its_sizes():
    model = build("gpt_oss")
    ids = torch.randint(3, 64, (1, 20), generator=torch.Generator().manual_seed(1))
    eager = logits(model, ids)
    for format in ("fp8_row", "mxfp8", "mxfp4", "mxfp4_mxfp8"):
        model.set_experts_implementation(implementation_name(format))
        assert relative_error(logits(model, ids), eager) < 0.15
    with pytest.raises(
        ValueError, match="hidden: expected a positive multiple of 128 for format 'fp8_block128', got 160"
    ):
        model.set_experts_implementation("envoi_fp8_block128")
    assert unserved(expert_modules(model)[0], "fp8_block128").startswith("hidden: expected a positive multiple of 128")


def test_a_saved_checkpoint_loads_with_envoi(tmp_path):
    model = build("qwen3_moe")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, experts_implementation="envoi"
    )
    model.set_experts_implementation("envoi")
    ids = torch.randint(3, 64, (1, 12))
    assert torch.equal(logits(loaded.eval(), ids), logits(model, ids))
    out = loaded.generate(ids, max_new_tokens=4, do_sample=False)
    assert out.shape == (1, 16)


def test_changed_weights_are_packed_again():
    model = build("mixtral")
    experts = model.model.layers[0].mlp.experts
    before = packed_experts(experts)
    assert packed_experts(experts) is before
    gate_up = before.gate_up.clone()
    with torch.no_grad():
        experts.gate_up_proj.mul_(2)
    assert torch.equal(packed_experts(experts).gate_up, gate_up * 2)


@pytest.mark.parametrize(("name", "activation", "limit"), [("mixtral", "swiglu", None), ("gpt_oss", "swiglu_oai", 7.0)])
def test_activations_are_recognised(name, activation, limit):
    assert recognise_activation(build(name).model.layers[0].mlp.experts) == (activation, limit)


def test_an_activation_that_envoi_does_not_have_is_refused():
    experts = build("mixtral").model.layers[0].mlp.experts
    experts.act_fn = torch.nn.Mish()
    with pytest.raises(ValueError, match="MixtralExperts: expected the activation swiglu .* got another"):
        packed_experts(experts)


ACTS = ["relu", "relu2", "quick_gelu", "sigmoid", "tanh", "gelu", "hardswish"]


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("gated", [True, False])
def test_other_curves_run(act, gated):
    module = build("mixtral").model.layers[0].mlp.experts
    module.act_fn = torch.nn.Hardswish() if act == "hardswish" else ACT2FN[act]
    x, weights = torch.randn(9, 128, generator=torch.manual_seed(0)).bfloat16(), torch.rand(9, 2)
    ids = torch.rand(9, 4).topk(2).indices
    if not gated:
        assert "%" in recognise_activation(SimpleNamespace(has_gate=False, act_fn=module.act_fn))[0] or act == "relu2"
        return
    with torch.no_grad():
        want = copy.deepcopy(module).double()(x.double(), ids, weights.double())
        module.config._experts_implementation = "envoi"
        assert 0 < relative_error(module(x, ids, weights), want) < 0.006


OTHER_ACTIVATIONS = {
    "geglu_tanh": ("Gemma4TextConfig", {
        "head_dim": 32, "global_head_dim": 32, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 64, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 64}),
    "relu2": ("NemotronHConfig", {
        "head_dim": 32, "layers_block_type": ["attention", "moe"], "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64, "n_group": 1, "topk_group": 1,
        "mamba_num_heads": 4, "mamba_head_dim": 32}),
}  # fmt: skip


@pytest.mark.parametrize("activation", OTHER_ACTIVATIONS)
def test_families_with_other_activations(activation):
    name, own = OTHER_ACTIVATIONS[activation]
    common = {key: value for key, value in COMMON.items() if name == "Gemma4TextConfig" or key != "num_hidden_layers"}
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, name)(**{**common, **own}), dtype=torch.bfloat16, experts_implementation="envoi"
    ).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() >= 2:
                tensor.normal_(std=0.1)
    modules = [module for module in model.modules() if is_experts(module)]
    assert {recognise_activation(module) for module in modules} == {(activation, None)}
    for module in modules:
        x, weights = torch.randn(9, 128).bfloat16(), torch.rand(9, 2)
        ids = torch.rand(9, 4).topk(2).indices
        with torch.no_grad():
            got = module(x, ids, weights)
            wide = copy.deepcopy(module).double()
            wide.config = copy.copy(module.config)
            wide.config._experts_implementation = "eager"
            want = wide(x.double(), ids, weights.double())
        assert 0 < relative_error(got, want) < 0.006


def test_an_ungated_activation_that_envoi_does_not_have_is_refused():
    experts = build("mixtral").model.layers[0].mlp.experts
    experts.has_gate = False
    experts.act_fn = torch.nn.Mish()
    with pytest.raises(ValueError, match="MixtralExperts: expected the activation silu or one of relu, .* of a plain"):
        packed_experts(experts)


def test_a_float32_model_is_refused_in_words():
    model = build("mixtral").float()
    model.set_experts_implementation("envoi")
    with pytest.raises(
        ValueError, match="got torch.float32, with weights in torch.float32 and no autocast; load the model with dtype"
    ):
        logits(model, torch.tensor([[5, 6]]))


def module_and_tokens(dtype: torch.dtype):
    """Make an experts module, tokens, ids and weights as a router gives them, and the oracle's outputs."""
    module = expert_modules(build("mixtral"))[0]
    x, weights = torch.randn(9, 128), torch.rand(9, 2)
    ids = torch.rand(9, 4).topk(2).indices
    with torch.no_grad():
        want = copy.deepcopy(module).double()(x.to(dtype).double(), ids, weights.double())
    module.config._experts_implementation = "eager"
    return module, x.to(dtype), ids, weights, want


def test_float16_models_run_as_well_as_bfloat16_would():
    module, x, ids, weights, want = module_and_tokens(torch.float16)
    with torch.no_grad():
        bfloat16 = copy.deepcopy(module)(x.bfloat16(), ids, weights.bfloat16())
        module.half().config._experts_implementation = "envoi"
        ours = module(x, ids, weights.half())
    assert ours.dtype == torch.float16
    assert relative_error(ours, want) <= 2 * relative_error(bfloat16, want)


@pytest.mark.parametrize("cast_to", [torch.bfloat16, torch.float16])
def test_a_float32_model_runs_under_autocast(cast_to):
    module, x, ids, weights, want = module_and_tokens(torch.float32)
    module.float()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        eager = module(x, ids, weights)
    module.config._experts_implementation = "envoi"
    with torch.no_grad(), torch.autocast("cpu", dtype=cast_to):
        ours = module(x, ids, weights)
    assert ours.dtype == torch.float32
    assert relative_error(ours, want) <= 2 * relative_error(eager, want)


def test_float32_tokens_are_cast_to_16_bit_weights():
    module, x, ids, weights, want = module_and_tokens(torch.float32)
    module.config._experts_implementation = "envoi"
    with torch.no_grad():
        ours = module(x, ids, weights)
        assert torch.equal(ours.bfloat16(), module(x.bfloat16(), ids, weights))
    assert ours.dtype == torch.float32
    assert relative_error(ours, want) < 0.01


def test_slots_of_other_ranks_count_nothing():
    module, x, ids, weights, _ = module_and_tokens(torch.bfloat16)
    module.config._experts_implementation = "envoi"
    with torch.no_grad():
        masked = module(x, torch.where(ids == 3, 4, ids), weights)
        assert torch.equal(masked, module(x, ids, weights * (ids != 3)))
        assert torch.equal(module(x, torch.full_like(ids, 4), weights), torch.zeros_like(x))


def test_arguments_needn_t_be_contiguous():
    module, x, ids, weights, _ = module_and_tokens(torch.bfloat16)
    module.config._experts_implementation = "envoi"
    with torch.no_grad():
        want = module(x, ids, weights)
        assert torch.equal(module(x.t().contiguous().t(), ids.t().contiguous().t(), weights.t().contiguous().t()), want)
