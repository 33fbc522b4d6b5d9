"""Users' own activations by the Triton kernels, in the interpreter."""

import pytest

from envoi.ops.moe.layer import run_layer
from envoi.quant import FORMATS
from tests.helpers.accuracy import relative_error
from tests.moe.own import OWN, layer_of, oracle
from tests.moe.test_own_activation import bound

SMALL = {"tokens": 9, "experts": 3, "k": 2, "hidden": 128, "intermediate": 128}


@pytest.mark.parametrize(("name", "format"), [
    *(("clipped", format) for format in FORMATS), *(("quick_gelu", format) for format in FORMATS),
    *((name, "bf16") for name in OWN if name not in ("clipped", "quick_gelu")),
])  # fmt: skip
def test_the_kernels_compute_the_layer(name, format):
    layer = layer_of(name, **SMALL, bias=name == "reglu")
    packed = layer.pack(format)
    got = run_layer(layer.tokens, layer.routing.topk_weights, layer.routing.topk_ids, packed)
    assert relative_error(got, oracle(layer, packed, name)) < bound(format, OWN[name])


@pytest.mark.parametrize("format", ["bf16", "fp8_block128"])
def test_the_kernels_read_rows_as_stored(format):
    layer = layer_of("clipped", **SMALL)
    layer.packed_layout = "concat"
    packed = layer.pack(format)
    got = run_layer(layer.tokens, layer.routing.topk_weights, layer.routing.topk_ids, packed)
    assert relative_error(got, oracle(layer, packed, "clipped")) < bound(format, OWN["clipped"])
