"""Function `envoi.route`: logits, extra outputs, hash routing, compilation, refusals."""

import pytest
import torch
from torch.nn.functional import linear

from envoi.ops.moe.router import Rule, route
from envoi.ops.moe.router.reference import select
from tests.helpers.accuracy import assert_at_most_twice, assert_same_bits, relative_error


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


def test_float32_gates_of_bf16_tokens():
    tokens, gate = make()
    got = route(tokens, gate.float() * 1.001, 4, return_logits=True)
    wide = gate.float() * 1.001
    assert relative_error(got.logits, tokens.double() @ wide.double().T) < 1e-6


@pytest.mark.parametrize("rule", [Rule(), Rule("sigmoid", 4, 2, "top2_sum")])
def test_a_tokens_bits_do_not_depend_on_its_batch(rule):
    tokens, gate = make(m=70, hidden=2048)
    whole = route(tokens, gate, 4, rule=rule, return_logits=True)
    for rows in (1, 2, 3, 15, 16, 17, 33, 64):
        part = route(tokens[:rows].clone(), gate, 4, rule=rule, return_logits=True)
        assert_same_bits(part.logits, whole.logits[:rows])
        assert_same_bits(part.topk_weights, whole.topk_weights[:rows])
        assert_same_bits(part.topk_ids, whole.topk_ids[:rows])


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


def test_no_tokens():
    tokens, gate = make(m=0)
    got = route(tokens, gate, 4, return_logits=True, return_dense=True, return_counts=True)
    assert got.topk_ids.shape == (0, 4)
    assert got.dense.shape == got.logits.shape == (0, 32)
    assert got.expert_offsets.tolist() == [0] * 33


def test_one_expert_and_all_experts():
    tokens, gate = make(n=1)
    assert bool((route(tokens, gate, 1).topk_weights == 1).all())
    tokens, gate = make(n=32)
    assert bool((route(tokens, gate, 32).topk_ids.sort(1).values == torch.arange(32)).all())


def test_hash_routing_looks_experts_up():
    tokens, gate = make()
    table = torch.randint(0, 32, (50, 4))
    token_ids = torch.randint(0, 50, (40,), dtype=torch.int32)
    got = route(tokens, gate, 4, rule="deepseek-v4-flash", token_ids=token_ids, hash_table=table, return_logits=True)
    assert got.topk_ids.tolist() == table[token_ids.long()].tolist()
    score = torch.nn.functional.softplus(got.logits).sqrt().gather(1, got.topk_ids.long())
    torch.testing.assert_close(got.topk_weights, score / score.sum(1, keepdim=True) * 1.5)


def test_operator_is_well_formed():
    tokens, gate = make(m=5)
    for extras in ((False, False, False), (True, True, True), (False, False, True)):
        arguments = ("sigmoid", 4, 2, "top2_sum", True, 2.5, None, torch.randn(32), None, None, *extras)
        torch.library.opcheck(torch.ops.envoi.route.default, (tokens, gate, 4, 1.0, *arguments))


@pytest.mark.parametrize("rule", ["mixtral", "deepseek-v3"])
def test_compiles_as_one_graph(rule):
    tokens, gate = make(n=256)

    def step(tokens, gate):
        got = route(tokens * 2, gate, 2, rule=rule, return_counts=True)
        return got.topk_weights + 1, got.topk_ids, got.expert_offsets

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(tokens, gate), step(tokens, gate), strict=True):
        assert_same_bits(got, want)


TOKENS, GATE = make()
IDS, TABLE = torch.zeros(40, dtype=torch.int64), torch.zeros(9, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (r"tokens: expected bfloat16 or float16 or float32 \[num_tokens, hidden\], got int32", {"tokens": IDS.int()}),
        (r"tokens: expected .*, got list", {"tokens": [1.0]}),
        (r"gate: expected .* \[num_experts, 64\], got bfloat16 \[32, 56\]", {"gate": GATE[:, :56]}),
        (r"gate: expected a tensor on cpu .*, got one on meta", {"gate": GATE.to("meta")}),
        ("expected hidden to be a positive multiple of 8, got 60", {"tokens": TOKENS[:, :60], "gate": GATE[:, :60]}),
        ("gate.shape.0.: expected an int from 1 to 1024 .num_experts., got 1120", {"gate": GATE.repeat(35, 1)}),
        ("k: expected an int from 1 to 32, got 33", {"k": 33}),
        ("k: expected an int from 1 to 32, got 0", {"k": 0}),
        ("k: expected at most num_experts = 3, got 4", {"gate": GATE[:3]}),
        ("logit_bias: expected .* \\[32\\], got float32 \\[31\\]", {"logit_bias": torch.zeros(31)}),
        ("expert_bias: expected .* \\[32\\], got int64 \\[32\\]", {"expert_bias": torch.zeros(32).long()}),
        ("rule: expected a Rule or a model's name, got int", {"rule": 3}),
        ("rule: expected one of 'mixtral', .*, got 'gpt-2'", {"rule": "gpt-2"}),
        ("gate.shape.0.: expected a multiple of 3 .rule.num_groups is 3., got 32", {"rule": Rule("sigmoid", 3, 1)}),
        ("k: expected at most 2 .1 groups of 2 experts compete., got 4", {"rule": Rule("sigmoid", 16, 1)}),
        ("'top2_sum', got 1", {"rule": Rule("sigmoid", 32, 8, "top2_sum")}),
        ("token_ids, hash_table: expected both or neither", {"token_ids": IDS}),
        ("token_ids: expected int32 or int64 .40., got float32", {"token_ids": IDS.float(), "hash_table": TABLE}),
        ("hash_table: expected .* .vocabulary, 4., got int64 .9, 3.", {"token_ids": IDS, "hash_table": TABLE[:, :3]}),
        ("token_ids: expected values from 0 to 8, got values from 9", {"token_ids": IDS + 9, "hash_table": TABLE}),
        ("hash_table: expected values from 0 to 31, got values from 32", {"token_ids": IDS, "hash_table": TABLE + 32}),
    ],
)  # fmt: skip
def test_refusals(message, changes):
    arguments = {"tokens": TOKENS, "gate": GATE, "k": 4} | changes
    with pytest.raises(ValueError, match=message):
        route(**arguments)


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("rule.score: expected one of 'softmax', .*, got 'relu'", ("relu",)),
        ("rule.group_score: expected one of 'max', 'top2_sum', got 'sum'", ("softmax", 4, 2, "sum")),
        ("rule.num_topk_groups: expected an int from 1 to 4 .at most num_groups., got 5", ("softmax", 4, 5)),
        ("rule.num_groups: expected an int of at least 1, got 0", ("softmax", 0, 1)),
    ],
)
def test_rules_that_make_no_sense_are_refused(message, arguments):
    with pytest.raises(ValueError, match=message):
        Rule(*arguments)
