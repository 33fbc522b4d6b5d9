"""Pool, waves and shared memory: the worked examples, and properties for all sizes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envoi.plan.capacity import experts_per_wave, pool_capacity
from envoi.plan.layer import MoeLayer
from envoi.plan.machines import MACHINES
from envoi.plan.shared import Roles, roles_of, shared_memory

BLOCK_MS = (8, 16, 32, 64, 96, 128, 192)


def test_pool_of_the_worked_example():
    assert math.lcm(*BLOCK_MS) == 384
    assert 8 * 256 * 8 + 32 * 191 == 22496
    assert pool_capacity(8, 256, 8, 32, BLOCK_MS) == 22656


@given(
    st.sampled_from((1, 2, 4, 8)), st.integers(1, 300), st.integers(1, 32), st.integers(1, 64),
    st.lists(st.sampled_from(BLOCK_MS), min_size=1, max_size=7),
)  # fmt: skip
def test_the_pool_holds_the_worst_routing(num_ranks, max_tokens, num_topk, num_local_experts, block_ms):
    pool = pool_capacity(num_ranks, max_tokens, num_topk, num_local_experts, block_ms)
    chosen = min(num_topk, num_local_experts)
    rows = [num_ranks * max_tokens * chosen - (num_local_experts - 1), *[1] * (num_local_experts - 1)]
    for block_m in block_ms:
        assert pool % block_m == 0
        if rows[0] > 0:  # one expert has all but one row of each of the others: the most padding
            assert sum(-(-count // block_m) * block_m for count in rows) <= pool


def test_a_token_comes_once_for_each_expert_of_a_rank():
    assert pool_capacity(8, 100, 8, 2, (8,)) == 8 * 100 * 2 + 16  # 14 rows of padding, in whole tiles


@pytest.mark.parametrize(("num_local_experts", "expected"), [(32, 8), (16, 8), (5, 5), (4, 4), (7, 7), (30, 5)])
def test_experts_a_wave_of_the_worked_example(num_local_experts, expected):
    # 256 rows an expert: 64 tiles of L1, 2 * 148 / 64 = 4.6 -> 5, then up to a divisor.
    assert experts_per_wave(1024 * 8 / 32, 2048, num_local_experts, 128, 128, 148) == expected


def test_with_less_than_a_row_an_expert_there_is_one_wave():
    assert experts_per_wave(0.99, 2048, 32, 128, 128, 148) == 32
    assert experts_per_wave(1.0, 2048, 32, 128, 128, 148) == 16  # 32 tiles an expert: 9.25 -> 10 -> 16


def test_stages_of_the_worked_example():
    layer = MoeLayer(7168, 2048, 256, 8, 1024, 8, "mxfp8")
    roles = Roles(128, 128, 128, 32, 4, 8, cluster=2, num_accumulators=2, pulls_through_shared=True)
    assert roles_of(MACHINES["sm_100"], "mxfp8", 128, 128, 128) == roles
    found = shared_memory(layer, roles, 232448)
    assert found.fixed == {
        "rows per expert": 1024, "pulled rows": 28672, "output tiles": 16384, "largest values": 1024, "barriers": 192,
        "tensor memory address": 4,
    }  # fmt: skip
    assert found.per_stage == {
        "tokens": 8192, "weights": 16384, "tokens' factors": 512, "weights' factors": 512, "barriers": 16,
    }  # fmt: skip
    assert (found.fixed_bytes, found.stage_bytes, found.num_stages) == (47300, 25616, 7)
    assert shared_memory(layer, roles, 40000).num_stages == 0


def test_four_bits_take_a_byte_on_blackwell_and_half_of_one_on_hopper():
    layer = MoeLayer(4096, 2048, 256, 6, 64, 8, "mxfp4_mxfp8")
    on = {arch: shared_memory(layer, roles_of(m, "mxfp4_mxfp8", 64, 128, 256), 232448) for arch, m in MACHINES.items()}
    assert on["sm_100"].per_stage["weights"] == 128 * 256
    assert on["sm_90"].per_stage["weights"] == 128 * 256 // 2
    assert on["sm_90"].per_stage["tokens"] == 64 * 256 * 2


def test_weights_are_as_wide_as_bf16_tokens_on_blackwell():
    layer = MoeLayer(4096, 2048, 256, 6, 64, 8, "mxfp4")
    found = shared_memory(layer, roles_of(MACHINES["sm_100"], "mxfp4", 64, 128, 64), 232448)
    assert found.per_stage["weights"] == 128 * 64 * 2
