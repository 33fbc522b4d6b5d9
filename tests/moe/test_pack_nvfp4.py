"""Packing of NVFP4 weights as checkpoints store them, with a scale for a matrix: every number kept, or refused."""

import pytest
import torch

from envoi.ops.moe import moe, pack, unpack
from envoi.types import QuantTensor
from tests.helpers.accuracy import assert_same_bits, relative_error
from tests.moe.layers import make
from tests.moe.stored import meaning, pairs, seeded
from tools.oracles.moe import moe_oracle

E, H, INTER = 3, 192, 128
GROUP = (1, 16)


def factors(*shape, seed=1):
    """Every factor that a checkpoint may have: 0, subnormal and normal ones up to 448."""
    return torch.randint(0, 0x7F, shape, generator=seeded(seed)).to(torch.uint8).view(torch.float8_e4m3fn)


def scales(*shape, seed=2):
    return torch.rand(shape, generator=seeded(seed)) * 1e-3 + 1e-4


GATE_UP = pairs(E, 2 * INTER, H // 2), factors(E, 2 * INTER, H // 16)
DOWN = pairs(E, H, INTER // 2, seed=2), factors(E, H, INTER // 16, seed=3)
SCALES = {"none": None, "a number": scales(), "an expert": scales(E), "gate and up": scales(E, 2),
          "a row": scales(E, 2 * INTER)}  # fmt: skip


def meant(weight, scale) -> torch.Tensor:
    x = meaning(*weight, GROUP)
    if scale is None:
        return x
    scale = scale.double()
    per_row = scale.expand(E) if scale.dim() == 0 else scale
    per_row = per_row[:, None] if per_row.dim() == 1 else per_row
    return x * per_row.repeat_interleave(x.shape[1] // per_row.shape[1], dim=1)[:, :, None]


def packed(scale="gate and up", **options):
    return pack(
        GATE_UP[0], DOWN[0], gate_up_sf=GATE_UP[1], down_sf=DOWN[1], gate_up_scale=SCALES[scale],
        down_scale=None if scale == "none" else scales(E, seed=5), **options,
    )  # fmt: skip


def check(experts, scale):
    got = unpack(experts, "concat", torch.float64)
    assert torch.equal(got[0], meant(GATE_UP, SCALES[scale]))
    assert torch.equal(got[1], meant(DOWN, None if scale == "none" else scales(E, seed=5)))
    assert experts.gate_up.scale.shape == (E, 2 * INTER)
    assert experts.down.scale.shape == (E, H)


@pytest.mark.parametrize("scale", SCALES)
def test_every_number_is_kept(scale):
    experts = packed(scale)
    assert (experts.format, experts.gate_up_layout) == ("nvfp4", "interleaved")
    check(experts, scale)
    check(packed(scale, format="nvfp4"), scale)
    given = [QuantTensor(*x, GROUP, y) for x, y in ((GATE_UP, SCALES[scale]), (DOWN, scales(E, seed=5)))]
    same = pack(*given)
    assert_same_bits(same.gate_up.values, experts.gate_up.values)
    assert_same_bits(same.gate_up.scale, experts.gate_up.scale)


@pytest.mark.parametrize("scale", ["none", "gate and up"])
def test_the_order_for_hopper_does_not_write_to_the_checkpoint(scale, packs_for_hopper):
    before = [x.clone() for x in (*GATE_UP, *DOWN)]
    experts = packed(scale)
    assert experts.order == "fragments"
    check(experts, scale)
    for x, old in zip((*GATE_UP, *DOWN), before, strict=True):
        assert_same_bits(x.view(torch.uint8), old.view(torch.uint8))


@pytest.mark.parametrize("bias", [True, False])
def test_the_layer_computes_what_the_file_means(bias):
    layer = make(tokens=40, experts=E, k=2, hidden=H, intermediate=INTER, bias=bias)
    experts = packed(**({"gate_up_bias": layer.gate_up_bias, "down_bias": layer.down_bias} if bias else {}))
    got = moe(layer.tokens, layer.routing, experts)
    want = moe_oracle(layer.tokens, layer.routing.topk_weights, layer.routing.topk_ids, experts)
    assert relative_error(got, want) < 0.004


def test_a_scale_is_applied_to_sums_and_not_to_numbers_of_bf16():
    """A scale far from a power of two, and one that no bf16 holds."""
    layer = make(tokens=30, experts=E, k=2, hidden=H, intermediate=INTER)
    routing = layer.routing
    for scale in (1.00390625 * 2**-9, 3e-30):
        one = torch.tensor(scale)
        experts = pack(GATE_UP[0], DOWN[0], gate_up_sf=GATE_UP[1], down_sf=DOWN[1], gate_up_scale=one, down_scale=one)
        want = moe_oracle(layer.tokens, routing.topk_weights, routing.topk_ids, experts)
        if scale > 1e-20:
            assert relative_error(moe(layer.tokens, routing, experts), want) < 0.004
        else:
            assert bool((moe(layer.tokens, routing, experts).abs() < 1e-30).all())


@pytest.mark.parametrize("format", ["bf16", "fp8_row", "fp8_block128", "mxfp8", "mxfp4", "mxfp4_fp8", "mxfp4_mxfp8"])
def test_other_formats_are_refused_or_rounded(format):
    gate_up, down = pairs(E, 256, 64), pairs(E, 128, 64, seed=1)
    sf = [factors(E, rows, 8, seed=7) for rows in (256, 128)]
    given = {"gate_up_sf": sf[0], "down_sf": sf[1], "gate_up_scale": scales(E, 2), "down_scale": scales(E)}
    with pytest.raises(ValueError, match=rf"gate_up: expected numbers that the scheme of '{format}' holds exactly"):
        pack(gate_up, down, format, **given)
    got = unpack(pack(gate_up, down, format, requantize=True, **given), "concat", torch.float64)
    want = unpack(pack(gate_up, down, **given), "concat", torch.float64)
    bound = {"bf16": 0.01, "mxfp4": 0.2, "mxfp4_fp8": 0.2, "mxfp4_mxfp8": 0.2}.get(format, 0.05)
    assert relative_error(got[0], want[0]) < bound
    assert relative_error(got[1], want[1]) < bound


def test_float_weights_have_a_power_of_two_for_each_matrix():
    layer = make(experts=E, hidden=H, intermediate=INTER)
    gate_up = layer.gate_up * torch.tensor([1.0, 2.0**-30, 2.0**20])[:, None, None]
    gate_up[1, 3, 5] = torch.inf
    gate_up[2] = 0
    experts = pack(gate_up, layer.down, "nvfp4")
    scale = experts.gate_up.scale
    assert bool((scale == scale[:, :1]).all())
    assert bool((torch.frexp(scale)[0] == 0.5).all())
    got = unpack(experts)[0]
    spoilt = got[1].isnan()
    assert spoilt.sum() == 16
    assert bool(spoilt[3, :16].all())
    good = ~spoilt
    assert relative_error(got[1][good], gate_up[1].float()[good]) < 0.11
    assert bool((got[2] == 0).all())


GIVEN = {"gate_up": GATE_UP[0], "gate_up_sf": GATE_UP[1], "down": DOWN[0], "down_sf": DOWN[1]}


@pytest.mark.parametrize(("message", "changes"), [
    (r"gate_up_scale: expected float32 \[\], \[3\], \[3, 2\] or \[3, 256\], got float32 \[2\]",
     {"gate_up_scale": torch.ones(2)}),
    (r"down_scale: expected float32 .*, got float32 \[3, 5\]", {"down_scale": torch.ones(3, 5)}),
    (r"down_scale: expected float32 .*, got bfloat16 \[3\]", {"down_scale": torch.ones(3).bfloat16()}),
    (r"down_scale: expected float32 .*, got float\b", {"down_scale": 0.5}),
    (r"gate_up_scale: expected None beside a QuantTensor",
     {"gate_up": QuantTensor(*GATE_UP, GROUP), "gate_up_sf": None, "gate_up_scale": torch.ones(3)}),
    (r"gate_up_scale: expected None beside weights without gate_up_sf",
     {"gate_up": torch.zeros(E, 256, H).bfloat16(), "gate_up_sf": None, "gate_up_scale": torch.ones(3)}),
    (r"packed_layout: expected 'interleaved' for format 'nvfp4', got 'concat'", {"packed_layout": "concat"}),
    (r"format: expected one that holds .* 1 x 8 elements share a factor",
     {"gate_up_sf": factors(E, 2 * INTER, H // 8), "down_sf": factors(E, H, INTER // 8), "weight_block_size": (1, 8)}),
])  # fmt: skip
def test_refusals(message, changes):
    with pytest.raises(ValueError, match=message):
        pack(**(GIVEN | changes))
