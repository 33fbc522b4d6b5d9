"""Quantised checkpoints loaded by transformers and run by Envoi as they are stored."""

import json

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, Mxfp4Config

from envoi.experts import from_checkpoint, unpack
from envoi.integrations.transformers import module_weights, packed_experts, register, report
from tests.helpers.accuracy import relative_error
from tests.helpers.quantised_models import WIDER, fp4, fp8_blocks, fp8_matrices, mxfp4_blocks
from tests.helpers.transformers_models import build, expert_modules, logits, tokens

pytestmark = pytest.mark.usefixtures("registered")


@pytest.fixture
def rounding():
    """Round weights again that a format can't hold."""
    register(requantize=True)
    yield
    register()


def load(folder, **options):
    options = {"dtype": torch.bfloat16, "experts_implementation": "envoi", **options}
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def experts_of(model):
    return [module for module in model.modules() if type(module).__name__ in ("FP8Experts", "Mxfp4Experts")]


def widened(model, folder):
    """Return the family's model in bf16 with the numbers that the file means, in place of the quantised modules'."""
    wide = build(folder.name, **WIDER)
    own = dict(model.named_parameters())
    with torch.no_grad():
        for key, x in wide.named_parameters():
            if ".experts." not in key:
                x.copy_(own[key])
        layers = [int(path.split(".")[2]) for path, m in model.named_modules() if m in experts_of(model)]
        for layer, module in zip(layers, expert_modules(wide), strict=True):
            gate_up, down, *_ = unpack(from_checkpoint(folder, layer), dtype=torch.float32)
            module.gate_up_proj.copy_(gate_up)
            module.down_proj.copy_(down)
    return wide


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_fp8_blocks(name, tmp_path):
    folder = fp8_blocks(name, tmp_path / name)
    model, ids = load(folder), tokens()
    assert {packed_experts(module).format for module in experts_of(model)} == {"fp8_block128"}
    assert relative_error(logits(model, ids), logits(widened(model, folder), ids)) < 0.03


@pytest.mark.parametrize("powers", [False, True])
def test_fp8_blocks_have_the_files_numbers(powers, tmp_path):
    folder = fp8_blocks("mixtral", tmp_path / "mixtral", powers)
    for layer, module in enumerate(experts_of(load(folder))):
        want = from_checkpoint(folder, layer)
        for got, right in zip(unpack(packed_experts(module)), unpack(want), strict=True):
            assert got is right is None or torch.equal(got, right)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_a_factor_a_matrix(name, tmp_path):
    folder = fp8_matrices(name, tmp_path / name)
    model, ids = load(folder), tokens()
    assert {packed_experts(module).format for module in experts_of(model)} == {"fp8_row"}
    assert relative_error(logits(model, ids), logits(widened(model, folder), ids)) < 0.03


@pytest.mark.parametrize("implementation", ["envoi", "envoi_mxfp4", "envoi_mxfp4_mxfp8"])
def test_fp4_pairs(implementation, tmp_path):
    folder = fp4("qwen3_moe", tmp_path / "qwen3_moe")
    model, ids = load(folder, experts_implementation=implementation), tokens()
    formats = {packed_experts(module, model_format(implementation)).format for module in experts_of(model)}
    assert formats == {implementation.removeprefix("envoi_").replace("envoi", "mxfp4")}
    want = logits(widened(model, folder), ids)
    assert relative_error(logits(model, ids), want) < (0.08 if implementation.endswith("mxfp8") else 0.02)
    assert experts_of(model)[0].gate_up_proj.dtype == torch.int8


def model_format(implementation):
    return {"envoi": "bf16"}.get(implementation, implementation.removeprefix("envoi_"))


def test_gpt_oss_blocks(tmp_path):
    folder = mxfp4_blocks(tmp_path)
    model, ids = load(folder), tokens()
    assert {type(module).__name__ for module in experts_of(model)} == {"Mxfp4Experts"}
    wide = load(folder, quantization_config=Mxfp4Config(dequantize=True))
    assert not experts_of(wide)  # as was asked for
    assert torch.equal(logits(model, ids), logits(wide, ids))
    eager = load(folder, experts_implementation="eager")
    assert not experts_of(eager)
    assert relative_error(logits(model, ids), logits(eager, ids)) < 0.02
    for layer, module in enumerate(experts_of(model)):
        for got, right in zip(unpack(packed_experts(module)), unpack(from_checkpoint(folder, layer)), strict=True):
            assert torch.equal(got, right)


def test_gpt_oss_blocks_are_saved_as_they_came(tmp_path):
    folder = mxfp4_blocks(tmp_path / "a")
    model, ids = load(folder), tokens()
    model.save_pretrained(tmp_path / "b")
    assert torch.equal(logits(load(tmp_path / "b"), ids), logits(model, ids))


def test_gpt_oss_blocks_are_widened_for_other_formats(tmp_path):
    model = load(mxfp4_blocks(tmp_path), experts_implementation="envoi_fp8_row")
    assert not experts_of(model)
    assert logits(model, tokens()).isfinite().all()


@pytest.mark.parametrize("save", [fp8_blocks, fp8_matrices])
def test_fp8_weights_are_kept_once(save, tmp_path):
    module = experts_of(load(save("mixtral", tmp_path)))[0]
    packed = packed_experts(module)
    assert packed.gate_up.values.data_ptr() == module.gate_up_proj.data_ptr()
    assert packed.down.values.data_ptr() == module.down_proj.data_ptr()


def test_weights_that_change_are_packed_again(tmp_path):
    module = experts_of(load(fp8_matrices("mixtral", tmp_path)))[0]
    before = unpack(packed_experts(module))[1].clone()
    assert packed_experts(module) is packed_experts(module)
    with torch.no_grad():
        module.down_proj_scale_inv.mul_(2)
    assert torch.equal(unpack(packed_experts(module))[1], before * 2)


def test_another_format_is_refused_before_weights_are_read(tmp_path, monkeypatch):
    folder = fp8_blocks("mixtral", tmp_path)
    read = []
    monkeypatch.setattr(transformers.PreTrainedModel, "_finalize_model_loading", lambda *_: read.append(0))
    message = r"experts \(FP8Experts\): expected 'envoi' or 'envoi_fp8_block128' for weights .* got 'envoi_mxfp8'"
    with pytest.raises(ValueError, match=message):
        load(folder, experts_implementation="envoi_mxfp8")
    assert not read


def test_another_format_if_asked_for(tmp_path, rounding):
    model = load(fp8_blocks("mixtral", tmp_path), experts_implementation="envoi_fp8_row")
    assert packed_experts(experts_of(model)[0], "fp8_row").format == "fp8_row"
    assert logits(model, tokens()).isfinite().all()


def test_factors_that_fit_no_format_are_refused(tmp_path):
    model = load(fp8_matrices("mixtral", tmp_path))
    module = experts_of(model)[0]
    module._envoi_activation = None
    module.down_proj_scale_inv = torch.nn.Parameter(torch.ones(4, 256, 4))
    with pytest.raises(ValueError, match=r"experts \(FP8Experts\): format: expected one that holds these weights"):
        model.set_experts_implementation("envoi_fp8_row")


def test_the_report_of_quantised_models(tmp_path):
    blocks = load(fp8_blocks("deepseek_v3", tmp_path / "a"))
    rows = report(blocks).rows
    assert [(row.path, row.kind, row.stored, row.chosen, row.runs) for row in rows] == [
        ("model.layers.1.mlp.experts", "FP8Experts", "fp8_block128", "envoi", True)
    ]
    oss = load(mxfp4_blocks(tmp_path / "b"), experts_implementation="envoi_mxfp4_mxfp8")
    assert [(row.stored, row.chosen, row.why) for row in report(oss).rows] == [("mxfp4", "envoi_mxfp4_mxfp8", "")] * 2
    line = ["2", "Mxfp4Experts", "mxfp4", "envoi_mxfp4_mxfp8", "yes", f"{own_bytes(oss) / 1e6:.2f}"]
    assert str(report(oss)).splitlines()[1].split() == line


def own_bytes(model):
    return sum(x.nbytes for module in experts_of(model) for x in module.parameters() if not x.is_meta)


def test_linear_layers_in_fp8_are_widened_where_nothing_runs_them(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folder = fp8_blocks("mixtral", tmp_path)
    said = json.loads((folder / "config.json").read_text())
    said["quantization_config"]["modules_to_not_convert"] = ["lm_head"]
    (folder / "config.json").write_text(json.dumps(said))
    assert {row.stored for row in report(load(folder)).rows} == {"bfloat16"}


def test_without_a_gpu_fp8_experts_run_by_envoi_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folder = fp8_blocks("mixtral", tmp_path)
    assert {row.stored for row in report(load(folder, experts_implementation="eager")).rows} == {"bfloat16"}
    model = load(folder)
    with pytest.raises(ValueError, match="experts: expected one of 'envoi', .* got 'eager': load the model again"):
        model.set_experts_implementation("eager")
    assert logits(model, tokens()).isfinite().all()


def test_the_report_says_why_not(tmp_path):
    model = build("qwen3_moe")
    first, _ = report(model).rows
    assert (first.stored, first.chosen, first.why) == ("bfloat16", "eager", "experts_implementation is 'eager'")
    assert not first.runs
    model.set_experts_implementation("envoi_fp8_row")
    assert all(row.runs for row in report(model).rows)
    config = build("mixtral").config
    config.hidden_act = "mish"
    odd = AutoModelForCausalLM.from_config(config)
    assert "and Envoi can't run it: expected the activation swiglu" in report(odd).rows[0].why
    assert "MixtralExperts (model.layers.0.mlp.experts, model.layers.1.mlp.experts)" in str(report(odd))
    llama = AutoModelForCausalLM.from_config(transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=8))  # fmt: skip
    assert str(report(llama)) == "no experts modules found"


def test_the_report_lists_experts_outside_the_interface():
    config = transformers.Llama4TextConfig(
        hidden_size=64, intermediate_size=64, intermediate_size_mlp=64, num_local_experts=2, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, vocab_size=64,
    )  # fmt: skip
    rows = report(AutoModelForCausalLM.from_config(config)).rows
    assert [(row.kind, row.runs) for row in rows] == [("Llama4TextExperts", False)]
    assert "doesn't look its experts up by experts_implementation" in rows[0].why


def test_every_tensor_of_a_quantised_module_is_watched(tmp_path):
    module = experts_of(load(mxfp4_blocks(tmp_path)))[0]
    kept = {x.data_ptr() for x in module_weights(module) if x is not None}
    assert kept == {x.data_ptr() for x in module.parameters()}
