"""Layouts of gate_up: concatenated rows are kept in place, with factors of their own, and compute the same layer."""

import pytest
import torch

from envoi.ops.moe import moe, pack
from envoi.ops.moe.packing import READ_AS_STORED
from envoi.quant import FORMATS, quantize
from envoi.types import ExpertWeights, QuantTensor
from tests.helpers.accuracy import assert_same_bits, relative_error
from tests.moe.layers import eager_bf16, make
from tests.moe.test_moe import BOUNDS, KINDS
from tools.oracles.moe import moe_oracle

LAYOUTS = ("concat", "interleaved")


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def test_concatenated_weights_are_read_in_place():
    layer = make(bias=True)
    packed = pack(layer.gate_up, layer.down, packed_layout="concat")
    assert packed.gate_up_layout == "concat"
    assert packed.gate_up.data_ptr() == layer.gate_up.data_ptr()
    assert packed.down.data_ptr() == layer.down.data_ptr()
    mixed = pack(layer.gate_up, layer.down, gate_up_layout="interleaved")
    assert (mixed.gate_up_layout, mixed.gate_up.data_ptr()) == ("interleaved", layer.gate_up.data_ptr())


@pytest.mark.parametrize("format", ["fp8_row", "fp8_block128"])
def test_gate_and_up_have_their_own_factors(format):
    layer = make(intermediate=256)
    layer.gate_up[:, 256:] *= 2.0**-9  # with one factor for both, ups would be below E4M3's normal numbers
    packed = pack(layer.gate_up, layer.down, format, packed_layout="concat")
    parts = [quantize(part.contiguous(), FORMATS[format].weights) for part in layer.gate_up.chunk(2, 1)]
    assert_same_bits(bits(packed.gate_up.values), torch.cat([bits(part.values) for part in parts], 1))
    assert_same_bits(packed.gate_up.sf, torch.cat([part.sf for part in parts], 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", READ_AS_STORED)
def test_a_layer_of_concatenated_weights(format, kind):
    layer = make(**KINDS[kind], packed_layout="concat")
    packed = layer.pack(format)
    got = moe(layer.tokens, layer.routing, packed)
    want = moe_oracle(layer.tokens, layer.routing.topk_weights, layer.routing.topk_ids, packed)
    assert relative_error(got, want) < BOUNDS[format]
    assert relative_error(got, eager_bf16(layer)) < 0.1  # the oracle shares the packing, this does not


def test_both_layouts_give_the_same_bits():
    layer = make(bias=True)
    # Whole numbers: their sums are exact in any order.
    layer.tokens.copy_((layer.tokens * 2).round())
    layer.gate_up.copy_((layer.gate_up * 20).round())
    results = []
    for kept in LAYOUTS:
        layer.packed_layout = kept
        results.append(moe(layer.tokens, layer.routing, layer.pack()))
    assert_same_bits(*results)


@pytest.mark.parametrize("format", [format for format in FORMATS if format not in READ_AS_STORED])
def test_formats_whose_kernels_read_one_layout(format):
    layer = make(packed_layout="concat")
    with pytest.raises(ValueError, match=f"packed_layout: expected 'interleaved' for format '{format}', got 'concat'"):
        layer.pack(format)


def test_refusals():
    layer = make()
    with pytest.raises(ValueError, match="packed_layout: expected one of 'concat', 'interleaved', got 'mixed'"):
        pack(layer.gate_up, layer.down, packed_layout="mixed")
    with pytest.raises(ValueError, match="gate_up_layout: expected 'interleaved' or 'concat' .*, got 'mixed'"):
        ExpertWeights(layer.gate_up, layer.down, "bf16", gate_up_layout="mixed")
    fragments = QuantTensor(torch.zeros(1, 64, 32, dtype=torch.uint8), torch.ones(1, 64, 2), (1, 32), order="fragments")
    with pytest.raises(ValueError, match="gate_up_layout: expected 'interleaved' beside order 'fragments', got 'conc"):
        ExpertWeights(fragments, fragments, "mxfp4", gate_up_layout="concat")
