"""Hostile logits through the kernel: every kind, every rule."""

import pytest
import torch

from tests.helpers.inputs import LOGITS, logits
from tests.moe.router.sides import Given, as_product, assert_meant, judge
from tests.moe.router.test_selection import RULES

ROWS, N, K = 13, 32, 5


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("rule", RULES)
def test_hostile_logits(kind, rule):
    x = logits(kind, ROWS, N, K)
    tokens, gate = as_product(x, torch.float32)
    given = Given(tokens, gate, K, RULES[rule])
    got = given.route()
    assert_meant(got.logits, x)
    judge(given, got)
