"""Path of `envoi.moe` on a GPU with concatenated gate and up: accuracy, bits of the interleaved layout, graphs."""

import pytest

from envoi.ops.moe.packing import READ_AS_STORED
from tests.helpers.accuracy import assert_same_bits
from tests.moe.layers import Layer, assert_replays_repeat, make
from tests.moe.test_gpu import assert_right, on_gpu, run
from tests.moe.test_moe import KINDS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("tidy_gpu")]


def with_equal_factors(layer: Layer) -> Layer:
    """Give every 64 rows of a block of 128 columns the same largest weight: fp8_block128 then has one factor in both
    layouts."""
    layer.gate_up[:, ::64, ::128] = 4.0
    assert float(layer.gate_up.abs().max()) == 4.0
    return layer


@pytest.mark.parametrize("format", READ_AS_STORED)
@pytest.mark.parametrize("kind", KINDS)
def test_error_is_at_most_twice_the_references(format, kind):
    assert_right(make(tokens=200, hidden=512, intermediate=256, packed_layout="concat", **KINDS[kind]), format)


@pytest.mark.parametrize("tokens", [5, 64, 700, 4000])
@pytest.mark.parametrize("format", READ_AS_STORED)
@pytest.mark.parametrize("kind", ["swiglu", "swiglu_oai"])
def test_both_layouts_give_the_same_bits(format, tokens, kind):
    layer = with_equal_factors(make(tokens=tokens, experts=16, k=4, hidden=1024, intermediate=512, **KINDS[kind]))
    layer = on_gpu(layer)
    interleaved = run(layer, format)
    layer.packed_layout = "concat"
    assert_same_bits(run(layer, format), interleaved)


@pytest.mark.parametrize("format", ["bf16", "fp8_row"])
@pytest.mark.parametrize("tokens", [7, 600])
def test_hidden_2880(format, tokens):
    layer = make(tokens, 8, 4, 2880, 360, activation="swiglu_oai", bias=True, packed_layout="concat")
    assert_right(layer, format)


@pytest.mark.parametrize("format", READ_AS_STORED)
def test_a_graph_of_weights_that_share_the_models_storage(format):
    layer = on_gpu(make(tokens=130, packed_layout="concat"))
    packed = layer.pack(format)
    if format == "bf16":
        assert packed.gate_up.data_ptr() == layer.gate_up.data_ptr()
    assert_replays_repeat(layer, packed)
