"""CPU cases: each runs, gives a valid measurement and is right; the command writes and shows them."""

import pytest
import torch

import envoi
from bench import predicted, roof, runner
from bench.__main__ import main
from bench.evidence import SUITES, load, read, to_line
from bench.libraries import OF_BASELINE
from bench.roof import Roof
from bench.shapes import Case, GemmShape, GroupedShape, HostShape, ModelShape, MoeShape
from bench.suites import cases, measure, model, moe, moe_shared
from bench.timing import Clock
from bench.trial import Bench
from tests.helpers.accuracy import relative_error
from tests.helpers.ranks import run_ranks
from tests.helpers.slow import mostly_slow

CPU = torch.device("cpu")
ROOF = Roof(30.0, {"bf16": 0.1, "fp32": 0.1})
CPU_CASES = [case for suite in SUITES for case in cases(suite) if case.on_cpu and case.alone]
MAX_ERROR = {
    "gemm_swiglu": 4e-3, "gemm_quant": 4e-2, "indexer_fast": 4e-3,
    **dict.fromkeys(("router", "router_call", "router_dense", "router_drawn"), 1e-5),
}  # fmt: skip
MAX_GEMM_ERROR = 3e-3
MAX_EPILOGUE_ERROR = {"swiglu": 4e-3, "swiglu_fp8": 4e-2}
MAX_MOE_ERROR = {
    "bf16": 6e-3, "fp8_row": 0.1, "fp8_block128": 0.1, "mxfp8": 0.1, "mxfp4": 6e-3, "mxfp4_mxfp8": 0.1,
    "mxfp4_fp8": 0.1,
}  # fmt: skip
MAX_MODEL_ERROR = {"bf16": 6e-3, "mxfp4": 0.25}  # of weights before they are packed


def max_error(case: Case) -> float:
    if isinstance(case.shape, HostShape):
        return MAX_MOE_ERROR["bf16"]
    if isinstance(case.shape, ModelShape):
        return MAX_MODEL_ERROR[case.shape.format]
    if isinstance(case.shape, MoeShape):
        return MAX_MOE_ERROR[case.shape.format]
    if case.suite == "gemm_drawn" and isinstance(case.shape, GemmShape):
        return MAX_EPILOGUE_ERROR.get(case.shape.epilogue, MAX_GEMM_ERROR)
    return MAX_ERROR.get(case.suite, MAX_GEMM_ERROR if case.suite.startswith(("gemm", "grouped")) else 1e-3)


@pytest.fixture
def traced_only(monkeypatch):
    """Let torch.compile trace a step whole, without Inductor's C++, which takes longest and serves no GPU."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda fn, mode, **given: compile_(fn, backend="aot_eager", **given))


# A model that torch compiles takes as long as all others.
QUICK = [case for case in CPU_CASES if " compiled " not in case.name]


@pytest.mark.parametrize("case", mostly_slow(CPU_CASES, QUICK), ids=lambda case: f"{case.suite} {case.name}")
def test_every_cpu_case_gives_a_measurement_that_is_right(case, traced_only):
    trial = measure(case, Bench(Clock(CPU, 1), ROOF))
    assert not trial.missing
    if isinstance(case.shape, ModelShape):
        assert set(trial.baselines) == set(model.theirs(case.shape))
    assert trial.error["ours"] <= max_error(case)
    assert (trial.num_bytes > 0) == (trial.flops > 0) == (case.suite not in ("host", "model"))
    measurement = runner.to_measurement(case, trial, ROOF, runner.Ranks(0, 1, CPU), "0123456789ab")
    assert to_line(measurement)
    assert measurement.gpu.endswith("(CPU)")
    assert (measurement.suite, measurement.case, measurement.n) == (case.suite, case.name, 1)


def test_a_wrong_result_shows_in_the_error(monkeypatch):
    case = next(case for case in CPU_CASES if isinstance(case.shape, GroupedShape))
    from bench.suites import grouped

    right = grouped.grouped_gemm
    monkeypatch.setattr(grouped, "grouped_gemm", lambda *args: right(*args).roll(1, dims=0))
    assert measure(case, Bench(Clock(CPU, 1), ROOF)).error["ours"] > 0.5


@pytest.mark.parametrize("case", [case for case in CPU_CASES if "shared" in case.name], ids=lambda case: case.name)
def test_two_gemms_and_a_sum_give_what_a_shared_expert_in_the_launches_gives(case):
    layer = moe.make_layer(case.shape, CPU)
    shared = moe_shared.draw(case.shape, CPU)
    experts, _ = moe_shared.join(layer, shared)
    got = envoi.moe(layer.tokens, layer.routing, experts)
    error = MAX_MOE_ERROR[case.shape.format]
    assert relative_error(moe_shared.separate(layer, shared)(), got) < error
    assert relative_error(envoi.moe(layer.tokens, layer.routing, layer.packed), got) > 2 * error


def test_the_command_appends_and_prints(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(roof, "GEMM_MNK", roof.GEMM_MNK | {"cpu": ((256, 256, 256),)})  # else roofs take longest
    for _ in range(2):
        assert main(["gemm", "--device", "cpu", "--repeat", "1", "--out", str(tmp_path)]) == 0
    stdout, _ = capsys.readouterr()
    names = [case.name for case in cases("gemm") if case.on_cpu]
    assert all(f"gemm {name}" in stdout for name in names)
    assert f"appended to {tmp_path / 'cpu.jsonl'}" in stdout
    assert len(read(tmp_path / "cpu.jsonl")) == 2 * len(names)
    assert [m.case for m in load(tmp_path)["cpu"]] == names


def measure_transports(rank: int, num_ranks: int) -> list[tuple[float, set[str], dict, dict]]:
    found = []
    for case in (case for case in cases("moe") if case.on_cpu and not case.alone):
        trial = measure(case, Bench(Clock(CPU, 2), ROOF, rank, num_ranks))
        found.append((max(trial.error.values()), set(trial.baselines), trial.missing, trial.details))
    return found


def test_transports_are_measured_over_ranks_beside_torchs_pipeline():
    for outcome in run_ranks(2, measure_transports):
        assert not outcome.error, outcome.text
        assert [details["exchange"] for *_, details in outcome.value] == ["counted", "counted"]  # over gloo
        for error, baselines, missing, _ in outcome.value:
            assert error < MAX_MOE_ERROR["bf16"]
            assert (baselines, missing) == ({"torch_ep"}, {})


@pytest.mark.parametrize(
    ("more", "num_ranks", "gpu", "us"),
    [
        ({}, 4, "NVIDIA H200", 878), ({}, 2, "NVIDIA H200", 978), ({"transport": "by host"}, 4, "NVIDIA H200", 1251),
        ({"transport": "by host", "presum": True}, 4, "NVIDIA H200", 1018),
        ({"transport": "over nccl"}, 4, "NVIDIA H200", None), ({"transport": "by host"}, 3, "NVIDIA H200", None),
        ({"zipf": 1.2}, 4, "NVIDIA H200", None), ({"skew": 8.0}, 4, "NVIDIA H200", None),
        ({}, 3, "NVIDIA H200", None), ({}, 1, "NVIDIA H200", None), ({}, 4, "NVIDIA H100", None),
    ],
)  # fmt: skip
def test_an_even_layer_over_ranks_is_predicted(more, num_ranks, gpu, us):
    found = predicted.predicted_us(MoeShape(4096, 2048, 256, 6, 2048, "fp8_block128", **more), num_ranks, gpu)
    assert found == (None if us is None else pytest.approx(us, rel=0.01))


GPU_CASES = {
    "gemm": ("16x7168x2048 bf16",),
    "gemm_fp8": ("2048x7168x2048 fp8_row", "2048x7168x2048 fp8_block128"),
    "gemm_epilogues": (
        "1024x5120x2880 absmax", "2000x4096x4096 capped_residual_max", "2000x4096x4096 logsumexp",
        "2000x4096x4096 logsumexp_of_max",
    ),
    "gemm_weights": ("32 experts x 16, 4096 -> 4096 bf16",),
    "gemm_swiglu": ("64x4096x7168 bf16",),
    "gemm_quant": ("1024x5120x2880 bf16",),
    "gemm_grouped": ("32 experts zipf 8192, 7168 -> 4096 fp8_row",),
    "router": ("512x8x128 top4 softmax fp16", "128x256x7168 deepseek-v3 bf16"),
    "router_call": ("1x256x7168 deepseek-v3 bf16",),
    "router_dense": ("4096x64x1024 top4 softmax fp16",),
    "indexer_fast": ("batch 1x131072",),
    "moe": ("2048/768/128/8 bf16 tokens=16", "2880/2880/32/4 mxfp4 tokens=1"),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("suite", "name"), [(suite, name) for suite, names in GPU_CASES.items() for name in names])
def test_a_gpu_runs_every_baseline_and_is_right(suite, name):
    (case,) = [case for case in cases(suite) if case.name == name]
    trial = measure(case, Bench(Clock(torch.device("cuda", 0), 2), ROOF))
    assert set(trial.missing) <= set(OF_BASELINE), "other libraries needn't be installed"
    assert trial.error["ours"] <= max_error(case)
