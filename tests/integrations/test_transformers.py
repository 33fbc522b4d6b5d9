"""transformers models with their experts through Envoi, beside transformers' own."""

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers

from envoi.integrations.transformers import implementation_name, packed_experts, recognise_activation, register
from envoi.quant import FORMATS
from tests.helpers.accuracy import relative_error

COMMON = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MLA = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
MODELS = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 128,
                                     "head_dim": 32, "norm_topk_prob": True}),
    "olmoe": ("OlmoeConfig", {"num_experts": 8, "num_experts_per_tok": 4}),
    "deepseek_v3": ("DeepseekV3Config", {**MLA, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
                                         "topk_group": 1, "moe_intermediate_size": 128, "first_k_dense_replace": 1,
                                         "n_shared_experts": 1, "num_key_value_heads": 4}),
    "glm4_moe": ("Glm4MoeConfig", {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
                                   "first_k_dense_replace": 1, "n_shared_experts": 1, "head_dim": 32}),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "hidden_size": 160, "head_dim": 32,
                                 "intermediate_size": 96}),
}  # fmt: skip


def build(name: str) -> transformers.PreTrainedModel:
    """A random model in bf16 whose routers and biases aren't all alike."""
    config_name, own = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**{**COMMON, **own})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation="eager")
    with torch.no_grad():
        for label, tensor in model.named_parameters():
            if tensor.dim() >= 2 or "bias" in label:
                tensor.normal_(std=0.05 if tensor.dim() >= 3 else 0.1)
    return model.eval()


@pytest.fixture(autouse=True)
def registered():
    register()


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


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
    assert relative_error(logits(model, ids), eager) < (0.12 if format.startswith("mxfp4") else 0.05)


def test_gpt_oss_in_formats_that_take_its_sizes():
    model = build("gpt_oss")
    ids = torch.randint(3, 64, (1, 20), generator=torch.Generator().manual_seed(1))
    eager = logits(model, ids)
    for format in ("fp8_row", "mxfp8", "mxfp4", "mxfp4_mxfp8"):
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
    with torch.no_grad():
        experts.gate_up_proj.mul_(2)
    after = packed_experts(experts)
    assert torch.equal(after.gate_up, before.gate_up * 2)


@pytest.mark.parametrize(("name", "activation", "limit"), [("mixtral", "swiglu", None), ("gpt_oss", "swiglu_oai", 7.0)])
def test_activations_are_recognised(name, activation, limit):
    assert recognise_activation(build(name).model.layers[0].mlp.experts) == (activation, limit)


def test_deepseek_v4s_clamp_is_recognised():
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts

    config = SimpleNamespace(
        num_local_experts=2, hidden_size=64, intermediate_size=32, hidden_act="silu", swiglu_limit=4.0,
        _experts_implementation="envoi",
    )  # fmt: skip
    module = DeepseekV4Experts(config)
    assert recognise_activation(module) == ("swiglu", 4.0)


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
        ValueError, match="expected bfloat16, got torch.float32; load the model with dtype=torch.bfloat16"
    ):
        logits(model, torch.tensor([[5, 6]]))
