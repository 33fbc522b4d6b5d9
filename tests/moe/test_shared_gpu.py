"""Shared experts on a GPU: layers against float64, the same bits eager, prepared and in graphs, slots by the launch."""

import pytest
import torch

from envoi.experts import with_shared
from envoi.ops.moe import moe, reference
from envoi.ops.moe.permute import add_shared
from envoi.quant import FORMATS
from tests.helpers.accuracy import relative_error
from tests.moe.layers import Layer, assert_replays_repeat, assert_same_bits_each_time, make
from tests.moe.parallel.cases import to
from tests.moe.test_moe import BOUNDS
from tests.moe.test_shared import gate_of, oracle, shared_layer

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("tidy_gpu")]

SIZES = {"experts": 8, "k": 2, "hidden": 256, "intermediate": 256}


def on_gpu(tokens: int) -> Layer:
    return to(make(tokens=tokens, **SIZES), "cuda")


@pytest.mark.parametrize("format", FORMATS)
def test_layers(format):
    """By the kernels for few tokens and for many, a shared expert in two slots and a part of a third."""
    routed, shared = on_gpu(1).pack(format), to(shared_layer(640), "cuda").pack(format)
    for gate in (None, gate_of().cuda()):
        experts = with_shared(routed, shared, gate)
        assert experts.num_shared == 3 and experts.order == routed.order
        for tokens in (1, 9, 300):
            layer = on_gpu(tokens)
            got = moe(layer.tokens, layer.routing, experts)
            assert relative_error(got, oracle(layer, routed, shared, gate)) < BOUNDS[format]
    assert_same_bits_each_time(layer, experts)
    assert_replays_repeat(layer, experts)
    assert_replays_repeat(on_gpu(3), experts)


@pytest.mark.parametrize(("num_tokens", "k", "hidden"), [(1, 8, 7168), (2048, 10, 2048), (513, 1, 64)])
def test_the_launch_adds_what_torch_adds(num_tokens, k, hidden):
    layer = to(make(tokens=num_tokens, experts=16, k=k, hidden=hidden, intermediate=64), "cuda")
    shared = to(shared_layer(64, hidden=hidden, k=1), "cuda").pack()
    for gate in (None, gate_of(hidden).cuda()):
        experts, r = with_shared(layer.pack(), shared, gate), layer.routing
        weights, ids = add_shared(layer.tokens, r.topk_weights, r.topk_ids, experts)
        want = reference.with_shared(layer.tokens, r.topk_weights, r.topk_ids, 16, 1, gate)
        assert torch.equal(ids, want[1])
        torch.testing.assert_close(weights, want[0], rtol=1e-5, atol=0)
