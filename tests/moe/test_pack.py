"""Packing: layouts, formats, round trips, refusals."""

import math
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from envoi.ops.gemm.hopper_mx.host import factor_words
from envoi.ops.moe import moe, pack, unpack
from envoi.ops.moe.op import flatten, unflatten
from envoi.quant import FORMATS
from envoi.quant.fragments import to_rows
from envoi.quant.pack import interleave_gate_up, pack_weight
from tests.helpers.accuracy import assert_same_bits, relative_error
from tests.moe.layers import make
from tests.test_types import same

BOUNDS = {"bf16": 0.0, "fp8_row": 0.04, "fp8_block128": 0.04, "mxfp8": 0.04, "mxfp4": 0.13, "mxfp4_mxfp8": 0.13,
          "mxfp4_fp8": 0.13, "nvfp4": 0.11, "int4": 0.14}  # fmt: skip


def weights(hidden=256, intermediate=128, experts=2):
    source = torch.Generator().manual_seed(0)
    gate_up = torch.randn(experts, 2 * intermediate, hidden, generator=source).bfloat16()
    return gate_up, torch.randn(experts, hidden, intermediate, generator=source).bfloat16()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("layout", ["concat", "interleaved"])
def test_round_trip(format, layout):
    gate_up, down = weights()
    gate_up_bias, down_bias = torch.randn(2, 256), torch.randn(2, 256)
    packed = pack(
        gate_up, down, format, gate_up_layout=layout, gate_up_bias=gate_up_bias, down_bias=down_bias
    )  # fmt: skip
    assert (packed.num_local_experts, packed.hidden, packed.intermediate) == (2, 256, 128)
    got = unpack(packed, layout)
    assert relative_error(got[0], gate_up.float()) <= BOUNDS[format]
    assert relative_error(got[1], down.float()) <= BOUNDS[format]
    assert torch.equal(got[2], gate_up_bias)
    assert torch.equal(got[3], down_bias)


@pytest.mark.parametrize(("hidden", "intermediate", "order"), [(256, 128, "fragments"), (256, 96, "rows")])
def test_a_hopper_gpu_has_an_order_of_its_own_for_4_bit_weights(hidden, intermediate, order, packs_for_hopper):
    gate_up, down = weights(hidden, intermediate)
    assert pack(gate_up, down, "mxfp4").order == order
    assert pack(gate_up, down, "mxfp4_fp8").order == order.replace("fragments", "fp8_fragments")
    assert pack(gate_up * 2.0**20, down, "mxfp4_fp8").order == order.replace("fragments", "fp8_fragments")
    assert pack(gate_up, down, "mxfp4_mxfp8").order == order
    assert pack(gate_up, down, "bf16").order == "rows"
    for format in ("mxfp4", "mxfp4_mxfp8"):
        assert pack(gate_up * 2.0**20, down, format).order == "rows"  # factors above 2
    assert pack(gate_up * 2.0**20, down, "nvfp4").order == order
    gate_up[0, 0, 0] = torch.nan
    assert pack(gate_up, down, "nvfp4").order == "rows"  # a factor is NaN


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4_mxfp8"])
def test_a_hopper_gpu_reads_factors_where_they_are(format, packs_for_hopper):
    gate_up, down = weights(256, 384)  # 8 and 12 factors a row
    gate_up *= 2.0**20  # factors above 2, so that MXFP4 stays by rows
    packed = pack(gate_up, down, format)
    for weight, given in ((packed.gate_up, interleave_gate_up(gate_up)), (packed.down, down)):
        assert factor_words(weight.sf).data_ptr() == weight.sf.data_ptr()
        want = pack_weight(given, FORMATS[format].weights, "it")
        assert_same_bits(weight.sf.view(torch.uint8), want.sf.view(torch.uint8))


def test_rows_of_factors_too_far_apart_stay_by_rows(packs_for_hopper):
    gate_up, down = weights(256, 128)
    gate_up[0, 3, :32] *= 2.0**-20
    packed = pack(gate_up, down, "mxfp4_fp8")
    assert (packed.gate_up.order, packed.down.order) == ("rows", "rows")


@pytest.mark.parametrize(("format", "order"), [("mxfp4", "fragments"), ("mxfp4_fp8", "fp8_fragments")])
def test_the_order_changes_no_number_and_no_result(format, order, packs_for_hopper):
    layer = make(tokens=9)
    packed = layer.pack(format)
    by_rows = replace(packed, gate_up=to_rows(packed.gate_up), down=to_rows(packed.down))
    assert (packed.order, by_rows.order) == (order, "rows")
    for got, want in zip(unpack(packed)[:2], unpack(by_rows)[:2], strict=True):
        assert_same_bits(got, want)
    # A CPU computes with what was packed for a GPU.
    results = [moe(layer.tokens, layer.routing, unflatten(*flatten(experts))) for experts in (packed, by_rows)]
    assert_same_bits(*results)


@pytest.mark.parametrize("format", FORMATS)
def test_hidden_2880(format):
    gate_up, down = weights(hidden=2880, intermediate=128, experts=1)
    if format == "fp8_block128":
        with pytest.raises(ValueError, match="hidden: expected a positive multiple of 128 .* got 2880 .*bf16"):
            pack(gate_up, down, format)
    else:
        assert pack(gate_up, down, format).hidden == 2880


GATE_UP, DOWN = weights()


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("format: expected one of 'bf16', .*, got 'fp4'", {"format": "fp4"}),
        ("gate_up_layout: expected one of 'concat', 'interleaved', got 'mixed'", {"gate_up_layout": "mixed"}),
        ("activation: expected one of 'swiglu', 'swiglu_oai', .*, got 'gelu'", {"activation": "gelu"}),
        ("swiglu_limit: expected None or a positive number that float32 can hold, got -1", {"swiglu_limit": -1.0}),
        ("swiglu_limit: expected None or a positive number that float32 can hold, got 1e.39", {"swiglu_limit": 1e39}),
        ("swiglu_limit: expected None or a positive number that float32 can hold, got nan", {"swiglu_limit": math.nan}),
        ("swiglu_limit: expected a number, got str '7'", {"swiglu_limit": "7"}),
        ("swiglu_limit: expected a number, got bool True", {"swiglu_limit": True}),
        ("gate_up: expected .* .num_experts, 2 . intermediate, hidden., got", {"gate_up": GATE_UP[0]}),
        ("gate_up: expected bfloat16 or float16 or float32 .*, got int8", {"gate_up": GATE_UP.to(torch.int8)}),
        ("gate_up.shape.1.: expected 2 . intermediate, an even number, got 255", {"gate_up": GATE_UP[:, :255]}),
        ("down: expected .* .2, 256, 128., got bfloat16 .2, 128, 256.", {"down": DOWN.transpose(1, 2)}),
        # Before all of the weights are looked at, which bf16 would round.
        ("down: expected .* .2, 256, 128., got float32 .2, 128, 256.",
         {"gate_up": GATE_UP.float() / 3, "down": DOWN.float().transpose(1, 2)}),
        ("down_bias: expected .* .2, 256., got float32 .2, 255.",
         {"gate_up": GATE_UP.float() / 3, "gate_up_bias": torch.zeros(2, 256), "down_bias": torch.zeros(2, 255)}),
        ("gate_up_bias, down_bias: expected both or neither", {"gate_up_bias": torch.zeros(2, 256)}),
        ("down_bias: expected .* .2, 256., got float32 .2, 255.",
         {"gate_up_bias": torch.zeros(2, 256), "down_bias": torch.zeros(2, 255)}),
    ],
)  # fmt: skip
def test_refusals(message, changes):
    arguments = {"gate_up": GATE_UP, "down": DOWN} | changes
    with pytest.raises(ValueError, match=message):
        pack(**arguments)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("dtype", "cast_to"), [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)])
def test_an_autocast_changes_nothing(format, dtype, cast_to):
    gate_up, down = (x.to(dtype) for x in weights())
    want = pack(gate_up, down, format)
    with torch.autocast("cpu", dtype=cast_to):
        got = pack(gate_up, down, format)
        back = unpack(got, dtype=dtype)
    assert same(got, want)
    for x, y in zip(back[:2], unpack(want, dtype=dtype)[:2], strict=True):
        assert_same_bits(x, y)


@pytest.mark.parametrize("format", FORMATS)
def test_fake_tensors_are_packed(format):
    with FakeTensorMode():
        packed = pack(torch.empty(4, 256, 256), torch.empty(4, 256, 128), format)
    assert packed.gate_up.shape == (4, 256, 256) and packed.down.shape == (4, 256, 128)
