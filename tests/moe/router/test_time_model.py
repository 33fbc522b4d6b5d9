"""The router's model of time, and `tools/time_models` on measured times of its tilings."""

from dataclasses import replace
from pathlib import Path

from bench.shapes import RouterShape
from envoi.ops.moe.router.choose_tiling import COSTS
from tools.kernel_cases import NUM_SMS
from tools.time_models import router as program
from tools.time_models.fit import mean_regret, regret

TIMES = Path(__file__).resolve().parents[3] / "bench" / "router_times.jsonl"


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
