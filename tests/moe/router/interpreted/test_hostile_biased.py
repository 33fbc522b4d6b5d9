"""Hostile logits through the kernel: every kind, every rule, with a bias for selection."""

import pytest
import torch

from tests.helpers.inputs import LOGITS, logits, normal
from tests.moe.router.sides import Given, as_product, judge
from tests.moe.router.test_selection import RULES

ROWS, N, K = 13, 32, 5


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("rule", RULES)
def test_hostile_logits_with_a_bias(kind, rule):
    tokens, gate = as_product(logits(kind, ROWS, N, K), torch.float32)
    bias = normal(N, seed=7) * 0.2
    bias[3] = -torch.inf
    given = Given(tokens, gate, K, RULES[rule], expert_bias=bias)
    judge(given, given.route())
