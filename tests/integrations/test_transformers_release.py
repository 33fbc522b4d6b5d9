"""Models whose experts' own weights are released once Envoi has packed them."""

import copy

import pytest
import torch

from envoi.integrations.transformers import packed_experts, refresh, release, report
from tests.helpers.quantised_models import compressed_fp8, mxfp4_blocks
from tests.helpers.transformers_models import build, expert_modules, logits, tokens
from tests.integrations.test_transformers_quantised import load

pytestmark = pytest.mark.usefixtures("registered")


def num_bytes(model):
    return sum(x.nbytes for x in model.parameters() if x.device.type != "meta")


@pytest.mark.parametrize("implementation", ["envoi", "envoi_mxfp8", "envoi_mxfp4", "envoi_fp8_row"])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_what_is_released_computes_the_same(name, implementation):
    model, ids = build(name), tokens()
    model.set_experts_implementation(implementation)
    want, before = logits(model, ids), num_bytes(model)
    freed = release(model)
    weights = [x for m in expert_modules(model) for x in (m.gate_up_proj, m.down_proj)]
    copied = [] if implementation == "envoi" else weights  # bf16 weights are read in place
    assert freed == before - num_bytes(model) == sum(x.nbytes for x in copied)
    assert torch.equal(logits(model, ids), want)
    assert release(model) == 0
    refresh(model)
    assert torch.equal(logits(model, ids), want)
    assert all(row.runs for row in report(model).rows)
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 15)


def test_mxfp4_blocks_are_released(tmp_path):
    model, ids = load(mxfp4_blocks(tmp_path), experts_implementation="envoi_mxfp4"), tokens()
    want = logits(model, ids)
    assert release(model) > 0
    assert torch.equal(logits(model, ids), want)


@pytest.mark.parametrize("called", [False, True])
def test_experts_of_compressed_tensors_keep_theirs(called, tmp_path):
    model, ids = load(compressed_fp8("qwen3_moe", tmp_path, "channel"), experts_implementation="envoi"), tokens()
    before = logits(copy.deepcopy(model), ids)
    if called:
        logits(model, ids)
    assert release(model) == 0
    assert torch.equal(logits(model, ids), before)


def test_released_experts_compile():
    model, ids = build("qwen3_moe"), tokens()
    model.set_experts_implementation("envoi")
    release(model)
    want = logits(model, ids)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(logits(compiled, ids), want)


def test_models_that_run_by_others_keep_theirs():
    model, ids = build("mixtral"), tokens()
    want = logits(model, ids)
    assert release(model) == 0
    assert torch.equal(logits(model, ids), want)


def test_what_needs_the_originals_is_refused(tmp_path):
    model = build("mixtral")
    model.set_experts_implementation("envoi_fp8_row")
    release(model)
    message = r"expected 'envoi_fp8_row' for weights that were released in this format, got 'envoi': load the model"
    with pytest.raises(ValueError, match=message):
        model.set_experts_implementation("envoi")
    with pytest.raises(ValueError, match="expected one of 'envoi', .* got 'grouped_mm': load the model again"):
        model.set_experts_implementation("grouped_mm")
    with pytest.raises(ValueError, match=message):
        packed_experts(expert_modules(model)[0], "bf16")
    with pytest.raises(ValueError, match="state_dict: expected a model with its own weights, got one whose experts"):
        model.state_dict()
    with pytest.raises(ValueError, match="state_dict: expected a model with its own weights"):
        model.save_pretrained(tmp_path)
    with pytest.raises(NotImplementedError, match="meta"):
        model.to("cpu")
    assert logits(model, tokens()).isfinite().all()
