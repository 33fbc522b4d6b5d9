"""Checkpoints of compressed-tensors loaded by transformers, their FP8 experts by Envoi as they are stored."""

import pytest
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from envoi.experts import from_checkpoint, unpack
from envoi.integrations.transformers import packed_experts, report
from tests.helpers.accuracy import relative_error
from tests.helpers.quantised_models import (
    compressed_blocks,
    compressed_fp8,
    compressed_groups,
    compressed_int4,
    compressed_mxfp8,
    compressed_nvfp4,
)
from tests.helpers.transformers_models import expert_modules, logits, tokens

pytestmark = pytest.mark.usefixtures("registered")
STRATEGIES = ("channel", "tensor")


def load(folder, implementation="envoi", **options):
    options = {"dtype": torch.bfloat16, "experts_implementation": implementation, **options}
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_moe", "mixtral"])
def test_fp8_experts_are_kept(name, strategy, tmp_path):
    model, ids = load(compressed_fp8(name, tmp_path, strategy)), tokens()
    assert {(row.stored, row.runs) for row in report(model).rows} == {("fp8_row", True)}
    layers = [int(row.path.split(".")[2]) for row in report(model).rows]
    for layer, module in zip(layers, expert_modules(model), strict=True):
        packed = packed_experts(module)
        assert packed.gate_up.values.data_ptr() == module.gate_up_proj.data_ptr()
        for got, want in zip(unpack(packed), unpack(from_checkpoint(tmp_path, layer)), strict=True):
            assert got is want is None or torch.equal(got, want)
    wide = load(tmp_path, "eager")
    assert {module.gate_up_proj.dtype for module in expert_modules(wide)} == {torch.bfloat16}
    assert 0 < relative_error(logits(model, ids), logits(wide, ids)) < 0.03


def test_they_are_widened_if_asked_for(tmp_path):
    folder = compressed_fp8("qwen3_moe", tmp_path, "channel")
    wide = load(folder, quantization_config=CompressedTensorsConfig(dequantize=True))
    assert {row.stored for row in report(wide).rows} == {"bfloat16"}
    other = load(folder, "envoi_mxfp4")
    assert {(row.stored, row.runs) for row in report(other).rows} == {("bfloat16", True)}
    assert logits(other, tokens()).isfinite().all()


@pytest.mark.parametrize(
    ("format", "compressed", "refusal"),
    [
        ("nvfp4", compressed_nvfp4, "weight_global_scale: expected experts without a scale"),
        ("int4", compressed_int4, "weight_packed: expected experts that transformers keeps"),
    ],
    ids=["nvfp4", "int4"],
)
@pytest.mark.parametrize("own", [False, True])
def test_what_transformers_does_not_keep_is_refused_with_what_loads_it(format, compressed, refusal, own, tmp_path):
    folder = compressed("qwen3_moe", tmp_path)
    with pytest.raises(ValueError, match=f"{refusal} .*from_checkpoint"):
        load(folder, f"envoi_{format}" if own else "envoi")
    assert from_checkpoint(folder, 0).format == format


ATTENTION = ("tensor", ["re:.*self_attn.*"])
EXPERTS = r"re:.*mlp\.(?:.*\.)?(gate|up|down)_proj$"


@pytest.mark.parametrize("groups", [
    [ATTENTION, ("channel", ["re:.*mlp.experts.*"])], [ATTENTION, ("channel", [EXPERTS])],
    [("tensor", ["re:.*shared_experts.*", "re:.*self_attn.*"]), ("channel", ["re:.*mlp.experts.*"])],
    [("channel", ["Linear"]), ATTENTION],
], ids=str)  # fmt: skip
def test_the_group_of_the_experts(groups, tmp_path):
    model = load(compressed_groups("qwen3_moe", tmp_path, groups))
    assert {(row.stored, row.runs) for row in report(model).rows} == {("fp8_row", True)}
    for layer, module in enumerate(expert_modules(model)):
        for got, want in zip(unpack(packed_experts(module)), unpack(from_checkpoint(tmp_path, layer)), strict=True):
            assert got is want is None or torch.equal(got, want)
    assert logits(model, tokens()).isfinite().all()


@pytest.mark.parametrize(("make", "format"), [(compressed_blocks, "fp8_block128"), (compressed_mxfp8, "mxfp8")])
def test_blocks_are_kept(make, format, tmp_path):
    model, ids = load(make("qwen3_moe", tmp_path)), tokens()
    assert {(row.stored, row.runs) for row in report(model).rows} == {(format, True)}
    for layer, module in enumerate(expert_modules(model)):
        for got, want in zip(unpack(packed_experts(module)), unpack(from_checkpoint(tmp_path, layer)), strict=True):
            assert got is want is None or torch.equal(got, want)
    before = logits(model, ids)  # transformers' own code for such checkpoints raises an error
    model.set_experts_implementation(f"envoi_{format}")
    assert torch.equal(logits(model, ids), before)
