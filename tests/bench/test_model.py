"""Suite model: its cases, what is compared, tokens per second, memory; at tiny sizes on a CPU."""

from contextlib import nullcontext
from typing import ClassVar

import pytest
import torch
from transformers.cache_utils import StaticLayer

from bench.__main__ import main
from bench.evidence import load
from bench.shapes import ModelShape, Options
from bench.suites import cases, measure, model
from bench.suites.models import MODELS
from bench.trial import Bench, Compiler
from envoi.integrations import transformers as integration
from envoi.integrations.transformers import forward
from envoi.ops.moe.op import constants_of, tensors_of
from envoi.runtime.devices import Target, standing_for
from envoi.runtime.rehearsal import find
from envoi.tune.timing import Clock

from .test_suites import CPU, ROOF


def test_cases_are_prefill_and_decode_eager_and_compiled():
    names = [case.name for case in cases("model") if case.on_cuda]
    for name, formats in model.FORMATS.items():
        layers = model.default_layers(name)
        for format in formats:
            steps = ["prefill 1x4096", "prefill 4x4096"]
            steps += [f"decode {n}{how}" for how in ("", " in a graph", " compiled") for n in (1, 16, 64, 256)]
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
    assert main(["model", "--list", "--layers", "3"]) == 0
    assert "sizes x3, decode 64 compiled fp8_block128" in capsys.readouterr().out
    assert main(["model", "--list", "--layers", "0"]) == 2
    assert "--layers: expected at least 1, got 0" in capsys.readouterr().err


def test_the_evidence_has_tokens_per_second(tmp_path, capsys):
    arguments = ["model", "--device", "cpu", "--repeat", "2", "--layers", "1", "--out", str(tmp_path)]
    assert main([*arguments, "--case", "prefill"]) == 0
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
    # Each step has two layers; the cache is filled by one more, batched_mm's too; the errors are known by then.
    assert seen.count("envoi_mxfp4") == 2 * (steps + 1) == seen.count("grouped_mm") - 2


def test_weights_are_copied_for_a_steps_tokens_alone(monkeypatch):
    """A batched matmul of all tokens of the context would need hundreds of gigabytes."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    seen = []
    forward = ALL_EXPERTS_FUNCTIONS["batched_mm"]

    def noted(module, hidden_states, *arguments):
        seen.append(len(hidden_states))
        return forward(module, hidden_states, *arguments)

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS, "batched_mm", noted)
    trial = measure(next(c for c in cases("model") if c.shape == tiny("graph")), Bench(Clock(CPU, 1), ROOF))
    assert "batched_mm" in trial.baselines and set(seen) == {2}


def test_a_wrong_layer_shows_in_the_error(monkeypatch):
    case = next(case for case in cases("model") if case.name == "tiny sizes x2, prefill 2x8 bf16")
    right = forward.moe
    monkeypatch.setattr(forward, "moe", lambda *args: right(*args).roll(1, dims=0))
    model._build.cache_clear()  # with the errors that are known
    assert measure(case, Bench(Clock(CPU, 1), ROOF)).error["ours"] > 0.5
    model._build.cache_clear()


def test_memory_is_that_of_one_contender(monkeypatch):
    """Counts memory as on a GPU, with tensors that other contenders hold."""
    shape = ModelShape("tiny", 2, "mxfp4", 2, 1)
    model._build.cache_clear()
    integration.register()
    subject = model._build("tiny", 2, "mxfp4", CPU)
    weights = model._weights(subject)
    monkeypatch.setattr(model.Subject, "on_gpu", property(lambda self: True))
    monkeypatch.setattr(model.Subject, "allocated", lambda self: weights + 10_000_000)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: weights + 10_000_500)
    with torch.no_grad():
        theirs = model._contender(subject, shape, "grouped_mm", Compiler())
        first = model._contender(subject, shape, "envoi_mxfp4", Compiler())
        second = model._contender(subject, shape, "envoi_mxfp4", Compiler())
    experts = 2 * 8 * 3 * 128 * 128  # elements of both layers
    assert subject.packed_bytes == experts // 2 + experts // 32
    assert subject.freed_bytes == 2 * experts
    assert theirs.peak_bytes == first.peak_bytes == weights + 500
    assert second.peak_bytes == weights + 500 + subject.packed_bytes
    model._build.cache_clear()


def tiny(how: str, format: str = "bf16") -> ModelShape:
    return ModelShape("tiny", 2, format, 2, 1, how)


def test_bf16_weights_are_neither_packed_nor_freed():
    model._build.cache_clear()
    integration.register()
    subject = model._build("tiny", 2, "bf16", CPU)
    with torch.no_grad():
        model._contender(subject, tiny("eager"), "envoi", Compiler())
    assert (subject.packed_bytes, subject.freed_bytes) == (0, 0)


class Graph:
    """Stand-in for a CUDA graph that counts its replays."""

    made: ClassVar[list] = []

    def __init__(self):
        self.replays = 0
        Graph.made.append(self)

    def replay(self):
        self.replays += 1


class Stream:
    """Stand-in for a stream."""

    def __init__(self, device):
        self.device = device

    def wait_stream(self, other):
        assert isinstance(other, Stream)


def on_a_gpu(monkeypatch) -> None:
    """Let CPU tensors take the path of a GPU, with a graph that counts."""
    Graph.made.clear()
    monkeypatch.setattr(model.Subject, "on_gpu", property(lambda self: True))
    monkeypatch.setattr(model.Subject, "allocated", lambda self: 0)
    for name in ("synchronize", "reset_peak_memory_stats", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 10**9)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: nullcontext())


@pytest.mark.parametrize("how", ["graph", "compiled"])
def test_steps_are_replayed_and_the_cache_has_room(how, monkeypatch):
    on_a_gpu(monkeypatch)
    written = []
    update = StaticLayer.update

    def noted(self, key_states, *rest, **more):
        written.append(key_states.shape[-2])
        return update(self, key_states, *rest, **more)

    if how == "graph":  # compiled code would be guarded by the list
        monkeypatch.setattr(StaticLayer, "update", noted)
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda fn, mode, **given: compile_(fn, backend="eager", **given))
    case = next(c for c in cases("model") if isinstance(c.shape, ModelShape) and c.shape == tiny(how))
    trial = measure(case, Bench(Clock(CPU, 1000), ROOF))
    assert set(trial.baselines) == {"grouped_mm", "batched_mm"}
    rounds = trial.ours.n
    assert [graph.replays for graph in Graph.made] == [1 + model.NUM_WARMUPS + rounds] * 3
    if how == "graph":
        assert written.count(1) == 3 * 2 * (model.NUM_WARMUPS + 1)
    most = 2 + model.NUM_WARMUPS + Graph.made[0].replays
    assert most <= model.ROOM
    assert trial.details["envoi_peak_gb"] > 0
    model._build.cache_clear()


def test_a_contender_that_fails_leaves_the_others(monkeypatch):
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def broken(*arguments, **options):
        raise RuntimeError("no kernel image")

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS, "batched_mm", broken)
    trial = measure(next(c for c in cases("model") if c.shape == tiny("graph")), Bench(Clock(CPU, 1), ROOF))
    assert set(trial.baselines) == {"grouped_mm"}
    assert trial.missing == {"batched_mm": "RuntimeError: no kernel image"}


def test_no_more_is_compiled_than_the_limit_allows():
    case = next(c for c in cases("model") if c.shape == tiny("compiled"))
    with pytest.raises(RuntimeError, match="left out: 0 s of 0 for torch.compile were spent"):
        measure(case, Bench(Clock(CPU, 1), ROOF, compiler=Compiler(0.0)))


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


def test_kernels_are_found_for_the_numbers_of_tokens():
    shapes = [ModelShape("Qwen3-30B-A3B", 8, "bf16", 4, 4096), ModelShape("Qwen3-30B-A3B", 8, "bf16", 16, 1, "graph")]
    counts = model.token_counts(shapes)
    assert counts == [16, 64, 2048, 16384]
    target = Target("sm_90")
    with standing_for(target):
        calls = [model._layer_call("Qwen3-30B-A3B", "fp8_block128")]
    names = [site.name for site in find(calls, target, counts).values()]
    assert len(names) >= 6
    assert any(name in ("gemm_kernel", "fused_kernel") for name in names)


def test_cases_are_chosen_by_several_parts(capsys):
    parts = ["--case", "A3B sizes x8, prefill 4x", "--case", "A3B sizes x8, decode 16 in"]
    assert main(["model", "--list", "--layers", "8", *parts]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert main(["model", "--list", "--case", "nowhere", "--case", "else"]) == 2
    assert "'nowhere' nor 'else' is in none of model" in capsys.readouterr().err
