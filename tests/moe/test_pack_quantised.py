"""Packing of weights that are quantised already: every number kept, or refused."""

import itertools

import pytest
import torch

from envoi.ops.moe import moe, pack, unpack
from envoi.ops.moe.packing import READ_AS_STORED
from envoi.quant.fragments import to_fragments
from envoi.quant.pack import with_checked_scales
from envoi.types import QuantTensor
from tests.helpers.accuracy import assert_same_bits, relative_error
from tests.moe.layers import make
from tests.moe.stored import e4m3, float_factors, meaning, pairs, power_bytes
from tools.oracles.moe import moe_oracle

E, H, INTER = 2, 256, 128


def rows_of_fp8(sf=float_factors):
    return (e4m3(E, 2 * INTER, H), sf(E, 2 * INTER, 1)), (e4m3(E, H, INTER, seed=2), sf(E, H, 1)), (1, H), (1, INTER)


def blocks_of_fp8(sf=float_factors, like=True, shape=(128, 128)):
    """Return 128x128 blocks; like: gate and up blocks beside each other have the same factor."""
    gate_up = sf(E, 2 * INTER // 128, H // 128)
    if like:
        gate_up = gate_up[:, : INTER // 128].repeat(1, 2, 1)
    return (e4m3(E, 2 * INTER, H), gate_up), (e4m3(E, H, INTER, seed=2), sf(E, H // 128, INTER // 128)), shape, shape


def mx(values, columns):
    gate_up = values(E, 2 * INTER, H // columns), power_bytes(E, 2 * INTER, H // 32)
    return gate_up, (values(E, H, INTER // columns, seed=2), power_bytes(E, H, INTER // 32)), (1, 32), (1, 32)


BESIDE_FP8 = ("mxfp4_fp8", "mxfp4_mxfp8")  # other tokens, the same weights
STORED = {
    "fp8_row": rows_of_fp8(),
    "fp8_block128": blocks_of_fp8(),
    "mxfp8": mx(e4m3, 1),
    "mxfp4": mx(pairs, 2),
    "mxfp4_fp8": mx(pairs, 2),
    "mxfp4_mxfp8": mx(pairs, 2),
}


def check_exact(packed, gate_up, down, groups, layout):
    got = unpack(packed, layout, torch.float64)
    assert torch.equal(got[0], meaning(*gate_up, groups[0]))
    assert torch.equal(got[1], meaning(*down, groups[1]))


@pytest.mark.parametrize("kept", [None, "concat", "interleaved"])
@pytest.mark.parametrize("layout", ["concat", "interleaved"])
@pytest.mark.parametrize("format", STORED)
def test_every_number_is_kept(format, layout, kept):
    gate_up, down, *groups = STORED[format]
    if kept == "concat" and (format not in READ_AS_STORED or (format == "fp8_block128" and layout != kept)):
        with pytest.raises(ValueError, match="packed_layout: expected 'interleaved' for"):
            pack(gate_up[0], down[0], format, gate_up_sf=gate_up[1], down_sf=down[1], gate_up_layout=layout,
                 packed_layout=kept)  # fmt: skip
        return
    packed = pack(
        gate_up[0], down[0], format, gate_up_sf=gate_up[1], down_sf=down[1], gate_up_layout=layout, packed_layout=kept
    )
    assert packed.format == format
    assert packed.gate_up_layout == (kept or (layout if format in READ_AS_STORED else "interleaved"))
    check_exact(packed, gate_up, down, groups, layout)
    found = pack(gate_up[0], down[0], gate_up_sf=gate_up[1], down_sf=down[1], gate_up_layout=layout, packed_layout=kept)
    assert found.format == ("mxfp4" if format in BESIDE_FP8 else format)
    assert_same_bits(found.gate_up.values, packed.gate_up.values)


@pytest.mark.parametrize("format", STORED)
def test_the_layer_computes_what_the_file_means(format):
    layer = make(tokens=40, experts=E, k=2, hidden=H, intermediate=INTER)
    gate_up, down, *_ = STORED[format]
    scaled = [x[1] if x[1].dtype == torch.uint8 else x[1] * 30 for x in (gate_up, down)]
    packed = pack(gate_up[0], down[0], format, gate_up_sf=scaled[0], down_sf=scaled[1])
    got = moe(layer.tokens, layer.routing, packed)
    want = moe_oracle(layer.tokens, layer.routing.topk_weights, layer.routing.topk_ids, packed)
    assert relative_error(got, want) < 0.06


def as_int8(values):
    return values.view(torch.int8)


def as_fp4(values):
    return values.view(torch.float4_e2m1fn_x2)


def as_blocks(values):
    return values.unflatten(-1, (-1, 16))


@pytest.mark.parametrize("dress", [as_int8, as_fp4, as_blocks])
def test_pairs_in_all_their_types(dress):
    gate_up, down, *groups = STORED["mxfp4"]
    packed = pack(dress(gate_up[0]), dress(down[0]), gate_up_sf=gate_up[1], down_sf=down[1])
    check_exact(packed, gate_up, down, groups, "concat")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_powers_of_two_are_factors_of_rows_too(dtype):
    gate_up, down, *groups = rows_of_fp8(lambda *shape: power_bytes(*shape).view(dtype))
    packed = pack(gate_up[0], down[0], gate_up_sf=gate_up[1].squeeze(-1), down_sf=down[1].squeeze(-1))
    assert packed.format == "fp8_row"
    check_exact(packed, gate_up, down, groups, "concat")


def test_one_factor_for_gate_one_for_up_and_one_for_down():
    gate_up, down = e4m3(E, 2 * INTER, H), e4m3(E, H, INTER, seed=2)
    factors = float_factors(E, 2), float_factors(E, seed=3)
    packed = pack(gate_up, down, gate_up_sf=factors[0], down_sf=factors[1])
    assert packed.format == "fp8_row"
    groups = (INTER, H), (H, INTER)
    check_exact(packed, (gate_up, factors[0][..., None]), (down, factors[1][:, None, None]), groups, "concat")


def test_blocks_of_powers_of_two_are_mxfp8_too():
    gate_up, down, *groups = blocks_of_fp8(power_bytes, like=False)
    packed = pack(gate_up[0], down[0], "mxfp8", gate_up_sf=gate_up[1], down_sf=down[1])
    assert packed.gate_up.sf.shape == (E, 2 * INTER, H // 32)
    check_exact(packed, gate_up, down, groups, "concat")


def test_powers_of_two_of_gate_and_up_become_one_without_loss():
    gate_up, down, *groups = blocks_of_fp8(power_bytes, like=False)
    values = gate_up[0].float()
    values = values.where(values.abs() >= 1, 1).to(torch.float8_e4m3fn)  # none that a shift would lose
    assert not torch.equal(*gate_up[1].chunk(2, dim=1))
    packed = pack(values, down[0], gate_up_sf=gate_up[1], down_sf=down[1], packed_layout="interleaved")
    assert (packed.format, packed.gate_up_layout) == ("fp8_block128", "interleaved")
    check_exact(packed, (values, gate_up[1]), down, groups, "concat")


@pytest.mark.parametrize("factors", [float_factors, power_bytes])
def test_gate_and_up_keep_their_own_factors_in_place(factors):
    gate_up, down, *groups = blocks_of_fp8(factors, like=False)
    packed = pack(gate_up[0], down[0], gate_up_sf=gate_up[1], down_sf=down[1])
    assert (packed.format, packed.gate_up_layout) == ("fp8_block128", "concat")
    assert packed.gate_up.values.data_ptr() == gate_up[0].data_ptr()
    check_exact(packed, gate_up, down, groups, "concat")


@pytest.mark.parametrize("factors", [float_factors, power_bytes])
def test_two_factors_that_one_cannot_replace_are_refused_or_rounded(factors):
    gate_up, down, *groups = blocks_of_fp8(factors, like=False)
    given = {"gate_up_sf": gate_up[1], "down_sf": down[1], "packed_layout": "interleaved"}
    with pytest.raises(ValueError, match=r"gate_up_sf: .* got factors with which \d+ of 131072 .*requantize=True"):
        pack(gate_up[0], down[0], **given)
    got = unpack(pack(gate_up[0], down[0], **given, requantize=True), "concat", torch.float64)
    want = meaning(*gate_up, groups[0])
    assert 0 < relative_error(got[0], want) < 0.04
    assert torch.equal(got[1], meaning(*down, groups[1]))
    larger = meaning(torch.ones(E, 2 * INTER, H).to(torch.float8_e4m3fn), gate_up[1], groups[0]).unflatten(
        1, (2, INTER)
    )
    kept = (larger >= larger.flip(1)).flatten(1, 2)
    assert torch.equal(got[0][kept], want[kept])
    # Rows that stand in turn in the file already have one factor there, and can't have two.
    packed = pack(gate_up[0], down[0], **given, gate_up_layout="interleaved")
    check_exact(packed, gate_up, down, groups, "interleaved")
    apart = pack(
        gate_up[0], down[0], gate_up_sf=gate_up[1], down_sf=down[1], gate_up_layout="interleaved",
        packed_layout="concat", requantize=True,
    )  # fmt: skip
    got = unpack(apart, "interleaved", torch.float64)[0]
    assert 0 < relative_error(got, meaning(*gate_up, groups[0])) < 0.04


def test_zero_factors_and_nan_weights_are_kept():
    gate_up, down, *groups = blocks_of_fp8(like=False)
    factors = gate_up[1].zero_()
    factors[:, 0, 0] = 1.0
    values = gate_up[0].clone()
    values.view(torch.uint8)[0, 5, 7] = 0x7F
    packed = pack(values, down[0], gate_up_sf=factors, down_sf=down[1], packed_layout="interleaved")
    got = unpack(packed, "concat", torch.float64)[0]
    want = meaning(values.where(~values.float().isnan(), 0.0), factors, groups[0])
    assert got[0, 5, 7].isnan()
    assert torch.equal(got.nan_to_num(0.0), want)


@pytest.mark.parametrize("kernels", ["torch", "hopper"])
def test_rows_that_are_parts_of_longer_ones(kernels, monkeypatch):
    monkeypatch.setattr("envoi.ops.moe.packing.implementation", lambda device: kernels)
    gate_up, down, *groups = STORED["mxfp4"]
    longer = [torch.cat((x, x), dim=2)[:, :, : x.shape[2]] for x in (gate_up[0], down[0])]
    before = [x.clone() for x in (gate_up[1], down[1])]
    assert not longer[0].is_contiguous()
    check_exact(pack(*longer, gate_up_sf=gate_up[1], down_sf=down[1]), gate_up, down, groups, "concat")
    for x, old in zip((gate_up[1], down[1]), before, strict=True):
        assert torch.equal(x, old)


STORED_AS = [name for name in STORED if name not in BESIDE_FP8]


@pytest.mark.parametrize(("stored", "format"), [
    pair for pair in itertools.product(STORED_AS, ["bf16", *STORED])
    if pair[0] != pair[1] and not (pair[0] == "mxfp4" and pair[1] in BESIDE_FP8)
])  # fmt: skip
def test_other_formats_are_refused_or_rounded(stored, format):
    gate_up, down, *groups = STORED[stored]
    given = {"gate_up_sf": gate_up[1], "down_sf": down[1]}
    with pytest.raises(ValueError, match=rf"gate_up: expected numbers that the scheme of '{format}' holds exactly"):
        pack(gate_up[0], down[0], format, **given)
    got = unpack(pack(gate_up[0], down[0], format, **given, requantize=True), "concat", torch.float64)
    bound = {"bf16": 0.01, **dict.fromkeys(("mxfp4", *BESIDE_FP8), 0.2)}.get(format, 0.05)
    assert relative_error(got[0], meaning(*gate_up, groups[0])) < bound
    assert relative_error(got[1], meaning(*down, groups[1])) < bound


def test_down_is_shared(packs_for_hopper):
    for format in ("fp8_row", "fp8_block128", "mxfp8"):
        gate_up, down, *_ = STORED[format]
        packed = pack(gate_up[0], down[0], gate_up_sf=gate_up[1], down_sf=down[1], gate_up_layout="interleaved")
        assert packed.gate_up.values.data_ptr() == gate_up[0].data_ptr()
        assert packed.down.values.data_ptr() == down[0].data_ptr()


@pytest.mark.parametrize("layout", ["concat", "interleaved"])
def test_the_order_for_hopper_does_not_write_to_the_checkpoint(layout, packs_for_hopper):
    gate_up, down, *groups = STORED["mxfp4"]
    before = [x.clone() for x in (*gate_up, *down)]
    packed = pack(gate_up[0], down[0], gate_up_sf=gate_up[1], down_sf=down[1], gate_up_layout=layout)
    assert packed.order == "fragments"
    check_exact(packed, gate_up, down, groups, layout)
    for x, old in zip((*gate_up, *down), before, strict=True):
        assert torch.equal(x, old)


def test_quant_tensors_in_the_order_of_the_tensor_cores():
    gate_up, down, *groups = STORED["mxfp4"]
    fragments = [
        to_fragments(with_checked_scales(QuantTensor(v.clone(), sf.clone().view(torch.float8_e8m0fnu), (1, 32))))
        for v, sf in (gate_up, down)
    ]
    check_exact(pack(*fragments), gate_up, down, groups, "concat")


ROW = {"gate_up": STORED["fp8_row"][0][0], "gate_up_sf": STORED["fp8_row"][0][1],
       "down": STORED["fp8_row"][1][0], "down_sf": STORED["fp8_row"][1][1]}  # fmt: skip
QUANT = QuantTensor(ROW["gate_up"], ROW["gate_up_sf"], (1, H))


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("gate_up_sf: expected the factors of gate_up in float8_e4m3fn .2, 256, 256., got None", {"gate_up_sf": None}),
        ("down_sf: expected the factors of 2 matrices of 256 x 128.*, got float32 .2, 100.",
         {"down_sf": torch.ones(2, 100)}),
        ("down_sf: expected the factors of .* in float32, .*, got int64 .2, 256.",
         {"down_sf": torch.ones(2, 256, dtype=torch.int64)}),
        ("gate_up_sf: expected the factors of 2 matrices.*, got float32 .3, 256, 1.",
         {"gate_up_sf": torch.ones(3, 256, 1)}),
        ("gate_up: expected weights in float8_e4m3fn, or uint8 or int8 pairs, got float8_e5m2",
         {"gate_up": ROW["gate_up"].float().to(torch.float8_e5m2)}),
        ("gate_up: expected .num_experts, rows, columns., got float8_e4m3fn .256, 256.",
         {"gate_up": ROW["gate_up"][0]}),
        ("gate_up, down: expected both quantised or neither, got QuantTensor.*bfloat16",
         {"down": torch.zeros(E, H, INTER).bfloat16(), "down_sf": None}),
        (r"down: expected .2, 256, 128., got QuantTensor.values=float8_e4m3fn .2, 128, 256.",
         {"down": ROW["down"].transpose(1, 2), "down_sf": torch.ones(2, 128, 1)}),
        ("gate_up.sf: expected tensor .2, 256, 2., got float32 .2, 256, 1.",
         {"gate_up": QuantTensor(QUANT.values, QUANT.sf, (1, 128)), "gate_up_sf": None}),
        ("gate_up_sf: expected None beside a QuantTensor", {"gate_up": QUANT}),
        ("format: expected one that holds these weights exactly, got 'auto', and there is none .fp8_row: 1 x 128",
         {"gate_up_sf": float_factors(E, 2 * INTER, 2)}),
        ("format: .*there is none .fp8_row: their factors are in float8_e4m3fn, and those of fp8_row in float32",
         {"gate_up_sf": e4m3(E, 2 * INTER, 1)}),
        ("requantize: expected True or False, got int 1", {"requantize": 1}),
    ],
)  # fmt: skip
def test_refusals(message, changes):
    with pytest.raises(ValueError, match=message):
        pack(**(ROW | changes))
