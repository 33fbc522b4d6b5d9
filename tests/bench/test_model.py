"""Suite model: its cases, what is compared, tokens per second, memory; at tiny sizes on a CPU."""

import pytest

from bench.__main__ import main
from bench.evidence import load
from bench.shapes import ModelShape
from bench.suites import cases, measure, model
from bench.trial import Bench
from envoi.integrations import transformers as integration
from envoi.integrations.transformers import forward
from envoi.ops.moe.op import constants_of, tensors_of
from envoi.runtime.devices import Target, standing_for
from envoi.tune.timing import Clock

from .test_suites import CPU, ROOF


def test_the_evidence_has_tokens_per_second(tmp_path, capsys):
    arguments = ["model", "--device", "cpu", "--repeat", "2", "--layers", "1", "--out", str(tmp_path)]
    assert main([*arguments, "--case", "prefill"]) == 0
    (found,) = load(tmp_path)["cpu"]
    assert found.case == "tiny sizes x1, prefill 2x8 bf16"
    assert set(found.baselines) == {"grouped_mm", "eager"}
    assert found.details["tokens_per_s"] == pytest.approx(16 / found.ours_us * 1e6, rel=1e-3)
    assert f"model {found.case}: tokens_per_s {found.details['tokens_per_s']}\n" in capsys.readouterr().out
    assert found.floor_us is found.tflops is found.gb_per_s is None


def test_a_wrong_layer_shows_in_the_error(monkeypatch):
    case = next(case for case in cases("model") if case.name == "tiny sizes x2, prefill 2x8 bf16")
    right = forward.moe
    monkeypatch.setattr(forward, "moe", lambda *args: right(*args).roll(1, dims=0))
    model._build.cache_clear()  # with the errors that are known
    assert measure(case, Bench(Clock(CPU, 1), ROOF)).error["ours"] > 0.5
    model._build.cache_clear()


def tiny(how: str, format: str = "bf16") -> ModelShape:
    return ModelShape("tiny", 2, format, 2, 1, how)


def test_a_contender_that_fails_leaves_the_others(monkeypatch):
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def broken(*arguments, **options):
        raise RuntimeError("no kernel image")

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS, "batched_mm", broken)
    trial = measure(next(c for c in cases("model") if c.shape == tiny("graph")), Bench(Clock(CPU, 1), ROOF))
    assert set(trial.baselines) == {"grouped_mm"}
    assert trial.missing == {"batched_mm": "RuntimeError: no kernel image"}


@pytest.mark.parametrize("format", ["bf16", "fp8_block128", "mxfp4"])
def test_what_is_compiled_ahead_is_what_is_packed(format):
    integration.register()
    subject = model._build("tiny", 2, format, CPU)
    packed = integration.packed_experts(subject.model.model.layers[0].mlp.experts, format)
    with standing_for(Target("sm_90")):
        ahead = model._layer_call("tiny", format).experts
    kept = [(x.shape, x.dtype) if x is not None else None for x in tensors_of(packed)]
    assert [(x.shape, x.dtype) if x is not None else None for x in tensors_of(ahead)] == kept
    if format != "mxfp4":  # whose order is the GPU's own
        assert constants_of(ahead) == constants_of(packed)
