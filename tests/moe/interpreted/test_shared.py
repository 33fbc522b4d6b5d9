"""Shared experts by kernels: the launch that adds their slots, and layers with them, against the reference."""

from dataclasses import replace

import pytest
import torch

from envoi.experts import with_shared
from envoi.ops.moe import moe, reference
from envoi.ops.moe.permute import MAX_COLUMNS, SHARED_SLOTS, add_shared
from envoi.types import Routing
from tests.helpers.accuracy import assert_at_most_twice, assert_same_bits
from tests.helpers.slow import mostly_slow
from tests.moe.layers import make
from tests.moe.test_shared import gate_of, oracle, shared_layer

FEW = {"tokens": 5, "experts": 4, "k": 2, "hidden": 128, "intermediate": 128}


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "k", "num_shared"), [(1, 1, 1), (7, 3, 2), (SHARED_SLOTS // 4 + 3, 5, 1), (3, 0, 1)]
)
def test_the_launch_adds_what_torch_adds(num_tokens, k, num_shared, gated):
    """Of ids that are none, as int64 too, and tokens far apart, in more columns than a program loads at once."""
    source, hidden = torch.Generator().manual_seed(num_tokens), MAX_COLUMNS + 64
    experts = make(experts=6, hidden=hidden, intermediate=64, tokens=1, k=1).pack()
    gate = gate_of(hidden) if gated else None
    experts = replace(experts, num_shared=num_shared, shared_gate=gate)
    tokens = torch.randn(num_tokens, 2 * hidden, generator=source).bfloat16()[:, :hidden]
    for dtype in (torch.int32, torch.int64):
        ids = torch.randint(-3, 9, (num_tokens, k), generator=source).to(dtype)
        ids.view(-1)[:1] = torch.iinfo(dtype).max
        weights = torch.rand(num_tokens, k, generator=source).bfloat16()
        got_weights, got = add_shared(tokens, weights, ids, experts)
        known = torch.where((ids < 0) | (ids >= experts.num_routed), -1, ids).to(torch.int32)
        want_weights, want = reference.with_shared(tokens, weights.float(), known, experts.num_routed, num_shared, gate)
        assert torch.equal(got, want) and got.dtype == torch.int32 and got_weights.dtype == torch.float32
        assert torch.equal(got_weights[:, :k], want_weights[:, :k])
        torch.testing.assert_close(got_weights, want_weights, rtol=2e-6, atol=0)
        alone, _ = add_shared(tokens[-1:], weights[-1:], ids[-1:], experts)
        assert torch.equal(alone, got_weights[-1:])


@pytest.mark.parametrize(
    ("format", "gated"),
    mostly_slow(
        [(f, g) for f in ("bf16", "fp8_block128", "fp8_row", "mxfp4_mxfp8", "nvfp4") for g in (False, True)],
        quick=[("bf16", True), ("fp8_block128", False)],
    ),
)
def test_error_is_at_most_twice_the_references(format, gated):
    layer, gate = make(**FEW), gate_of(128) if gated else None
    routed, shared = layer.pack(format), shared_layer(256, tokens=1, hidden=128).pack(format)
    experts, r = with_shared(routed, shared, gate), layer.routing
    want = oracle(layer, routed, shared, gate)
    got = moe(layer.tokens, r, experts)
    assert_at_most_twice(got, reference.moe(layer.tokens, r.topk_weights, r.topk_ids, experts), want)
    none = Routing(r.topk_weights[:, :0], r.topk_ids[:, :0], 4)
    masked = replace(r, topk_ids=torch.full_like(r.topk_ids, -1))
    assert_same_bits(moe(layer.tokens, none, experts), moe(layer.tokens, masked, experts))


def test_ids_past_the_routed_experts_are_masked():
    """On a device nothing refuses them; the shared experts' own ids are no routing's."""
    layer = make(**FEW)
    experts, r = with_shared(layer.pack(), shared_layer(128, tokens=1, hidden=128).pack()), layer.routing
    wrong = r.topk_ids.clone()
    wrong[2, 1] = 4
    added = add_shared(layer.tokens, r.topk_weights, wrong, experts)[1]
    assert added[2].tolist() == [int(wrong[2, 0]), -1, 4]
