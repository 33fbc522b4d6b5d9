"""E2M1 nibbles and UE8M0 powers of two, code by code; tensors of any dtype concatenated."""

import pytest
import torch

from envoi.quant.bits import (
    as_bytes,
    concatenate,
    e2m1_decode,
    e2m1_encode,
    e8m0_ceil,
    e8m0_to_float,
    pack_nibbles,
    unpack_nibbles,
)
from tests.quant.scalar import E2M1_VALUES, nearest_even, power_of_two_from


def test_every_nibble_decodes_and_encodes_to_itself():
    codes = torch.arange(16, dtype=torch.uint8)
    values = e2m1_decode(codes)
    assert values.tolist() == E2M1_VALUES + [-v for v in E2M1_VALUES]
    assert torch.equal(e2m1_encode(values), codes)


def test_rounding_is_to_nearest_with_ties_to_even_and_saturates():
    x = torch.cat([torch.arange(-8, 8, 1 / 64), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 1e30, -1e30])])
    want = torch.tensor([nearest_even(v, E2M1_VALUES) for v in x.tolist()])
    assert torch.equal(e2m1_decode(e2m1_encode(x)), want)
    assert torch.equal(torch.signbit(e2m1_decode(e2m1_encode(x))), torch.signbit(x))


def test_even_columns_lie_in_the_low_nibble():
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert pack_nibbles(codes).tolist() == [[0x21, 0x0F]]
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)


def test_every_scale_byte_decodes():
    sf = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    values = e8m0_to_float(sf)
    assert values[:255].double().tolist() == [2.0 ** (e - 127) for e in range(255)]
    assert values[255].isnan()


def test_scales_round_up():
    x = torch.tensor([1.0, 1.0000001, 0.5, 3.0, 447.9, 2.0**-126, 1e-30, 1.7e38, 2.0**127])
    assert e8m0_to_float(e8m0_ceil(x)).double().tolist() == [power_of_two_from(v) for v in x.double().tolist()]
    assert e8m0_to_float(e8m0_ceil(torch.tensor([torch.nan, torch.inf]))).isnan().all()
    tiny = e8m0_to_float(e8m0_ceil(torch.tensor([0.0, 1e-45])))
    assert (tiny == 2.0**-126).all()


DTYPES = torch.float8_e8m0fnu, torch.float8_e4m3fn, torch.uint8, torch.bfloat16, torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_any_dtype_are_concatenated(dtype):
    raw = torch.arange(1, 25, dtype=torch.uint8)
    x = raw.view(dtype) if dtype.itemsize == 1 else raw.to(dtype)
    x = x.view(6, 4)
    whole = concatenate([x[:1], x[1:4], x[4:]])
    assert whole.dtype == dtype
    assert torch.equal(as_bytes(whole), as_bytes(x))
    assert as_bytes(x).data_ptr() == x.data_ptr()
