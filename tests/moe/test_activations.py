"""Activations of experts beside SwiGLU: GeGLU, and experts without a gate."""

import pytest
import torch

from envoi.experts import from_state_dict, state_dict
from envoi.ops.moe import moe, pack, unpack
from envoi.ops.moe.choose import why_not_decode_mx
from envoi.quant import FORMATS
from tests.helpers.accuracy import assert_at_most_twice, assert_same_bits, relative_error
from tests.helpers.slow import mostly_slow
from tests.moe.layers import eager_bf16, make
from tests.test_types import same
from tools.oracles.moe import moe_oracle

MORE_KINDS = {
    "geglu": {"activation": "geglu", "bias": True}, "geglu_tanh": {"activation": "geglu_tanh", "limit": 0.7},
    "geglu_concat": {"activation": "geglu", "packed_layout": "concat"},
    "silu": {"activation": "silu"}, "relu2": {"activation": "relu2", "bias": True},
}  # fmt: skip


def results(layer, format="bf16"):
    packed = layer.pack(format)
    got = moe(layer.tokens, layer.routing, packed)
    return got, moe_oracle(layer.tokens, layer.routing.topk_weights, layer.routing.topk_ids, packed)


@pytest.mark.parametrize("kind", MORE_KINDS)
def test_bf16_is_as_good_as_torchs(kind):
    layer = make(**MORE_KINDS[kind])
    got, want = results(layer)
    assert_at_most_twice(got, eager_bf16(layer), want)


@pytest.mark.parametrize("activation", ["silu", "relu2"])
@pytest.mark.parametrize("format", FORMATS)
def test_experts_without_a_gate_have_up_alone(format, activation):
    layer = make(activation=activation, bias=True)
    packed = layer.pack(format)
    assert (packed.gate_up.shape, packed.intermediate, packed.hidden) == ((8, 128, 256), 128, 256)
    up, down, up_bias, down_bias = unpack(packed)
    assert relative_error(up, layer.gate_up.float()) < 0.13
    assert relative_error(down, layer.down.float()) < 0.13
    assert torch.equal(up_bias, layer.gate_up_bias)
    assert torch.equal(down_bias, layer.down_bias)
    assert same(from_state_dict(state_dict(packed)), packed)
    for layout in ("concat", "interleaved"):
        other = pack(layer.gate_up, layer.down, format, activation=activation, gate_up_layout=layout)
        assert_same_bits(unpack(other, "interleaved")[0], up)


@pytest.mark.parametrize(("format", "order"), [("mxfp4", "fragments"), ("mxfp4_fp8", "fp8_fragments")])
def test_kernels_for_few_tokens_have_two_activations(packs_for_hopper, format, order):
    for activation in ("swiglu", "swiglu_oai"):
        assert why_not_decode_mx(make(activation=activation).pack(format), 2) == ""
    for activation in ("geglu", "geglu_tanh", "silu", "relu2"):
        packed = make(activation=activation).pack(format)
        assert packed.order == order
        assert why_not_decode_mx(packed, 2) == "the activation"


@pytest.mark.parametrize("kind", mostly_slow(MORE_KINDS, quick=["geglu_concat", "relu2"]))
def test_compiles_as_one_graph(kind):
    layer = make(tokens=7, **MORE_KINDS[kind])
    packed = layer.pack()
    compiled = torch.compile(moe, fullgraph=True, backend="eager")
    assert_same_bits(compiled(layer.tokens, layer.routing, packed), moe(layer.tokens, layer.routing, packed))


def test_refusals():
    layer = make()
    with pytest.raises(ValueError, match="down: expected .* .8, 256, 256., got bfloat16 .8, 256, 128."):
        pack(layer.gate_up, layer.down, activation="silu")  # gate and up where up alone is expected
    up = layer.gate_up[:, :128]
    with pytest.raises(ValueError, match="swiglu_limit: expected None for 'relu2', which has no gate, got 7.0"):
        pack(up, layer.down, activation="relu2", swiglu_limit=7.0)
    with pytest.raises(ValueError, match="activation: expected one of .*'geglu_tanh', 'silu', 'relu2', got 'tanh'"):
        pack(up, layer.down, activation="tanh")
