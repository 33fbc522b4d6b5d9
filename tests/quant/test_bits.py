"""E2M1 nibbles and UE8M0 powers of two, code by code; tensors of any dtype concatenated."""

import pytest
import torch

from envoi.quant.bits import as_bytes, concatenate, pack_nibbles, unpack_nibbles


def test_even_columns_lie_in_the_low_nibble():
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert pack_nibbles(codes).tolist() == [[0x21, 0x0F]]
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)


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
