"""`tools/time_models` on synthetic times of GEMMs: constants that choose better, and none changed for nothing."""

import json
import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bench.shapes import GemmShape, GroupedShape
from envoi.ops.gemm.hopper.config import Config, Problem
from envoi.ops.gemm.hopper.time_model import COSTS, Costs, predicted_cycles
from envoi.runtime.kernel_case import NUM_SMS
from envoi.tune import problems
from tools.time_models import gemm as program
from tools.time_models.__main__ import main
from tools.time_models.fit import fit, held_out_regret, mean_regret, regret, report

# A GPU whose loads are slower, with cheaper parts and dearer tiles.
OTHER = replace(COSTS, l2_bytes=45, part=1000, tile=5000, element=0.4)
TIMES = Path(__file__).resolve().parents[2] / "bench" / "gemm_times.jsonl"


def measured(shape: GemmShape | GroupedShape, costs: Costs, noise: float = 0.0, seed: int = 0):
    """Return the times that a GPU with these costs would take, at 1.7 GHz."""
    problem = problems.planned(shape, NUM_SMS).problem
    source = random.Random(f"{seed} {shape}")
    times = tuple(
        (
            config,
            (predicted_cycles(problem, config, NUM_SMS, costs) + program.TIMED_LAUNCH)
            / 1.7e3
            * (1 + noise * source.uniform(-1, 1)),
        )
        for config in program.configs_of(shape, NUM_SMS, 12, 0)
    )
    return program.GemmTimes(problems.label(shape), NUM_SMS, times, problem)


@pytest.fixture(scope="module")
def shapes():
    return program.shapes_of(seed=1, count=40)


@pytest.mark.slow
def test_shapes_are_drawn_and_on_the_kernel(shapes):
    assert len(shapes) == len(set(shapes)) == 40
    assert sum(isinstance(shape, GroupedShape) for shape in shapes) == 10
    assert {shape.format for shape in shapes} == set(program.FORMATS)
    assert program.shapes_of(seed=1, count=40) == shapes != program.shapes_of(seed=2, count=40)


def test_half_of_the_configs_are_the_models_and_half_are_not():
    shape = GemmShape(200, 4096, 7168)
    ranked = problems.planned(shape, NUM_SMS).promising(NUM_SMS, 999)
    found = program.configs_of(shape, NUM_SMS, 10, 0)
    assert found[:5] == ranked[:5]
    assert len(found) == len(set(found)) == 10
    assert set(found[5:]) <= set(ranked[5:])
    assert found == program.configs_of(shape, NUM_SMS, 10, 0) != program.configs_of(shape, NUM_SMS, 10, 1)


def test_regret_is_the_chosen_time_over_the_best():
    problem, one, two = Problem(64, 4096, 4096, 2), Config(64, 1, 64, 128, 6), Config(64, 1, 32, 128, 8)
    fast, slow = sorted((one, two), key=lambda config: predicted_cycles(problem, config, NUM_SMS))
    assert regret(program.GemmTimes("", NUM_SMS, ((fast, 12.0), (slow, 10.0)), problem), COSTS) == 1.2
    assert regret(program.GemmTimes("", NUM_SMS, ((fast, 10.0), (slow, 12.0)), problem), COSTS) == 1.0


@pytest.mark.slow
def test_a_fit_chooses_better_also_where_it_has_not_seen(shapes):
    data = [measured(shape, OTHER, noise=0.02) for shape in shapes]
    before = mean_regret(data, COSTS)
    costs = fit(data, program.MODEL)
    after, held_out = mean_regret(data, costs), held_out_regret(data, program.MODEL)
    assert before > 1.03
    assert after < 1 + (before - 1) / 3
    assert held_out < 1 + (before - 1) / 2
    assert costs.l2_bytes == pytest.approx(OTHER.l2_bytes, rel=0.1)
    assert costs.tile == pytest.approx(OTHER.tile, rel=0.2)
    unseen = [measured(shape, OTHER) for shape in program.shapes_of(seed=5, count=40)]
    assert mean_regret(unseen, costs) < 1 + (mean_regret(unseen, COSTS) - 1) / 2
    text = report(data, program.MODEL, costs, held_out)
    assert f"before    {before:.3f}" in text
    assert f"after     {after:.3f}" in text
    assert f"held out  {held_out:.3f}" in text
    assert f"tile: float = {costs.tile:.4g}" in text


def test_a_fit_to_what_the_model_says_changes_little(shapes):
    data = [measured(shape, COSTS) for shape in shapes]
    assert mean_regret(data, COSTS) == 1.0
    assert fit(data, program.MODEL) == COSTS


def test_the_shipped_constants_choose_well_among_what_was_measured():
    data = program.read([TIMES])
    assert len(data) >= 100
    assert mean_regret(data, COSTS) < 1.02
    assert max(regret(measured, COSTS) for measured in data) < 1.2


@pytest.mark.slow
def test_constants_that_nothing_shows_stay(shapes):
    plain = [shape for shape in shapes if shape.format == "bf16" and isinstance(shape, GemmShape)]
    costs = fit([measured(shape, OTHER) for shape in plain], program.MODEL)
    for name in (*program.MODEL.fixed, "scaled_block", "wide_step", "wide_tile"):
        assert getattr(costs, name) == getattr(COSTS, name)
    assert costs != COSTS


def test_the_data_file_keeps_everything(tmp_path, shapes):
    data = [measured(shape, OTHER) for shape in shapes[:3]]
    path = tmp_path / "times.jsonl"
    path.write_text("\n".join(program.to_line(each, "NVIDIA H200") for each in data) + "\n\n")
    assert program.read([path, path]) == data + data
    assert json.loads(path.read_text().splitlines()[0])["gpu"] == "NVIDIA H200"


def test_shapes_with_few_tokens_can_be_asked_for():
    found = program.shapes_of(seed=3, count=6, tokens=(9, 64))
    assert len(found) == 6 and all(isinstance(shape, GemmShape) and 9 <= shape.m <= 64 for shape in found)


@pytest.mark.parametrize("tokens", ["9", "64-9", "a-b", "9-"])
def test_a_range_of_tokens_that_is_none_is_refused(tokens, tmp_path, capsys):
    assert main(["gemm", "measure", str(tmp_path / "times.jsonl"), "--tokens", tokens]) == 2
    assert f"--tokens: expected a range like 9-64, got {tokens!r}" in capsys.readouterr().err


def test_one_time_is_no_choice():
    line = program.to_line(measured(GemmShape(64, 4096, 4096), COSTS), "NVIDIA H200")
    entries = json.loads(line)
    entries["times_us"] = entries["times_us"][:1]
    with pytest.raises(ValueError, match="64x4096x4096 bf16 store: expected at least two configs"):
        program.from_line(json.dumps(entries))


@pytest.mark.slow
def test_the_command_prints_constants(tmp_path, capsys):
    path = tmp_path / "times.jsonl"
    few = [GemmShape(m, 4096, 4096) for m in (16, 64, 256, 1024, 4096)]
    path.write_text("\n".join(program.to_line(measured(shape, OTHER), "NVIDIA H200") for shape in few))
    assert main(["gemm", "fit", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("5 shapes, 60 times; regret")
    assert all(f"    {name}: float = " in out for name in asdict(COSTS))
