"""MXFP4 weights in the order of FP8 products: numbers, bits and what isn't taken."""

from dataclasses import replace

import pytest
import torch

from envoi.quant import dequantize, quantize
from envoi.quant.bits import e2m1_decode
from envoi.quant.fp8_fragments import (
    LARGEST_SHIFT,
    LEAST_SHIFT,
    ORDER,
    SPREAD,
    e4m3_tables,
    to_fp8_fragments,
    why_not_fp8_fragments,
)
from envoi.quant.fragments import to_rows
from envoi.quant.pack import with_checked_scales
from envoi.types import QuantTensor
from tests.helpers.accuracy import assert_same_bits

MAGNITUDES = e2m1_decode(torch.arange(8, dtype=torch.uint8)).double()


def weights(E=2, N=128, K=192, least=100, spread=SPREAD, seed=0):
    source = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (E, N, K // 2), dtype=torch.uint8, generator=source)
    sf = torch.randint(least, least + spread + 1, (E, N, K // 32), dtype=torch.uint8, generator=source)
    return QuantTensor(values, sf.view(torch.float8_e8m0fnu), (1, 32))


def copy(x):
    return replace(x, values=x.values.clone(), sf=x.sf.clone())


def test_e2m1_is_e4m3_under_exactly_these_powers_of_two():
    def exact(shift):
        wanted = MAGNITUDES * 2.0**shift
        return bool((wanted.to(torch.float8_e4m3fn).double() == wanted).all())

    assert [shift for shift in range(-20, 20) if exact(shift)] == list(range(LEAST_SHIFT, LARGEST_SHIFT + 1))
    numbers = e4m3_tables().view(torch.float8_e4m3fn).double()
    for index, row in enumerate(numbers[:-1]):
        assert torch.equal(row, MAGNITUDES * 2.0 ** (index + LEAST_SHIFT))
    assert numbers[-1].isnan().all()


@pytest.mark.parametrize("least", [0, 100, 254 - SPREAD])
def test_every_number_and_factor_comes_back(least):
    x = weights(least=least)
    packed = to_fp8_fragments(copy(x))
    assert packed.order == ORDER
    assert (packed.shape, packed.sf.shape, packed.scale.shape) == (x.shape, x.sf.shape, x.shape[:2])
    assert torch.equal(dequantize(packed, torch.float64), dequantize(x, torch.float64))
    back = to_rows(packed)
    assert (back.order, back.scale) == ("rows", None)
    assert_same_bits(back.values, x.values)
    assert_same_bits(back.sf.view(torch.uint8), x.sf.view(torch.uint8))


def test_what_the_kernel_reads_are_e4m3_numbers_of_each_row_and_column():
    """Decode words as the kernel does: magnitudes by table, signs by position, rows and K by place."""
    E, N, K = 2, 128, 192
    x = weights(E, N, K)
    packed = to_fp8_fragments(copy(x))
    words = packed.values.flatten().view(torch.int32).view(E, N // 64, K // 64, 4, 8, 4, 2, 2)
    index = packed.sf.view(torch.uint8).flatten().view(E, N // 64, K // 64, 4, 8, 2, 2)
    tables = e4m3_tables().view(torch.float8_e4m3fn).double()
    want = dequantize(x, torch.float64)
    source = torch.Generator().manual_seed(1)
    for _ in range(500):
        e, tile, step, warp, g, t, k16, half, block, i = (
            int(torch.randint(0, size, (), generator=source)) for size in (E, N // 64, K // 64, 4, 8, 4, 2, 2, 2, 4)
        )
        word = int(words[e, tile, step, warp, g, t, k16, half])
        row, k = 64 * tile + 16 * warp + 2 * g + half, 64 * step + 32 * block + 16 * k16 + 4 * t + i
        table = tables[int(index[e, tile, step, warp, g, block, half])]
        number = table[word >> (16 * block + 4 * i) & 7] * (-1) ** (word >> (8 * i + (3 if block else 7)) & 1)
        assert float(number * packed.scale[e, row].double()) == float(want[e, row, k])


def test_a_factor_that_is_nan_is_nan_and_changes_nothing_else():
    x = weights()
    x.sf.view(torch.uint8)[1, 70, 2] = 255
    got = dequantize(to_fp8_fragments(copy(x)), torch.float64)
    assert torch.equal(got.isnan(), dequantize(x, torch.float64).isnan())
    assert got.isnan().sum() == 32
    assert torch.equal(got.nan_to_num(), dequantize(x, torch.float64).nan_to_num())


def test_near_shifts_are_promised_where_no_e4m3_number_is_subnormal():
    def promised(x):
        return with_checked_scales(to_fp8_fragments(copy(x))).scales_at_most_2

    near = weights(spread=0)
    assert promised(near)
    near.sf.view(torch.uint8)[1, 7, 3] -= 11
    assert promised(near)
    near.sf.view(torch.uint8)[1, 7, 3] -= 1
    assert not promised(near)
    near.sf.view(torch.uint8)[1, 7, 3] = 255
    assert not promised(near)


@pytest.mark.parametrize(
    ("x", "why"),
    [
        (weights(N=96), "multiples of 64"),
        (weights(K=96), "multiples of 64"),
        (quantize(torch.ones(1, 64, 64), "nvfp4"), "it isn't MXFP4"),
        (quantize(torch.ones(1, 64, 64), "mxfp8"), "it isn't MXFP4"),
        (to_fp8_fragments(weights()), "in another order already"),
    ],
)
def test_others_are_refused(x, why):
    with pytest.raises(ValueError, match=why):
        to_fp8_fragments(x)


def test_a_row_of_factors_too_far_apart_is_refused_by_its_number():
    x = weights(spread=0)
    x.values[1, 70, :16] = 0x11
    x.sf.view(torch.uint8)[1, 70, 0] = 100 - SPREAD
    assert why_not_fp8_fragments(x) == ""
    x.sf.view(torch.uint8)[1, 70, 0] -= 1
    with pytest.raises(ValueError, match=r"1 rows of expert 1 have factors more than 2\^14 apart, first row 70"):
        to_fp8_fragments(x)
