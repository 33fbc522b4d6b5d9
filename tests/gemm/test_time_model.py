"""The shipped constants of the GEMM's model of time, held to the times that they were fitted to."""

from pathlib import Path

from envoi.ops.gemm.hopper.time_model import COSTS
from tools.time_models import gemm as program
from tools.time_models.fit import mean_regret, regret

TIMES = Path(__file__).resolve().parents[2] / "bench" / "gemm_times.jsonl"


def test_the_shipped_constants_choose_well_among_what_was_measured():
    data = program.read([TIMES])
    assert len(data) >= 100
    assert mean_regret(data, COSTS) < 1.02
    assert max(regret(measured, COSTS) for measured in data) < 1.2
