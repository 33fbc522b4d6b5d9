"""Whole schemes against loops over groups in Python numbers, and properties for any input."""

import math

import pytest
import torch

from envoi.quant import SCHEMES, dequantize, quantize
from envoi.quant.pack import pack_weight
from tests.helpers.accuracy import assert_same_bits
from tests.quant.scalar import e2m1_code


@pytest.mark.parametrize("name", SCHEMES)
def test_other_dtypes_strides_and_leading_sides_change_nothing(name):
    x = torch.randn(130, 256, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    want = quantize(x, name)
    before = x.clone()
    for other in (x.bfloat16(), x.double(), x.T.contiguous().T, x[None].expand(1, -1, -1)[0]):
        got = quantize(other, name)
        assert torch.equal(got.values.view(torch.uint8), want.values.view(torch.uint8))
        assert_same_bits(got.sf.float(), want.sf.float())
    led = quantize(x.expand(2, 3, -1, -1), name)
    assert led.values.shape[:2] == led.sf.shape[:2] == (2, 3)
    assert torch.equal(led.values[1, 2].view(torch.uint8), want.values.view(torch.uint8))
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("place", [(0, 0), (129, 255), (64, 127), (128, 128)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_number_at_a_corner_poisons_its_group_alone(name, place, bad):
    x = torch.randn(130, 256, generator=torch.Generator().manual_seed(2))
    clean = dequantize(quantize(x, name))
    x[place] = bad
    q = quantize(x, name)
    height, width = q.group
    r, c = place[0] // height * height, place[1] // width * width
    hit = torch.zeros(130, 256, dtype=torch.bool)
    hit[r : r + height, c : c + width] = True
    got = dequantize(q)
    assert bool(got[hit].isnan().all())
    assert_same_bits(got[~hit], clean[~hit])


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("shape", [(0, 256), (3, 0), (2, 0, 256), (0, 3, 256)])
def test_nothing_in_nothing_out(name, shape):
    q = quantize(torch.zeros(shape), name)
    assert q.shape == dequantize(q).shape == shape


def test_dequantize_in_float64_rounds_nothing():
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(5))
    for name in SCHEMES:
        q = quantize(x, name)
        exact = dequantize(q, torch.float64)
        assert exact.dtype == torch.float64
        assert_same_bits(dequantize(q), exact.float())


def test_a_scale_of_the_whole_tensor_is_multiplied_on_top():
    q = quantize(torch.full((2, 32), 6.0), "nvfp4")
    scaled = type(q)(q.values, q.sf, q.group, torch.tensor(0.25))
    assert bool((dequantize(scaled) == 1.5).all())
    assert (scaled.packed, scaled.shape, scaled.device) == (True, (2, 32), torch.device("cpu"))


def squared_errors(q, w: torch.Tensor) -> torch.Tensor:
    return (dequantize(q, torch.float64) - w.double()).square().unflatten(-1, (-1, 32)).sum(-1)


@pytest.mark.parametrize("power", [-60, -59, -31, -7, -1, 0, 1, 2, 13, 47, 60])
@pytest.mark.parametrize("heavy", [False, True])
def test_the_mxfp4_search_takes_the_better_of_two_scales(power, heavy):
    w = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(power))
    w = (w**3 if heavy else w) * 2.0**power
    plain, packed = quantize(w, "mxfp4"), pack_weight(w, SCHEMES["mxfp4"], "w")
    wide = plain.sf.view(torch.uint8).int()
    chosen = packed.sf.view(torch.uint8).int()
    assert bool(((chosen == wide) | (chosen == wide - 1)).all())
    ours, plains = squared_errors(packed, w), squared_errors(plain, w)
    assert bool((ours <= plains).all())
    assert bool((ours[chosen != wide] < plains[chosen != wide]).all())
    half = torch.tensor([[(2.0 ** (int(e) - 128)) for e in row] for row in wide.flatten(0, 1)]).view(3, 8, 2, 1)
    scaled = w.unflatten(-1, (-1, 32)) / half
    codes = torch.tensor([e2m1_code(v) for v in scaled.flatten().tolist()], dtype=torch.uint8).view(3, 8, 64)
    narrow = type(plain)(codes[..., 0::2] | codes[..., 1::2] << 4, (wide - 1).to(torch.uint8).view(packed.sf.dtype),
                         plain.group)  # fmt: skip
    best = torch.minimum(plains, squared_errors(narrow, w))
    assert bool((ours <= best * (1 + 1e-6)).all())


@pytest.mark.parametrize("name", [name for name in SCHEMES if name not in ("mxfp4", "nvfp4")])
def test_packing_in_other_schemes_is_the_plain_cast(name):
    w = torch.randn(2, 130, 256, generator=torch.Generator().manual_seed(4))
    got, want = pack_weight(w.transpose(1, 2).contiguous().transpose(1, 2), SCHEMES[name], "w"), quantize(w, name)
    assert torch.equal(got.values.view(torch.uint8), want.values.view(torch.uint8))
    assert_same_bits(got.sf.float(), want.sf.float())


@pytest.mark.parametrize(
    ("message", "x", "scheme"),
    [
        ("w: expected a floating-point tensor [.., R, C], got int32 [4, 128]", torch.zeros(4, 128).int(), "mxfp8"),
        ("w: expected a floating-point tensor [.., R, C], got float32 [128]", torch.zeros(128), "mxfp8"),
        ("w: expected a floating-point tensor [.., R, C], got bool [4, 128]", torch.zeros(4, 128).bool(), "mxfp8"),
        (
            "w: expected a floating-point tensor [.., R, C], got float8_e4m3fn [4, 128]",
            torch.zeros(4, 128).to(torch.float8_e4m3fn),
            "mxfp8",
        ),
        ("w: expected a floating-point tensor [.., R, C], got list", [[1.0]], "mxfp8"),
        ("w: expected a floating-point tensor [.., R, C], got NoneType", None, "mxfp8"),
        (
            "w.shape[-1]: expected a multiple of 128 (fp8_1x128 shares a scale over 128 columns), got 2880",
            torch.zeros(4, 2880),
            "fp8_1x128",
        ),
        (
            "w.shape[-1]: expected a multiple of 16 (nvfp4 shares a scale over 16 columns), got 40",
            torch.zeros(4, 40),
            "nvfp4",
        ),
        ("scheme: expected one of 'fp8_tensor', 'fp8_row', 'fp8_1x128', 'fp8_128x128', 'mxfp8', 'mxfp4', 'nvfp4', "
         "got 'MXFP8'", torch.zeros(4, 128), "MXFP8"),
        ("scheme: expected one of 'fp8_tensor', 'fp8_row', 'fp8_1x128', 'fp8_128x128', 'mxfp8', 'mxfp4', 'nvfp4', "
         "got None", torch.zeros(4, 128), None),
        ("scheme: expected one of 'fp8_tensor', 'fp8_row', 'fp8_1x128', 'fp8_128x128', 'mxfp8', 'mxfp4', 'nvfp4', "
         "got ['mxfp8']", torch.zeros(4, 128), ["mxfp8"]),
    ],
)  # fmt: skip
def test_refusals(message, x, scheme):
    with pytest.raises(ValueError) as caught:
        quantize(x, scheme, "w")
    assert str(caught.value) == message
