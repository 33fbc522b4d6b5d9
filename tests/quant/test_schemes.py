"""Whole schemes against loops over groups in Python numbers, and properties for any input."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from envoi.quant import SCHEMES, Scheme, dequantize, quantize
from envoi.quant.cast import AMAX_FLOOR
from envoi.quant.pack import pack_weight
from tests.helpers.accuracy import assert_same_bits
from tests.quant.scalar import e2m1_code, e4m3_code, e4m3_value, e8m0_ceil_code

F = np.float32


def quantize_by_loops(x: np.ndarray, scheme: Scheme) -> tuple[np.ndarray, np.ndarray]:
    """Quantise float32 [R, C] to codes [R, C] and scale bytes or floats [row groups, column groups], one by one."""
    rows, columns = x.shape
    height, width = scheme.group[0] or max(rows, 1), scheme.group[1] or max(columns, 1)
    codes = np.zeros((rows, columns), np.uint8)
    sf = np.zeros((-(-rows // height), -(-columns // width)), np.float64)
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            cells = [(r, c) for r in range(top, min(top + height, rows)) for c in range(left, left + width)]
            amax = F(max(max(abs(x[r, c]) for r, c in cells), F(AMAX_FLOOR)))
            stored, multiplier = scale_by_hand(amax, scheme)
            sf[top // height, left // width] = stored
            for r, c in cells:
                scaled = float(F(x[r, c] * multiplier))
                codes[r, c] = e2m1_code(scaled) if scheme.values == torch.uint8 else e4m3_code(scaled)
    return codes, sf


def scale_by_hand(amax: np.float32, scheme: Scheme) -> tuple[float, np.float32]:
    quotient = F(amax / F(scheme.max_value))
    if scheme.sf == torch.float8_e8m0fnu:
        power = 2.0 ** (e8m0_ceil_code(float(quotient)) - 127)
        return power, F(1 / power)
    if scheme.sf == torch.float8_e4m3fn:
        stored = e4m3_value(e4m3_code(min(max(float(quotient), 2**-9), 448.0)))
        return stored, F(F(1) / F(stored))
    return float(quotient), F(F(scheme.max_value) / amax)


def codes_of(q) -> torch.Tensor:
    """Return one code per element, [.., R, C]."""
    if not q.packed:
        return q.values.view(torch.uint8)
    return torch.stack((q.values & 15, q.values >> 4), -1).flatten(-2)


def hard_numbers(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Return rows of different magnitudes; zeros of both signs, equal magnitudes, one outlier, halves of a step."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=source) * 10 ** (torch.rand(rows, 1, generator=source) * 4 - 2)
    x[::5] = torch.where(x[::5] > 0, 0.0, -0.0)
    x[1::5] = x[1::5].sign() * 3.5
    x[2::5, ::7] = 2000.0
    x[3::5] = (x[3::5] * 8).round() / 16
    return x


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("rows", [1, 5, 128, 131])
def test_every_code_and_scale_matches_loops(name, rows):
    x = hard_numbers(rows, 256, rows)
    q = quantize(x, name)
    codes, sf = quantize_by_loops(x.numpy(), SCHEMES[name])
    assert np.array_equal(codes_of(q).numpy(), codes)
    assert np.array_equal(q.sf.double().numpy(), sf.astype(np.float32))


@pytest.mark.parametrize("name", SCHEMES)
@given(rows=st.integers(0, 9), groups=st.integers(0, 3), seed=st.integers(0, 999))
@settings(max_examples=15, deadline=None)
def test_small_shapes_match_loops(name, rows, groups, seed):
    columns = groups * (SCHEMES[name].group[1] or 24)
    x = hard_numbers(rows, columns, seed)
    q = quantize(x, name)
    codes, sf = quantize_by_loops(x.numpy(), SCHEMES[name])
    assert q.shape == (rows, columns)
    assert np.array_equal(codes_of(q).numpy(), codes)
    assert np.array_equal(q.sf.double().numpy(), sf.astype(np.float32))
    assert dequantize(q).shape == (rows, columns)


@pytest.mark.parametrize("name", SCHEMES)
def test_other_dtypes_strides_and_leading_sides_change_nothing(name):
    x = torch.randn(130, 256, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    want = quantize(x, name)
    before = x.clone()
    for other in (
        x.bfloat16(),
        x.double(),
        x.T.contiguous().T,
        x[None].expand(1, -1, -1)[0],
    ):
        got = quantize(other, name)
        assert torch.equal(got.values.view(torch.uint8), want.values.view(torch.uint8))
        assert_same_bits(got.sf.float(), want.sf.float())
    led = quantize(x.expand(2, 3, -1, -1), name)
    assert led.values.shape[:2] == led.sf.shape[:2] == (2, 3)
    assert torch.equal(led.values[1, 2].view(torch.uint8), want.values.view(torch.uint8))
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
@given(seed=st.integers(0, 9999), power=st.integers(-60, 60))
@settings(max_examples=25, deadline=None)
def test_powers_of_two_make_a_second_round_trip_exact(name, seed, power):
    x = hard_numbers(6, 64, seed) * 2.0**power
    once = dequantize(quantize(x, name))
    assert_same_bits(dequantize(quantize(once, name)), once)
    assert_same_bits(dequantize(quantize(-x, name)), -once)
    assert_same_bits(dequantize(quantize(x * 4, name)), once * 4)


@pytest.mark.parametrize("name", SCHEMES)
@given(seed=st.integers(0, 9999))
@settings(max_examples=15, deadline=None)
def test_each_element_is_within_half_a_step_of_its_group(name, seed):
    """Test the bound: 2^-4 of the element in E4M3, a third in E2M1, or half the least step at the group's scale."""
    scheme = SCHEMES[name]
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(seed)) * 3
    q = quantize(x, name)
    step = dequantize(type(q)(torch.full_like(q.values.view(torch.uint8), 0x11 if q.packed else 1).view(q.values.dtype),
                              q.sf, q.group), torch.float64)  # fmt: skip
    share = 1 / 3 if scheme.values == torch.uint8 else 1 / 16
    allowed = torch.maximum(share * x.abs().double(), step / 2) * (1 + 1e-6)
    if scheme.sf == torch.float8_e4m3fn:  # rounding this scale down may clip the largest by a sixteenth
        allowed = torch.maximum(allowed, x.abs().double() / 16 + step / 2)
    assert bool(((dequantize(q, torch.float64) - x).abs() <= allowed).all())


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


@given(seed=st.integers(0, 9999), power=st.integers(-60, 60), heavy=st.booleans())
@settings(max_examples=25, deadline=None)
def test_the_mxfp4_search_takes_the_better_of_two_scales(seed, power, heavy):
    w = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(seed))
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
