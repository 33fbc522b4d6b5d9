"""Selection from hostile logits: bf16, many experts, barred experts, unlike rows in one tile."""

from dataclasses import replace

import pytest
import torch

from envoi.ops.moe.router import Rule, route
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.inputs import LOGITS, logits, normal
from tests.moe.router.sides import EVERYTHING, Given, as_product, assert_meant, judge
from tests.moe.router.test_selection import RULES

ROWS, N, K = 13, 32, 5


def hostile(kind: str, dtype=torch.float32, n: int = N, k: int = K) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make hostile logits, and tokens and a gate whose product they are."""
    x = logits(kind, ROWS, n, k)
    return x, *as_product(x, dtype)


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("rule", ["softmax", "sigmoid, groups by two"])
def test_hostile_logits_of_bf16(kind, rule):
    x, tokens, gate = hostile(kind, torch.bfloat16)
    given = Given(tokens, gate, K, RULES[rule], expert_bias=normal(N, seed=7) * 0.2 if rule != "softmax" else None)
    got = given.route()
    assert_meant(got.logits, x)
    judge(given, got)


@pytest.mark.parametrize("kind", ["crowded around 1", "ties at the boundary"])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (8, 8), (130, 9), (130, 32), (1024, 32)])
def test_hostile_logits_of_many_experts(kind, n, k):
    _, tokens, gate = hostile(kind, n=n, k=k)
    for rule in (Rule(), Rule("sigmoid", renormalize=False)):
        given = Given(tokens, gate, k, rule, expert_bias=normal(n) * 0.01 if rule.score == "sigmoid" else None)
        judge(given, given.route())


def test_minus_infinity_for_selection_disables_an_expert():
    _, tokens, gate = hostile("randn")
    bias = torch.zeros(N)
    bias[::2] = -torch.inf
    for rule in RULES.values():
        given = Given(tokens, gate, 16, replace(rule, num_topk_groups=rule.num_groups), expert_bias=bias)
        got = given.route()
        judge(given, got)
        assert bool((got.topk_ids.sort(1).values == torch.arange(1, N, 2)).all())


@pytest.mark.parametrize("rule", RULES)
def test_rows_do_not_meet(rule):
    """Check rows that need exact keys in a tile with rows that don't, against each of them alone."""
    x = torch.cat([logits(kind, 4, N, K) for kind in ("randn", "crowded around 1", "few distinct", "NaN", "all equal")])
    tokens, gate = as_product(x, torch.float32)
    given = Given(tokens, gate, K, RULES[rule], expert_bias=normal(N, seed=7) * 0.2)
    whole = given.route()
    for row in range(0, len(x), 6):
        alone = route(tokens[row : row + 1], gate, K, rule=given.rule, expert_bias=given.expert_bias, **EVERYTHING)
        for field in ("topk_weights", "topk_ids", "logits", "dense"):
            assert_same_bits(getattr(alone, field), getattr(whole, field)[row : row + 1])


@pytest.mark.parametrize("rule", RULES)
def test_operands_that_are_not_finite(rule):
    _, tokens, gate = hostile("randn")
    tokens[5], tokens[6], tokens[7, 3] = torch.nan, torch.inf, -torch.inf
    gate[9], gate[10, 0] = torch.nan, torch.inf
    got = (given := Given(tokens, gate, K, RULES[rule])).route()
    judge(given, got)
    assert bool((got.topk_ids[5:7] == -1).all())
    assert not bool((got.topk_ids == 9).any())
