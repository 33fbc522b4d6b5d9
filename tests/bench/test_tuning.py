"""`envoi tune` without a GPU: the measurements it would make, its refusals, its choice."""

import pytest

from bench import shapes
from bench.ahead import shapes_of
from bench.evidence import SUITES
from bench.suites import cases
from envoi import cli
from envoi.ops.gemm.hopper import tune
from envoi.runtime.devices import Target
from envoi.runtime.planned_kernels import find
from envoi.tune import command as tuning
from envoi.tune import problems
from tools.kernel_cases import NUM_SMS, kernel_key
from tools.kernel_cases.gemm_hopper import launch_with

GEMMS = [name for name in SUITES if name.startswith("gemm") and name != "gemm_drawn"]
CASES = [case for name in GEMMS for case in cases(name) if case.on_cuda]


def test_a_shape_of_ones_own(capsys):
    arguments = [
        "tune",
        "--list",
        "--shape",
        "500x256x256",
        "--groups",
        "8",
        "--format",
        "fp8_row",
        "--epilogue",
        "swiglu",
    ]
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("8: 500x256x256 <= 63 fp8_row swiglu ")


@pytest.fixture
def measured_here(tmp_path, monkeypatch):
    """Give the file of what is measured on this machine, which is empty."""
    monkeypatch.setenv("ENVOI_CACHE_DIR", str(tmp_path))
    tune._entries.cache_clear()
    yield tmp_path / "gemm.json"
    monkeypatch.undo()
    tune._entries.cache_clear()
    tune.forget_choices()


def test_the_list_has_what_was_measured_here(capsys, measured_here):
    planned = problems.planned(shapes.GemmShape(4096, 4096, 7168, "fp8_row"), NUM_SMS)
    other = next(config for config in planned.promising(NUM_SMS, 9) if config != planned.chosen(NUM_SMS))
    tune.keep({planned.key(NUM_SMS): other}, measured_here)
    assert cli.main(["tune", "--list", "--shape", "4096x4096x7168", "--format", "fp8_row"]) == 0
    assert f"  {other.label()}  " in capsys.readouterr().out


def test_rows_as_routing_leaves_them(capsys):
    arguments = ["tune", "--list", "--shape", "12288x512x256", "--groups", "32", "--epilogue", "swiglu"]
    assert cli.main([*arguments, "--drawn"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("32: 12288x512x256 <= 422 bf16 swiglu ")
    assert cli.main(arguments) == 0
    assert "<=" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--shape", "16x64x64", "--out", "."], "--out: expected a file, got the folder ."),
        (["--shape", "1x2"], "--shape: expected MxNxK"),
        (["--shape", "0x2x3"], "--shape: expected MxNxK"),
        (["--shape", "16x64x64", "--format", "fp9"], "--format: expected one of"),
        (["--shape", "16x64x64", "--epilogue", "sigmoid"], "--epilogue: expected one of"),
        (["--shape", "16x64x64", "--groups", "0"], "--groups: expected at least 1"),
        (["--shape", "16x64x64", "--drawn"], "--drawn: expected it only beside --groups"),
        (["--shape", "16x64x64", "--candidates", "0"], "--candidates: expected at least 1"),
    ],
)
def test_refusals(arguments, problem, capsys):
    assert cli.main(["tune", *arguments, "--list"]) == 2
    assert capsys.readouterr().err.startswith(f"envoi: {problem}")


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["tune", "--shape", "16x64x64"]) == 2
    assert "expected a Hopper GPU" in capsys.readouterr().err


def test_the_default_is_the_first_candidate():
    known = [shape for shape in shapes_of(CASES) if not shape.format.startswith("mx")]
    for shape in known[::7]:
        planned = problems.planned(shape, 132)
        found = planned.promising(132, 6)
        assert found[0] == planned.default
        assert len(found) == len(set(found)) <= 6


def test_every_config_is_compiled_before_it_is_measured():
    shape = shapes.GemmShape(512, 512, 512)
    planned = problems.planned(shape, NUM_SMS)
    found = planned.promising(NUM_SMS, 4)
    sites = find([problems.ConfigCall(shape, config, NUM_SMS) for config in found], Target("sm_90"), (0,))
    keys = {kernel_key(*launch_with(planned.call, config, NUM_SMS)) for config in found}
    assert len(sites) == len(keys) > 1 and {site.name for site in sites.values()} == {"gemm_kernel"}


def test_the_winner_is_best_for_all_that_share_an_entry():
    first, second, third = problems.planned(shapes.GemmShape(4096, 4096, 7168), 132).promising(132, 3)
    assert tuning.winner([{first: 10.0, second: 9.0}]) == second
    assert tuning.winner([{first: 10.0, second: 9.0}, {first: 10.0, second: 20.0, third: 1.0}]) == first
    assert tuning.winner([{first: 10.0}, {second: 5.0}]) == second
