"""Sort, gather, quantise, combine: data movement bit for bit, and no writes after the last expert's rows."""

import random

import pytest
import torch

from envoi.epilogues.library import expert_l1, store
from envoi.ops.gemm.backend import run_kernels
from envoi.ops.gemm.grouping import EXPERTS_ROWS
from envoi.ops.gemm.reference import accumulate_groups
from envoi.ops.moe import permute as permute_kernels
from envoi.ops.moe import reference
from envoi.ops.moe.permute import gather_rows, map_ids, sort_slots
from envoi.runtime.devices import Target
from envoi.runtime.program import building
from envoi.types import QuantTensor
from tests.helpers.accuracy import assert_same_bits, relative_error
from tests.moe.steps import (
    SINGLE_ROWS,
    judge_combined,
    judge_gathered,
    judge_kept_in_bf16,
    judge_quantised,
    judge_sorted,
    of_sizes,
    random_ids,
)


@pytest.mark.parametrize("seed", range(20))
def test_rows_by_expert_then_by_slot(seed):
    draw = random.Random(seed)
    tokens, experts, k = draw.choice((1, draw.randint(2, 20))), draw.randint(1, 9), draw.randint(1, 6)
    judge_sorted(random_ids(tokens, experts, k, seed), experts)


def test_one_expert_of_many_takes_all():
    for ids in (torch.full((50, 6), 7, dtype=torch.int32), torch.full((50, 6), -1, dtype=torch.int32)):
        judge_sorted(ids, 9)


@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 1, 1), (37, 3, 3), (150, 16, 4), (20, 33, 8)])
def test_many_slots_are_counted_before_they_are_placed(tokens, experts, k, monkeypatch):
    monkeypatch.setattr(permute_kernels, "COUNT_SLOTS", 0)
    monkeypatch.setattr(permute_kernels, "CHUNK_SLOTS", 32)
    monkeypatch.setattr(permute_kernels, "COUNTS_AT_ONCE", 128)  # of chunks that are counted in turns
    judge_sorted(random_ids(tokens, experts, k, tokens), experts)
    judge_sorted(random_ids(tokens, experts, k, tokens).long() + 2**33 * (tokens % 2), experts)
    judge_sorted(torch.full((tokens, k), experts - 1, dtype=torch.int32), experts)
    judge_sorted(torch.full((tokens, k), -1, dtype=torch.int32), experts)


@pytest.mark.parametrize("most", [1, 1 << 20])
def test_a_chunk_that_one_expert_has_alone_is_counted(most, monkeypatch):
    monkeypatch.setattr(permute_kernels, "COUNT_SLOTS", 0)
    monkeypatch.setattr(permute_kernels, "MANY_SLOTS", most)
    judge_sorted(torch.full((2100, 4), 2, dtype=torch.int32), 4)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_by_a_map(dtype):
    expert_map = torch.tensor([3, -1, 0, -9, 2, 1], dtype=torch.int32)
    ids = torch.tensor([[0, 1, 2], [3, 4, 5], [-1, 6, 7]], dtype=dtype)
    if dtype == torch.int64:
        ids[2, 2] = 2**32 + 2  # no expert, though its lower half is one
    want = torch.tensor([[3, -1, 0], [-9, 2, 1], [-1, -1, -1]], dtype=dtype)
    assert_same_bits(map_ids(ids, expert_map), want)
    assert_same_bits(map_ids(ids.t(), expert_map), want.t())
    draw = torch.Generator().manual_seed(0)
    many = torch.randint(-2, 8, (1000, 3), generator=draw).to(dtype)
    assert_same_bits(map_ids(many, expert_map), reference.mapped(many, expert_map))


def test_ids_and_weights_are_read_as_they_are():
    ids = random_ids(9, 5, 3, 0)
    wide = torch.where(ids < 0, 2**32 + 1, ids.long())  # no expert, though its lower half is one
    row_map, want = sort_slots(wide, 5), sort_slots(ids, 5)
    assert_same_bits(row_map.offsets, want.offsets)
    assert_same_bits(row_map.slot_to_pos, want.slot_to_pos)
    tokens, weights = torch.randn(9, 64).bfloat16(), torch.rand(9, 3).bfloat16()
    rows = int(want.offsets[-1])
    got = [gather_rows(tokens, given, row_map, None)[1][:rows] for given in (weights, weights.float())]
    assert_same_bits(*got)


def test_ids_that_no_expert_has_are_masked():
    row_map = sort_slots(torch.tensor([[2, -7], [9, 0], [1 << 30, 1]], dtype=torch.int32), 2)
    assert row_map.offsets.tolist() == [0, 1, 2]
    assert row_map.slot_to_pos.tolist() == [[-1, -1], [-1, 0], [-1, 1]]


@pytest.mark.parametrize(("format", "hidden"), of_sizes(128, 384, 2880))
def test_gathered_rows_have_the_references_bits(format, hidden, monkeypatch):
    monkeypatch.setattr(permute_kernels, "MAX_COLUMNS", 1024 if hidden > 1024 else 128)
    tokens = torch.randn(7, hidden, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens *= torch.logspace(-4, 4, 7)[:, None].bfloat16()
    rows, used = judge_gathered(tokens, random_ids(7, 4, 3, 1), 4, format)
    untouched = rows.values if isinstance(rows, QuantTensor) else rows
    assert bool((untouched.view(torch.uint8)[used:] == 255).all())


@pytest.mark.parametrize("hidden", [64, 2880])
def test_rows_kept_in_bf16_have_all_numbers_of_mxfp8(hidden):
    tokens = torch.randn(7, hidden, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens[:, : hidden // 2] *= torch.logspace(-36, 36, 7)[:, None].bfloat16()
    judge_kept_in_bf16(tokens, random_ids(7, 4, 3, 1), 4)


@pytest.mark.parametrize("scheme", SINGLE_ROWS)
def test_rows_are_quantised_as_far_as_experts_have_them(scheme):
    rows = torch.randn(9, 384, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert bool((judge_quantised(rows, [0, 2, 6], scheme) == 255).all())


@pytest.mark.parametrize(("width", "k"), [(8, 1), (200, 3), (1032, 8), (24, 32)])
@pytest.mark.parametrize("early", [False, True])
def test_combine_against_a_loop(width, k, early):
    judge_combined(5, width, k)
    judge_combined(5, width, k, few=True, early=early)


def test_combine_adds_in_the_order_of_slots():
    big = 2.0**24  # in float32, big + one == big
    rows = torch.tensor([big, -big, 1.0, big, 1.0, -big]).bfloat16()[:, None].expand(6, 192).contiguous()
    got = permute_kernels.combine_rows(rows, torch.arange(6, dtype=torch.int32).view(2, 3), few=True, early=True)
    assert got[:, 0].tolist() == [1.0, 0.0]


def test_combine_keeps_no_rows_in_the_cache_where_they_are_many(monkeypatch):
    rows, slot_to_pos = torch.zeros(6, 8).bfloat16(), torch.zeros(2, 3, dtype=torch.int32)
    with building(Target("cpu")) as builder:
        permute_kernels.combine_rows(rows, slot_to_pos)
        monkeypatch.setattr(permute_kernels, "KEPT_BYTES", 6 * 8 * 2 - 1)
        permute_kernels.combine_rows(rows, slot_to_pos)
    assert [launched.arguments[-3] for launched in builder.launches] == ["evict_first", ""]
    judge_combined(2, 8, 3)


@pytest.mark.parametrize("used", [0, 1, 6])
@pytest.mark.parametrize(("ep", "N"), [(store, 24), (expert_l1("swiglu", None, False, "fp8_row"), 288)])
def test_a_grouped_gemm_leaves_rows_of_no_expert_alone(ep, N, used):
    a, b = torch.randn(9, 64).bfloat16(), torch.randn(2, N, 64).bfloat16()
    a[used:] = torch.nan
    offsets = torch.tensor([0, used // 2, used], dtype=torch.int32)
    operands = {"weight": torch.rand(9)} if ep is not store else {}
    got, *sf = run_kernels(a, b, offsets, ep.ir, torch.bfloat16, operands, EXPERTS_ROWS)
    assert bool((got.view(torch.uint8)[used:] == 255).all())
    assert bool(got.float()[:used].isfinite().all())
    if ep is store:
        assert relative_error(got[:used], accumulate_groups(a, b, offsets.tolist())[:used]) < 0.004
    else:
        assert bool(sf[0][used:].isnan().all()) and bool(sf[0][:used].isfinite().all())
