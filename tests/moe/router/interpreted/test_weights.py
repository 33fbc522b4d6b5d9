"""Logits as weights, and weights in fp16 and bf16, by the kernel."""

import pytest
import torch

from envoi.ops.moe.router import Rule
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.inputs import normal
from tests.moe.router.sides import random_call
from tests.moe.router.test_selection import RULES


@pytest.mark.parametrize("biased", [False, True])
def test_the_identity_gives_the_logits_themselves(biased):
    given = random_call(19, 40, 64, 5, Rule("identity", renormalize=False), torch.bfloat16)
    if biased:
        given = random_call(19, 40, 64, 5, given.rule, torch.bfloat16, expert_bias=normal(40, seed=3))
    given.gate[7] = given.gate[3]
    given.tokens[4, 1] = torch.nan
    got = given.route()
    chosen = got.logits.gather(1, got.topk_ids.clamp(min=0).long())
    assert_same_bits(got.topk_weights, chosen.masked_fill(got.topk_ids < 0, 0.0))
    assert bool((got.topk_ids[4] == -1).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", RULES)
def test_weights_are_rounded_once(rule, dtype):
    given = random_call(19, 40, 64, 5, RULES[rule], torch.bfloat16)
    want = given.route()
    got = given.route(weights_dtype=dtype, return_dense=True, return_counts=True)
    assert_same_bits(got.topk_weights, want.topk_weights.to(dtype))
    assert_same_bits(got.dense, want.dense.to(dtype))
    for name in ("topk_ids", "expert_offsets"):
        assert_same_bits(getattr(got, name), getattr(want, name))
