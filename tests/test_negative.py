"""Tensors whose memory holds the negative of their elements (`torch.Tensor.is_neg`), as every tensor of every operator.

tests/interpreted/test_negative.py runs these tests with Triton's kernels.
"""

import pytest
import torch

import envoi
from envoi.epilogues import Col, HalfCol, HalfTile, Row, Scalar, Tile, pairs
from envoi.ops.moe.op import flatten, unflatten
from envoi.quant import SCHEMES, quantize
from envoi.runtime.custom_op import plain
from tests.helpers.accuracy import assert_same_bits
from tests.moe.layers import make
from tools.oracles.indexer_workloads import one

SOURCE = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=SOURCE)


def negative(x: torch.Tensor) -> torch.Tensor:
    """Return equal elements whose memory holds their negatives."""
    return torch._neg_view(-x)


@envoi.epilogue
def everything(acc, s: Scalar, r: Row, c: Col, t: Tile, h: HalfCol, ht: HalfTile):
    even, odd = pairs(acc * s * r + c + t)
    return even * h + odd + ht


OPERANDS = {"s": normal(1), "r": normal(5), "c": normal(16), "t": normal(5, 16), "h": normal(8), "ht": normal(5, 8)}
GATES = {"tokens": normal(5, 64), "gate": normal(16, 64)}
LAYER = make(tokens=7, hidden=64, intermediate=32, bias=True, activation="swiglu_oai")
PACKED = flatten(LAYER.pack())
NAMES = ("gate_up", "gate_up_sf", "gate_up_bias", "down", "down_sf", "down_bias")
PAGES = dict(zip(("q", "k_cache", "weights", "seq_lens", "block_table"), one((70, 3)).tensors(), strict=True))
SCALED = quantize(normal(5, 64), "fp8_row"), quantize(normal(16, 64), "fp8_row")


def gemm(a, b, **operands):
    return [envoi.gemm(a, b, everything, **operands)]


def grouped_gemm(rows, weights, offsets, **operands):
    return [envoi.grouped_gemm(rows, weights, offsets, everything, **operands)]


def scaled_gemm(a_sf, b_sf):
    sides = (envoi.QuantTensor(x.values, sf, x.group) for x, sf in zip(SCALED, (a_sf, b_sf), strict=True))
    return [envoi.gemm(*sides)]


def route(tokens, gate, **extra):
    found = envoi.route(tokens, gate, 3, return_logits=True, **extra)
    return [found.topk_ids, found.topk_weights, found.logits]


def moe(tokens, topk_weights, topk_ids, **weights):
    packed = [weights.get(name, other) for name, other in zip(NAMES, PACKED, strict=False)]
    return [envoi.moe(tokens, envoi.Routing(topk_weights, topk_ids, 8), unflatten(*packed, *PACKED[len(NAMES) :]))]


def indexer(**tensors):
    return [envoi.indexer_topk(**tensors, k=512, mode="fast")]


CASES = {
    gemm: {"a": normal(5, 64), "b": normal(16, 64), **OPERANDS},
    grouped_gemm: {
        "rows": normal(5, 64), "weights": normal(2, 16, 64), "offsets": torch.tensor([0, 2, 5], dtype=torch.int32),
        **OPERANDS, "c": normal(2, 16), "h": normal(2, 8),
    },
    scaled_gemm: {"a_sf": SCALED[0].sf, "b_sf": SCALED[1].sf},
    route: {**GATES, "logit_bias": normal(16), "expert_bias": normal(16)},
    (lambda **given: route(**given)): {
        **GATES, "token_ids": torch.arange(5), "hash_table": torch.rand(9, 16, generator=SOURCE).argsort(1)[:, :3],
    },
    moe: {
        "tokens": LAYER.tokens, "topk_weights": LAYER.routing.topk_weights, "topk_ids": LAYER.routing.topk_ids,
        **{name: x for name, x in zip(NAMES, PACKED, strict=False) if x is not None},
    },
    indexer: PAGES,
}  # fmt: skip


@pytest.mark.parametrize(
    ("function", "name"), [(f, name) for f, given in CASES.items() for name, x in given.items()
                           if x.dtype != torch.float8_e4m3fn]
)  # fmt: skip
def test_the_sign_is_kept(function, name):
    given = CASES[function]
    other = given | {name: negative(given[name])}
    assert other[name].is_neg()
    for got, want in zip(function(**other), function(**given), strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantising_keeps_the_sign(scheme):
    x = normal(6, 256)
    got, want = quantize(negative(x), scheme), quantize(x, scheme)
    assert torch.equal(got.values.view(torch.uint8), want.values.view(torch.uint8))
    assert torch.equal(got.sf.view(torch.uint8), want.sf.view(torch.uint8))


def test_such_tensors_are_not_plain():
    x = normal(3)
    assert plain([x, 1, "text", None, [x, torch.nn.Parameter(x)]])
    for other in (negative(x), torch.complex(x, x).conj(), x.to("meta"), [x, negative(x)]):
        assert not plain([x, other])


def test_what_torch_can_not_negate_is_an_error():
    """Test an error instead of a wrong result: eight-bit floats have no negation on CPUs."""
    q = SCALED[0]
    with pytest.raises(NotImplementedError, match="neg"):
        envoi.gemm(envoi.QuantTensor(torch._neg_view(q.values), q.sf, q.group), SCALED[1])
