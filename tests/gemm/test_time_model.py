"""`tools/time_models` on synthetic times of GEMMs: constants that choose better, and none changed for nothing."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.shapes import GemmShape, GroupedShape
from envoi.epilogues.library import expert_l2
from envoi.epilogues.lower import lower
from envoi.ops.gemm.hopper import tune
from envoi.ops.gemm.hopper.candidates import candidates, default_config
from envoi.ops.gemm.hopper.config import Problem
from envoi.ops.gemm.hopper.time_model import COSTS, Costs, expected_tiles, predicted_cycles
from envoi.tune import problems
from tools.kernel_cases import NUM_SMS
from tools.time_models import gemm as program
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


def test_the_shipped_constants_choose_well_among_what_was_measured():
    data = program.read([TIMES])
    assert len(data) >= 100
    assert mean_regret(data, COSTS) < 1.02
    assert max(regret(measured, COSTS) for measured in data) < 1.2


@pytest.mark.parametrize("element_bytes", [1, 2])
@pytest.mark.parametrize("rows", [3, 6, 8, 12, 16, 20, 24, 32, 40])
@pytest.mark.parametrize(("N", "K", "experts"), [(5760, 2880, 32), (28672, 4096, 8), (4096, 14336, 8), (7168, 2048, 9)])
def test_few_rows_of_nearly_every_expert_fit_one_tile(N, K, experts, rows, element_bytes):
    problem = Problem(rows * experts, N, K, element_bytes, experts)
    code = lower(expert_l2(False).ir, torch.bfloat16, "gluon", False, False, frozenset())
    chosen = default_config(tune.rounded(problem), code, NUM_SMS)
    assert expected_tiles(rows, rows**0.5, 1.0, chosen.block_m) < 1.12, chosen.label()


# Measured: L1 of Mixtral 514 us in tiles of 64 tokens beside 128 features, 466 in tiles of 128 beside 256, 482 to 496
# in those of 128 in turns, L2 263, 239 and 244; 7168/2048/32/8 470, 468 and 480, 250, 244 and 252 us.
@pytest.mark.parametrize(
    ("N", "K", "experts"), [(28672, 4096, 8), (4096, 14336, 8), (4096, 7168, 32), (7168, 2048, 32)]
)
def test_experts_with_as_many_rows_as_a_tile_take_a_wider_one(N, K, experts):
    by_tma = lower(expert_l2(False).ir, torch.bfloat16, "gluon", False, True, frozenset())
    chosen = default_config(Problem(64 * experts, N, K, 2, experts), by_tma, NUM_SMS)
    assert chosen.block_m >= 128 and not chosen.pingpong, chosen.label()


# Measured, means of five routings, us: 64 x 256 in turns, shared 128 x 128, shared 128 x 256. 5760x2880 (23, 45 tiles
# along the features) 166.9, 150.3, 159.4; 7168x2048 (28, 56) 132.1, 132.9, 136.0; 2048x2048 (8, 16) 81.6, 82.1, 84.2.
@pytest.mark.parametrize(
    ("N", "K", "experts", "in_turns"), [(5760, 2880, 32, False), (7168, 2048, 32, True), (2048, 2048, 64, True)]
)
def test_an_odd_number_of_tiles_along_the_features_costs_where_experts_have_one_or_two(N, K, experts, in_turns):
    by_tma = lower(expert_l2(False).ir, torch.bfloat16, "gluon", False, True, frozenset())
    chosen = default_config(Problem(64 * experts, N, K, 1, experts), by_tma, NUM_SMS)
    assert chosen.pingpong == in_turns, chosen.label()


@pytest.mark.parametrize("num_tokens", [1, 4, 16, 64, 512])
def test_reading_weights_twice_never_saves_time(num_tokens):
    """Nor where experts have one token or two, and all of them one tile."""
    problem = Problem(num_tokens, 5760, 2880, 1, 8)
    often = replace(COSTS, again_odd=10 * COSTS.again_odd, again_by_expert=10 * COSTS.again_by_expert)
    for config in candidates(problem, lower(expert_l2(False).ir, torch.bfloat16, "gluon", False, False, frozenset())):
        once, more = (predicted_cycles(problem, config, NUM_SMS, costs) for costs in (COSTS, often))
        assert more >= once, config.label()


def test_rows_that_fill_their_tiles_by_the_mean_take_wider_ones_than_those_that_never_vary():
    assert expected_tiles(16, 4.0, 1.0, 16) > 1.4
    assert expected_tiles(16, 4.0, 1.0, 32) < 1.01
