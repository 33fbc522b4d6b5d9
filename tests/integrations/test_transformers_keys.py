"""Settings, structures and tensors of transformers' experts that Envoi doesn't know: refused or warned of by name."""

import inspect
import json
import warnings

import pytest
import safetensors.torch
import torch
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM
from transformers.integrations import moe

from envoi.epilogues.library import swiglu_clamped_after
from envoi.integrations.transformers import packed_experts, recognise_activation, unserved
from tests.helpers.quantised_models import compressed_fp8, fp8_blocks
from tests.helpers.transformers_models import build, expert_modules

pytestmark = pytest.mark.usefixtures("registered")


def experts():
    return expert_modules(build("mixtral"))[0]


def gated(formula):
    return lambda gate_up: formula(*gate_up.chunk(2, dim=-1))


def test_a_clamp_after_silu_is_recognised():
    module = experts()
    for limit in (0.5, 4.0, 7.0):
        module._apply_gate = gated(lambda gate, up, n=limit: silu(gate).clamp(max=n) * up.clamp(-n, n))
        assert recognise_activation(module) == (swiglu_clamped_after(limit), None)
    module._apply_gate = gated(lambda gate, up: silu(gate.clamp(max=4.0)) * up.clamp(-4.0, 4.0))
    assert recognise_activation(module) == ("swiglu", 4.0)
    module._apply_gate = gated(lambda gate, up: silu(gate) * up.clamp(-4.0, 4.0))
    with pytest.raises(ValueError, match="expected the activation swiglu"):
        recognise_activation(module)


def test_a_parameter_that_is_not_a_weight_is_refused():
    module = experts()
    assert unserved(module) is None
    module.post_norm = torch.nn.LayerNorm(8)
    module.__dict__.pop("_envoi_activation")
    reason = "expected no parameters but the experts' weights, got post_norm.weight"
    assert unserved(module) == reason
    with pytest.raises(ValueError, match=reason):
        packed_experts(module)


def test_a_structure_that_a_newer_release_may_have_is_refused(monkeypatch):
    module, known = experts(), inspect.signature(moe.use_experts_implementation)
    more = inspect.Parameter("has_residual", inspect.Parameter.KEYWORD_ONLY, default=False)
    newer = lambda *given, **options: None  # noqa: E731
    newer.__signature__ = known.replace(parameters=[*known.parameters.values(), more])
    monkeypatch.setattr(moe, "use_experts_implementation", newer)
    module.has_residual = False
    assert unserved(module) is None
    module.__dict__.pop("_envoi_activation")
    module.has_residual = True
    assert unserved(module) == "expected experts of a structure that Envoi knows, got has_residual"


@pytest.mark.parametrize(("key", "value"), [("moe_apply_router_weight_on_input", True), ("post_norm_eps", 1e-8)])
def test_a_setting_that_from_checkpoint_refuses_is_refused(key, value):
    model = build("mixtral")
    setattr(model.config, key, value)
    with pytest.raises(ValueError, match=rf"{key}: (tokens are multiplied|each expert's output)"):
        model.set_experts_implementation("envoi")


DOUBTS = {
    "expert_output_scale": (2.0, "config: expert_output_scale 2.0 is unknown to Envoi, which computes what Mixtral"),
    "expert_swiglu_limit_list": (
        [0, 4.0],
        r"config: it says that experts compute swiglu_clamped_after.*, but MixtralE",
    ),
    "swiglu_limit": (7.0, "config: it says that experts compute swiglu, clamped at 7, but MixtralExperts, .* swiglu"),
    "hidden_activation": ("gelu", None),  # as for config.json, of two names none is right: transformers' code decides
    "aux_loss_alpha": (0.1, None),
}


@pytest.mark.parametrize("key", DOUBTS)
def test_a_setting_that_transformers_code_does_not_follow_is_warned_of(key):
    value, message = DOUBTS[key]
    model = build("mixtral")
    setattr(model.config, key, value)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.set_experts_implementation("envoi")
    said = [str(warning.message) for warning in caught if str(warning.message).startswith("config: ")]
    assert len(said) == (message is not None)
    if message is not None:
        with pytest.warns(UserWarning, match=message):
            model.set_experts_implementation("envoi")


ROW = "model.layers.1.mlp.experts.3.up_proj"
STACKED = "model.layers.1.mlp.experts"
FILES = {
    "float": (lambda folder: build("qwen3_moe").save_pretrained(folder), f"{ROW}.bias"),
    "float, of an expert": (lambda folder: build("qwen3_moe").save_pretrained(folder), f"{STACKED}.3.norm.weight"),
    "stacked": (lambda folder: build("gpt_oss").save_pretrained(folder), f"{STACKED}.down_proj_scale"),
    "fp8": (lambda folder: fp8_blocks("qwen3_moe", folder), f"{ROW}.weight_zero_point"),
    "compressed": (lambda folder: compressed_fp8("qwen3_moe", folder, "channel"), f"{ROW}.weight_zero_point"),
}


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, experts_implementation="envoi")


@pytest.mark.parametrize("name", FILES)
def test_a_tensor_beside_the_weights_is_refused(name, tmp_path):
    make, tensor = FILES[name]
    make(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    safetensors.torch.save_file(tensors | {tensor: torch.zeros(3)}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"model.safetensors: {tensor}: (expected beside the experts'|.*biases, got)"):
        load(tmp_path)
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    assert load(tmp_path) is not None


def test_the_same_tensor_in_two_shards_is_refused(tmp_path):
    build("qwen3_moe").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    names = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    file.unlink()
    for name in names:
        safetensors.torch.save_file(tensors, tmp_path / name, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {key: names[i % 2] for i, key in enumerate(tensors)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"00002.safetensors: \S+: expected each tensor in one file, .*00001-of"):
        load(tmp_path)
