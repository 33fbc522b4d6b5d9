"""Suites that draw: the same cases for the same seed, sizes of published models, and what the evidence says of them."""

import pytest
import torch

from bench.__main__ import main
from bench.libraries import OF_BASELINE
from bench.shapes import GemmShape, Options
from bench.suites import cases, drawn, measure, module_of, rehearsal
from bench.suites.models import MODELS
from bench.trial import Bench, Compiler
from envoi.ops.gemm.hopper import tune
from envoi.ops.gemm.hopper.candidates import default_config
from envoi.ops.moe.router import presets
from envoi.runtime.kernel_case import NUM_SMS
from envoi.tune import problems
from envoi.tune.timing import Clock

from .test_suites import ROOF, max_error

SUITES = tuple(drawn.SUITES)


def on_gpu(suite: str, seed: int = 0, count: int = 48):
    return [case for case in cases(suite, Options(seed, count)) if case.on_cuda]


@pytest.mark.parametrize("suite", SUITES)
def test_a_seed_decides(suite):
    assert cases(suite, Options(7)) == cases(suite, Options(7))
    first, second = ({case.name for case in on_gpu(suite, seed)} for seed in (7, 8))
    assert len(first) == len(second) == 48
    assert len(first & second) < 12
    assert {case.name for case in on_gpu(suite, 7, 12)} < first
    for case in cases(suite, Options(7)):
        assert dict(case.details)["seed"] == 7
        assert not case.on_cuda or dict(case.details)["model"] in {model.name for model in MODELS}


def test_gemms_run_on_the_hopper_kernel_unless_a_tile_cannot_hold_a_group():
    for case in on_gpu("gemm_drawn"):
        assert isinstance(case.shape, GemmShape)
        if (case.shape.format, case.shape.epilogue) != ("fp8_block128", "swiglu_fp8"):
            assert problems.planned(case.shape, NUM_SMS).default


@pytest.mark.parametrize("name", presets.PRESETS)
def test_the_eager_router_is_that_of_the_preset(name):
    from bench.suites.eager_router import eager_route
    from envoi.ops.moe.router import reference

    preset = presets.preset(name)
    source = torch.Generator().manual_seed(5)
    logits = torch.randn(40, preset.num_experts, generator=source)
    bias = torch.randn(preset.num_experts, generator=source) * 0.02 if preset.has_expert_bias else None
    weights, ids = eager_route(logits, preset.num_topk, preset.rule, bias)
    want = reference.to_dense(*reference.select(logits, preset.num_topk, preset.rule, bias), preset.num_experts)
    torch.testing.assert_close(reference.to_dense(weights, ids, preset.num_experts), want, rtol=1e-5, atol=1e-6)


def test_untuned_measures_the_model_alone_and_says_so(tmp_path, monkeypatch):
    shape = GemmShape(4096, 4096, 7168)
    planned = problems.planned(shape, NUM_SMS)
    modelled = default_config(planned.problem, planned.call.code, NUM_SMS)
    other = next(c for c in planned.promising(NUM_SMS, 8) if c not in (planned.default, modelled))
    monkeypatch.setattr(tune, "_entries", lambda shipped_only: {planned.key(NUM_SMS): other})
    assert planned.chosen(NUM_SMS) == other
    seen = []

    def measure(fitting, ranks, plan):
        seen.append(([case.name for case in fitting], planned.chosen(NUM_SMS)))
        return [], 0

    monkeypatch.setattr("bench.runner.run_cases", measure)
    assert main(["gemm_drawn", "--device", "cpu", "--untuned"]) == 0
    (names, chosen), = seen  # fmt: skip
    assert all(name.startswith("untuned ") for name in names)
    assert chosen != other
    assert planned.chosen(NUM_SMS) == other


def test_prepared_calls_are_forgotten_with_the_configs_that_they_hold(monkeypatch):
    cleared = []
    monkeypatch.setattr(tune.prepared, "clear", lambda: cleared.append(True))
    tune.use_measured(False)
    tune.use_measured(True)
    assert len(cleared) == 2


@pytest.mark.parametrize("suite", SUITES)
def test_a_rehearsal_makes_the_calls(suite):
    for case in cases(suite):
        if case.on_cpu:
            assert rehearsal.is_rehearsed(case)
            module_of(suite).rehearse(case, torch.device("cpu"))


def test_rehearsals_run_in_other_processes_and_report_their_errors():
    good = next(case for case in cases("router_drawn") if case.on_cpu)
    bad = next(case for case in cases("gemm_drawn") if case.on_cpu)
    shape = GemmShape(0, 0, 0)
    object.__setattr__(bad, "shape", shape)
    failed = rehearsal.rehearse_with([good, bad], torch.device("cpu"), 2, tuned=False)
    assert list(failed) == [f"gemm_drawn {bad.name}"]


@pytest.mark.gpu
@pytest.mark.parametrize("suite", SUITES)
def test_a_gpu_rehearses_and_measures(suite):
    found = on_gpu(suite, seed=2, count=3)
    assert not rehearsal.rehearse_all(found, num_processes=3)
    for case in found:
        trial = measure(case, Bench(Clock(torch.device("cuda", 0), 2), ROOF, compiler=Compiler(0.0)))
        assert set(trial.missing) <= set(OF_BASELINE)
        assert trial.error["ours"] <= max_error(case)
