"""The router's model of time, and `tools/time_models` on measured times of its tilings."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.shapes import RouterShape
from envoi.ops.moe.router.choose_tiling import choose_tiling
from envoi.ops.moe.router.time_model import COSTS, predicted_cycles
from envoi.runtime.kernel_case import NUM_SMS
from tools.time_models import router as program
from tools.time_models.__main__ import main
from tools.time_models.fit import fit, mean_regret, regret

TIMES = Path(__file__).resolve().parents[3] / "bench" / "router_times.jsonl"
SHAPE = RouterShape(200, 256, 7168, 8, "deepseek-v3", "bf16")
SHAPES = [replace(SHAPE, m=m) for m in (1, 30, 90, 700, 3000)]


def measured(shape: RouterShape, costs, factor: float = 1.0):
    """Return the times that a GPU with these costs would take."""
    times = program.RouterTimes(program.label_of(shape), NUM_SMS, (), shape)
    found = [(tiling, factor * times.predicted_us(tiling, costs)) for tiling in program.tilings_of(shape, 132, 9, 0)]
    return replace(times, times_us=tuple(found))


def test_the_shipped_constants_choose_well_among_what_was_measured():
    data = program.read([TIMES])
    assert len(data) >= 100
    assert mean_regret(data, COSTS) < 1.02
    assert max(regret(each, COSTS) for each in data) < 1.25


def test_two_thirds_of_the_tilings_are_the_models():
    found = program.tilings_of(SHAPE, NUM_SMS, 9, 0)
    assert len(found) == len(set(found)) == 9
    spec = program._spec_of(SHAPE)
    cycles = [predicted_cycles(SHAPE.m, SHAPE.k, spec, tiling, NUM_SMS) for tiling in found]
    assert cycles[:6] == sorted(cycles[:6])
    assert max(cycles[:6]) <= min(cycles[6:]) and max(cycles) < program.WITHIN * cycles[0]
    assert found[0] == choose_tiling(SHAPE.m, SHAPE.k, spec, NUM_SMS)[0]
    assert found == program.tilings_of(SHAPE, NUM_SMS, 9, 0) != program.tilings_of(SHAPE, NUM_SMS, 9, 1)


def test_a_fit_finds_what_takes_longer():
    other = replace(COSTS, roles=600.0, meet=8000.0)
    data = [measured(shape, other) for shape in SHAPES]
    costs = fit(data, program.MODEL)
    assert mean_regret(data, costs) <= mean_regret(data, COSTS)
    assert costs.roles == pytest.approx(other.roles, rel=0.3)
    assert costs.meet == pytest.approx(other.meet, rel=0.2)


def test_times_as_such_count_beside_their_ratios():
    data = [measured(shape, COSTS, factor=1.5) for shape in SHAPES]
    assert fit(data, replace(program.MODEL, absolute=0.0)) == COSTS
    assert fit(data, program.MODEL) != COSTS


def test_the_data_file_keeps_everything(tmp_path):
    data = [measured(shape, COSTS) for shape in SHAPES]
    path = tmp_path / "times.jsonl"
    path.write_text("\n".join(program.to_line(each, "NVIDIA H200") for each in data) + "\n\n")
    again = program.read([path])
    assert [(each.label, each.shape, each.num_sms) for each in again] == [
        (each.label, each.shape, each.num_sms) for each in data
    ]
    for one, other in zip(data, again, strict=True):
        assert [tiling for tiling, _ in one.times_us] == [tiling for tiling, _ in other.times_us]
        assert [us for _, us in one.times_us] == pytest.approx([us for _, us in other.times_us], abs=1e-4)
    assert json.loads(path.read_text().splitlines()[0])["label"] == "1x256x7168 deepseek-v3 bf16"


def test_one_shape_is_enough_to_fit(tmp_path, capsys):
    path = tmp_path / "times.jsonl"
    path.write_text(program.to_line(measured(SHAPE, COSTS), "NVIDIA H200"))
    assert main(["router", "fit", str(path)]) == 0
    assert "held out  nan" in capsys.readouterr().out
