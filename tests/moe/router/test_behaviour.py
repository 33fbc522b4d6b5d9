"""Behaviour of `envoi.route` for its users: batches, dtypes, strides, autocast, tracing, refusals."""

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear

from envoi.ops.moe.router import PRESETS, Rule, preset, replay, route, rule
from envoi.ops.moe.router.reference import EPS, router_logits, select
from tests.helpers.accuracy import assert_at_most_twice, assert_same_bits, relative_error
from tests.helpers.slow import mostly_slow
from tests.moe.router.test_selection import RULES

FLOATS = [torch.bfloat16, torch.float16, torch.float32]
EVERYTHING = {"return_logits": True, "return_dense": True, "return_counts": True}


def make(m: int, n: int, hidden: int = 64, dtype=torch.float32, seed: int = 0):
    source = torch.Generator().manual_seed(seed)
    tokens, gate = (torch.randn(rows, hidden, generator=source) for rows in (m, n))
    return tokens.to(dtype), (gate / hidden**0.5).to(dtype)


def assert_same_routing(got, want) -> None:
    for field in ("topk_weights", "topk_ids", "logits", "dense", "num_tokens_per_expert", "expert_offsets"):
        mine, theirs = getattr(got, field), getattr(want, field)
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert_same_bits(mine, theirs)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus", "softmax_over_topk", "sigmoid_of_topk"])
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


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss-20b", "deepseek-v3", "deepseek-v4-flash", "nemotron-super-v3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tokens_bits_are_its_own_in_models(name, dtype):
    chosen = preset(name)
    tokens, gate = make(1030, chosen.num_experts, 520, dtype)
    bias = torch.randn(chosen.num_experts) * 0.1 if chosen.has_expert_bias else None
    whole = route(tokens, gate, chosen.num_topk, rule=name, expert_bias=bias, return_logits=True)
    for rows in (1, 2, 4, 8, 16, 48, 100, 256, 1024):
        part = route(tokens[-rows:].clone(), gate, chosen.num_topk, rule=name, expert_bias=bias, return_logits=True)
        assert_same_bits(part.logits, whole.logits[-rows:])
        assert_same_bits(part.topk_weights, whole.topk_weights[-rows:])
        assert_same_bits(part.topk_ids, whole.topk_ids[-rows:])


@pytest.mark.parametrize("tokens_dtype", FLOATS)
@pytest.mark.parametrize("gate_dtype", FLOATS)
def test_every_pair_of_dtypes_is_summed_in_float32(tokens_dtype, gate_dtype):
    tokens, gate = make(65, 40, 1024)
    tokens, gate = tokens.to(tokens_dtype), gate.to(gate_dtype)
    got = route(tokens, gate, 4, return_logits=True)
    oracle = tokens.double() @ gate.double().T
    assert_at_most_twice(got.logits, linear(tokens.float(), gate.float()), oracle)
    if tokens_dtype == gate_dtype:
        assert relative_error(got.logits, oracle) <= relative_error(linear(tokens, gate), oracle) * 2
    assert (got.topk_weights.dtype, got.topk_ids.dtype, got.logits.dtype) == (torch.float32, torch.int32, torch.float32)
    assert got.num_experts == 40


@pytest.mark.parametrize("name", PRESETS)
def test_weights_are_close_to_the_float64_oracle(name):
    chosen = preset(name)
    n, k = chosen.num_experts, chosen.num_topk
    tokens, gate = make(200, n, 128, torch.bfloat16)
    source = torch.Generator().manual_seed(4)
    bias = torch.randn(n, generator=source) * 0.1 if chosen.has_expert_bias else None
    linear_bias = torch.randn(n, generator=source) if chosen.has_logit_bias else None
    got = route(tokens, gate, k, rule=name, expert_bias=bias, logit_bias=linear_bias)
    wide = chosen.alpha * tokens.double() @ gate.double().T + (0 if linear_bias is None else linear_bias.double())
    weights, ids = select(wide, k, chosen.rule, None if bias is None else bias.double())
    same = (ids == got.topk_ids).all(1)
    assert same.float().mean() > 0.98  # near ties may fall the other way
    torch.testing.assert_close(got.topk_weights[same].double(), weights[same], rtol=1e-5, atol=1e-7)
    if chosen.rule.renormalize:
        sums = got.topk_weights.double().sum(1)
        torch.testing.assert_close(sums, torch.full_like(sums, chosen.rule.routed_scale), rtol=1e-6, atol=0)


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


def test_arguments_are_left_alone():
    tokens, gate = make(9, 16)
    bias = torch.randn(16)
    table, token_ids = torch.arange(48).view(12, 4) % 16, torch.arange(9)
    before = [x.clone() for x in (tokens, gate, bias, table, token_ids)]
    route(tokens, gate, 4, rule=Rule("sigmoid"), logit_bias=bias, expert_bias=bias, **EVERYTHING)
    route(tokens, gate, 4, token_ids=token_ids, hash_table=table, **EVERYTHING)
    for x, was in zip((tokens, gate, bias, table, token_ids), before, strict=True):
        assert_same_bits(x, was)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_reach_the_logits(dtype):
    tokens, gate = make(30, 32, 256)
    want = route(tokens, gate, 4, **EVERYTHING)
    with torch.autocast("cpu", dtype=dtype):
        got = route(tokens, gate, 4, **EVERYTHING)
        assert (tokens @ gate.T).dtype == dtype  # autocast is still on
    assert_same_routing(got, want)


@pytest.mark.parametrize("setting", [torch.inference_mode, torch.no_grad])
def test_modes_change_nothing(setting):
    tokens, gate = make(30, 32)
    want = route(tokens, gate, 4, **EVERYTHING)
    with setting():
        assert_same_routing(route(tokens, gate, 4, **EVERYTHING), want)


@pytest.mark.parametrize("rule", RULES)
def test_no_tokens_at_all(rule):
    tokens, gate = make(0, 32)
    got = route(tokens, gate, 8, rule=RULES[rule], expert_bias=torch.zeros(32), **EVERYTHING)
    assert got.topk_ids.shape == got.topk_weights.shape == (0, 8)
    assert got.logits.shape == got.dense.shape == (0, 32)
    assert got.num_tokens_per_expert.tolist() == [0] * 32
    assert got.expert_offsets.tolist() == [0] * 33
    hashed = route(
        tokens, gate, 2, rule=RULES[rule], token_ids=torch.zeros(0).int(), hash_table=torch.zeros(3, 2).int()
    )
    assert hashed.topk_ids.shape == (0, 2)


@pytest.mark.parametrize("rule", RULES)
def test_dense_has_k_weights_in_a_row_of_ties(rule):
    tokens = torch.ones(12, 8)
    got = route(tokens, torch.ones(32, 8), 6, rule=RULES[rule], **EVERYTHING)
    assert bool(((got.dense > 0).sum(1) == 6).all())
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
    assert bool((route(tokens, gate, 3, float("nan")).topk_ids == -1).all())


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
        alone = route(tokens, gate[open_], 5, rule=chosen)
        torch.testing.assert_close(got.topk_weights[:, :5], alone.topk_weights, rtol=1e-6, atol=0)


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


@pytest.mark.parametrize("rule", RULES)
def test_hash_routing_weighs_as_the_rule_does(rule):
    source = torch.Generator().manual_seed(6)
    tokens, gate = make(300, 32)
    table = torch.stack([torch.randperm(32, generator=source)[:4] for _ in range(50)])
    token_ids = torch.randint(0, 50, (300,), generator=source)
    for ints in (torch.int32, torch.int64):
        got = route(
            tokens, gate, 4, rule=RULES[rule], token_ids=token_ids.to(ints), hash_table=table.to(ints), **EVERYTHING
        )
        assert torch.equal(got.topk_ids.long(), table[token_ids])
        wide = got.logits.double()
        for row in range(0, 300, 60):
            ids = table[token_ids[row]]
            score = {
                "softmax": wide[row].softmax(0), "sigmoid": wide[row].sigmoid(),
                "sqrt_softplus": (1 + wide[row].exp()).log().sqrt(),
                "softmax_over_topk": torch.zeros(32).double().scatter(0, ids, wide[row, ids].softmax(0)),
                "sigmoid_of_topk": wide[row].sigmoid(),
            }[RULES[rule].score][ids]  # fmt: skip
            want = score / score.sum() if RULES[rule].renormalize else score
            torch.testing.assert_close(
                got.topk_weights[row].double(), want * RULES[rule].routed_scale, rtol=2e-6, atol=1e-9
            )
        assert got.num_tokens_per_expert.tolist() == torch.bincount(table[token_ids].flatten(), minlength=32).tolist()
        assert_same_bits(got.dense.gather(1, got.topk_ids.long()), got.topk_weights)


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
    "message, ids",
    [
        ("topk_ids: expected a row of k for each of 50 tokens, got int64 [49, 3]", torch.zeros(49, 3).long()),
        ("topk_ids: expected a row of k for each of 50 tokens, got int64 [50]", torch.zeros(50).long()),
        ("topk_ids: expected int32 or int64, got float32 [50, 3]", torch.zeros(50, 3)),
        ("hash_table: expected values from -1 to 15, got values from 0 to 16", torch.tensor([[0, 16]] * 50)),
    ],
)
def test_replay_refuses(message, ids):
    with pytest.raises(ValueError, match=re.escape(message)):
        replay(*make(50, 16), ids)


OPERATOR_CALLS = {
    "softmax": ("softmax", 1, 1, "max", True, 1.0),
    "groups by two": ("sigmoid", 4, 2, "top2_sum", True, 2.5),
    "softmax over the k": ("softmax_over_topk", 1, 1, "max", False, 1.0),
}


@pytest.mark.parametrize("call", mostly_slow(OPERATOR_CALLS, ["groups by two"]))
@pytest.mark.parametrize("m", [0, 3])
@pytest.mark.parametrize("hashed", [False, True])
def test_the_operator_keeps_its_promises(call, m, hashed):
    tokens, gate = make(m, 16)
    lookup = (torch.zeros(m).long(), torch.arange(8).view(2, 4)) if hashed else (None, None)
    bias = None if hashed else torch.randn(16)
    arguments = (tokens, gate, 4, 1.0, *OPERATOR_CALLS[call], torch.randn(16), bias, *lookup, True, True, True)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.envoi.route.default, arguments, test_utils=tests)


@pytest.mark.parametrize(
    "name", mostly_slow(["mixtral", "gpt-oss-20b", "deepseek-v3", "deepseek-v4-flash"], ["deepseek-v3"])
)
@pytest.mark.parametrize("dynamic", [False, True])
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


def test_a_hash_lookup_compiles_with_a_changing_batch():
    _, gate = make(1, 16)
    table = torch.arange(20).view(5, 4) % 16

    def step(tokens, token_ids):
        return route(tokens, gate, 4, rule="deepseek-v4-flash", token_ids=token_ids, hash_table=table).topk_weights + 1

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for m in (4, 9, 30):  # the second size makes it a symbol
        tokens, _ = make(m, 1, seed=m)
        assert_same_bits(compiled(tokens, torch.arange(m) % 5), step(tokens, torch.arange(m) % 5))


def test_shapes_are_known_without_data():
    tokens, gate = (x.to("meta") for x in make(6, 16))
    got = route(tokens, gate, 3, **EVERYTHING)
    assert (got.topk_weights.shape, got.topk_ids.dtype, got.dense.shape) == ((6, 3), torch.int32, (6, 16))
    assert (got.logits.device.type, got.expert_offsets.shape) == ("meta", (17,))
    plain = route(tokens, gate, 3)
    assert (plain.logits, plain.dense, plain.num_tokens_per_expert, plain.expert_offsets) == (None,) * 4


@given(
    m=st.integers(0, 20), size=st.integers(2, 12), data=st.data(), score=st.sampled_from(sorted(RULES)),
    dtype=st.sampled_from(FLOATS), biased=st.booleans(), seed=st.integers(0, 999),
    spread=st.sampled_from([0.0, 1.0, 9.0]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_what_always_holds(m, size, data, score, dtype, biased, seed, spread):
    chosen = RULES[score]
    n = size * chosen.num_groups
    k = data.draw(st.integers(1, min(size * chosen.num_topk_groups, 32)))
    tokens, gate = make(m, n, 16, dtype, seed)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(seed)) if biased else None
    got = route(tokens, gate, k, spread, rule=chosen, expert_bias=bias, **EVERYTHING)
    ids, weights = got.topk_ids.long(), got.topk_weights
    assert bool(((ids >= 0) & (ids < n)).all())
    assert all(len(set(row)) == k for row in ids.tolist())
    if not biased:  # the key rises with the logit, so do the weights
        ordered = got.logits.gather(1, ids)
        assert bool((ordered[:, :-1] >= ordered[:, 1:]).all()) or chosen.group_score == "top2_sum"
        assert bool((weights[:, :-1] >= weights[:, 1:]).all())
    if chosen.num_groups > 1:
        assert all(len({i // size for i in row}) <= chosen.num_topk_groups for row in ids.tolist())
    assert bool((weights >= 0).all()) and bool(weights.isfinite().all())
    if chosen.renormalize:
        as_scored = replace(chosen, renormalize=False, routed_scale=1.0)
        sums = route(tokens, gate, k, spread, rule=as_scored, expert_bias=bias).topk_weights.double().sum(1)
        # A bias may choose experts whose softmax all but underflows: EPS is a part of so small a sum.
        want = (chosen.routed_scale * sums / (sums + EPS)).float()
        torch.testing.assert_close(weights.sum(1), want, rtol=1e-5, atol=1e-30)
    assert_same_bits(got.dense.gather(1, ids), weights)
    assert torch.equal(got.dense.count_nonzero(1), weights.count_nonzero(1))
    assert got.num_tokens_per_expert.sum() == m * k == got.expert_offsets[-1]
    assert torch.equal(got.expert_offsets.diff(), got.num_tokens_per_expert)
    assert_same_bits(got.logits, router_logits(tokens, gate, spread, None))


def test_presets_and_rules_by_name():
    assert rule("deepseek-v3") == preset("deepseek-v3").rule == PRESETS["deepseek-v3"].rule
    for look_up in (rule, preset):
        with pytest.raises(ValueError, match="model: expected one of 'mixtral', .*'muse-spark', got 'deepseek'"):
            look_up("deepseek")


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
        ("hash_table: expected values from -1 to 31, got values from -2 to -2",
         {"token_ids": IDS, "hash_table": TABLE - 2}),
    ],
)  # fmt: skip
def test_refusals_word_for_word(message, changes):
    with pytest.raises(ValueError) as caught:
        route(**{"tokens": TOKENS, "gate": GATE, "k": 4} | changes)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("rule.score: expected one of 'softmax', 'sigmoid', 'sqrt_softplus', 'softmax_over_topk', 'sigmoid_of_topk', "
         "got 'SoftMax'", {"score": "SoftMax"}),
        ("rule.group_score: expected one of 'max', 'top2_sum', got None", {"group_score": None}),
        ("rule.num_groups: expected an int of at least 1, got 2.0", {"num_groups": 2.0}),
        ("rule.num_topk_groups: expected an int from 1 to 1 (at most num_groups), got 2", {"num_topk_groups": 2}),
        ("rule.routed_scale: expected a number, got str '2.5'", {"routed_scale": "2.5"}),
        ("rule.renormalize: expected True or False, got int 1", {"renormalize": 1}),
    ],
)  # fmt: skip
def test_rules_are_refused_when_they_are_made(message, fields):
    with pytest.raises(ValueError) as caught:
        Rule(**fields)
    assert str(caught.value) == message
