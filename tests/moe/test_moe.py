"""Function `envoi.moe` on one rank: accuracy, bits, compilation, refusals."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from envoi.ops.moe import moe
from envoi.ops.moe.op import flatten
from envoi.ops.moe.router import route
from envoi.quant import FORMATS
from envoi.types import Routing
from tests.helpers.accuracy import assert_at_most_twice, assert_same_bits
from tests.helpers.slow import mostly_slow
from tests.moe.layers import Layer, eager_bf16, make
from tools.oracles.moe import moe_oracle

OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
BOUNDS = {"bf16": 0.006, "fp8_row": 0.06, "fp8_block128": 0.06, "mxfp8": 0.06, "mxfp4": 0.004, "mxfp4_mxfp8": 0.06,
          "mxfp4_fp8": 0.06, "nvfp4": 0.004, "int4": 0.005}  # fmt: skip
KINDS = {
    "swiglu": {}, "limit": {"limit": 0.5}, "bias": {"bias": True},
    "swiglu_oai": {"bias": True, "activation": "swiglu_oai"},
}  # fmt: skip
CROSSED = [*product(["bf16"], KINDS), *product(FORMATS, ["swiglu"])]  # each format, and each kind


def run(layer: Layer, format: str = "bf16") -> torch.Tensor:
    return moe(layer.tokens, layer.routing, layer.pack(format))


def oracle(layer: Layer, format: str) -> torch.Tensor:
    return moe_oracle(layer.tokens, layer.routing.topk_weights, layer.routing.topk_ids, layer.pack(format))


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_as_good_as_torchs(kind):
    layer = make(**KINDS[kind])
    assert_at_most_twice(run(layer), eager_bf16(layer), oracle(layer, "bf16"))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_token_spoils_no_other(format, bad):
    layer = make(masked=0.0)
    clean = run(layer, format)
    layer.tokens[7, 100] = bad
    got = run(layer, format)
    others = torch.arange(60) != 7
    assert_same_bits(got[others], clean[others])
    assert bool(got[7].isnan().any())


@pytest.mark.parametrize(("format", "kind"), mostly_slow(product(FORMATS, KINDS), quick=CROSSED))
def test_a_tokens_bits_do_not_depend_on_the_others(format, kind):
    width = 24 if format in ("bf16", "fp8_row") else 128  # 24 isn't a multiple of every CPU's vector
    layer = make(tokens=97, hidden=width, intermediate=width, **KINDS[kind])
    weights, ids, packed = layer.routing.topk_weights, layer.routing.topk_ids, layer.pack(format)
    whole = run(layer, format)
    source = torch.Generator().manual_seed(1)
    for size in (1, 1, 2, 5, 31, 97):
        chosen = torch.randperm(97, generator=source)[:size]
        got = moe(layer.tokens[chosen], Routing(weights[chosen], ids[chosen], 8), packed)
        assert_same_bits(got, whole[chosen])
    others = torch.arange(97) % 4 != 0
    layer.tokens[others] = torch.randn(int(others.sum()), width, generator=source).bfloat16() * 100
    ids[others] = ids[others].flip(0)
    assert_same_bits(run(layer, format)[~others], whole[~others])


def test_operator_is_well_formed():
    layer = make(tokens=4, bias=True)
    for format in ("bf16", "fp8_block128", "mxfp4", "mxfp4_mxfp8"):
        arguments = (layer.tokens, layer.routing.topk_weights, layer.routing.topk_ids, *flatten(layer.pack(format)))
        # torch's own check of the schema can't compare float8 arguments.
        checks = OPCHECKS if format == "bf16" else OPCHECKS[1:]
        torch.library.opcheck(torch.ops.envoi.moe.default, arguments, test_utils=checks)


def test_compiles_as_one_graph():
    layer = make()
    packed, gate = layer.pack("mxfp8"), torch.randn(8, 256).bfloat16()

    def step(tokens):
        return moe(tokens, route(tokens, gate, 2), packed) * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(layer.tokens), step(layer.tokens))


def changed(ids: torch.Tensor, token: int, slot: int, expert: int) -> torch.Tensor:
    ids = ids.clone()
    ids[token, slot] = expert
    return ids


LAYER = make()
R = LAYER.routing


@pytest.mark.parametrize(
    ("message", "tokens", "routing"),
    [
        (r"tokens: expected bfloat16 or float16 \[num_tokens, 256\], got float32 \[60, 256\]", LAYER.tokens.float(), R),
        (r"expected bfloat16 or float16 \[num_tokens, 256\], got bfloat16 \[60, 255\]", LAYER.tokens[:, :255], R),
        ("tokens: expected a tensor on cpu .*, got one on meta", LAYER.tokens.to("meta"), R),
        (r"expected int32 or int64 \[60, num_topk\], got int16", LAYER.tokens, replace(R, topk_ids=R.topk_ids.short())),
        ("topk_ids: expected int32 or int64 .60, .*, got NoneType", LAYER.tokens, replace(R, topk_ids=None)),
        ("topk_ids: expected int32 or .* .60, .*, got int32 .9, 3.", LAYER.tokens, replace(R, topk_ids=R.topk_ids[:9])),
        ("topk_weights: expected float32 or .* .60, 3., got float64", LAYER.tokens,
         replace(R, topk_weights=R.topk_weights.double())),
        ("experts: expected all 16 experts of the routing, got 8", LAYER.tokens, replace(R, num_experts=16)),
        ("ids from 0 to 7, or -1 .*, got 8 at token 1, slot 2", LAYER.tokens,
         replace(R, topk_ids=changed(R.topk_ids, 1, 2, 8))),
        ("got -2 at token 0, slot 0", LAYER.tokens, replace(R, topk_ids=torch.full_like(R.topk_ids, -2))),
        ("routing: expected an envoi.Routing, got tuple", LAYER.tokens, (R.topk_weights, R.topk_ids)),
    ],
)  # fmt: skip
def test_refusals(message, tokens, routing):
    with pytest.raises(ValueError, match=message):
        moe(tokens, routing, LAYER.pack())
