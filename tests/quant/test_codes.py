"""Codes bit by bit: every byte, every bfloat16 number, and the values at which rounding changes."""

import itertools
import math
import struct

import numpy as np
import pytest
import torch

from envoi.quant import SCHEMES, Scheme, dequantize, quantize
from envoi.quant.bits import e2m1_decode, e2m1_encode, e8m0_ceil, e8m0_to_float, pack_nibbles, unpack_nibbles
from envoi.quant.cast import AMAX_FLOOR, decode_values, group_amax
from tests.quant.scalar import E2M1_VALUES, E4M3_VALUES, e2m1_code, e4m3_code, e4m3_value, e8m0_ceil_code

NEGATIVE_NAN = torch.tensor([-1], dtype=torch.int32).view(torch.float32)


def every_bfloat16() -> torch.Tensor:
    """Return all finite bfloat16 numbers, as float32."""
    bits = torch.arange(1 << 16, dtype=torch.int32) << 16
    x = bits.view(torch.float32)
    return x[x.isfinite()]


def turning_points(grid: list[float]) -> torch.Tensor:
    """Return every value of a grid, every midpoint, and the float32 numbers on both sides of each; both signs."""
    points = np.array(grid + [(a + b) / 2 for a, b in itertools.pairwise(grid)] + [grid[-1] * 1.0625], np.float32)
    with np.errstate(under="ignore"):
        around = [points, np.nextafter(points, np.float32(-1e9)), np.nextafter(points, np.float32(1e9))]
    return torch.from_numpy(np.concatenate([*around, *(-a for a in around)]))


def test_turning_points_are_where_the_code_turns():
    codes = {e4m3_code(x) for x in turning_points(E4M3_VALUES).tolist()}
    assert codes == set(range(256)) - {0x7F, 0xFF}


def test_every_e4m3_byte_decodes():
    for scheme in ("fp8_row", "mxfp8"):
        q = quantize(torch.ones(2, 128) * 448, scheme)
        bytes_ = torch.arange(256, dtype=torch.uint8).view(2, 128)
        got = decode_values(type(q)(bytes_.view(torch.float8_e4m3fn), q.sf, q.group)).flatten().tolist()
        for code, value in enumerate(got):
            want = e4m3_value(code)
            assert struct.pack("f", value) == struct.pack("f", want) or (math.isnan(value) and math.isnan(want))


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_row", "fp8_1x128", "fp8_128x128", "mxfp8"])
@pytest.mark.parametrize("numbers", ["every bfloat16", "turning points"])
def test_every_e4m3_byte_encodes(name, numbers):
    x = every_bfloat16() if numbers == "every bfloat16" else turning_points(E4M3_VALUES)
    x = x[x.abs() <= 448]
    rows = torch.full((-(-len(x) // 31), 32), 448.0)  # a scale of exactly one in each group
    flat = torch.zeros(rows.shape[0] * 31)
    flat[: len(x)] = x
    rows[:, :31] = flat.view(-1, 31)
    columns = SCHEMES[name].group[1] or 32
    rows = torch.nn.functional.pad(rows, (0, columns - 32))
    q = quantize(rows, name)
    assert bool((q.sf.float() == 1).all())
    got = q.values.view(torch.uint8)[:, :31].flatten()[: len(x)].tolist()
    wrong = [(v, hex(code), hex(e4m3_code(v))) for v, code in zip(x.tolist(), got, strict=True) if code != e4m3_code(v)]
    assert not wrong, wrong[:5]


def test_every_e2m1_nibble_encodes():
    x = torch.cat((every_bfloat16(), turning_points(E2M1_VALUES)))
    got = e2m1_encode(x).tolist()
    wrong = [(v, code, e2m1_code(v)) for v, code in zip(x.tolist(), got, strict=True) if code != e2m1_code(v)]
    assert not wrong, wrong[:5]


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_nibbles_under_a_scale_of_one(name):
    grid = [*E2M1_VALUES, *(-v for v in E2M1_VALUES)]
    x = torch.tensor([grid * 4, grid[::-1] * 4])
    q = quantize(x, name)
    assert q.values.shape == (2, 32)
    for row, numbers in zip(q.values.tolist(), x.tolist(), strict=True):
        for byte, even, odd in zip(row, numbers[0::2], numbers[1::2], strict=True):
            assert byte == e2m1_code(even) | e2m1_code(odd) << 4


def test_a_nan_has_no_sign_in_e2m1():
    assert e2m1_encode(torch.tensor([math.nan])).tolist() == e2m1_encode(NEGATIVE_NAN).tolist() == [0]


def test_every_byte_unpacks_and_packs():
    packed = torch.arange(256, dtype=torch.uint8).view(2, 128)
    codes = unpack_nibbles(packed)
    assert codes.shape == (2, 256)
    assert [low | high << 4 for low, high in codes.view(-1, 2).tolist()] == list(range(256))
    assert torch.equal(pack_nibbles(codes), packed)
    assert torch.equal(e2m1_encode(e2m1_decode(codes)), codes)


def test_scales_round_up_at_every_exponent():
    mantissas = torch.tensor([0, 1, 0x400000, 0x7FFFFE, 0x7FFFFF], dtype=torch.int32)
    bits = (torch.arange(255, dtype=torch.int32) << 23)[:, None] + mantissas
    x = bits.view(torch.float32).flatten()
    got = e8m0_ceil(x)
    wrong = [
        (v, code, e8m0_ceil_code(v))
        for v, code in zip(x.tolist(), got.view(torch.uint8).tolist(), strict=True)
        if code != e8m0_ceil_code(v)
    ]
    assert not wrong, wrong[:5]
    wide = e8m0_to_float(got).double()
    usual = (x >= 2.0**-126) & (x <= 2.0**127)
    assert bool(((wide >= x) & (wide / 2 < x))[usual].all())


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
def test_a_scale_of_nothing_finite_is_nan(bad):
    x = torch.tensor([bad, 1.0])
    assert e8m0_ceil(x).view(torch.uint8).tolist() == [255, 127]
    assert e8m0_ceil(NEGATIVE_NAN).view(torch.uint8).tolist() == [255]


def test_a_nan_poisons_groups_that_run_down_a_column():
    """Test that NaN propagates: vectorised reductions over the outer dimension return a NaN with its sign set."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    x[5, 17] = math.nan
    for sf in (torch.float8_e8m0fnu, torch.float32, torch.float8_e4m3fn):
        q = quantize(x, Scheme("columns", torch.float8_e4m3fn, (32, 1), sf))
        got = dequantize(q)
        assert bool(got[:32, 17].isnan().all()), sf
        assert int(got.isnan().sum()) == 32, sf


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_the_power_of_two_is_the_smallest_that_clips_nothing(name):
    scheme = SCHEMES[name]
    exponents = torch.arange(-80, 110, dtype=torch.float64)
    edges = (scheme.max_value * 2.0**exponents).float()
    amax = torch.cat([edges, *(torch.nextafter(edges, torch.tensor(to)) for to in (0.0, math.inf)), edges * 0.71])
    amax = amax[amax >= AMAX_FLOOR * scheme.max_value]
    x = torch.zeros(len(amax), 32)
    x[:, 7] = -amax
    q = quantize(x, name)
    sf = e8m0_to_float(q.sf)[:, 0].double()
    assert bool((sf * scheme.max_value >= amax.double()).all()), "clipped"
    assert bool((sf / 2 * scheme.max_value < amax.double()).all()), "coarser than needed"


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_row", "fp8_1x128", "fp8_128x128"])
def test_the_largest_element_takes_the_largest_code(name):
    source = torch.Generator().manual_seed(3)
    for _ in range(40):
        x = torch.randn(4, 128, generator=source) * 10 ** float(torch.rand(1, generator=source) * 60 - 25)
        q = quantize(x, name)
        codes = q.values.float().abs()
        groups = group_amax(x, q.group)
        spread = groups.repeat_interleave(q.group[0], 0)[:4].repeat_interleave(q.group[1], 1)
        assert bool((codes[x.abs() == spread] == 448).all())
        assert not bool(codes.isnan().any())
