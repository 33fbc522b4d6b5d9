"""Data movement, bit for bit, and the order of the one sum."""

import random

import pytest
import torch

from envoi.ops.moe.reference import combine, permute, take_rows
from envoi.quant import SCHEMES, quantize
from tests.helpers.accuracy import assert_same_bits


def naive_order(ids: torch.Tensor, num_experts: int) -> tuple[list[int], list[int]]:
    flat, order, offsets = ids.flatten().tolist(), [], [0]
    for expert in range(num_experts):
        order += [slot for slot, chosen in enumerate(flat) if chosen == expert]
        offsets.append(len(order))
    return order, offsets


@pytest.mark.parametrize("seed", range(30))
def test_rows_by_expert_then_by_slot(seed):
    draw, source = random.Random(seed), torch.Generator().manual_seed(seed)
    tokens, experts, k = draw.choice((0, 1, draw.randint(2, 20))), draw.randint(1, 9), draw.randint(1, 6)
    ids = torch.randint(-1, experts, (tokens, k), generator=source, dtype=torch.int32)
    x, weights = torch.randn(tokens, 8, generator=source), torch.rand(tokens, k, generator=source)
    order, offsets = naive_order(ids, experts)
    rows = permute(x, weights, ids, experts)
    assert rows.pos_to_slot.tolist() == order
    assert rows.offsets.tolist() == offsets
    assert_same_bits(rows.rows, x[[slot // k for slot in order]])
    assert_same_bits(rows.topk_weights, weights.flatten()[order])


@pytest.mark.parametrize("scheme", [name for name, scheme in SCHEMES.items() if scheme.group[0] == 1])
def test_quantised_rows_move_with_their_scales(scheme):
    q = quantize(torch.randn(9, 256), scheme)
    index = torch.tensor([8, 0, 0, 3])
    moved = take_rows(q, index)
    assert_same_bits(moved.values.view(torch.uint8), q.values.view(torch.uint8)[index])
    assert_same_bits(moved.sf.view(torch.uint8), q.sf.view(torch.uint8).view(9, -1)[index])


def test_scales_of_several_rows_are_refused():
    with pytest.raises(ValueError, match="rows: expected scale factors of single rows, got groups of 128 rows"):
        take_rows(quantize(torch.randn(128, 128), "fp8_128x128"), torch.tensor([0]))


def test_combine_sums_in_slot_order():
    big, one = 2.0**24, 1.0
    # In float32, big + one == big, so the order shows: (big - big) + one is 1, (big + one) - big is 0.
    rows = torch.tensor([[big], [-big], [one], [big], [one], [-big]])
    out = combine(rows, torch.tensor([0, 1, 2, 3, 4, 5], dtype=torch.int32), 2, 3)
    assert out.flatten().tolist() == [1.0, 0.0]


@pytest.mark.parametrize("seed", range(25))
def test_combine_against_a_loop(seed):
    draw, source = random.Random(seed), torch.Generator().manual_seed(seed)
    tokens, k = draw.choice((0, 1, draw.randint(2, 12))), draw.randint(1, 8)
    kept = torch.rand(tokens * k, generator=source) < 0.8
    slots = kept.nonzero().flatten()[torch.randperm(int(kept.sum()), generator=source)]
    rows = torch.randn(len(slots), 4, generator=source).bfloat16()
    want = torch.zeros(tokens, 4)
    for token in range(tokens):
        for slot in range(token * k, token * k + k):
            for row in (slots == slot).nonzero().flatten().tolist():
                want[token] += rows[row].float()
    assert_same_bits(combine(rows, slots.to(torch.int32), tokens, k), want.bfloat16())
