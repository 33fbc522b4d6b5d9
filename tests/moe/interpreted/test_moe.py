"""Path of `envoi.moe` by kernels against the reference, on layers and routings chosen to break it."""

from itertools import product

import pytest
import torch

from envoi.ops.moe import api, moe, reference
from envoi.ops.moe.experts import run_experts, run_layer
from envoi.ops.moe.packing import READ_AS_STORED
from envoi.ops.moe.parallel import counted
from envoi.ops.moe.permute import empty_rows
from envoi.ops.moe.reference import permute
from envoi.quant import FORMATS, format_named
from envoi.types import Routing
from tests.helpers.accuracy import assert_at_most_twice, assert_same_bits, relative_error
from tests.helpers.slow import mostly_slow
from tests.moe.layers import Layer, make, with_ids
from tests.moe.own import OWN, layer_of, oracle
from tests.moe.test_activations import MORE_KINDS
from tests.moe.test_moe import BOUNDS, CROSSED, KINDS
from tests.moe.test_own_activation import bound
from tools.oracles.moe import moe_oracle

# One format for each path through L1's epilogue and the tokens' quantisation.
SOME = ("bf16", "fp8_block128", "mxfp4", "mxfp4_mxfp8", "nvfp4")
SMALL = {"tokens": 9, "experts": 4, "k": 2, "hidden": 128, "intermediate": 128}


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Count the calls of the kernels' path: a test that doesn't take it proves nothing."""
    made = []
    original = api.run_layer
    monkeypatch.setattr(api, "run_layer", lambda *given: made.append(1) or original(*given))
    return made


def arguments(layer: Layer, format: str) -> tuple:
    return layer.tokens, layer.routing.topk_weights, layer.routing.topk_ids, layer.pack(format)


def run(layer: Layer, format: str = "bf16") -> torch.Tensor:
    return moe(layer.tokens, layer.routing, layer.pack(format))


def assert_right(layer: Layer, format: str) -> torch.Tensor:
    got, want = run(layer, format), moe_oracle(*arguments(layer, format))
    assert_at_most_twice(got, reference.moe(*arguments(layer, format)), want)
    assert relative_error(got, want) < 1.5 * BOUNDS[format]
    return got


@pytest.mark.parametrize(("format", "kind"), mostly_slow(product(FORMATS, KINDS), quick=CROSSED))
def test_error_is_at_most_twice_the_references(format, kind, calls):
    assert_right(make(**SMALL, **KINDS[kind]), format)
    assert calls


@pytest.mark.parametrize("format", SOME)
def test_hostile_routing(format):
    layer = make(**SMALL)
    assert_right(with_ids(layer, torch.full((9, 2), 3)), format)  # one expert, and twice in a token
    masked = with_ids(layer, torch.full((9, 2), -1))
    assert_same_bits(run(masked, format), torch.zeros_like(layer.tokens))
    some = run(with_ids(layer, torch.tensor([[0, 1], [-1, -1], [-1, 2], *[[1, 0]] * 6])), format)
    assert bool((some[1] == 0).all())
    assert bool(some[2].any())


@pytest.mark.parametrize("format", FORMATS)
def test_no_tokens(format, calls):
    assert run(make(**{**SMALL, "tokens": 0}), format).shape == (0, 128)
    assert calls


@pytest.mark.parametrize("format", SOME)
def test_bad_tokens_spoil_no_others(format):
    layer = make(**SMALL, masked=0.0)
    clean = run(layer, format)
    layer.tokens[7, 100], layer.tokens[2, 0] = torch.nan, torch.inf
    got = run(layer, format)
    others = [0, 1, 3, 4, 5, 6, 8]
    assert_same_bits(got[others], clean[others])
    assert bool(got[[2, 7]].isnan().any(1).all())


@pytest.mark.parametrize("format", SOME)
def test_bits_are_the_same_in_every_run_and_in_every_batch(format):
    layer = make(**SMALL)
    whole, packed = run(layer, format), layer.pack(format)
    assert_same_bits(run(layer, format), whole)
    part = Routing(layer.routing.topk_weights[2:5], layer.routing.topk_ids[2:5], 4)
    assert_same_bits(moe(layer.tokens[2:5], part, packed), whole[2:5])


@pytest.mark.parametrize("format", ["bf16", "mxfp4", "mxfp4_mxfp8"])
def test_hidden_2880(format):
    assert_right(make(2, 1, 1, hidden=2880, intermediate=32, activation="swiglu_oai", bias=True), format)


@pytest.mark.parametrize("format", SOME)
def test_the_path_across_ranks_has_the_same_bits(format):
    layer = make(**SMALL, bias=True)
    tokens, weights, ids, packed = arguments(layer, format)
    rows = permute(reference.quantize_tokens(tokens, format), weights, ids, 4)
    slots = torch.zeros(18, 128, dtype=torch.bfloat16)
    slots[rows.pos_to_slot.long()] = counted.run_local_experts(rows, packed)
    total = torch.zeros(9, 128)
    for slot in range(2):
        total += slots.view(9, 2, 128)[:, slot].float()
    assert_same_bits(total.bfloat16(), run(layer, format))


@pytest.mark.parametrize("format", FORMATS)
def test_a_rank_without_rows(format):
    packed = make(**SMALL, bias=True).pack(format)
    rows = empty_rows(0, 128, format_named(format).activations, torch.device("cpu"))
    out = run_experts(rows, torch.zeros(0), torch.zeros(5, dtype=torch.int32), packed)
    assert (out.shape, out.dtype) == ((0, 128), torch.bfloat16)


# Weights as stored, gate rows above up rows


@pytest.mark.parametrize("format", READ_AS_STORED)
@pytest.mark.parametrize("kind", mostly_slow(KINDS, quick=[next(iter(KINDS))]))
def test_concatenated_weights(format, kind, calls):
    assert_right(make(**SMALL, **KINDS[kind], packed_layout="concat"), format)
    assert calls


@pytest.mark.parametrize("format", ["bf16", "fp8_row"])  # blocks of 128 rows have other factors in each layout
@pytest.mark.parametrize("kind", mostly_slow(KINDS, quick=[next(iter(KINDS))]))
def test_both_layouts_give_the_same_bits(format, kind):
    layer = make(**{**SMALL, "intermediate": 200}, **KINDS[kind])
    interleaved = run(layer, format)
    layer.packed_layout = "concat"
    assert_same_bits(run(layer, format), interleaved)


# Other activations


@pytest.mark.parametrize(("kind", "format"), [
    *((kind, "bf16") for kind in MORE_KINDS), ("geglu", "mxfp8"), ("geglu_concat", "fp8_block128"), ("silu", "fp8_row"),
    ("relu2", "mxfp8"), ("relu2", "mxfp4"),
])  # fmt: skip
def test_more_activations(kind, format):
    given = arguments(make(**SMALL, **MORE_KINDS[kind]), format)
    assert relative_error(run_layer(*given), moe_oracle(*given)) < BOUNDS[format] * (2 if kind == "relu2" else 1)


@pytest.mark.parametrize(("name", "format", "layout"), [
    *(("clipped", format, None) for format in FORMATS), *(("quick_gelu", format, None) for format in SOME),
    *((name, "bf16", None) for name in OWN if name not in ("clipped", "quick_gelu")),
    ("clipped", "bf16", "concat"), ("clipped", "fp8_block128", "concat"),
])  # fmt: skip
def test_users_own_activations(name, format, layout):
    layer = layer_of(name, **SMALL, bias=name == "reglu")
    layer.packed_layout = layout
    given = arguments(layer, format)
    assert relative_error(run_layer(*given), oracle(layer, given[-1], name)) < bound(format, OWN[name])
