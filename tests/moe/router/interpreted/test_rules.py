"""Rules of all models, biases, hash routing, the extra outputs."""

from dataclasses import replace

import pytest
import torch

from envoi.ops.moe.router import Rule, preset
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.inputs import normal
from tests.moe.router.sides import judge, judge_logits, looked_up, preset_call, random_call
from tests.moe.router.test_exact import distinct_presets
from tests.moe.router.test_selection import RULES

M, HIDDEN = 9, 64


@pytest.mark.parametrize("name", distinct_presets())
def test_models(name):
    given = preset_call(name, M, HIDDEN)
    got = given.route()
    judge_logits(given, got.logits)
    judge(given, got)


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-moe"])
def test_wanted_outputs_change_nothing(name):
    given = preset_call(name, M, HIDDEN, torch.bfloat16)
    whole = given.route()
    wishes = {"return_logits": "logits", "return_dense": "dense", "return_counts": "expert_offsets"}
    for wish, field in wishes.items():
        got = given.route(**{wish: True})
        for x in ("topk_weights", "topk_ids", field):
            assert_same_bits(getattr(got, x), getattr(whole, x))
        assert all(getattr(got, x) is None for y, x in wishes.items() if y != wish)


def test_counters_come_back_to_zero():
    for name, m in (("deepseek-v3", 18), ("mixtral", 3), ("deepseek-v3", 5)):
        given = preset_call(name, m, HIDDEN)
        for _ in range(2):
            judge(given, given.route())


@pytest.mark.parametrize("rule", RULES)
def test_biases_and_alpha(rule):
    bias, other = normal(40, seed=5), normal(40, seed=6) * 0.1
    bias[7], bias[8], bias[9] = torch.nan, torch.inf, -torch.inf
    given = random_call(M, 40, HIDDEN, 5, RULES[rule])
    for changes in (
        {"alpha": 0.25},
        {"alpha": -3.0, "logit_bias": bias},
        {"logit_bias": bias.bfloat16(), "expert_bias": other.half()},
        {"logit_bias": normal(80)[::2], "expert_bias": other},
    ):
        one = replace(given, **changes)
        got = one.route()
        judge_logits(replace(one, logit_bias=None if one.logit_bias is None else one.logit_bias.float()), got.logits)
        judge(one, got)
    nothing = replace(given, logit_bias=torch.full((40,), torch.nan)).route()
    assert bool((nothing.topk_ids == -1).all())
    assert bool((nothing.topk_weights == 0).all())
    assert nothing.expert_offsets.tolist() == [0] * 41


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("ints", [torch.int32, torch.int64])
def test_hash_routing(rule, ints):
    """Check that tokens outside the table and experts outside the gate give -1."""
    source = torch.Generator().manual_seed(6)
    table = torch.stack([torch.randperm(32, generator=source)[:3] for _ in range(20)]).to(ints)
    table[3, 1], table[4, 0], table[5, 2] = 32, -1, 2**31 - 1
    token_ids = torch.arange(-2, M - 2).to(ints)
    token_ids[-1] = 2**31 - 1
    bias = normal(32, seed=5)
    bias[2] = torch.nan  # an expert of the table without a finite logit
    bias[table[1].long()] = -120.0  # the scores of a row of the table are all 0
    for given in (
        random_call(M, 32, HIDDEN, 3, RULES[rule], token_ids=token_ids, hash_table=table),
        random_call(M, 32, HIDDEN, 3, RULES[rule], token_ids=token_ids, hash_table=table, logit_bias=bias),
    ):
        got = given.route()
        judge(given, got)
        want = looked_up(token_ids, table, 32)
        if given.logit_bias is not None:
            want = want.masked_fill(want == 2, -1)
        assert_same_bits(got.topk_ids.long(), want)
        assert bool((got.topk_ids == -1).any())


def test_a_rule_for_the_model_that_hashes():
    chosen = preset("deepseek-v4-flash")
    token_ids = torch.arange(M).flip(0)
    table = torch.arange(M * chosen.num_topk).view(M, -1) % chosen.num_experts
    given = random_call(M, 256, HIDDEN, chosen.num_topk, chosen.rule, token_ids=token_ids, hash_table=table)
    got = given.route()
    judge(given, got)
    assert_same_bits(got.topk_ids.long(), table.flip(0))


@pytest.mark.parametrize(("num_groups", "size"), [(3, 8), (5, 7), (32, 2), (4, 12), (2, 33)])
@pytest.mark.parametrize("score", ["max", "top2_sum"])
def test_groups_of_any_size(num_groups, size, score):
    rule = Rule("sigmoid", num_groups, max(2, num_groups // 2), score)
    given = random_call(M, num_groups * size, HIDDEN, 4, rule, expert_bias=normal(num_groups * size, seed=2) * 0.1)
    assert given.route(return_dense=True).logits is None
    judge(given, given.route())
