"""Behaviour of `envoi.route` for its users: batches, dtypes, strides, autocast, tracing, refusals."""

import re

import pytest
import torch

from envoi.ops.moe.router import Rule, preset, replay, route
from envoi.ops.moe.router.spec import SCORES
from tests.helpers.accuracy import assert_same_bits, relative_error
from tests.helpers.slow import mostly_slow
from tests.moe.router.test_selection import RULES

EVERYTHING = {"return_logits": True, "return_dense": True, "return_counts": True}


def make(m: int, n: int, hidden: int = 64, dtype=torch.float32, seed: int = 0):
    source = torch.Generator().manual_seed(seed)
    tokens, gate = (torch.randn(rows, hidden, generator=source) for rows in (m, n))
    return tokens.to(dtype), (gate / hidden**0.5).to(dtype)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("n", [7, 8, 33, 96])
def test_a_tokens_bits_are_its_own(score, n):
    """Check N and k that no vector register divides: a tensor's last elements must not be rounded otherwise."""
    k, chosen = min(n, 5), Rule(score, renormalize=score == "sigmoid")
    bias = torch.randn(n, generator=torch.Generator().manual_seed(5)) * 0.1
    tokens, gate = make(600, n, 136, torch.bfloat16)
    whole = route(tokens, gate, k, rule=chosen, expert_bias=bias, return_logits=True, return_dense=True)
    for first, rows in (
        (0, 1),
        (3, 1),
        (599, 1),
        (0, 2),
        (7, 5),
        (0, 15),
        (1, 16),
        (2, 31),
        (5, 64),
        (9, 257),
        (0, 599),
    ):
        cut = slice(first, first + rows)
        part = route(tokens[cut], gate, k, rule=chosen, expert_bias=bias, return_logits=True, return_dense=True)
        for field in ("logits", "topk_weights", "topk_ids", "dense"):
            assert_same_bits(getattr(part, field), getattr(whole, field)[cut])


def test_strides_change_nothing():
    tokens, gate = make(50, 32, 64)
    want = route(tokens, gate, 4, **EVERYTHING)
    wide = torch.randn(50, 128)
    wide[:, :64] = tokens
    for other in (wide[:, :64], tokens.T.contiguous().T, torch.stack((tokens, tokens), 1)[:, 1]):
        assert_same_bits(route(other, gate, 4).topk_ids, want.topk_ids)
        assert relative_error(route(other, gate, 4, return_logits=True).logits, want.logits) < 1e-6
    assert_same_bits(route(tokens, gate.T.contiguous().T, 4).topk_ids, want.topk_ids)
    one = route(tokens[:1].expand(20, -1), gate, 4)
    assert_same_bits(one.topk_weights, want.topk_weights[:1].expand(20, -1).contiguous())


@pytest.mark.parametrize("rule", RULES)
def test_dense_has_k_weights_in_a_row_of_ties(rule):
    tokens = torch.ones(12, 8)
    got = route(tokens, torch.ones(32, 8), 6, rule=RULES[rule], **EVERYTHING)
    assert bool(((got.dense != 0).sum(1) == 6).all())
    assert got.topk_ids.tolist() == [list(range(6))] * 12
    assert_same_bits(got.dense[:, :6], got.topk_weights)
    assert got.num_tokens_per_expert.tolist() == [12] * 6 + [0] * 26


def test_alpha_multiplies_the_product_and_not_the_bias():
    tokens, gate = make(20, 16)
    bias = torch.randn(16)
    plain = route(tokens, gate, 3, return_logits=True).logits
    assert_same_bits(route(tokens, gate, 3, 0.5, logit_bias=bias, return_logits=True).logits, plain * 0.5 + bias)
    turned = route(tokens, gate, 1, -1.0)
    assert torch.equal(turned.topk_ids[:, 0].long(), plain.argmin(1))
    assert route(tokens, gate, 3, 0).topk_ids.tolist() == [[0, 1, 2]] * 20


def test_a_logit_bias_that_is_not_finite_bars_its_expert():
    tokens, gate = make(25, 8)
    bias = torch.zeros(8)
    bias[1], bias[4], bias[6] = torch.nan, torch.inf, -torch.inf
    open_ = [0, 2, 3, 5, 7]
    for name, chosen in RULES.items():
        if chosen.num_groups > 1:
            continue
        got = route(tokens, gate, 7, rule=chosen, logit_bias=bias, **EVERYTHING)
        assert bool((got.topk_ids[:, :5].sort(1).values == torch.tensor(open_)).all()), name
        assert bool((got.topk_ids[:, 5:] == -1).all())
        assert bool((got.topk_weights[:, 5:] == 0).all())
        assert bool(got.topk_weights.isfinite().all())
        assert got.num_tokens_per_expert.tolist() == [25, 0, 25, 25, 0, 25, 0, 25]
        alone = route(tokens, gate[open_], 5, rule=chosen)  # CPUs may add up products of fewer experts otherwise
        torch.testing.assert_close(got.topk_weights[:, :5], alone.topk_weights, rtol=1e-5, atol=0)


def test_minus_infinity_for_selection_disables_an_expert_and_keeps_the_softmax_whole():
    tokens, gate = make(25, 8)
    bias = torch.zeros(8)
    bias[3] = -torch.inf
    for name, chosen in RULES.items():
        got = route(tokens, gate, 2, rule=chosen, expert_bias=bias, **EVERYTHING)
        assert not bool((got.topk_ids == 3).any()), name
        assert bool((got.topk_ids >= 0).all())
        assert got.num_tokens_per_expert[3] == 0
    weights = route(tokens, gate, 7, rule=Rule(renormalize=False), expert_bias=bias, return_logits=True)
    whole = weights.logits.double().softmax(1).gather(1, weights.topk_ids.long())
    torch.testing.assert_close(weights.topk_weights.double(), whole, rtol=1e-6, atol=0)


def test_a_looked_up_expert_without_a_finite_logit_is_masked():
    tokens, gate = make(4, 8)
    bias = torch.zeros(8)
    bias[2] = torch.nan
    table = torch.tensor([[2, 5], [1, 3]])
    got = route(tokens, gate, 2, logit_bias=bias, token_ids=torch.tensor([0, 1, 0, 1]), hash_table=table, **EVERYTHING)
    assert got.topk_ids.tolist() == [[-1, 5], [1, 3], [-1, 5], [1, 3]]
    assert got.topk_weights[0].tolist() == [0.0, 1.0]
    assert got.num_tokens_per_expert.tolist() == [0, 2, 0, 2, 0, 2, 0, 0]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("form", ["int32", "int64", "three dimensions"])
def test_replay_of_what_was_chosen_is_the_same_routing(rule, form):
    tokens, gate = make(60, 32)
    want = route(tokens, gate, 4, rule=RULES[rule], **EVERYTHING)
    ids = want.topk_ids.long() if form == "int64" else want.topk_ids
    if form == "three dimensions":
        tokens, ids = tokens.view(3, 20, -1), ids.view(3, 20, 4)
    got = replay(tokens, gate, ids, rule=RULES[rule], **EVERYTHING)
    for name in ("topk_ids", "topk_weights", "logits", "dense", "num_tokens_per_expert", "expert_offsets"):
        assert_same_bits(getattr(got, name), getattr(want, name))


def test_replay_weighs_by_the_gate_that_is_given():
    tokens, gate = make(50, 16)
    recorded = torch.stack([torch.randperm(16, generator=torch.Generator().manual_seed(i))[:3] for i in range(50)])
    recorded[7, 1], recorded[8] = -1, -1  # slots without an expert stay so
    got = replay(tokens, gate, recorded)
    assert torch.equal(got.topk_ids.long(), recorded)
    score = (tokens.double() @ gate.double().T).softmax(1).gather(1, recorded.clamp(min=0)) * (recorded >= 0)
    want = score / (score.sum(1, keepdim=True) + 1e-20)
    torch.testing.assert_close(got.topk_weights.double(), want, rtol=1e-5, atol=1e-9)
    assert not got.topk_weights[8].any()


@pytest.mark.parametrize(
    ("message", "ids"),
    [
        ("topk_ids: expected a row of k for each of 50 tokens, got int64 [49, 3]", torch.zeros(49, 3).long()),
        ("topk_ids: expected a row of k for each of 50 tokens, got int64 [50]", torch.zeros(50).long()),
        ("topk_ids: expected int32 or int64, got float32 [50, 3]", torch.zeros(50, 3)),
        ("topk_ids: expected values from -1 to 15, got values from 0 to 16", torch.tensor([[0, 16]] * 50)),
    ],
)
def test_replay_refuses(message, ids):
    with pytest.raises(ValueError, match=re.escape(message)):
        replay(*make(50, 16), ids)


def test_replay_names_the_tokens():
    with pytest.raises(ValueError, match="tokens: expected bfloat16 or float16 or float32, got NoneType"):
        replay(None, make(50, 16)[1], torch.zeros(50, 3).long())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "name", mostly_slow(["mixtral", "gpt-oss-20b", "deepseek-v3", "deepseek-v4-flash"], ["deepseek-v3"])
)
@pytest.mark.parametrize("dynamic", mostly_slow([False, True], [True]))
def test_compiled_in_one_graph(name, dynamic):
    """Check sizes as symbols too: torch makes them so by itself from the second batch size on."""
    chosen = preset(name)
    _, gate = make(1, chosen.num_experts)
    bias = torch.randn(chosen.num_experts) * 0.1 if chosen.has_expert_bias else None

    def step(tokens, gate):
        got = route(tokens + 1, gate, chosen.num_topk, rule=name, expert_bias=bias, **EVERYTHING)
        return got.topk_weights * 2, got.topk_ids, got.logits, got.dense, got.num_tokens_per_expert, got.expert_offsets

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for m in (5, 33, 2) if dynamic else (5,):
        tokens, _ = make(m, 1, seed=m)
        for got, want in zip(compiled(tokens, gate), step(tokens, gate), strict=True):
            assert_same_bits(got, want)


TOKENS, GATE = make(40, 32)
IDS, TABLE = torch.zeros(40).long(), torch.zeros(9, 4).long()
KINDS = "bfloat16 or float16 or float32"


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (f"tokens: expected {KINDS} [num_tokens, hidden], got float64 [40, 64]", {"tokens": TOKENS.double()}),
        (f"tokens: expected {KINDS} [num_tokens, hidden], got float32 [64]", {"tokens": TOKENS[0]}),
        (f"tokens: expected {KINDS} [num_tokens, hidden], got float32 [1, 1, 40, 64]", {"tokens": TOKENS[None, None]}),
        (f"tokens: expected {KINDS} [num_tokens, hidden], got NoneType", {"tokens": None}),
        (f"gate: expected {KINDS} [num_experts, 64], got int8 [32, 64]", {"gate": GATE.to(torch.int8)}),
        (f"gate: expected {KINDS} [num_experts, 64], got float32 [64, 32]", {"gate": GATE.T}),
        ("gate: expected a tensor on cpu like the other arguments, got one on meta", {"gate": GATE.to("meta")}),
        (
            "tokens.shape[1]: expected hidden to be a positive multiple of 8, got 0",
            {"tokens": TOKENS[:, :0], "gate": GATE[:, :0]},
        ),
        ("gate.shape[0]: expected an int from 1 to 1024 (num_experts), got 0", {"gate": GATE[:0]}),
        ("gate.shape[0]: expected an int from 1 to 1024 (num_experts), got 1056", {"gate": GATE.repeat(33, 1)}),
        ("k: expected an int from 1 to 32, got 33", {"k": 33}),
        ("k: expected an int from 1 to 32, got 0", {"k": 0}),
        ("k: expected an int from 1 to 32, got 4.0", {"k": 4.0}),
        ("k: expected an int from 1 to 32, got True", {"k": True}),
        ("k: expected at most num_experts = 3, got 4", {"gate": GATE[:3]}),
        ("alpha: expected a number, got str '2'", {"alpha": "2"}),
        ("alpha: expected a number, got str '1'", {"alpha": "1"}),
        ("rule: expected a Rule or a model's name, got NoneType", {"rule": None}),
        ("weights_dtype: expected torch.bfloat16, float16 or float32, got torch.float64",
         {"weights_dtype": torch.float64}),
        ("weights_dtype: expected torch.bfloat16, float16 or float32, got 'fp16'", {"weights_dtype": "fp16"}),
        ("gate.shape[0]: expected a multiple of 5 (rule.num_groups is 5), got 32", {"rule": Rule("sigmoid", 5, 2)}),
        ("gate.shape[0]: expected a multiple of 8 (rule.num_groups is 8), got 30",
         {"gate": GATE[:30], "rule": "deepseek-v3"}),
        ("rule.group_score: expected groups of at least 2 experts for 'top2_sum', got 1",
         {"rule": Rule("sigmoid", 32, 4, "top2_sum")}),
        ("k: expected at most 2 (1 groups of 2 experts compete), got 4", {"rule": Rule("sigmoid", 16, 1)}),
        (f"logit_bias: expected {KINDS} [32], got float32 [1, 1, 32]", {"logit_bias": torch.zeros(1, 1, 32)}),
        ("logit_bias: expected one bias for all tokens, [32], got float32 [1, 32]; call route once with each bias "
         "and choose rows with torch.where", {"logit_bias": torch.zeros(1, 32)}),
        ("expert_bias: expected one bias for all tokens, [32], got float16 [40, 32]; call route once with each bias "
         "and choose rows with torch.where", {"expert_bias": torch.zeros(40, 32).half()}),
        (f"expert_bias: expected {KINDS} [32], got float32 [31]", {"expert_bias": torch.zeros(31)}),
        (f"expert_bias: expected {KINDS} [32], got list", {"expert_bias": [0.0] * 32}),
        ("expert_bias: expected a tensor on cpu like the other arguments, got one on meta",
         {"expert_bias": torch.zeros(32, device="meta")}),
        ("token_ids, hash_table: expected both or neither, got one of them", {"hash_table": TABLE}),
        ("token_ids, hash_table: expected both or neither, got one of them", {"token_ids": IDS}),
        ("token_ids: expected int32 or int64 [40], got int64 [39]", {"token_ids": IDS[1:], "hash_table": TABLE}),
        ("hash_table: expected int32 or int64 [vocabulary, 4], got int64 [9, 3]",
         {"token_ids": IDS, "hash_table": TABLE[:, 1:]}),
        ("hash_table: expected int32 or int64 [vocabulary, 4], got float32 [9, 4]",
         {"token_ids": IDS, "hash_table": TABLE.float()}),
        ("token_ids: expected a tensor on cpu like the other arguments, got one on meta",
         {"token_ids": IDS.to("meta"), "hash_table": TABLE}),
        ("token_ids: expected values from 0 to 8, got values from -1 to -1",
         {"token_ids": IDS - 1, "hash_table": TABLE}),
        ("token_ids: expected values from 0 to 8, got values from 9 to 9", {"token_ids": IDS + 9, "hash_table": TABLE}),
        ("hash_table: expected distinct experts in a row, got [7, 3, -1, 7]",
         {"token_ids": IDS, "hash_table": torch.tensor([[7, 3, -1, 7]])}),
        ("hash_table: expected values from -1 to 31, got values from -2 to -2",
         {"token_ids": IDS, "hash_table": TABLE - 2}),
    ],
)  # fmt: skip
def test_refusals_word_for_word(message, changes):
    with pytest.raises(ValueError) as caught:
        route(**{"tokens": TOKENS, "gate": GATE, "k": 4} | changes)
    assert str(caught.value) == message
