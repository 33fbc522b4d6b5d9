"""Near ties that packed keys don't tell apart, settled among the few experts that matter."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from envoi.ops.moe.router.choose_experts import router_logits
from envoi.ops.moe.router.device_types import Args, Positions, Scalars, Tables
from envoi.ops.moe.router.host import spec_of
from envoi.ops.moe.router.reference import select
from envoi.ops.moe.router.selection import choose_exactly, choose_fast, load_biases
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.inputs import normal
from tests.moe.router.test_selection import RULES

ROWS, N = 8, 48


@triton.jit
def choose_kernel(x, args, ids, exact, certain, live, R: tl.constexpr, spec: tl.constexpr):
    """Choose the experts of R rows of logits, fast and by exact keys; the first `live` exist."""
    rows, columns = tl.arange(0, R), tl.arange(0, spec.columns)[None, :]
    slots, contenders = tl.arange(0, spec.slots)[None, :], tl.arange(0, spec.contenders)[None, :]
    positions = Positions(columns, slots, contenders, tl.arange(0, spec.group_slots)[None, :])
    product = tl.load(x + rows[:, None] * spec.num_experts + columns, mask=columns < spec.num_experts, other=0.0)
    biases = load_biases(args.tables, columns, spec)
    logits, usable, softmax = router_logits(product, columns, 1.0, biases.logit, spec)
    chosen, sure, _doubt = choose_fast(logits, softmax, rows < live, positions, biases.key, args, True, spec)
    tl.store(ids + rows[:, None] * spec.k + chosen.slots, chosen.ids, mask=chosen.slots < spec.k)
    chosen = choose_exactly(logits, usable, softmax, positions, biases.key, args.scalars.k, spec)
    tl.store(exact + rows[:, None] * spec.k + chosen.slots, chosen.ids, mask=chosen.slots < spec.k)
    tl.store(certain + rows, sure.to(tl.int32))


def choose(x, k, rule, bias, live=ROWS):
    """Return the chosen ids [R, k], those by exact keys, and which rows are certain."""
    spec = spec_of(x.shape[1], k, rule, None, bias, False, (False,) * 3)
    ids, exact = (torch.full((ROWS, k), -7, dtype=torch.int32) for _ in range(2))
    certain = torch.full((ROWS,), -7, dtype=torch.int32)
    args = Args(Scalars(1.0, 1.0, k), Tables(None, bias, None, None, 0), None)
    choose_kernel[(1,)](x, args, ids, exact, certain, live, ROWS, spec)
    return ids, exact, certain.bool()


def spread(n=N):
    """Make rows of logits far apart, in any order."""
    order = torch.stack([torch.randperm(n, generator=torch.Generator().manual_seed(i)) for i in range(ROWS)])
    return order.float() / 16 - 2.0


def ranked(x, rank):
    """Return the expert of each row at a rank, 0 the best."""
    return x.argsort(1, descending=True)[:, rank : rank + 1]


def set_beside(x, first, *others):
    """Give experts at the ranks `others` logits that are one or two units above that at the rank `first`, or equal."""
    near = x.gather(1, ranked(x, first))
    steps = [torch.inf, -torch.inf, None]
    where = [ranked(x, rank) for rank in others]
    for i, at in enumerate(where):
        step = steps[i % 3]
        x.scatter_(1, at, near if step is None else torch.nextafter(near, torch.full_like(near, step)))


@pytest.mark.parametrize("rule", [x for x in RULES if "groups" not in x])
@pytest.mark.parametrize("k", [1, 4, 5, 8])
@pytest.mark.parametrize("biased", [False, True])
def test_near_ties_are_settled(rule, k, biased):
    rule, bias = replace(RULES[rule], routed_scale=1.0), torch.zeros(N) if biased else None
    for place in {0, k // 2, k - 1}:
        x = spread()
        set_beside(x, place, place + 1)
        x[0] = x[0].flip(0)
        x[1].scatter_(0, ranked(x, place)[1], x[1].gather(0, ranked(x, place + 1)[1]))  # a tie: the smaller id
        ids, exact, certain = choose(x, k, rule, bias)
        assert bool(certain.all())
        assert_same_bits(ids, exact)
        if rule.score != "softmax" or not biased:  # the bits of a sum of exponentials aren't the reference's
            assert_same_bits(ids, select(x, k, rule, bias)[1].int())


GROUPED = [x for x in RULES if "groups" in x]


@pytest.mark.parametrize("rule", GROUPED)
@pytest.mark.parametrize(("n", "biased"), [(48, False), (64, True)])  # groups of 12, and of a power of two
@pytest.mark.parametrize("k", [5, "all"])
def test_near_ties_within_the_best_groups_are_settled(rule, n, k, biased):
    rule, bias = replace(RULES[rule], routed_scale=1.0), torch.zeros(n) if biased else None
    competing = n // rule.num_groups * rule.num_topk_groups
    k = competing if k == "all" else k
    for place in {0, k // 2, k - 1} - {competing - 1}:
        x = spread(n)
        best = select(x, competing, rule, bias)[1].long()[:, place : place + 2]
        near = x.gather(1, best[:, :1])
        x.scatter_(1, best[:, 1:], torch.nextafter(near, torch.full_like(near, torch.inf)))
        x[1, best[1, 1]] = near[1]  # a tie: the smaller id
        ids, exact, certain = choose(x, k, rule, bias)
        if k < competing:  # else the next expert is one that doesn't compete, as near as any other of these
            assert bool(certain.all())
        assert_same_bits(ids[certain], exact[certain])
        if rule.score != "softmax":  # the bits of a sum of exponentials aren't the reference's
            assert_same_bits(exact, select(x, k, rule, bias)[1].int())


@pytest.mark.parametrize("rule", GROUPED)
@pytest.mark.parametrize("n", [48, 64])
def test_near_ties_between_groups_are_left_to_exact_keys(rule, n):
    """Make the last group that is kept and the first that isn't equal but for one or two units of one logit."""
    rule = replace(RULES[rule], routed_scale=1.0)
    size, kept = n // rule.num_groups, rule.num_topk_groups
    x = spread(n)
    by_group = x.view(ROWS, rule.num_groups, size)
    order = by_group.topk(1 if rule.group_score == "max" else 2, 2).values.sum(2).argsort(1, descending=True)
    for row in range(ROWS):
        last, next = order[row, kept - 1], order[row, kept]
        by_group[row, next] = by_group[row, last].flip(0)
        if row % 3:
            top = by_group[row, next].argmax()
            by_group[row, next, top] = torch.nextafter(by_group[row, next, top], torch.tensor((-1.0) ** row * 99))
    ids, exact, certain = choose(x, 6, rule, None)
    assert certain[0] == (rule.score != "sigmoid")  # other keys are exact at first
    assert_same_bits(ids[certain], exact[certain])
    if rule.score != "softmax":
        assert_same_bits(exact, select(x, 6, rule, None)[1].int())


def test_a_third_expert_near_the_last_is_left_to_exact_keys():
    x = spread()
    set_beside(x[3:4], 4, 5, 6)
    ids, exact, certain = choose(x, 5, RULES["softmax"], None)
    assert certain.tolist() == [row != 3 for row in range(ROWS)]
    assert_same_bits(ids[certain], exact[certain])


@pytest.mark.parametrize("rule", ["softmax", "sigmoid", "sqrt(softplus)"])
def test_experts_that_cannot_be_chosen_do_not_win_a_near_tie(rule):
    bias = normal(N, seed=3) * 1e-7
    bias[::3] = -torch.inf
    x = spread()
    x[:, 1::3] = torch.where(x[:, 1::3] < 0, torch.nan, x[:, 1::3])
    order = torch.where(bias.isfinite(), x, -torch.inf).nan_to_num(-9.0)
    near = order.gather(1, ranked(order, 3))
    x.scatter_(1, ranked(order, 4), torch.nextafter(near, torch.full_like(near, 9.0)))
    ids, exact, certain = choose(x, 4, RULES[rule], bias)
    assert bool(certain.all())
    assert_same_bits(ids, exact)


def test_rows_that_do_not_exist_send_no_other_row_another_way():
    x = spread()
    x[5:] = 0.0
    _, _, certain = choose(x, 5, RULES["softmax"], None, live=5)
    assert certain[:5].all()
    assert not certain[5:].any()
