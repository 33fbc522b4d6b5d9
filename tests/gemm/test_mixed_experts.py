"""The mixed order of experts' tiles without a GPU; which configs have it."""

import random
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch

from envoi.epilogues import library
from envoi.epilogues.lower import lower
from envoi.ops.gemm.hopper.config import Config, Problem, why_not
from envoi.ops.gemm.hopper.mixed_experts import clamp_share, id_bits
from envoi.ops.moe.one_launch.config import FEW, SQUARE, WIDE
from tools.kernel_cases.gemm_hopper import Case, inputs, launch_with, planned
from tools.machine_code.compile import compile_launch


def test_both_kinds_have_all_their_tiles_whatever_the_share():
    draw, most = random.Random(0), 2**32 - 256
    cases = [*product((0, 1, 2, 300), (0, 1, 2, 300), (0, 1, 2**31, most))]
    cases += [(draw.randint(0, 300), draw.randint(0, 300), draw.randint(0, most)) for _ in range(60)]
    for num_many, num_few, share in cases:
        places = range(num_many + num_few + 1)
        before = [clamp_share.fn(place * share >> 32, place, num_many, num_few) for place in places]
        assert before[0] == 0 and before[-1] == num_many
        assert all(step in (0, 1) for step in (b - a for a, b in pairwise(before)))


def test_bits_of_an_experts_number():
    assert [id_bits(n) for n in (32, 64, 512)] == [5, 6, 9]


@pytest.mark.parametrize("tiling", [FEW, WIDE, SQUARE])
def test_one_launch_mixes_in_tiles_of_as_many_rows(tiling):
    first, second = tiling
    assert first.mixed_experts and second.mixed_experts
    assert first.block_m == second.block_m and first.num_stages == second.num_stages


def test_only_experts_are_mixed():
    code = lower(library.store.ir, torch.bfloat16, "gluon", False, False, frozenset())
    config = Config(64, 2, 128, 64, 4, mixed_experts=True)
    grouped, plain = Problem(4096, 512, 512, 2, num_groups=8), Problem(4096, 512, 512, 2)
    assert why_not(grouped, config, code) == ""
    assert "mixed_experts" in why_not(plain, config, code)
    assert "mixed_experts" in why_not(grouped, replace(config, num_consumers=1, swap_ab=True), code)
    assert config.label().endswith("mixed_experts")


@pytest.mark.compiles
def test_rows_of_no_expert_compile_beside_mixed_ones():
    call, config = planned(inputs(Case("mixed", "store", 4096, 512, 512, num_experts=8)))
    assert call.grouping.write_tail
    launch = launch_with(call, replace(config, mixed_experts=True))
    assert "wgmma" in compile_launch(launch, "sm_90").ptx
