"""Bad files that transformers loads a model from: one error that names the file and the tensor, and no model."""

import gc
import json
import re
import weakref

import pytest
import safetensors.torch
import torch
import transformers
from transformers import AutoModelForCausalLM

from tests.helpers.quantised_models import compressed_fp8, fp4, fp8_blocks, mxfp4_blocks
from tests.helpers.slow import mostly_slow
from tests.helpers.transformers_models import build

pytestmark = pytest.mark.usefixtures("registered")

MAKE = {
    "bf16": lambda folder: build("qwen3_moe").save_pretrained(folder),
    "bf16 in one tensor": lambda folder: build("gpt_oss").save_pretrained(folder),
    "fp8": lambda folder: fp8_blocks("qwen3_moe", folder),
    "fp4": lambda folder: fp4("deepseek_v3", folder),
    "mxfp4": mxfp4_blocks,
    "compressed": lambda folder: compressed_fp8("qwen3_moe", folder, "channel"),
}
ONE = "model.layers.1.mlp.experts.0.down_proj"
ALL = "model.layers.1.mlp.experts.down_proj"
WEIGHT = rf"{ONE}.weight: expected a tensor of this name .the layer has experts 0 to 7., got none"
FACTORS = rf": expected a tensor of this name .the factors of {ONE}.weight., got none"
LOST = [  # checkpoint, tensor, message
    ("bf16", f"{ONE}.weight", WEIGHT),
    ("bf16 in one tensor", ALL, rf"{ALL}: expected a tensor of this name, got none"),
    ("bf16 in one tensor", f"{ALL}_bias", rf"{ALL}_bias: expected a bias, as the other projection has one, got none"),
    ("fp8", f"{ONE}.weight", WEIGHT),
    ("fp8", f"{ONE}.weight_scale_inv", rf"{ONE}.weight_scale_inv{FACTORS}"),
    ("fp4", f"{ONE}.weight", WEIGHT),
    ("fp4", f"{ONE}.weight_scale_inv", rf"{ONE}.weight_scale_inv{FACTORS}"),
    ("compressed", f"{ONE}.weight", rf"{ONE}.weight: expected a tensor of this name.*, got none"),
    ("compressed", f"{ONE}.weight_scale", rf"{ONE}.weight_scale{FACTORS}"),
    ("mxfp4", f"{ALL}_blocks", rf"{ALL}_blocks: expected a tensor of this name, got none"),
    ("mxfp4", f"{ALL}_scales", rf"{ALL}_scales: expected a tensor of this name, got none"),
    ("mxfp4", f"{ALL}_bias", rf"{ALL}_bias: expected a bias, as the other projection has one, got none"),
]
SHORT = [
    ("bf16", f"{ONE}.weight", "bfloat16 .128, 128., got bfloat16 .64, 128."),
    ("fp8", f"{ONE}.weight", "float8_e4m3fn .256, 128., got float8_e4m3fn .128, 128."),
    ("fp8", f"{ONE}.weight_scale_inv", r"float32 .*.2, 1. or .2., got float32 .1, 1."),
    ("fp4", f"{ONE}.weight", "int8 .256, 64., got int8 .128, 64."),
    ("compressed", f"{ONE}.weight_scale", ".256, 1. or .256., got bfloat16 .128, 1."),
    ("mxfp4", f"{ALL}_blocks", "uint8 .4, 160, 3, 16., got uint8 .2, 160, 3, 16."),
    ("mxfp4", f"{ALL}_scales", "uint8 or float8_e8m0fnu .4, 160, 3., got uint8 .2, 160, 3."),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a function that saves a checkpoint once."""
    kept = {}

    def folder(name):
        if name not in kept:
            kept[name] = tmp_path_factory.mktemp("whole") / "checkpoint"
            MAKE[name](kept[name])
        return kept[name]

    return folder


@pytest.fixture
def spoilt(whole, tmp_path):
    """Return a function that copies a checkpoint, its tensors and its config.json changed."""

    def make(name, change=lambda tensors: None, say=lambda config: None):
        config = json.loads((whole(name) / "config.json").read_text())
        tensors = safetensors.torch.load_file(whole(name) / "model.safetensors")
        change(tensors)
        say(config)
        safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return make


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, experts_implementation="envoi")


def assert_refused(folder, message, monkeypatch):
    """Assert that loading raises, and that no parameter of the model stays."""
    made = []
    original = transformers.PreTrainedModel._load_pretrained_model

    def noted(model, *arguments, **options):
        made.append(weakref.ref(model))
        return original(model, *arguments, **options)

    monkeypatch.setattr(transformers.PreTrainedModel, "_load_pretrained_model", staticmethod(noted))
    text = ""
    try:
        load(folder)
    except ValueError as error:
        text = str(error)
    assert re.search(message, text), text
    gc.collect()
    assert not any(model() is not None for model in made)


@pytest.mark.parametrize("name", MAKE)
def test_whole_checkpoints_load(name, whole):
    load(whole(name))


# A tensor and its factors or bias, of each way to store experts.
@pytest.mark.parametrize(("name", "tensor", "message"), mostly_slow(LOST, [*LOST[:5:2], *LOST[6:10:2], *LOST[10:]]))
def test_a_lost_tensor(name, tensor, message, spoilt, monkeypatch):
    folder = spoilt(name, lambda tensors: tensors.pop(tensor))
    assert_refused(folder, f"{folder}.*: {message}", monkeypatch)


@pytest.mark.parametrize(("name", "tensor", "message"), mostly_slow(SHORT, [*SHORT[:1], *SHORT[2:6]]))
def test_a_tensor_of_another_shape(name, tensor, message, spoilt, monkeypatch):
    def halve(tensors):
        tensors[tensor] = tensors[tensor][: len(tensors[tensor]) // 2].clone()

    folder = spoilt(name, halve)
    assert_refused(folder, f"{folder}/model.safetensors: {tensor}: expected .*{message}", monkeypatch)


@pytest.mark.parametrize("name", mostly_slow(MAKE, ["bf16", "fp8", "mxfp4"]))
def test_a_truncated_file(name, spoilt, monkeypatch):
    folder = spoilt(name)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    message = f"{file}: expected a whole file of safetensors, got one of {file.stat().st_size} bytes"
    assert_refused(folder, message, monkeypatch)


def test_a_way_of_quantising_that_nobody_knows(spoilt, monkeypatch):
    folder = spoilt("fp8", say=lambda config: config["quantization_config"].update(quant_method="q7"))
    message = "config.json: quantization_config.quant_method: expected one of 'fp8', .*, got 'q7'"
    assert_refused(folder, message, monkeypatch)


def test_what_a_user_lets_pass(spoilt):
    def halve(tensors):
        tensors[f"{ONE}.weight"] = tensors[f"{ONE}.weight"][:64].clone()

    with pytest.raises(ValueError, match="expected bfloat16 .128, 128., got bfloat16 .64, 128."):
        load(spoilt("bf16", halve))
    folder = spoilt("bf16", lambda tensors: tensors.pop(f"{ONE}.weight"))
    AutoModelForCausalLM.from_pretrained(folder, experts_implementation="envoi", ignore_mismatched_sizes=True)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):  # transformers' own error, without Envoi
        AutoModelForCausalLM.from_pretrained(folder, experts_implementation="grouped_mm")
