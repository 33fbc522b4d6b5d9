"""Plans: the bound of a step, sums, refusals; and every format, machine and number of GPUs."""

import itertools
import math

import pytest

from envoi.estimates import MoeLayer, estimate
from envoi.estimates.machines import H200, MACHINES, machine_of
from envoi.quant.formats import FORMATS

BLOCK_MS = {"sm_90": (8, 16, 32, 64, 128), "sm_100": (128,)}  # that the kernels have


def layer(num_tokens: int = 2048, num_ranks: int = 8, format: str = "fp8_block128", **sizes: int) -> MoeLayer:
    wanted = {"hidden": 4096, "intermediate": 2048, "num_experts": 256, "num_topk": 6} | sizes
    return MoeLayer(**wanted, num_tokens=num_tokens, num_ranks=num_ranks, format=format)


@pytest.mark.parametrize(("format", "arch"), list(itertools.product(FORMATS, MACHINES)))
def test_every_format_machine_and_number_of_gpus_has_a_plan(format, arch):
    for num_ranks, num_tokens in itertools.product((1, 2, 4, 8), (1, 64, 4096)):
        plan = estimate(layer(num_tokens, num_ranks, format), arch)
        assert [step.name for step in plan.steps] == ["router", "dispatch", "L1", "L2", "combine"]
        for blocks in (plan.l1, plan.l2):
            assert blocks.block_m in (*BLOCK_MS[arch], *machine_of(arch).w4a16_tflops)
            assert blocks.num_stages >= 2
        assert plan.pool_rows == num_ranks * num_tokens * 6
        for step in plan.steps:
            parts = [*step.parts_us.values(), step.fixed_us]
            assert max(parts) <= step.time_us <= sum(parts) * (1 + 1e-9)
            sends = "combine" if plan.presum else "L2"
            assert (step.nvlink_us == 0) == (num_ranks == 1 or step.name not in ("dispatch", sends))


def test_work_and_traffic_by_hand():
    steps = {step.name: step for step in estimate(layer()).steps}
    rows = 2048 * 6
    assert steps["L1"].flops + steps["L2"].flops == 6 * rows * 4096 * 2048  # 6 h d per row
    assert steps["L2"].nvlink_bytes == rows * 7 / 8 * 4096 * 2
    # A token has none of its 6 distinct experts among a rank's 32 of 256 with this probability; else it is pulled once.
    missed = math.comb(224, 6) / math.comb(256, 6)
    token = 4096 + 4096 / 128 * 4 + 8
    assert steps["dispatch"].nvlink_bytes == pytest.approx(7 * 2048 * (1 - missed) * token)
    assert steps["router"].flops == 2 * 2048 * 256 * 4096
    assert steps["L2"].nvlink_us == pytest.approx(steps["L2"].nvlink_bytes / H200.push_gb_per_s / 1e3)


def test_rows_that_meet_are_sent_once():
    sizes = {"hidden": 2048, "intermediate": 768, "num_experts": 128, "num_topk": 8, "num_ranks": 4}
    plan, off = estimate(layer(**sizes)), estimate(layer(64, **sizes))
    assert plan.presum and not off.presum
    _router, dispatch, _l1, l2, combine = plan.steps
    assert l2.nvlink_bytes == 0 < off.steps[3].nvlink_bytes
    token = 2048 + 2048 / 128 * 4 + 8
    assert combine.nvlink_bytes / (2048 * 2) == pytest.approx(dispatch.nvlink_bytes / token)
    pool = plan.pool_rows * (2048 + 16 * 4 + 768 + 6 * 4)
    assert plan.buffer_bytes == pool + 2048 * 4 * 2048 * 2  # a row from each of 4 ranks, not one for each of 8 slots


def test_where_l1_cannot_quantise_another_kernel_does():
    def l1(format):
        return estimate(layer(2048, 1, format, num_experts=32)).steps[2]

    row, weights = 4096 + 32 * 4, 32 * 2 * (4096 * 2048 + 32 * 16 * 4)
    stored, quantised = 2048 * 2, 2048 + 16 * 4
    assert l1("fp8_block128").hbm_bytes == pytest.approx(weights + 12288 * (row + 2 * stored + quantised))
    assert l1("fp8_block128").fixed_us == 2 * l1("bf16").fixed_us == 2 * l1("mxfp8").fixed_us


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": 4100}, "hidden: expected a multiple of 128 for format 'fp8_block128', got 4100"),
        ({"intermediate": 0}, "intermediate: expected an int from 1 to 1048576, got 0"),
        ({"num_experts": 100}, "num_experts: expected a multiple of 8 GPUs, got 100"),
        ({"num_topk": 33}, "num_topk: expected an int from 1 to 32"),
        ({"num_experts": 8, "num_topk": 9}, "num_topk: .* 1 to 8 .a token's experts are distinct., got 9"),
        ({"num_tokens": 0}, "num_tokens: expected an int from 1 to 2147483647, got 0"),
        ({"num_ranks": 3}, "num_ranks: expected 1, 2, 4 or 8 GPUs of one NVLink domain, got 3"),
        ({"num_ranks": 16}, "num_ranks: expected 1, 2, 4 or 8"),
        ({"format": "int3"}, "format: expected one of 'bf16'.*got 'int3'"),
        ({"hidden": 65536, "intermediate": 65536, "num_ranks": 1}, "GB of buffers a GPU don't fit H200's 141 GB"),
        ({"num_tokens": 10**6}, "more GPUs, or fewer max_tokens"),
    ],
)  # fmt: skip
def test_impossible_layers_are_refused_in_words(change, words):
    with pytest.raises(ValueError, match=words):
        estimate(layer(**change))


def test_impossible_calls_are_refused_in_words():
    with pytest.raises(ValueError, match="arch: expected one of 'sm_90', 'sm_100', got 'sm_80'"):
        estimate(layer(), "sm_80")
    with pytest.raises(ValueError, match="mxfp4_mxfp8 on sm_100, 4096 x 2848: .* K in 64s"):
        estimate(layer(hidden=2848, format="mxfp4_mxfp8"), "sm_100")
    with pytest.raises(ValueError, match="max_tokens: expected an int from 2048 to 2147483647, got 64"):
        estimate(layer(), max_tokens=64)
