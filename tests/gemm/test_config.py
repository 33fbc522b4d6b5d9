"""Candidate configs of a GEMM on Hopper, and the choice among them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from envoi.epilogues import Col, epilogue, library, row_sum
from envoi.epilogues.lower import lower
from envoi.ops.gemm.hopper import config as configs
from envoi.ops.gemm.hopper.candidates import candidates, default_config
from envoi.ops.gemm.hopper.config import Config, Problem, shared_bytes, why_not
from envoi.ops.gemm.hopper.time_model import predicted_cycles
from envoi.runtime.devices import SHARED_BYTES

NUM_SMS = 132
STORE = lower(library.store.ir, torch.bfloat16, "gluon", False, True, frozenset())
SCALED = Problem(64 * 256, 4096, 7168, 1, num_groups=64, scaled=True)
SQUARE, WIDE = Config(64, 2, 128, 128, 6, num_store_buffers=2), Config(64, 2, 128, 128, 5, wide_tail_tiles=True)


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (SCALED, ""),
        (replace(SCALED, N=4096 + 128), "wide_tail_tiles: expected a grouped GEMM with N a multiple of 256, got 4224"),
        (replace(SCALED, num_groups=0), "wide_tail_tiles: expected a grouped GEMM with N a multiple of 256, got 4096"),
    ],
)
def test_problems_that_wide_tiles_refuse(problem, words):
    assert why_not(problem, WIDE, STORE) == words


SHORT = Config(64, 2, 128, 256, 4, pingpong=True, short_boxes=True)


@pytest.mark.parametrize(
    ("problem", "changes", "words"),
    [
        (SCALED, {}, ""),
        (replace(SCALED, num_groups=0), {}, "expected a grouped GEMM with one consumer a tile"),
        (SCALED, {"pingpong": False}, "expected a grouped GEMM with one consumer a tile"),
        (
            SCALED,
            {"swap_ab": True, "num_stages": 2},
            "expected a grouped GEMM with one consumer a tile, without swap_ab",
        ),
        (replace(SCALED, scaled=False), {"block_k": 64}, "expected rows of a multiple of 128 bytes in a stage, got 64"),
    ],
)
def test_problems_that_short_boxes_refuse(problem, changes, words):
    config = replace(SHORT, **changes)
    plain = lower(library.store.ir, torch.bfloat16, "gluon", False, False, frozenset())
    found = why_not(problem, config, plain if config.swap_ab else STORE)
    assert found.startswith(f"short_boxes: {words}" if words else "") and bool(found) == bool(words)


def units_of(stage: int, wide: bool, config: Config) -> set[int]:
    """Return the units that a tile uses of the buffer shared by x, in boxes of one unit, and y, in boxes of two."""
    from envoi.ops.gemm.hopper.pipeline import x_box_index
    from envoi.ops.gemm.hopper.y_boxes import y_box_index

    used = [x_box_index.fn(stage, part, config) for part in ((0,) if wide else (0, 1))]
    for side in (0, 1) if wide else (0,):
        first = 2 * y_box_index.fn(stage, side, config)
        used += [first, first + 1]
    assert len(set(used)) == len(used)
    return set(used)


@pytest.mark.parametrize("num_stages", [2, 3, 4, 5])
def test_stages_of_wide_and_square_tiles_are_apart(num_stages):
    config = replace(WIDE, num_stages=num_stages)
    stages = [units_of(stage, False, config) | units_of(stage, True, config) for stage in range(num_stages)]
    assert sum(map(len, stages)) == len(set().union(*stages))
    assert set().union(*stages) <= set(range(config.num_x_boxes))


@pytest.mark.parametrize("rows", [1, 16, 64, 96, 128, 192, 256, 384, 512, 1024, 4096])
@pytest.mark.parametrize("element_bytes", [1, 2])
def test_candidates_fit(rows, element_bytes):
    for groups in (0, 8, 64):
        for scaled in {False, element_bytes == 1}:
            problem = Problem(rows * max(1, groups), 4096, 7168, element_bytes, groups, scaled)
            found = candidates(problem, STORE)
            assert found
            for config in found:
                assert not why_not(problem, config, STORE)
                assert shared_bytes(problem, config, STORE) <= SHARED_BYTES
                assert not config.wide_tail_tiles or (scaled and groups and rows > 64 and config.num_stages == 5)


@pytest.mark.parametrize(
    ("rows", "wide"), [(64, False), (96, False), (128, True), (192, True), (256, True), (2048, False)]
)
def test_wide_tiles_where_they_save_more_than_they_cost(rows, wide):
    """Test the choice by measurements: 96 rows per expert lose 3 %, 192 and 256 gain 5 to 9 %; more rows save less."""
    chosen = default_config(replace(SCALED, M=64 * rows), STORE, NUM_SMS)
    assert chosen is not None
    assert chosen.wide_tail_tiles == wide


# Times in us on an H200 of both GEMMs of experts by tiles of 64 x 256 and of 128 x 128, all in turns, routed at random:
# notes/2026-11-around-gemms.md, "Tiles of 64 tokens in bf16". Tokens of all experts, features and K of the first.
@pytest.mark.parametrize(
    ("M", "N", "K", "experts", "low", "square"),
    [(16384, 1536, 2048, 128, 355.3, 384.2), (32768, 1536, 2048, 128, 519.1, 578.1),
     (65536, 1536, 2048, 128, 907.1, 991.5), (262144, 1536, 2048, 128, 3320.8, 3506.9),
     (12288, 4096, 4096, 32, 925.4, 974.1), (49152, 4096, 4096, 32, 3215.4, 3348.6),
     (24576, 2816, 2048, 64, 640.6, 660.2)],
)  # fmt: skip
def test_experts_rows_in_bf16_have_tiles_of_64_where_they_were_faster(M, N, K, experts, low, square):
    for n, k in ((N, K), (K, N // 2)):
        chosen = default_config(Problem(M, n, k, 2, experts), STORE, NUM_SMS)
        assert chosen is not None
        assert (chosen.block_m == 64) == (low < square)
        plain = default_config(Problem(M, n, k, 2), STORE, NUM_SMS)
        assert plain is not None and plain.block_m > 64


# The first GEMM's, of weights in halves of 2880 features, which tiles of 256 don't divide.
@pytest.mark.parametrize(("M", "low", "square"), [(4096, 292.2, 325.5), (16384, 844.3, 821.9)])
def test_features_outside_of_a_half_count(M, low, square):
    chosen = default_config(Problem(M, 5760, 2880, 2, 32, in_halves=True), STORE, NUM_SMS)
    assert chosen is not None
    assert (chosen.block_m == 64) == (low < square)


# The last tokens' tile

TWO_HIGH, TALL, SWAPPED, THREE_HIGH = (
    Config(64, 2, 128, 64, 6, tiles_overlap=True),
    Config(128, 2, 128, 64, 6, pingpong=True, tiles_overlap=True),
    Config(64, 1, 32, 64, 12, swap_ab=True, tiles_overlap=True),
    Config(64, 3, 128, 64, 5, tiles_overlap=True),
)


def first_tokens(M: int, config: Config, num_whole_tiles: int) -> list[int]:
    """Return the first token of each row of tiles, as the kernel's roles compute it."""
    from envoi.ops.gemm.hopper.tile_scheduler import TileScheduler

    scheduler = SimpleNamespace(problem=SimpleNamespace(M=M, num_whole_tiles=num_whole_tiles, cfg=config))
    block, box = (config.block_y,) * 2 if config.swap_ab else (config.block_x, config.rows_per_consumer)
    move = TileScheduler.ending_with_tokens.fn
    return [move(scheduler, row, block, box) for row in range(0, M, block)]


@pytest.mark.parametrize("config", [TWO_HIGH, TALL, SWAPPED, THREE_HIGH], ids=Config.label)
@pytest.mark.parametrize("M", [1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 257, 1199])
def test_every_token_is_in_a_tile_and_no_box_has_rows_after_the_last_one(M, config):
    firsts = first_tokens(M, config, 0)
    box = config.block_y if config.swap_ab else config.rows_per_consumer
    boxes = [row + start for row in firsts for start in range(0, config.block_m, box)]
    assert set(range(M)) <= {row + i for row in boxes for i in range(box)}
    assert min(firsts) == 0
    with_tokens = [row for row in boxes if row < M]
    assert len(set(with_tokens)) == len(with_tokens), "boxes of two tiles share a counter of row reductions"
    if len(firsts) > 1:
        assert max(with_tokens) + box <= M or M % box == 0


@pytest.mark.parametrize("config", [TWO_HIGH, TALL, SWAPPED, THREE_HIGH], ids=Config.label)
def test_a_tile_that_is_split_shares_no_token_with_one_that_is_not(config):
    split = replace(config, split_k=2)
    assert first_tokens(193, split, 132) == list(range(0, 193, config.block_m))
    assert first_tokens(193, split, 0) == first_tokens(193, config, 132)


def test_tiles_overlap_only_in_plain_gemms_without_sums_of_rows():
    sums = lower(epilogue(lambda acc: (acc, row_sum(acc))).ir, torch.bfloat16, "gluon", False, True, frozenset())
    maxima = lower(library.absmax.ir, torch.bfloat16, "gluon", False, True, frozenset())
    assert maxima.maxima_together and not sums.maxima_together and not STORE.maxima_together
    plain = Problem(200, 4096, 4096, 2)
    for config in candidates(plain, STORE):
        is_full = configs.accumulator_registers(config) == configs.MAX_ACCUMULATORS
        assert config.tiles_overlap == (config.split_k == 1 or not is_full)
    assert not any(config.tiles_overlap for config in candidates(plain, sums))
    assert any(config.tiles_overlap for config in candidates(plain, maxima))
    grouped = replace(plain, num_groups=8)
    assert not any(config.tiles_overlap for config in candidates(grouped, STORE))
    assert why_not(grouped, TWO_HIGH, STORE) == "tiles_overlap: expected False in a grouped GEMM, got True"


# Three consumers


def test_three_consumers_share_plain_tiles_only():
    plain = Problem(1000, 2880, 4096, 2)
    assert why_not(plain, THREE_HIGH, STORE) == ""
    assert (THREE_HIGH.block_m, THREE_HIGH.block_n) == (192, 128)
    for other in (replace(plain, num_groups=8), replace(plain, element_bytes=1, scaled=True)):
        assert why_not(other, replace(THREE_HIGH, tiles_overlap=False), STORE).startswith("num_consumers: expected at")
    for config in (replace(THREE_HIGH, block_y=256), replace(THREE_HIGH, rows_per_consumer=128, num_warps=8)):
        assert why_not(plain, config, STORE).startswith("consumers: expected at most 64 accumulators a thread")
    assert why_not(plain, replace(THREE_HIGH, pingpong=True), STORE) == "pingpong: expected 2 consumers, got 3"


# Two accumulators a consumer

TWO_WIDTHS = [
    Config(64, 2, 96, 64, 7, epilogue_columns=32), Config(64, 2, 160, 64, 6, epilogue_columns=32),
    Config(64, 2, 192, 64, 5), Config(64, 2, 192, 64, 6, pingpong=True), Config(128, 2, 96, 64, 4, epilogue_columns=32),
]  # fmt: skip


@pytest.mark.parametrize("config", TWO_WIDTHS, ids=Config.label)
def test_a_tile_of_two_widths_is_a_power_of_two_and_another(config):
    plain = Problem(862, 2880, 4096, 2)
    assert why_not(plain, config, STORE) == ""
    assert config.block_n == config.block_y == config.main_y + config.rest_y
    assert config.rest_y in (32, 64) and config.main_y in (64, 128)
    assert config.rest_y % config.epilogue_columns == config.main_y % config.epilogue_columns == 0
    assert (SQUARE.main_y, SQUARE.rest_y) == (SQUARE.block_y, 0)


@pytest.mark.parametrize(
    ("change", "why"),
    [({"split_k": 2}, "block_y: expected a power of two unless"),
     ({"swap_ab": True, "block_y": 128}, "swap_ab: expected an epilogue lowered to plain loads and stores"),
     ({"epilogue_columns": 64}, "epilogue_columns: expected a multiple of 1 that divides 160"),
     ({"block_y": 192, "epilogue_columns": 96}, "epilogue_columns: expected one that divides 64"),
     ({"num_store_buffers": 2, "num_stages": 3}, "num_store_buffers: expected one that divides 5 chunks"),
     ({"block_y": 216}, "block_y: expected a power of two from 8 to 256, or one of (96, 160, 192, 80, 112, "),
     ({"rows_per_consumer": 128}, "block_y: expected at most 128 accumulators a thread")],
)  # fmt: skip
def test_two_widths_are_refused_where_the_kernel_has_one(change, why):
    assert why_not(Problem(862, 2880, 4096, 2), replace(TWO_WIDTHS[1], **change), STORE).startswith(why)


def fastest(problem: Problem, among) -> Config:
    """Return the config that the model chooses of some of the candidates for a store."""
    found = [config for config in candidates(problem, STORE) if among(config)]
    return min(found, key=lambda config: predicted_cycles(problem, config, NUM_SMS))


# Times in us on an H200 of the best config of one width with three consumers and of the best without:
# notes/2026-11-gemm-sm90.md, "Tiles of 192".
@pytest.mark.parametrize(
    ("M", "N", "K", "three", "others"),
    [(274, 7168, 5120, 40.2, 55.4), (2460, 6144, 16384, 745.9, 723.5), (2238, 2048, 2048, 33.4, 32.4)],
)  # fmt: skip
def test_three_consumers_are_chosen_where_they_were_faster(M, N, K, three, others):
    chosen = fastest(Problem(M, N, K, 2), lambda config: not (config.rest_y or config.narrowed))
    assert (chosen.num_consumers == 3) == (three < others)


# Times in us on an H200 of the best config of two widths and of the best of one:
# notes/2026-11-gemm-sm90.md, "Tiles of 96, 160 and 192 features".
@pytest.mark.parametrize(
    ("M", "N", "K", "two", "one"),
    [(412, 2880, 4096, 18.30, 22.92), (293, 4096, 14336, 62.66, 73.56), (2238, 2048, 2048, 29.57, 34.54),
     (369, 6144, 4096, 32.88, 36.14), (536, 5120, 2048, 23.47, 19.84), (5901, 5120, 2048, 193.27, 187.79)],
)  # fmt: skip
def test_two_widths_are_chosen_where_they_were_faster(M, N, K, two, one):
    chosen = fastest(Problem(M, N, K, 2), lambda config: not config.narrowed)
    assert bool(chosen.rest_y) == (two < one)


def test_column_operands_are_loaded_ahead_where_that_costs_no_stage():
    problem, turns = Problem(2000, 4096, 4096, 2), Config(128, 2, 128, 64, 6, pingpong=True)
    one, none = (lowered(getattr(library, name).ir, True) for name in ("scale_bias_relu", "store"))
    assert (one.columns_ahead, none.columns_ahead) == (1, 0)
    chosen = configs.fitted(problem, turns, one)
    assert chosen.columns_ahead and chosen.num_stages == turns.num_stages
    bytes_ahead = shared_bytes(problem, chosen, one) - shared_bytes(problem, replace(chosen, columns_ahead=False), one)
    assert bytes_ahead == 2 * 128 * 4  # a float32 for each column of both consumers
    assert not configs.fitted(problem, turns, none).columns_ahead
    two = lowered(with_two_columns.ir, True)
    crowded = configs.fitted(problem, turns, two)
    assert two.columns_ahead == 2 and not crowded.columns_ahead and crowded.num_stages == turns.num_stages
    assert configs.fitted(problem, replace(turns, epilogue_columns=32), two).columns_ahead


def lowered(ir, tma: bool):
    return lower(ir, torch.bfloat16, "gluon", False, tma, frozenset())


@epilogue
def with_two_columns(acc, scale: Col, bias: Col):
    return acc * scale + bias
