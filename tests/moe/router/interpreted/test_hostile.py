"""Hostile logits through the kernel: every kind, every rule, in turn with and without a bias for selection."""

from itertools import product

import pytest
import torch

from tests.helpers.inputs import LOGITS, logits, normal
from tests.helpers.slow import mostly_slow
from tests.moe.router.sides import Given, as_product, assert_meant, judge
from tests.moe.router.test_selection import RULES

ROWS, N, K = 13, 32, 5


IN_TURN = [(kind, rule, (i + j) % 2 == 0) for i, kind in enumerate(LOGITS) for j, rule in enumerate(RULES)]


@pytest.mark.parametrize(("kind", "rule", "biased"), mostly_slow(product(LOGITS, RULES, [False, True]), quick=IN_TURN))
def test_hostile_logits(kind, rule, biased):
    x = logits(kind, ROWS, N, K)
    tokens, gate = as_product(x, torch.float32)
    bias = normal(N, seed=7).mul(0.2).index_fill(0, torch.tensor(3), -torch.inf) if biased else None
    given = Given(tokens, gate, K, RULES[rule], expert_bias=bias)
    got = given.route()
    assert_meant(got.logits, x)
    judge(given, got)
