"""Models of transformers with their experts by Envoi, against transformers' own code."""

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers.activations import ACT2FN

from envoi.integrations.transformers import (
    implementation_name,
    packed_experts,
    recognise_activation,
)  # fmt: skip
from envoi.quant import FORMATS
from tests.helpers.accuracy import relative_error
from tests.helpers.transformers_models import MODELS, build, expert_modules, logits

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


def test_slots_of_other_ranks_count_nothing():
    module, x, ids, weights, _ = module_and_tokens(torch.bfloat16)
    module.config._experts_implementation = "envoi"
    with torch.no_grad():
        masked = module(x, torch.where(ids == 3, 4, ids), weights)
        assert torch.equal(masked, module(x, ids, weights * (ids != 3)))
        assert torch.equal(module(x, torch.full_like(ids, 4), weights), torch.zeros_like(x))
