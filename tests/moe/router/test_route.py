"""Function `envoi.route`: logits, extra outputs, hash routing, compilation, refusals."""

import pytest
import torch
from torch.nn.functional import linear

import envoi
from envoi.ops.moe.router import Rule, host, route
from envoi.ops.moe.router.api import _given
from envoi.ops.moe.router.reference import select
from tests.helpers.accuracy import assert_at_most_twice, assert_same_bits


def make(m=40, n=32, hidden=64, dtype=torch.bfloat16, seed=0):
    source = torch.Generator().manual_seed(seed)
    tokens, gate = (torch.randn(rows, hidden, generator=source) for rows in (m, n))
    return tokens.to(dtype), gate.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("alpha", [1.0, 0.125])
def test_logits_are_as_good_as_torchs(dtype, alpha):
    tokens, gate = make(dtype=dtype, hidden=512)
    bias = torch.randn(32)
    got = route(tokens, gate, 4, alpha, logit_bias=bias, return_logits=True)
    oracle = alpha * (tokens.double() @ gate.double().T) + bias.double()
    assert_at_most_twice(got.logits, alpha * linear(tokens, gate).float() + bias, oracle)
    weights, ids = select(got.logits, 4, Rule())
    assert_same_bits(got.topk_weights, weights)
    assert_same_bits(got.topk_ids, ids)


def test_extra_outputs_agree():
    tokens, gate = make(m=100)
    gate[5] = gate[9]  # a tie in every row
    got = route(tokens, gate, 4, return_dense=True, return_counts=True)
    assert got.logits is None
    assert bool(((got.dense != 0).sum(1) == 4).all())
    assert_same_bits(got.dense.gather(1, got.topk_ids.long()), got.topk_weights)
    counts = torch.bincount(got.topk_ids.flatten().long(), minlength=32)
    assert got.num_tokens_per_expert.tolist() == counts.tolist()
    assert got.expert_offsets.tolist() == [0, *counts.cumsum(0).tolist()]
    assert got.expert_offsets.dtype == got.num_tokens_per_expert.dtype == torch.int32


def test_masked_slots_are_not_counted():
    tokens, gate = make(m=3, n=4)
    tokens[1] = torch.nan
    got = route(tokens, gate, 4, return_dense=True, return_counts=True)
    assert got.topk_ids[1].tolist() == [-1] * 4
    assert bool((got.dense[1] == 0).all())
    assert got.num_tokens_per_expert.tolist() == [2, 2, 2, 2]


def test_operator_is_well_formed():
    tokens, gate = make(m=5)
    for extras in (
        (False, False, False, torch.float32),
        (True, True, True, torch.float16),
        (False, False, True, torch.bfloat16),
    ):
        arguments = ("sigmoid", 4, 2, "top2_sum", True, 2.5, None, torch.randn(32), None, None, *extras)
        torch.library.opcheck(torch.ops.envoi.route.default, (tokens, gate, 4, 1.0, *arguments))


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_the_promise_of_bits_reaches_the_kernels(batch_invariant, monkeypatch):
    calls = []
    monkeypatch.setattr(host, "supported", lambda *_: True)
    monkeypatch.setattr(host, "run_router", lambda call: calls.append(call) or [call.tokens[:, :4], call.tokens[:, :4]])
    tokens, gate = make()
    for call in (route, envoi.ops.moe.router.replay):
        chosen = 4 if call is route else torch.zeros(40, 4, dtype=torch.int32)
        call(tokens, gate, chosen, batch_invariant=batch_invariant)
        assert calls.pop().batch_invariant is batch_invariant
    assert _given(tokens, gate, 4, batch_invariant=batch_invariant)[0] != _given(tokens, gate, 4, batch_invariant=1)[0]


def test_the_promise_of_bits_is_given_by_default_and_changes_nothing_on_a_cpu():
    tokens, gate = make()
    want, got = route(tokens, gate, 4), route(tokens, gate, 4, batch_invariant=False)
    assert_same_bits(got.topk_weights, want.topk_weights)
    assert_same_bits(got.topk_ids, want.topk_ids)
    with pytest.raises(ValueError, match="batch_invariant: expected True or False, got int 1"):
        route(tokens, gate, 4, batch_invariant=1)


TOKENS, GATE = make()
IDS, TABLE = torch.zeros(40, dtype=torch.int64), torch.zeros(9, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("rule.score: expected one of 'softmax', .*, got 'relu'", ("relu",)),
        ("rule.group_score: expected one of 'max', 'top2_sum', got 'sum'", ("softmax", 4, 2, "sum")),
        ("rule.num_topk_groups: expected an int from 1 to 4 .at most num_groups., got 5", ("softmax", 4, 5)),
        ("rule.num_groups: expected an int of at least 1, got 0", ("softmax", 0, 1)),
        ("rule.renormalize: expected False for 'identity', whose weights may add up to 0, got True", ("identity",)),
    ],
)
def test_rules_that_make_no_sense_are_refused(message, arguments):
    with pytest.raises(ValueError, match=message):
        Rule(*arguments)
