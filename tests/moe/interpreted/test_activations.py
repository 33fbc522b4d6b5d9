"""Activations beside SwiGLU by the Triton kernels, in the interpreter."""

import pytest

from envoi.ops.moe.layer import run_layer
from tests.helpers.accuracy import relative_error
from tests.moe.layers import make
from tests.moe.test_activations import MORE_KINDS
from tests.moe.test_moe import BOUNDS
from tools.oracles.moe import moe_oracle

SMALL = {"tokens": 9, "experts": 3, "k": 2, "hidden": 128, "intermediate": 128}


@pytest.mark.parametrize(("kind", "format"), [
    *((kind, "bf16") for kind in MORE_KINDS), ("geglu", "mxfp8"), ("geglu_concat", "fp8_block128"), ("silu", "fp8_row"),
    ("relu2", "mxfp8"), ("relu2", "mxfp4"),
])  # fmt: skip
def test_the_kernels_compute_the_layer(kind, format):
    layer = make(**SMALL, **MORE_KINDS[kind])
    packed, slots = layer.pack(format), (layer.routing.topk_weights, layer.routing.topk_ids)
    got = run_layer(layer.tokens, *slots, packed)
    bound = BOUNDS[format] * (2 if kind == "relu2" else 1)
    assert relative_error(got, moe_oracle(layer.tokens, *slots, packed)) < bound
