"""Keys of config.json that decide what experts compute: read as their families' code has them, or refused by name."""

import itertools
import json

import pytest
import torch
from torch.nn.functional import silu

import envoi
from envoi.experts import from_checkpoint
from tests.checkpoints.files import CASES, EXPERTS, HIDDEN, INTER, floats
from tests.checkpoints.files import silu as config_of
from tests.helpers.accuracy import relative_error

QWEN = config_of("qwen3_moe", num_experts=EXPERTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return floats(QWEN).write(tmp_path_factory.mktemp("keys"))


def saying(folder, **config):
    """Write another config.json beside the same files; keys of value `...` are left out."""
    said = {key: value for key, value in (QWEN | config).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def step(gate, up, limit):
    return silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def softcapped(gate, up, gate_cap, up_cap):
    up = up if up_cap is None else up_cap * torch.tanh(up / up_cap)
    return gate_cap * torch.tanh(gate / gate_cap) * torch.sigmoid(gate) * up


def oai(gate, up, alpha, limit):
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def plain(gate, up):
    return silu(gate) * up


LING = {
    "model_type": "bailing_hybrid",
    "expert_swiglu_limit_list": [0, 0, 4],
    "share_expert_swiglu_limit_list": [1] * 3,
}
STEP = {"model_type": "step3p5", "swiglu_limits": [None, 0.0, 0.5, 7], "swiglu_limits_shared": [0, 0, 16, 0]}
SITU = {"model_type": "kimi_k3", "hidden_act": "situ", "activation_situ_beta": 4.0}
M3 = {"model_type": "minimax_m3_vl", "hidden_act": "swigluoai", "swiglu_alpha": 1.5, "swiglu_limit": 3.0}
FORMULAS = {
    "Ling, a layer without": (LING, 1, plain),
    "Ling, a layer with": (LING, 2, lambda gate, up: step(gate, up, 4.0)),
    "Step, a layer without": (STEP, 1, plain),
    "Step, a layer with": (STEP, 2, lambda gate, up: step(gate, up, 0.5)),
    "Inkling-2": ({"model_type": "inkling2_text", "mlp_gate_softcap": 2.0, "mlp_up_softcap": 5.0}, 1,
                  lambda gate, up: softcapped(gate, up, 2.0, 5.0)),
    "Kimi-K3": (SITU | {"activation_situ_linear_beta": 2.5}, 1, lambda gate, up: softcapped(gate, up, 4.0, 2.5)),
    "SiTU without a cap of up": (SITU | {"activation_situ_linear_beta": None}, 1,
                                 lambda gate, up: softcapped(gate, up, 4.0, None)),
    "MiniMax-M3": (M3 | {"swiglu_beta": 1.0}, 1, lambda gate, up: oai(gate, up, 1.5, 3.0)),
    "swigluoai alone": ({"hidden_act": "swigluoai"}, 1, lambda gate, up: oai(gate, up, 1.702, 7.0)),
    "DeepSeek-V4, 0 is none": ({"model_type": "deepseek_v4", "swiglu_limit": 0.0}, 1, plain),
    "LongCat, which names none": ({"model_type": "longcat_flash", "hidden_act": ..., "zero_expert_num": 2,
                                   "zero_expert_type": "identity"}, 1, plain),
    "two keys that say the same": ({"hidden_act": "silu", "hidden_activation": "swish"}, 1, plain),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_the_published_formula(name, folder):
    config, layer, formula = FORMULAS[name]
    experts = from_checkpoint(saying(folder, **config), layer)
    meant = floats(QWEN).layers[layer]
    source = torch.Generator().manual_seed(0)
    tokens = torch.randn(8, HIDDEN, generator=source).mul(0.5).bfloat16()  # gates of a standard deviation of 8
    ids = (torch.arange(8, dtype=torch.int32) % EXPERTS)[:, None]
    got = envoi.moe(tokens, envoi.Routing(torch.ones(8, 1), ids, EXPERTS), experts)

    def computed(formula):
        x, chosen = tokens.double()[:, None], ids[:, 0].long()
        gate, up, down = (part[chosen].mT for part in (meant.gate, meant.up, meant.down))
        return (formula((x @ gate)[:, 0], (x @ up)[:, 0])[:, None] @ down)[:, 0]

    assert relative_error(got, computed(formula)) < 0.006
    others = [other for *_, other in FORMULAS.values()]
    alike = [other for other in others if relative_error(computed(other), computed(formula)) < 0.02]
    assert len(alike) <= 1 + others.count(formula), "inputs don't tell formulas apart"


REFUSED = [
    ({"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input: expected none, got True: tok"),
    ({"post_norm_eps": 1e-8}, "post_norm_eps: expected none, got 1e-08: each expert's output is normalised"),
    ({"model_type": "muse_spark_text"}, "model_type: .* got 'muse_spark': each expert's output is normalised"),
    ({"approximate_experts": {"1": [3]}}, "approximate_experts: expected none, got .*constants"),
    ({"expert_swiglu_limit_list": [4.0]}, "expert_swiglu_limit_list: expected a list with a number for layer 1, got 1"),
    ({"swiglu_limits": 7.0}, "swiglu_limits: expected a list with a number for layer 1, got 7.0"),
    ({"swiglu_limits": [0, -1.0]}, "swiglu_limits: expected a positive number, got -1.0"),
    ({"swiglu_limits": [0, "7"]}, "swiglu_limits: expected a number, got '7'"),
    ({"swiglu_limits": [0, True]}, "swiglu_limits: expected a number, got True"),
    ({"swiglu_limits": [0, 7], "expert_swiglu_limit_list": [0, 4]}, "expert_swiglu_limit_list: .* swiglu_limits too"),
    ({"swiglu_limits": [0, 7], "swiglu_limit": 7.0}, "swiglu_limits: expected no other .* got swiglu_limit too"),
    ({"swiglu_limits": [0, 7], "swiglu_alpha": 1.702}, "swiglu_alpha: expected no other formula .* swiglu_limits too"),
    ({"swiglu_limits": [0, 7], "hidden_act": "gelu"}, "hidden_act: expected one of 'silu', 'swish', got 'gelu'"),
    ({"swiglu_alpha": 1.702, "hidden_act": "gelu"}, "hidden_act: expected one of 'silu', 'swish', got 'gelu'"),
    ({"swiglu_alpha": 1.702, "swiglu_limit": 0.0}, "swiglu_limit: expected a positive number, got 0.0"),
    ({"swiglu_limit": -1}, "swiglu_limit: expected a positive number, got -1"),
    ({"swiglu_limit": [0, 7.0]}, "swiglu_limit: expected a number, got .0, 7.0."),
    ({"swiglu_beta": 1.0}, "swiglu_beta: expected 1, what is added to up beside swiglu_alpha, got 1.0"),
    ({"swiglu_beta": 0.0, "swiglu_alpha": 1.702}, "swiglu_beta: expected 1, .*got 0.0"),
    ({"mlp_gate_softcap": 4.0}, "mlp_up_softcap: expected a positive number, got None"),
    ({"mlp_up_softcap": 25.0}, "mlp_gate_softcap: expected a positive number, got None"),
    (SITU, "activation_situ_linear_beta: expected a number or null beside the activation 'situ', got none"),
    (SITU | {"activation_situ_beta": ...}, "activation_situ_linear_beta: expected a number or null"),
    ({"activation_situ_beta": 4.0}, "activation_situ_beta: expected none where the activation is 'silu', got 4.0"),
    ({"model_type": "inkling2_text"}, "mlp_gate_softcap: expected a number, as the experts of 'inkling2' have one"),
    ({"model_type": "deepseek_v4"}, "swiglu_limit: expected a number, as the experts of 'deepseek_v4' have one"),
    (M3 | {"swiglu_alpha": ...}, "swiglu_alpha: expected a number, as the experts of 'minimax_m3_vl' have one"),
    ({"hidden_act": "silu", "hidden_activation": "gelu"}, "hidden_act: expected one activation, got hidden_act 'silu'"),
    ({"hidden_act": ..., "mlp_hidden_act": "relu2"}, ".*mlp_hidden_act: expected an activation of gate .*relu2'"),
    ({"hidden_act": ..., "mlp_hidden_act": "mish"}, "mlp_hidden_act: expected one of 'silu', .* got 'mish'"),
    ({"hidden_act": ..., "activation_function": 3}, "activation_function: expected one of 'silu', .* got 3"),
    ({"moe_latent_size": 128}, rf"moe_latent_size: expected the hidden size of .*down_proj.* .{HIDDEN}, .*128"),
    ({"text_config": QWEN | {"expert_output_scale": 2.0}}, "expert_output_scale: expected only keys .* got 2.0"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=[message[:50] for _, message in REFUSED])
def test_refused_by_name(config, message, folder):
    with pytest.raises(ValueError, match=rf"config.json: {message}"):
        from_checkpoint(saying(folder, **config), 1)


WORDS = ("clamp", "limit", "alpha", "beta", "softcap", "scale", "norm_eps", "multiplier", "latent_dim", "input_scale")
NEW = [f"{whose}_{word}" for whose, word in itertools.product(("expert", "experts_output", "moe", "mlp"), WORDS)]
NEW += [f"{what}_{word}" for what in ("activation", "swiglu", "act_fn", "silu") for word in ("clamp", "beta2", "bound")]
NEW += ["router_weight_on_input", "gate_limit", "up_softcap", "moe_activation", "gelu_alpha", "expertNormEps"]


@pytest.mark.parametrize("key", NEW)
def test_a_new_key_of_the_kind_is_refused(key, folder):
    with pytest.raises(ValueError, match=rf"config.json: {key}: expected only keys that Envoi knows .*, got 0.5"):
        from_checkpoint(saying(folder, **{key: 0.5}), 1)
    assert from_checkpoint(saying(folder, **{key: None}), 1, [0]).activation == "swiglu"


# Of published config.json files, and some that only look like an expert's.
ORDINARY = """
aux_loss_alpha ep_size first_k_dense_replace moe_layer_freq n_group topk_group routed_scaling_factor
num_experts_per_tok norm_topk_prob scoring_func topk_method shared_moe_mode layernorm_linear_attention_beta
layernorm_mlp_alpha postnorm moe_capacity moe_num_shared_experts moe_dropout_prob
moe_multimodal_dispatch_use_allgather moe_group_experts moe_k moe_aux_loss_lambda moe_orthogonal_loss_lambda
moe_drop_tokens num_shared_expert capacity_factor moe_gate use_expert_bias moe_router_enable_expert_bias
moe_router_enable_routed_scaling share_expert_swiglu_limit_list moe_layers_enum moe_router_activation
use_moe_router_bias share_expert_dim norm_expert_weight experts_per_token expert_layer_period attn_logit_softcapping
final_logit_softcapping router_logit_softcapping embedding_multiplier residual_multiplier output_multiplier_scale
residual_moe parallel_attn_mlp_res moe_layer_frequency moe_train_capacity_factor zero_expert_num
enable_expert_tensor_parallelism num_limited_groups moe_shared_expert_overlap expert_dtype moe_router_activation_func
moe_router_topk moe_intermediate_size mlp_bias use_bias mla_scale_q_lora time_step_limit attention_value_scale
clip_qkv mamba_hidden_act logits_scaling rope_scaling attention_multiplier mlp_only_layers decoder_sparse_step
linear_silu enable_moe_fp32_combine latent_moe_use_norm moe_renormalize expert_ffn_hidden_size chunk_size_feed_forward
"""


def test_ordinary_keys_pass(folder):
    assert from_checkpoint(saying(folder, **dict.fromkeys(ORDINARY.split(), 1.0)), 1, [0]).activation == "swiglu"
    latents = {"moe_latent_size": HIDDEN, "hidden_size": 4 * HIDDEN}
    assert from_checkpoint(saying(folder, **latents), 1, [0]).hidden == HIDDEN


SIZES = {"routed_expert_hidden_size": HIDDEN, "hidden_size": HIDDEN, "moe_intermediate_size": INTER}


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("case", ["compressed_mxfp4", "gpt_oss", "gpt_oss_bf16", "granitemoe", "jamba"])
def test_sizes_are_those_of_the_files(case, key, tmp_path):
    files, size = CASES[case].make(), SIZES[key]
    files.config[key] = size
    experts = from_checkpoint(files.write(tmp_path), 1, [0])
    assert (experts.hidden, experts.intermediate) == (HIDDEN, INTER)
    files.config[key] = size + 64
    what = "intermediate" if size == INTER else "hidden"
    with pytest.raises(ValueError, match=rf"config.json: {key}: expected the {what} size of .*, got {size + 64}"):
        from_checkpoint(files.write(tmp_path), 1, [0])


def test_separate_experts_are_read_gate_first_in_every_family(tmp_path):
    files = floats(config_of("gpt_oss", num_local_experts=EXPERTS, swiglu_limit=7.0))
    experts = from_checkpoint(files.write(tmp_path), 1)
    assert experts.activation == "swiglu_oai"
    gate_up, *_ = envoi.experts.unpack(experts, dtype=torch.float64)
    assert torch.equal(gate_up, torch.cat((files.layers[1].gate, files.layers[1].up), dim=1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_floats_that_bf16_would_round_are_refused(dtype, tmp_path):
    folder = floats(QWEN, dtype).write(tmp_path)
    with pytest.raises(
        ValueError, match=r"gate_up: expected weights that bfloat16 holds exactly, got .*requantize=True"
    ):
        from_checkpoint(folder, 1)
    rounded = [from_checkpoint(folder, 1, requantize=True), from_checkpoint(folder, 1, format="bf16")]
    want = floats(QWEN, dtype).layers[1].down.bfloat16()
    assert all(torch.equal(experts.down, want) for experts in rounded)
    assert from_checkpoint(folder, 1, format="fp8_row").format == "fp8_row"
