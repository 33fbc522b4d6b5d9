"""Casts in Triton, bit for bit those of torch."""

import pytest
import torch
import triton
import triton.language as tl

from envoi.epilogues import codes_triton, device, tile_triton
from envoi.quant import bits
from tests.helpers.accuracy import assert_same_bits


@triton.jit
def apply(x, y, n, function: tl.constexpr, BLOCK: tl.constexpr):
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + ids, function(tl.load(x + ids, mask=ids < n)), mask=ids < n)


@triton.jit
def first_of_e8m0(x):
    return device.e8m0_ceil(x)[0]


@triton.jit
def second_of_e8m0(x):
    return device.e8m0_ceil(x)[1]


def through(function, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=dtype)
    apply[(triton.cdiv(x.numel(), 65536),)](x, y, x.numel(), function, 65536)
    return y


def numbers() -> torch.Tensor:
    """Return float32: all of bf16's, all of E4M3's with the ties between them and their neighbours, random bits."""
    bf16 = torch.arange(65536).to(torch.uint16).view(torch.bfloat16).float()
    e4m3 = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
    e4m3 = e4m3[e4m3.isfinite()].sort().values
    ties = (e4m3[1:] + e4m3[:-1]) / 2
    near = [torch.nextafter(ties, torch.tensor(side)) for side in (-torch.inf, torch.inf)]
    halves = (bf16.view(torch.int32) | 0x8000).view(torch.float32)
    random = torch.randint(-(2**31), 2**31, (200000,), generator=torch.Generator().manual_seed(0)).int()
    small = torch.randn(100000, generator=torch.Generator().manual_seed(1)) * 0.02
    return torch.cat((bf16, e4m3, ties, *near, halves, random.view(torch.float32), small))


X = numbers()


def test_bf16():
    assert_same_bits(through(device.bf16, X, torch.bfloat16), X.bfloat16())
    every = torch.arange(65536).to(torch.uint16).view(torch.bfloat16)
    assert_same_bits(through(codes_triton.widen, every, torch.float32), every.float())


def test_numbers_of_e4m3_by_arithmetic_are_those_of_the_cast():
    x = X[X.abs() <= 448]
    got = through(device.near_e4m3, x, torch.float32)
    assert_same_bits(got + 0.0, x.to(torch.float8_e4m3fn).float() + 0.0)  # of zeros it loses the sign


@pytest.mark.parametrize("function", [codes_triton.to_e4m3, tile_triton.e4m3])
def test_e4m3(function):
    got = through(function, X, torch.uint8).view(torch.float8_e4m3fn)
    assert_same_bits(got, X.clamp(-448, 448).to(torch.float8_e4m3fn))


def test_narrow_codes_are_decoded():
    codes = torch.arange(256).to(torch.uint8)
    assert_same_bits(through(codes_triton.from_e4m3, codes, torch.float32), codes.view(torch.float8_e4m3fn).float())
    assert_same_bits(through(codes_triton.from_e8m0, codes, torch.float32), codes.view(torch.float8_e8m0fnu).float())
    assert_same_bits(through(codes_triton.from_e2m1, codes[:16], torch.float32), bits.e2m1_decode(codes[:16]))


def test_e2m1():
    assert_same_bits(through(device.e2m1, X, torch.uint8), bits.e2m1_encode(X))


def test_e8m0():
    x = X[(X > 0) | X.isnan()]
    want = bits.e8m0_ceil(x)
    assert_same_bits(through(first_of_e8m0, x, torch.uint8), want.view(torch.uint8))
    assert_same_bits(through(second_of_e8m0, x, torch.float32), 1.0 / bits.e8m0_to_float(want))
