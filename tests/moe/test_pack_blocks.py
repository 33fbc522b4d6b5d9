"""Packing of FP8 blocks: which groups are told by shapes, partial last blocks, what fills them."""

import math

import pytest
import torch

from envoi.ops.moe import moe, pack, unpack
from tests.helpers.accuracy import assert_same_bits, relative_error
from tests.moe.layers import make
from tests.moe.stored import e4m3, float_factors, meaning, power_bytes
from tools.oracles.moe import moe_oracle

E, H, BLOCK = 2, 256, (128, 128)


def stored(inter, hidden=H, block=BLOCK, factors=float_factors, gated=True):
    """Return arguments of pack for FP8 experts in blocks, gate above up, and what they mean in float64."""
    rows = [inter, inter] if gated else [inter]
    each = [(n, hidden) for n in rows] + [(hidden, inter)]
    values = [e4m3(E, *shape, seed=n) for n, shape in enumerate(each)]
    sf = [factors(E, *map(math.ceil, (a / block[0], b / block[1])), seed=9 + n) for n, (a, b) in enumerate(each)]
    means = [meaning(x, f, block) for x, f in zip(values, sf, strict=True)]
    given = {"gate_up": torch.cat([x.view(torch.uint8) for x in values[:-1]], 1).view(torch.float8_e4m3fn),
             "gate_up_sf": torch.cat(sf[:-1], 1), "down": values[-1], "down_sf": sf[-1]}  # fmt: skip
    return given, torch.cat(means[:-1], 1), means[-1]


def check(packed, gate_up, down, layout="concat"):
    got = unpack(packed, layout, torch.float64)
    assert torch.equal(got[0], gate_up)
    assert torch.equal(got[1], down)


@pytest.mark.parametrize("factors", [float_factors, power_bytes])
@pytest.mark.parametrize("inter", [192, 64, 704, 128, 130, 8])
def test_partial_last_blocks_keep_every_number(inter, factors):
    given, gate_up, down = stored(inter, factors=factors)
    packed = pack(**given, weight_block_size=BLOCK)
    assert (packed.format, packed.padding) == ("fp8_block128", -inter % 128)
    check(packed, gate_up, down)
    turns = pack(**given, weight_block_size=BLOCK, packed_layout="interleaved", requantize=True)
    assert torch.equal(unpack(turns, "concat", torch.float64)[1], down)
    assert relative_error(unpack(turns, "concat", torch.float64)[0], gate_up) < 0.04


@pytest.mark.parametrize(("inter", "hidden", "block"), [
    (192, 192, BLOCK), (64, 192, BLOCK), (96, 224, (32, 32)), (192, 256, (64, 128)), (160, 256, (1, 128)),
    (96, 256, (256, 128)), (128, 256, (128, 64)),
])  # fmt: skip
def test_powers_of_two_in_other_blocks_are_mxfp8(inter, hidden, block):
    given, gate_up, down = stored(inter, hidden, block, power_bytes)
    packed = pack(**given, weight_block_size=block)
    assert (packed.format, packed.padding) == ("mxfp8", 0)
    check(packed, gate_up, down)


@pytest.mark.parametrize(("inter", "hidden", "block"), [
    (192, 192, BLOCK), (96, 224, (32, 32)), (192, 256, (64, 128)), (160, 256, (1, 128)), (192, 256, BLOCK),
])  # fmt: skip
@pytest.mark.parametrize("format", ["auto", "bf16", "fp8_row", "mxfp8"])
def test_numbers_that_no_format_holds_are_refused_or_rounded(inter, hidden, block, format):
    given, gate_up, down = stored(inter, hidden, block)
    if format != "auto" or block != BLOCK or hidden % 128:
        with pytest.raises(ValueError, match="requantize=True"):
            pack(**given, format=format, weight_block_size=block)
    packed = pack(**given, format=format, weight_block_size=block, requantize=True)
    if format == "auto":
        assert packed.format == ("fp8_block128" if block == BLOCK and hidden % 128 == 0 else "bf16")
    got = unpack(packed, "concat", torch.float64)
    for x, want in zip(got[:2], (gate_up, down), strict=True):
        assert x.shape == want.shape
        assert relative_error(x, want) < 0.04


@pytest.mark.parametrize("activation", ["relu2", "silu", lambda up: up * up])
def test_experts_without_a_gate(activation):
    given, up, down = stored(192, gated=False)
    packed = pack(**given, weight_block_size=BLOCK, activation=activation)
    assert (packed.gate_up.shape, packed.padding) == ((E, 256, H), 64)
    check(packed, up, down)


def filled(given):
    """Return the tensors of I = 192 with zeros up to 256, as a file of whole blocks would have them."""
    inter, rows = 192, given["gate_up"].shape[1]
    gate_up = torch.zeros(E, rows // inter, 256, H, dtype=torch.uint8)
    gate_up[:, :, :inter] = given["gate_up"].view(torch.uint8).unflatten(1, (-1, inter))
    down = torch.zeros(E, H, 256, dtype=torch.uint8)
    down[:, :, :inter] = given["down"].view(torch.uint8)
    return given | {"gate_up": gate_up.flatten(1, 2).view(torch.float8_e4m3fn), "down": down.view(torch.float8_e4m3fn)}


@pytest.mark.parametrize("options", [{}, {"activation": "swiglu_oai"}, {"activation": "geglu", "swiglu_limit": 0.5},
                                     {"activation": "relu2"}], ids=str)  # fmt: skip
@pytest.mark.parametrize("bias", [False, True])
def test_the_layer_computes_what_the_file_means(options, bias):
    gated = options.get("activation") != "relu2"
    given, gate_up, down = stored(192, gated=gated)
    for name in ("gate_up_sf", "down_sf"):
        given[name] = given[name] * 30
    layer = make(tokens=40, experts=E, k=2, hidden=H, intermediate=192)
    biases, whole = {}, {}
    if bias:
        biases = {"gate_up_bias": torch.randn(E, gate_up.shape[1]), "down_bias": torch.randn(E, H)}
        zeros = torch.zeros(E, gate_up.shape[1] // 192, 64)
        rows = torch.cat((biases["gate_up_bias"].unflatten(1, (-1, 192)), zeros), 2).flatten(1, 2)
        whole = biases | {"gate_up_bias": rows}
    packed = pack(**given, weight_block_size=BLOCK, **biases, **options)
    if bias:
        assert torch.equal(unpack(packed)[2], biases["gate_up_bias"])
    got = moe(layer.tokens, layer.routing, packed)
    assert_same_bits(got, moe(layer.tokens, layer.routing, pack(**filled(given), **whole, **options)))
    plain = pack(30 * gate_up.float(), 30 * down.float(), "bf16", **biases, **options)
    want = moe_oracle(layer.tokens, layer.routing.topk_weights, layer.routing.topk_ids, plain)
    assert relative_error(got, want) < 0.12


def test_an_activation_whose_value_at_zero_is_not_zero():
    def shifted(gate, up):
        return gate * up + 1.0

    given, gate_up, down = stored(192, factors=power_bytes)
    packed = pack(**given, weight_block_size=BLOCK, activation=shifted)
    assert (packed.format, packed.padding) == ("mxfp8", 0)  # zeros would take part in the activations' factors
    check(packed, gate_up, down)
    with pytest.raises(ValueError, match="intermediate: expected a positive multiple of 128"):
        pack(**given, format="fp8_block128", weight_block_size=BLOCK, activation=shifted)


def test_shards_of_tensor_parallelism():
    """Two ranks with 192 of 384 features each, the second of which begins inside a block."""
    given, *_ = stored(384)
    values, sf = given["gate_up"].view(torch.uint8).unflatten(1, (2, 384)), given["gate_up_sf"].unflatten(1, (2, 3))
    shards = []
    for first, last, blocks in ((0, 192, slice(0, 2)), (192, 384, slice(1, 3))):
        filled = first % 128  # zeros for what the other rank has of the first block
        rows = torch.nn.functional.pad(values[:, :, first:last], (0, 0, filled, 0)).flatten(1, 2)
        columns = torch.nn.functional.pad(given["down"].view(torch.uint8)[:, :, first:last], (filled, 0))
        shard = pack(
            rows.view(torch.float8_e4m3fn), columns.view(torch.float8_e4m3fn), weight_block_size=BLOCK,
            gate_up_sf=sf[:, :, blocks].flatten(1, 2), down_sf=given["down_sf"][:, :, blocks],
        )  # fmt: skip
        shards.append(shard)
    assert [(x.format, x.intermediate, x.padding) for x in shards] == [("fp8_block128", 256, n) for n in (64, 0)]
    layer = make(tokens=16, experts=E, k=2, hidden=H, intermediate=384)
    routing = layer.routing.topk_weights, layer.routing.topk_ids
    whole, *parts = (moe_oracle(layer.tokens, *routing, x) for x in (pack(**given, weight_block_size=BLOCK), *shards))
    assert relative_error(sum(parts), whole) < 1e-12


@pytest.mark.parametrize(("inter", "counts"), [(192, (4, 2)), (192, (3, 2)), (160, (4, 2)), (96, (3, 2))])
@pytest.mark.parametrize("factors", [float_factors, power_bytes])
def test_groups_that_shapes_do_not_tell_are_not_guessed(inter, counts, factors):
    values = e4m3(E, 2 * inter, H), e4m3(E, H, inter)
    with pytest.raises(ValueError, match=r"gate_up_sf: expected the factors of 2 .*; pass weight_block_size="):
        pack(*values, gate_up_sf=factors(E, *counts), down_sf=factors(E, 1, 1), requantize=True)
    with pytest.raises(ValueError, match=r"down_sf: expected the factors of 2 .*; pass weight_block_size="):
        pack(*values, gate_up_sf=factors(E, 2), down_sf=factors(E, 3, 5), requantize=True)


@pytest.mark.parametrize("counts", [(384, 8), (384, 1), (2, 1), (1, 1), (384, 2), (12, 8), (384, 16)])
def test_groups_that_shapes_tell(counts):
    inter, sides = 192, (384 // counts[0], H // counts[1])
    given = {"gate_up": e4m3(E, 384, H), "gate_up_sf": power_bytes(E, *counts)}
    down = {"down": e4m3(E, H, inter), "down_sf": power_bytes(E, 1, 1)}
    got = unpack(pack(**given, **down, format="bf16", requantize=True), "concat", torch.float64)[0]
    want = meaning(given["gate_up"], given["gate_up_sf"], sides)
    assert torch.equal(got, want)  # powers of two: bf16 holds them


@pytest.mark.parametrize(("changes", "message"), [
    ({"weight_block_size": 128}, "weight_block_size: expected None or rows and columns of a block, got 128"),
    ({"weight_block_size": (128, 0)}, "weight_block_size: expected None or rows and columns"),
    ({"weight_block_size": (128, 128, 1)}, "weight_block_size: expected None or rows and columns"),
    ({"weight_block_size": (64, 128)},
     r"gate_up_sf: expected the factors of 2 matrices of 384 x 256 in blocks of 64 x 128, .2, 6, 2., as blocks begin "
     r"anew at each of 2 x 192 rows, got float32 .2, 4, 2."),
    ({"gate_up_sf": torch.ones(E, 3, 2)}, r"gate_up_sf: expected .*, .2, 4, 2., as .*, got float32 .2, 3, 2."),
    ({"gate_up_sf": torch.ones(E, 384)}, r"gate_up_sf: expected .*, .2, 4, 2., as .*, got float32 .2, 384."),
    ({"gate_up_sf": None, "gate_up": torch.zeros(E, 384, H).bfloat16()},
     "weight_block_size: expected None without gate_up_sf"),
])  # fmt: skip
def test_refusals(changes, message):
    given, *_ = stored(192)
    with pytest.raises(ValueError, match=message):
        pack(**given | {"weight_block_size": BLOCK} | changes)
