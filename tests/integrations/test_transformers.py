"""transformers models with their experts through Envoi, beside transformers' own."""

import copy

import pytest
import torch
import transformers

from envoi.integrations.transformers import implementation_name, packed_experts, recognise_activation
from envoi.quant import FORMATS
from tests.helpers.accuracy import relative_error
from tests.helpers.transformers_models import MODELS, build, logits


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_as_good_as_eager(name):
    model = build(name)
    ids = torch.randint(3, 64, (2, 40), generator=torch.Generator().manual_seed(1))
    oracle = logits(copy.deepcopy(model).double(), ids)
    eager = logits(model, ids)
    model.set_experts_implementation("envoi")
    ours = logits(model, ids)
    assert relative_error(ours, oracle) <= 2 * relative_error(eager, oracle)
    assert not torch.equal(ours, eager)  # or Envoi had no part in it


@pytest.mark.parametrize("format", [name for name in FORMATS if name != "bf16"])
def test_every_format_stays_close(format):
    model = build("mixtral")
    ids = torch.randint(3, 64, (1, 40), generator=torch.Generator().manual_seed(1))
    eager = logits(model, ids)
    model.set_experts_implementation(implementation_name(format))
    assert relative_error(logits(model, ids), eager) < (0.12 if format == "mxfp4" else 0.05)


def test_gpt_oss_in_formats_that_take_its_sizes():
    model = build("gpt_oss")
    ids = torch.randint(3, 64, (1, 20), generator=torch.Generator().manual_seed(1))
    eager = logits(model, ids)
    for format in ("fp8_row", "mxfp8", "mxfp4"):
        model.set_experts_implementation(implementation_name(format))
        assert relative_error(logits(model, ids), eager) < 0.15
    model.set_experts_implementation("envoi_fp8_block128")
    with pytest.raises(
        ValueError, match="hidden: expected a positive multiple of 128 for format 'fp8_block128', got 160"
    ):
        logits(model, ids)


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
    experts.act_fn = torch.nn.GELU()
    with pytest.raises(ValueError, match="MixtralExperts: expected the activation swiglu .* got another"):
        packed_experts(experts)


def test_experts_without_a_gate_are_refused():
    experts = build("mixtral").model.layers[0].mlp.experts
    experts.has_gate = False
    with pytest.raises(ValueError, match="MixtralExperts: expected gated experts"):
        packed_experts(experts)


def test_a_float32_model_is_refused_in_words():
    model = build("mixtral").float()
    model.set_experts_implementation("envoi")
    with pytest.raises(
        ValueError, match="got torch.float32, with weights in torch.float32 and no autocast; load the model with dtype"
    ):
        logits(model, torch.tensor([[5, 6]]))
