"""Suite model: its cases, what is compared, tokens per second, memory; at tiny sizes on a CPU."""

import pytest
import torch

from envoi import cli
from envoi.bench.evidence import load
from envoi.bench.shapes import ModelShape, Options, cases
from envoi.bench.suites import measure, model
from envoi.bench.suites.models import MODELS
from envoi.bench.timing import Clock
from envoi.bench.trial import Bench

from .test_suites import CPU, ROOF


def test_cases_are_prefill_and_decode_eager_and_compiled():
    names = [case.name for case in cases("model") if case.on_cuda]
    for name, formats in model.FORMATS.items():
        layers = model.default_layers(name)
        for format in formats:
            steps = ["prefill 1x4096", "prefill 4x4096"]
            steps += [f"decode {n}{how}" for how in ("", " compiled") for n in (1, 16, 64, 256)]
            assert [f"{name} sizes x{layers}, {step} {format}" for step in steps] == [
                found for found in names if found.startswith(name) and found.endswith(f" {format}")
            ]


@pytest.mark.parametrize("name", model.FORMATS)
def test_the_default_layers_fit_and_one_more_does_not(name):
    sizes, layers = model.sizes_of(name), model.default_layers(name)
    experts = 3 * sizes.num_experts * sizes.hidden * sizes.expert_intermediate
    assert 1 < layers < model.NUM_LAYERS[name]
    assert 4 * experts * layers + 4 * model.VOCABULARY * sizes.hidden < model.MAX_BYTES
    assert 4 * experts * (layers + 2) + 4 * model.VOCABULARY * sizes.hidden > model.MAX_BYTES
    assert sizes in MODELS


def test_layers_can_be_chosen(capsys):
    shapes = [case.shape for case in cases("model", Options(layers=3))]
    assert {shape.num_layers for shape in shapes if isinstance(shape, ModelShape)} == {3}
    assert cli.main(["bench", "model", "--list", "--layers", "3"]) == 0
    assert "sizes x3, decode 64 compiled fp8_block128" in capsys.readouterr().out
    assert cli.main(["bench", "model", "--list", "--layers", "0"]) == 2
    assert "--layers: expected at least 1, got 0" in capsys.readouterr().err


def test_the_evidence_has_tokens_per_second(tmp_path, capsys):
    arguments = ["bench", "model", "--device", "cpu", "--repeat", "2", "--layers", "1", "--out", str(tmp_path)]
    assert cli.main([*arguments, "--case", "prefill"]) == 0
    (found,) = load(tmp_path)["cpu"]
    assert found.case == "tiny sizes x1, prefill 2x8 bf16"
    assert set(found.baselines) == {"grouped_mm", "eager"}
    assert found.details["tokens_per_s"] == pytest.approx(16 / found.ours_us * 1e6, rel=1e-3)
    assert f"model {found.case}: tokens_per_s {found.details['tokens_per_s']}\n" in capsys.readouterr().out
    assert found.floor_us is found.tflops is found.gb_per_s is None


def test_each_contender_runs_its_own_implementation(monkeypatch):
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    seen = []
    case = next(case for case in cases("model") if case.name == "tiny sizes x2, decode 2 mxfp4")
    measure(case, Bench(Clock(CPU, 1), ROOF))  # registers
    for name in ("grouped_mm", "envoi_mxfp4"):
        forward = ALL_EXPERTS_FUNCTIONS[name]

        def noted(*args, name=name, forward=forward, **options):
            seen.append(name)
            return forward(*args, **options)

        monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS, name, noted)
    rounds = 3
    measure(case, Bench(Clock(CPU, rounds), ROOF))
    steps = 1 + model.NUM_WARMUPS + rounds
    # Each step has two layers; the cache is filled by one more, and the error is that of one module.
    assert seen.count("grouped_mm") == seen.count("envoi_mxfp4") == 2 * (steps + 1) + 1


def test_a_wrong_layer_shows_in_the_error(monkeypatch):
    from envoi.integrations import transformers as integration

    case = next(case for case in cases("model") if case.name == "tiny sizes x2, prefill 2x8 bf16")
    right = integration.moe
    monkeypatch.setattr(integration, "moe", lambda *args: right(*args).roll(1, dims=0))
    assert measure(case, Bench(Clock(CPU, 1), ROOF)).error["ours"] > 0.5


def test_memory_is_that_of_one_contender(monkeypatch):
    """Counts memory as on a GPU, with tensors that other contenders hold."""
    shape = ModelShape("tiny", 2, "mxfp4", 2, 1)
    model._build.cache_clear()
    from envoi.integrations import transformers as integration

    integration.register()
    subject = model._build("tiny", 2, "mxfp4", CPU)
    weights = model._weights(subject)
    monkeypatch.setattr(model.Subject, "on_gpu", property(lambda self: True))
    monkeypatch.setattr(model.Subject, "allocated", lambda self: weights + 10_000_000)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: weights + 10_000_500)
    with torch.no_grad():
        theirs = model._contender(subject, shape, "grouped_mm")
        first = model._contender(subject, shape, "envoi_mxfp4")
        second = model._contender(subject, shape, "envoi_mxfp4")
    experts = 2 * 8 * 3 * 128 * 128  # elements of both layers
    assert subject.packed_bytes == experts // 2 + experts // 32
    assert theirs.peak_bytes == first.peak_bytes == weights + 500
    assert second.peak_bytes == weights + 500 + subject.packed_bytes
    model._build.cache_clear()
