"""Sizes that no tile divides, and every pair of dtypes."""

from dataclasses import replace

import pytest
import torch

from envoi.ops.moe.router import Rule
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.inputs import normal
from tests.moe.router.sides import judge, judge_logits, random_call

FLOATS = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("for_tokens", FLOATS)
@pytest.mark.parametrize("for_gate", FLOATS)
def test_dtypes(for_tokens, for_gate):
    given = random_call(21, 40, 136, 4, Rule())
    given = replace(given, tokens=given.tokens.to(for_tokens), gate=given.gate.to(for_gate))
    got = given.route()
    judge_logits(given, got.logits)
    judge(given, got)


@pytest.mark.parametrize("n", [1, 2, 8, 31, 130, 513, 1024])
@pytest.mark.parametrize(("m", "hidden"), [(1, 8), (17, 72)])
def test_sizes(n, m, hidden):
    for k in sorted({1, min(n, 7), min(n, 32)}):
        given = random_call(m, n, hidden, k, Rule("sigmoid"), torch.bfloat16)
        got = given.route()
        judge_logits(given, got.logits)
        judge(given, got)


@pytest.mark.parametrize("n", [40, 300, 600])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tokens_bits_are_its_own(n, dtype):
    """Check slices of a batch, with whole numbers: the order in which numpy sums a product depends on the row."""
    given = random_call(36, n, 72, 5, Rule("sigmoid"), dtype, alpha=1 / 64, expert_bias=normal(n, seed=4) * 0.1)
    given = replace(given, tokens=(given.tokens * 4).round(), gate=(given.gate * 64).round())
    whole = given.route()
    for first, rows in ((0, 1), (35, 1), (3, 17), (13, 23)):
        part = replace(given, tokens=given.tokens[first : first + rows]).route()
        for field in ("logits", "topk_weights", "topk_ids", "dense"):
            assert_same_bits(getattr(part, field), getattr(whole, field)[first : first + rows])


def test_strides_change_nothing():
    given = random_call(19, 33, 64, 4, Rule())
    want = given.route()
    wide = torch.randn(19, 200)
    wide[:, 3:67] = given.tokens
    for changes in (
        {"tokens": wide[:, 3:67]}, {"tokens": given.tokens.T.contiguous().T}, {"gate": given.gate.T.contiguous().T},
        {"gate": torch.stack((given.gate, given.gate), 1)[:, 1]},
    ):  # fmt: skip
        got = replace(given, **changes).route()
        for field in ("logits", "topk_weights", "topk_ids", "dense", "expert_offsets"):
            assert_same_bits(getattr(got, field), getattr(want, field))
    one = replace(given, tokens=given.tokens[:1].expand(20, -1)).route()
    assert_same_bits(one.topk_ids, want.topk_ids[:1].expand(20, -1).contiguous())


def test_several_blocks_of_sums():
    given = random_call(3, 8, 1032, 2, Rule(), torch.bfloat16)
    got = given.route()
    judge_logits(given, got.logits)
    judge(given, got)
