"""Weights of `envoi.route`: logits themselves (the score "identity"), and weights in fp16 and bf16."""

import numpy as np
import pytest
import torch

import envoi
from envoi.ops.moe.router import Rule, replay, route
from envoi.ops.moe.router.api import _given
from envoi.types import Routing
from tests.helpers.accuracy import assert_same_bits
from tests.moe.router.test_selection import RULES

IDENTITY = Rule("identity", renormalize=False)
HALVES = [torch.bfloat16, torch.float16]
EVERYTHING = {"return_logits": True, "return_dense": True, "return_counts": True}
OTHERS = ("topk_ids", "logits", "num_tokens_per_expert", "expert_offsets")


def make(m: int, n: int, hidden: int = 64, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    tokens, gate = (torch.randn(rows, hidden, generator=source) for rows in (m, n))
    return tokens, gate / hidden**0.5


def hostile(m: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make whole numbers, so that every product is exact in float32; ties, and logits that aren't finite."""
    tokens, gate = (x.mul(4).round() for x in make(m, n))
    gate[5], gate[7] = gate[9], gate[3]
    gate[2], gate[11, 0] = torch.nan, torch.inf
    tokens[4], tokens[6] = torch.nan, 0.0
    return tokens, gate


def best_of(logits: np.ndarray, key: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return values and ids of the k largest keys, first by value and then by id; 0 and -1 where there are no more."""
    values, ids = np.zeros((len(key), k)), np.full((len(key), k), -1)
    for row in range(len(key)):
        finite = np.flatnonzero(np.isfinite(key[row]))
        best = finite[np.lexsort((finite, -key[row, finite]))][:k]
        values[row, : len(best)], ids[row, : len(best)] = logits[row, best], best
    return values, ids


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("scale", [1.0, -2.0])
def test_the_identity_gives_the_logits_themselves(biased, scale):
    tokens, gate = hostile(40, 32)
    bias = torch.arange(32).remainder(5).float() if biased else None
    rule = Rule("identity", renormalize=False, routed_scale=scale)
    got = route(tokens, gate, 6, rule=rule, expert_bias=bias, return_logits=True)
    with np.errstate(invalid="ignore"):
        logits = tokens.double().numpy() @ gate.double().numpy().T
    values, ids = best_of(logits, logits if bias is None else logits + bias.double().numpy(), 6)
    assert np.array_equal(got.topk_ids.numpy(), ids)
    assert np.array_equal(got.topk_weights.double().numpy(), values * scale)
    assert bool((got.topk_ids[4] == -1).all())
    assert got.topk_ids[6].tolist() == [0, 1, 3, 4, 5, 6] if not biased else [4, 9, 14, 19, 24, 29]


def test_groups_of_the_identity_compete_by_logits():
    x = torch.tensor([[-9.0, -9.0, 1.0, 1.5, 3.0, -1.0, -2.0, -2.0]])
    got = route(torch.ones(1, 8), x.T.repeat(1, 8) / 8, 2, rule=Rule("identity", 4, 1, "top2_sum", renormalize=False))
    assert got.topk_ids.tolist() == [[3, 2]]
    assert got.topk_weights.tolist() == [[1.5, 1.0]]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rule", RULES)
def test_weights_are_rounded_once(rule, dtype):
    tokens, gate = make(60, 32)
    tokens[3] = torch.nan
    want = route(tokens, gate, 5, rule=RULES[rule], **EVERYTHING)
    got = route(tokens, gate, 5, rule=RULES[rule], weights_dtype=dtype, **EVERYTHING)
    assert_same_bits(got.topk_weights, want.topk_weights.to(dtype))
    assert_same_bits(got.dense, want.dense.to(dtype))
    for name in OTHERS:
        assert_same_bits(getattr(got, name), getattr(want, name))
    again = replay(tokens, gate, want.topk_ids, rule=RULES[rule], weights_dtype=dtype)
    assert_same_bits(again.topk_weights, got.topk_weights)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_every_way_to_call_has_the_dtype(dtype):
    tokens, gate = make(12, 32)
    given = {"rule": IDENTITY, "weights_dtype": dtype, "return_dense": True}
    want = route(tokens, gate, 4, **given)
    assert want.topk_weights.dtype == want.dense.dtype == dtype
    out = Routing(
        torch.empty(12, 4, dtype=dtype), torch.empty(12, 4, dtype=torch.int32), 32, dense=torch.empty(12, 32).to(dtype)
    )
    assert route(tokens, gate, 4, out=out, **given).topk_weights is out.topk_weights
    assert_same_bits(out.topk_weights, want.topk_weights)
    assert_same_bits(out.dense, want.dense)
    meta = tokens.to("meta"), gate.to("meta")
    planned = envoi.plan(route, *meta, 4, **given).outputs
    assert planned.topk_weights.dtype == planned.dense.dtype == route(*meta, 4, **given).topk_weights.dtype == dtype
    compiled = torch.compile(lambda x: route(x, gate, 4, **given).topk_weights, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(tokens), want.topk_weights)


def test_out_of_another_dtype_is_refused():
    tokens, gate = make(12, 32)
    out = Routing(torch.empty(12, 4), torch.empty(12, 4, dtype=torch.int32), 32)
    with pytest.raises(ValueError, match="float16"):
        route(tokens, gate, 4, weights_dtype=torch.float16, out=out)


def test_out_that_says_something_else_is_refused():
    """Else the caller's Routing would send tokens to experts that it doesn't know, or have logits as weights."""
    tokens, gate = make(12, 32)
    two = torch.empty(12, 4), torch.empty(12, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="^out.num_experts: expected 32, as the call returns, got 16"):
        route(tokens, gate, 4, out=Routing(*two, 16))
    out = Routing(*two, 32, dense=torch.empty(12, 32))
    with pytest.raises(ValueError, match=r"^out.logits: expected float32 \[12, 32\], as the call returns, got None"):
        route(tokens, gate, 4, return_logits=True, out=out)
    assert route(tokens, gate, 4, return_dense=True, out=out).num_experts == out.num_experts


def test_a_layer_takes_weights_of_fewer_bits():
    source = torch.Generator().manual_seed(2)
    tokens, gate = (x.bfloat16() for x in make(12, 8, 64))
    weights = [torch.randn(8, *shape, generator=source).bfloat16() / 8 for shape in ((128, 64), (64, 64))]
    experts = envoi.ExpertWeights(*weights, "bf16")
    routing = route(tokens, gate, 2, weights_dtype=torch.float16)
    wide = Routing(routing.topk_weights.float(), routing.topk_ids, 8)
    assert_same_bits(envoi.moe(tokens, routing, experts), envoi.moe(tokens, wide, experts))


def test_calls_of_several_dtypes_are_prepared_apart():
    tokens, gate = make(4, 32)
    kinds = [_given(tokens, gate, 4, weights_dtype=dtype)[0] for dtype in (torch.float32, *HALVES)]
    assert len(set(kinds)) == 3
