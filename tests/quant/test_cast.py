"""Casts: against the scalar code, at the edges, and over shapes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from envoi.quant import FORMATS, SCHEMES, dequantize, format_named, quantize, scheme_named
from envoi.quant.cast import AMAX_FLOOR, decode_sf, decode_values, expand_sf
from envoi.types import QuantTensor
from tests.helpers.accuracy import assert_same_bits, relative_error
from tests.quant.scalar import E2M1_VALUES, E4M3_VALUES, nearest_even, power_of_two_from

BOUNDS = {
    "fp8_tensor": 0.04, "fp8_row": 0.04, "fp8_1x128": 0.04, "fp8_128x128": 0.04, "mxfp8": 0.04, "mxfp4": 0.15,
    "nvfp4": 0.12,
}  # fmt: skip


def f32(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32).item()


def scalar_group(values: list[float], scheme) -> tuple[list[float], float]:
    """Return one group by Python numbers, every operation rounded to float32: elements and scale factor."""
    amax = max(max(map(abs, values)), f32(AMAX_FLOOR))
    if scheme.sf == torch.float8_e8m0fnu:
        sf = power_of_two_from(f32(amax / scheme.max_value))
        multiplier = 1 / sf
    elif scheme.sf == torch.float8_e4m3fn:
        sf = nearest_even(max(f32(amax / scheme.max_value), 2**-9), E4M3_VALUES)
        multiplier = f32(1 / sf)
    else:
        sf, multiplier = f32(amax / scheme.max_value), f32(scheme.max_value / amax)
    grid = E2M1_VALUES if scheme.values == torch.uint8 else E4M3_VALUES
    return [nearest_even(f32(v * multiplier), grid) for v in values], sf


@pytest.mark.parametrize("name", ["fp8_row", "fp8_1x128", "mxfp8", "mxfp4", "nvfp4"])
def test_every_element_matches_the_scalar_code(name):
    scheme = SCHEMES[name]
    source = torch.Generator().manual_seed(0)
    x = torch.randn(4, 128, generator=source) * torch.tensor([[1.0], [1e-3], [300.0], [0.0]])
    x[0, :8] = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, 448.0, -447.0, 2.0**-9])
    q = quantize(x, name)
    columns = q.group[1]
    for row in range(len(x)):
        for start in range(0, 128, columns):
            want, sf = scalar_group(x[row, start : start + columns].tolist(), scheme)
            assert decode_sf(q)[row, start // columns].item() == sf
            assert decode_values(q)[row, start : start + columns].tolist() == want


@pytest.mark.parametrize("name", SCHEMES)
def test_error_is_bounded_and_nothing_is_clipped(name):
    x = torch.randn(3, 200, 256, generator=torch.Generator().manual_seed(0))
    q = quantize(x, name)
    assert q.shape == tuple(x.shape)
    assert relative_error(dequantize(q), x) < BOUNDS[name]
    top = dequantize(q).abs().amax()
    assert abs(top - x.abs().amax()) <= 0.17 * x.abs().amax()


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])  # the last in float64
def test_a_bad_number_poisons_its_group_and_no_other(name, bad):
    x = torch.randn(130, 256, generator=torch.Generator().manual_seed(1))
    clean = dequantize(quantize(x, name))
    y = x.double() if bad == 1e300 else x.clone()
    y[1, 40] = bad
    q = quantize(y, name)
    rows, columns = q.group
    hit = torch.zeros(130, 256, dtype=torch.bool)
    hit[1 // rows * rows : (1 // rows + 1) * rows, 40 // columns * columns : (40 // columns + 1) * columns] = True
    got = dequantize(q)
    assert bool(got[hit].isnan().all())
    assert_same_bits(got[~hit], clean[~hit])


@pytest.mark.parametrize("group", [None, 128, (128,), "1x128"])
def test_a_group_that_is_no_pair_is_refused(group):
    with pytest.raises(ValueError, match="^group: expected the rows and the columns that share a scale factor, got "):
        QuantTensor(torch.zeros(2, 128, dtype=torch.float8_e4m3fn), torch.ones(2, 1), group)


@pytest.mark.parametrize("name", SCHEMES)
def test_zeros_stay_zeros(name):
    q = quantize(torch.zeros(5, 256), name)
    assert bool((dequantize(q) == 0).all())
    assert bool(decode_sf(q).isfinite().all())


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_what_the_format_holds_comes_back_exactly(name):
    grid = E2M1_VALUES if name == "mxfp4" else E4M3_VALUES[-30:]
    x = torch.tensor([(grid * 32)[:31] + [grid[-1]] for _ in range(4)]) * torch.tensor([[1.0], [4.0], [0.25], [-8.0]])
    assert torch.equal(dequantize(quantize(x, name)), x)


@pytest.mark.parametrize("name", SCHEMES)
@given(rows=st.integers(0, 140), groups=st.integers(1, 3), lead=st.integers(0, 2), seed=st.integers(0, 99))
@settings(max_examples=12, deadline=None)
def test_any_shape_matches_a_loop_over_groups(name, rows, groups, lead, seed):
    columns = 128 * groups
    shape = (lead, rows, columns) if lead else (rows, columns)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    q = quantize(x, name)
    r, c = q.group
    assert q.sf.shape == (*shape[:-2], -(-rows // r), columns // c)
    spread = expand_sf(decode_sf(q), q.group, q.shape).expand(shape)
    assert_same_bits(dequantize(q), decode_values(q) * spread)
    for index in range(0, rows, 37):
        alone = quantize(x[..., index // r * r : (index // r + 1) * r, :], name)
        assert_same_bits(dequantize(alone), dequantize(q)[..., index // r * r : (index // r + 1) * r, :])


def test_last_groups_may_be_smaller():
    values, sf = torch.ones(2, 192, 160).to(torch.float8_e4m3fn), torch.tensor([[1.0, 2.0], [3.0, 4.0]]).expand(2, 2, 2)
    x = dequantize(QuantTensor(values, sf, (128, 128)))
    assert [x[1, 127, 127], x[1, 127, 128], x[1, 128, 127], x[1, 191, 159]] == [1, 2, 3, 4]
    assert x.shape == (2, 192, 160)


def test_a_half_precision_input_is_widened_by_value():
    x = torch.tensor([[37.0] * 128], dtype=torch.float16)
    assert torch.equal(
        dequantize(quantize(x, "mxfp8")), torch.full((1, 128), 36.0)
    )  # 37 between 36 and 40 in E4M3 steps


def test_refusals():
    with pytest.raises(ValueError, match="x: expected a floating-point tensor"):
        quantize(torch.zeros(4, 128, dtype=torch.int32), "mxfp8")
    with pytest.raises(ValueError, match=r"x.shape\[-1\]: expected a multiple of 128 \(fp8_1x128 .*\), got 2880"):
        quantize(torch.zeros(4, 2880), "fp8_1x128")
    with pytest.raises(ValueError, match="scheme: expected one of 'fp8_tensor', .*, got 'fp9'"):
        quantize(torch.zeros(4, 128), "fp9")
    with pytest.raises(ValueError, match=r"q: expected a QuantTensor, got float32 \[4, 128\]"):
        dequantize(torch.zeros(4, 128))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="format: expected one of 'bf16', .*, got 'int4'"):
        format_named("int4")
    assert scheme_named("mxfp4").max_value == 6.0
    assert {name: format.group_k for name, format in FORMATS.items()} == {
        "bf16": 1, "fp8_row": 1, "fp8_block128": 128, "mxfp8": 32, "mxfp4": 32, "mxfp4_fp8": 32, "mxfp4_mxfp8": 32,
        "nvfp4": 16,
    }  # fmt: skip
