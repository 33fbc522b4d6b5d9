"""Refusals: of models that Envoi can't run, when it is chosen; of gradients that would be lost, at the call."""

import peft
import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from envoi.integrations.transformers import recognise_activation
from tests.helpers.transformers_models import COMMON, build, expert_modules, logits, tokens

pytestmark = pytest.mark.usefixtures("registered")

SMALL = {**COMMON, "num_hidden_layers": 1}
OUTSIDE = {
    "JetMoeConfig": {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 32},
    "Llama4TextConfig": {"num_local_experts": 2, "head_dim": 32, "intermediate_size_mlp": 64},
    "DbrxConfig": {"d_model": 64, "n_heads": 2, "n_layers": 1, "vocab_size": 64,
                   "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2}, "ffn_config": {"ffn_hidden_size": 64}},
    "DogeConfig": {"is_moe": True, "num_experts": 4, "num_experts_per_tok": 2},
    "LongcatFlashConfig": {
        "num_layers": 1, "n_routed_experts": 4, "moe_topk": 2, "zero_expert_num": 1, "q_lora_rank": 32,
        "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32, "head_dim": 16,
        "expert_ffn_hidden_size": 64, "ffn_hidden_size": 64,
    },
    "LlamaConfig": {},
}  # fmt: skip
NO_PART = "expected experts that transformers looks up by experts_implementation, got none.*'eager'"


def outside(name: str):
    own = OUTSIDE[name]
    return getattr(transformers, name)(**(own if name == "DbrxConfig" else {**SMALL, **own}))


@pytest.mark.parametrize("name", OUTSIDE)
def test_families_that_look_nothing_up_are_refused(name, tmp_path):
    with pytest.raises(ValueError, match=f"experts_implementation='envoi': .*{NO_PART}"):
        AutoModelForCausalLM.from_config(outside(name), experts_implementation="envoi")
    model = AutoModelForCausalLM.from_config(outside(name))
    before = model.get_experts_implementation()
    with pytest.raises(ValueError, match=f"experts_implementation='envoi_mxfp4': {type(model).__name__}: {NO_PART}"):
        model.set_experts_implementation("envoi_mxfp4")
    assert model.get_experts_implementation() == before
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=NO_PART):
        AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="envoi")
    AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager")


def test_refused_before_weights_are_read(tmp_path, monkeypatch):
    AutoModelForCausalLM.from_config(outside("LlamaConfig")).save_pretrained(tmp_path)
    read = []
    monkeypatch.setattr(transformers.PreTrainedModel, "_finalize_model_loading", lambda *_: read.append(0))
    with pytest.raises(ValueError, match=NO_PART):
        AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="envoi")
    assert not read


def test_a_vision_tower_needs_no_experts():
    text = {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32,
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4}}  # fmt: skip
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128,
              "deepstack_visual_indexes": [0], "num_position_embeddings": 16}  # fmt: skip
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    model = AutoModel.from_config(config, experts_implementation="envoi")
    assert {module.config._experts_implementation for module in expert_modules(model)} == {"envoi"}


def test_a_tower_of_another_family_needs_no_experts():
    config = transformers.LlavaConfig(
        text_config=build("mixtral").config,
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=16,
            patch_size=8,
        ),
    )
    model = AutoModel.from_config(config, experts_implementation="envoi", dtype=torch.bfloat16)
    assert [module.config._experts_implementation for module in expert_modules(model)] == ["envoi", "envoi"]
    model.set_experts_implementation({"text_config": "envoi_mxfp8"})
    with pytest.raises(ValueError, match="LlamaForCausalLM"):
        AutoModelForCausalLM.from_config(outside("LlamaConfig"), experts_implementation="envoi")


def test_fp8_checkpoints_in_blocks_of_another_size_are_refused_before_weights_are_read(tmp_path, monkeypatch):
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer as Quantizer

    model = build("mixtral")
    model.config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 64]}
    model.save_pretrained(tmp_path)
    # Without a GPU transformers dequantises.
    monkeypatch.setattr(Quantizer, "validate_environment", lambda *given, **options: None)
    with pytest.raises(ValueError, match=r"experts \(FP8Experts\): format: expected one that holds these weights"):
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, experts_implementation="envoi")


def test_gpt_oss_in_the_order_of_other_kernels_is_refused_with_the_cure(monkeypatch):
    from transformers.integrations import hub_kernels
    from transformers.integrations.mxfp4 import replace_with_mxfp4_linear

    # The kernels that it fetches are never called here.
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *given, **options: None)
    model = build("gpt_oss")
    replace_with_mxfp4_linear(model, quantization_config=transformers.Mxfp4Config())
    with pytest.raises(ValueError, match=r"got MXFP4 ones.*choose experts_implementation in from_pretrained"):
        model.set_experts_implementation("envoi")


def test_activations_that_envoi_does_not_have_are_refused_when_chosen():
    config = build("mixtral").config
    config.hidden_act = "mish"
    with pytest.raises(ValueError, match=r"layers.0.mlp.experts \(MixtralExperts\): expected the activation swiglu"):
        AutoModelForCausalLM.from_config(config, experts_implementation="envoi")


def test_a_norm_after_each_expert_is_refused():
    model = build("mixtral")
    expert_modules(model)[1].has_post_expert_norm = True
    with pytest.raises(ValueError, match="layers.1.mlp.experts .* got a norm after each"):
        model.set_experts_implementation("envoi")


class Gate:
    """Gate of an experts module alone: swiglu or swiglu_oai with a clamp."""

    def __init__(self, limit, oai=False, concatenated=True, above=None, alpha=1.702):
        self.limit_of_its_own, self.oai, self.is_concatenated, self.alpha = limit, oai, concatenated, alpha
        self.above = limit if above is None else above

    def _apply_gate(self, x):
        gate, up = x.float().chunk(2, dim=-1) if self.is_concatenated else (x[..., 0::2], x[..., 1::2])
        if self.limit_of_its_own is not None:
            gate, up = gate.clamp(max=self.above), up.clamp(-self.limit_of_its_own, self.limit_of_its_own)
        if self.oai:
            return (up + 1) * gate * torch.sigmoid(gate * self.alpha)
        return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("oai", [False, True])
@pytest.mark.parametrize("limit", [None, 0.5, 4.0, 7.0, 10.0, 12.0, 16.0, 20.0, 33.3, 100.0, 1e4])
def test_any_clamp_is_recognised(limit, oai):
    for concatenated in (True, False):
        gate = Gate(limit, oai, concatenated)
        assert recognise_activation(gate) == ("swiglu_oai" if oai else "swiglu", limit)


@pytest.mark.parametrize("gate", [Gate(12.0, above=16.0), Gate(20.0, above=1e9)])
def test_clamps_and_slopes_of_other_kinds_are_refused(gate):
    with pytest.raises(ValueError, match="Gate: expected the activation"):
        recognise_activation(gate)


@pytest.mark.parametrize("concatenated", [True, False])
def test_gate_and_up_in_another_order_than_the_module_says_are_refused(concatenated):
    """transformers runs them right: its own code never asks. Envoi packs the weights in the order that is said."""
    gate = Gate(7.0, concatenated=concatenated)
    gate._apply_gate = Gate(7.0, concatenated=not concatenated)._apply_gate
    with pytest.raises(ValueError, match=f"Gate: expected the activation .* is_concatenated={concatenated} says; got"):
        recognise_activation(gate)


def test_training_is_refused_with_both_cures():
    model, ids = build("qwen3_moe"), tokens()
    model.set_experts_implementation("envoi")
    with pytest.raises(ValueError, match=r"torch.inference_mode\(\) or torch.no_grad\(\).*'grouped_mm'"):
        model(ids, labels=ids)
    with torch.inference_mode():
        want = model(ids, use_cache=False).logits
    assert torch.equal(logits(model, ids), want)
    model.requires_grad_(False)
    assert torch.equal(model(ids, use_cache=False).logits, want)  # grad mode alone is no reason


def test_lora_on_attention_is_refused_in_training_and_runs_without():
    model, ids = build("qwen3_moe"), tokens()
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    model.set_experts_implementation("envoi")
    with pytest.raises(ValueError, match="for training choose experts_implementation='grouped_mm'"):
        tuned(ids, labels=ids)
    assert logits(tuned, ids).isfinite().all()
    model.set_experts_implementation("grouped_mm")
    tuned(ids, labels=ids).loss.backward()


def test_a_router_that_learns_is_refused():
    model = build("mixtral").requires_grad_(False)
    model.set_experts_implementation("envoi")
    for module in model.modules():
        if type(module).__name__ == "MixtralTopKRouter":
            module.weight.requires_grad_()
    with pytest.raises(ValueError, match="expected inputs and weights that need no gradient"):
        model(tokens())


def test_a_name_may_be_chosen_from_a_configuration():
    config = AutoConfig.for_model("mixtral", **COMMON, num_local_experts=2, experts_implementation="envoi_fp8_row")
    model = AutoModelForCausalLM.from_config(config)
    assert model.get_experts_implementation() == {"": "envoi_fp8_row"}
