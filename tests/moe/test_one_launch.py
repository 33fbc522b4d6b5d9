"""Experts' L1 and L2 in one launch, without a GPU: which calls take it, in which tiles, and what refuses it."""

from dataclasses import replace

import pytest
import torch

from envoi.ops.gemm.grouping import Grouping
from envoi.ops.gemm.hopper.config import SHORT_BYTES, SHORT_ROWS, Config
from envoi.ops.moe import choose
from envoi.ops.moe.choose import why_not_one_launch
from envoi.ops.moe.one_launch import host
from envoi.ops.moe.one_launch.config import LANES, LEAST_SHIFT, NUM_COUNTERS, OTHER_COUNTERS, UNIT_COUNTERS, WIDE
from envoi.ops.moe.warm_up import LayerCall
from envoi.runtime.devices import Target, standing_for
from envoi.runtime.planned_kernels import launches_of
from envoi.runtime.program import without_memory
from envoi.types import ExpertWeights, QuantTensor
from tests.helpers.choices import force
from tests.moe.layers import make

HOPPER = Target("sm_90", 132)


def experts(hidden: int = 4096, intermediate: int = 2048, count: int = 32) -> ExpertWeights:
    def matrix(rows: int, columns: int) -> QuantTensor:
        values = without_memory((count, rows, columns), torch.float8_e4m3fn)
        return QuantTensor(values, without_memory((count, rows // 128, columns // 128), torch.float32), (128, 128))

    return ExpertWeights(matrix(2 * intermediate, hidden), matrix(hidden, intermediate), "fp8_block128")


def names(num_tokens: int, *sizes: int, num_topk: int = 6) -> list[str]:
    return [kernel.fn.__name__ for kernel, *_ in launches_of(LayerCall(experts(*sizes), num_topk), num_tokens, HOPPER)]


@pytest.fixture
def forced(monkeypatch):
    yield lambda wanted: force(monkeypatch, one_launch=wanted)


def test_few_rows_take_one_launch_that_is_not_cooperative():
    launched = launches_of(LayerCall(experts(), 6), 500, HOPPER)
    assert [kernel.fn.__name__ for kernel, *_ in launched] == [
        "map_kernel", "sort_kernel", "gather_kernel", "fused_kernel", "combine_kernel",
    ]  # fmt: skip
    _, grid, arguments, options = launched[3]
    assert grid == (132,)
    assert "launch_cooperative_grid" not in options
    assert any(isinstance(x, torch.Tensor) and x.shape == (NUM_COUNTERS,) for x in arguments)
    one, two = (x for x in arguments if isinstance(x, Config))
    assert (one.num_stages, one.block_m) == (two.num_stages, two.block_m)


@pytest.mark.parametrize("sizes", [(4096, 2048, 32), (2048, 768, 64), (7168, 2048, 16)])
def test_few_and_many_rows_of_an_expert_take_one_launch(sizes):
    most = choose.ONE_LAUNCH_ROWS * sizes[2] // 6
    for tokens in (most // 12, most // 5, most - 16):
        assert "fused_kernel" in names(tokens, *sizes)
    assert "fused_kernel" not in names(most + 16, *sizes)
    many = choose.ONE_LAUNCH_ROWS_AGAIN * sizes[2] // 6
    assert "fused_kernel" not in names(many - 16, *sizes)
    for tokens in (many + 16, 3 * many):
        assert "fused_kernel" in names(tokens, *sizes)


@pytest.mark.parametrize(("tokens", "short"), [(64, 2), (1000, 0)])
def test_few_rows_are_loaded_in_short_boxes(tokens, short):
    """By descriptors of their own, of L1's rows and of L2's."""
    _, _, arguments, _ = launches_of(LayerCall(experts(), 6), tokens, HOPPER)[3]
    boxes = [tuple(x.block_shape) for x in arguments if hasattr(x, "block_shape")]
    assert boxes.count((SHORT_ROWS, SHORT_BYTES)) == short
    assert [x.short_boxes for x in arguments if isinstance(x, Config)] == [short > 0] * 2


def test_an_expert_too_small_for_its_tiles_takes_two():
    assert names(64, 4096, 2048, 1, num_topk=1).count("gemm_kernel") == 2


def test_more_rows_than_a_search_can_tell_apart_take_two():
    sizes = (1 << 20, 256), (1 << 26, 1024), (1 << 27, 1024), (1 << 25, 4096)
    assert [choose.fits_search(*size) for size in sizes] == [True, True, False, False]


def test_what_it_does_not_run():
    with standing_for(HOPPER):
        assert why_not_one_launch(experts(), 64) == ""
        assert why_not_one_launch(experts(), 64, Grouping()) == "rows of no expert are written"
        assert why_not_one_launch(experts(), 1 << 32) == "more rows than a search can tell apart"
        ungated = replace(experts(), activation="relu2")
        assert why_not_one_launch(ungated, 64).startswith("experts whose L1 has no groups")
    assert why_not_one_launch(make().pack("fp8_block128"), 64) == "experts on cpu, which is no Hopper GPU"
    assert why_not_one_launch(make().pack("bf16"), 64) == "experts in bf16, not fp8_block128"


@pytest.mark.parametrize("hidden", [128, 384, 2816, 7168])
@pytest.mark.parametrize("intermediate", [128, 768, 2048])
@pytest.mark.parametrize("tokens", [200, 3000, 40000])
def test_every_width_has_a_tiling(forced, hidden, intermediate, tokens):
    forced(True)
    assert "fused_kernel" in names(tokens, hidden, intermediate, 8)


def test_there_is_a_counter_for_every_unit_of_l1():
    for rows in (0, 1, 64, 65, 10_000, 1 << 20):
        for num_experts in (1, 3, 64, 512):
            # The most units that so many rows can be: one row of every other expert, all others of one.
            tiles = min(rows, num_experts - 1) + -(-max(0, rows - num_experts + 1) // 64)
            shift = host.unit_shift(rows, 4096, num_experts, WIDE[0])
            assert tiles * 4096 // 512 <= UNIT_COUNTERS << shift
            assert shift == LEAST_SHIFT or tiles * 4096 // 512 > UNIT_COUNTERS << shift - 2, "more than it needs"
    assert NUM_COUNTERS == OTHER_COUNTERS + UNIT_COUNTERS + LANES


@pytest.mark.parametrize("hidden", [128, 384, 1152, 7168])
@pytest.mark.parametrize("intermediate", [128, 768, 2048])
@pytest.mark.parametrize("rows", [1, 64, 65, 300])
@pytest.mark.parametrize("sent", [False, True])
def test_both_gemms_have_the_same_stages(hidden, intermediate, rows, sent):
    with standing_for(HOPPER):
        packed = experts(hidden, intermediate, 4)
        assert why_not_one_launch(packed, 8192) == ""
        given = (
            without_memory((8192, hidden), torch.float8_e4m3fn),
            without_memory((8192, hidden // 128), torch.float32),
        )
        to = without_memory((8192,), torch.int64) if sent else None
        grouping = Grouping(write_tail=False, expected=4 * rows, to=to)
        weights, offsets = without_memory((8192,), torch.float32), without_memory((5,), torch.int32)
        found = host.plan(QuantTensor(*given, (1, 128)), weights, offsets, packed, grouping, 132)
    one, two = found.first_config, found.second_config
    assert rows > 64 or one.num_consumers == 1
    assert one.paired_tiles and not two.paired_tiles
    assert (one.num_stages, one.block_k, one.block_m) == (two.num_stages, two.block_k, two.block_m)
    assert one.consumers_per_tile == two.consumers_per_tile
    assert one.wide_tail_tiles == two.wide_tail_tiles
