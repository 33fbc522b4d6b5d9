"""Suites that draw: the same cases for the same seed, sizes of published models, and what the evidence says of them."""

from typing import cast

import pytest
import torch

from bench import command
from bench.__main__ import main
from bench.evidence import load
from bench.libraries import OF_BASELINE
from bench.shapes import GemmShape, GroupedShape, MoeShape, Options, RouterShape, drawn_rows
from bench.suites import cases, drawn, measure, module_of, rehearsal, router
from bench.suites.models import MODELS, linears
from bench.trial import Bench, Compiler
from envoi.ops.gemm.hopper import tune
from envoi.ops.gemm.hopper.candidates import default_config
from envoi.ops.moe.router import presets
from envoi.quant.formats import FORMATS
from envoi.runtime.kernel_case import NUM_SMS
from envoi.tune import problems
from envoi.tune.timing import Clock
from tools.kernel_cases.router import rule_of

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


def test_tokens_are_log_uniform():
    shapes = [case.shape for case in on_gpu("gemm_drawn", count=400)]
    tokens = [shape.m for shape in shapes if isinstance(shape, GemmShape)]
    assert min(tokens) < 4
    assert 8192 < max(tokens) <= drawn.MAX_M
    for least, most in ((1, 32), (32, 724), (724, 16384)):
        assert 0.25 < sum(least <= m < most for m in tokens) / 400 < 0.42


def test_gemms_are_layers_of_the_model_that_is_named():
    layers = {(model.name, layer.role): layer for model in MODELS for layer in linears(model)}
    found = on_gpu("gemm_drawn", count=300)
    for case in found:
        details, shape = dict(case.details), case.shape
        layer = layers[details["model"], details["layer"]]
        assert isinstance(shape, GemmShape)
        assert (shape.n, shape.k) == (layer.n, layer.k)
        assert layer.role.startswith("gate_up") or not shape.epilogue.startswith("swiglu")
        assert case.name == f"{shape.m}x{shape.n}x{shape.k} {shape.epilogue} {shape.format}"
    shapes = [case.shape for case in found if isinstance(case.shape, GemmShape)]
    assert {shape.epilogue for shape in shapes} == {*drawn.GATED, *drawn.PLAIN}
    assert {shape.format for shape in shapes} == set(drawn.GEMM_FORMATS)
    assert len({dict(case.details)["model"] for case in found}) >= 15


def test_gemms_run_on_the_hopper_kernel_unless_a_tile_cannot_hold_a_group():
    for case in on_gpu("gemm_drawn"):
        assert isinstance(case.shape, GemmShape)
        if (case.shape.format, case.shape.epilogue) != ("fp8_block128", "swiglu_fp8"):
            assert problems.planned(case.shape, NUM_SMS).default


def test_experts_fit_a_gpu_and_their_rows_are_those_of_routing():
    for suite in ("grouped_drawn", "moe_drawn"):
        found = on_gpu(suite, count=200)
        for shape in (case.shape for case in found):
            if isinstance(shape, GroupedShape):
                total = sum(shape.num_rows)
                assert shape.num_rows == drawn_rows(total, len(shape.num_rows))
                assert 1 <= total <= drawn.MAX_ROWS
                assert len(shape.num_rows) * shape.n * shape.k <= drawn.MAX_LAYER_ELEMENTS
                assert shape.k % FORMATS[shape.format].group_k == 0
            else:
                assert isinstance(shape, MoeShape)
                assert shape.num_experts * 3 * shape.hidden * shape.intermediate <= drawn.MAX_LAYER_ELEMENTS
                assert 1 <= shape.num_topk <= shape.num_experts
                assert shape.skew * shape.num_topk <= shape.num_experts
        formats = {case.shape.format for case in found if isinstance(case.shape, (GroupedShape, MoeShape))}
        assert formats == set(drawn.GROUPED_FORMATS)
    assert any(case.shape.skew > 1 for case in found if isinstance(case.shape, MoeShape))


def test_routers_are_those_of_the_presets():
    found = [case.shape for case in on_gpu("router_drawn", count=200)]
    for shape in found:
        assert isinstance(shape, RouterShape)
        preset = presets.preset(shape.rule)
        assert (shape.n, shape.num_topk) == (preset.num_experts, preset.num_topk)
    assert len({shape.rule for shape in found if isinstance(shape, RouterShape)}) > 10


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


@pytest.mark.parametrize(("count", "said"), [("0", "got 0"), ("1001", "got 1001")])
def test_a_count_out_of_range_is_refused(count, said, capsys):
    assert main(["gemm_drawn", "--list", "--count", count]) == 2
    assert f"--count: expected 1 to {command.MAX_COUNT}, {said}" in capsys.readouterr().err


def test_the_command_lists_what_the_seed_draws(capsys):
    assert main(["gemm_drawn", "--list", "--seed", "7", "--count", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[1] for line in lines] == [case.name for case in cases("gemm_drawn", Options(7, 5))]


def test_the_seed_stands_in_the_evidence(tmp_path):
    arguments = ["router_drawn", "--device", "cpu", "--repeat", "1", "--seed", "11", "--out", str(tmp_path)]
    assert main(arguments) == 0
    found = load(tmp_path)["cpu"]
    assert len(found) == drawn.CPU_COUNT
    assert all(m.details == {"seed": 11} for m in found)


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


@pytest.mark.parametrize("compiled", [True, False])
def test_compiled_baselines_are_rehearsed_unless_left_out(compiled, monkeypatch):
    made = []
    monkeypatch.setattr(router, "rehearse_compiled", lambda case, device: made.append(case.name))
    case = next(case for case in cases("router_drawn") if case.on_cpu)
    assert rehearsal._rehearse("cpu", False, compiled, case) == ""
    assert made == [case.name] * compiled


@pytest.mark.parametrize(("limit_s", "there"), [(0.0, False), (30.0, True), (None, True)])
def test_without_torch_compile_a_router_has_no_such_baseline(limit_s, there, monkeypatch):
    monkeypatch.setattr(Bench, "on_gpu", True)
    shape = next(case for case in cases("router_drawn") if case.on_cpu).shape
    bench = Bench(Clock(torch.device("cpu"), 1), ROOF, compiler=Compiler(limit_s))
    found = router._baselines(cast(RouterShape, shape), rule_of(cast(RouterShape, shape).rule)[0], bench)
    assert ("compile" in found) == there and {"eager", "cublas", "empty"} <= set(found)


def test_layers_that_fill_a_gpu_are_not_rehearsed():
    rehearsed = {case.name: rehearsal.is_rehearsed(case) for case in cases("moe")}
    assert rehearsed["2880/2880/32/4 mxfp4 tokens=1"]
    assert rehearsed["2048/768/128/8 bf16 tokens=1"]
    assert not rehearsed["7168/2048/256/8 fp8_block128 tokens=64"]
    assert not any(map(rehearsal.is_rehearsed, cases("gemm") + cases("indexer_fast") + cases("model")))
    for suite in rehearsal.SUITES:
        assert callable(module_of(suite).rehearse)


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
