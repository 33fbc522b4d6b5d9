"""`widen_kernel` beside the reference's dequantisation: formats, groups, sizes, strides, hostile bytes."""

import pytest
import torch

from envoi.ops.gemm.widened import becomes_bf16, widened
from envoi.quant import dequantize, quantize
from envoi.types import QuantTensor
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.inputs import normal

FORMATS = ["nvfp4", "mxfp4", "mxfp8"]


def some_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def assert_widened(q: QuantTensor) -> None:
    assert becomes_bf16(q)
    got, want = widened(q), dequantize(q).bfloat16()
    assert got.is_contiguous()
    tiny = want.abs() < 2.0**-126  # Triton's interpreter rounds them otherwise
    assert bool((got[tiny].abs() < 2.0**-126).all())
    assert_same_bits(got.masked_fill(tiny, 0.0), want.masked_fill(tiny, 0.0))


@pytest.mark.parametrize(("rows", "K"), [(1, 32), (7, 96), (8, 512), (19, 544), (33, 1056)])
@pytest.mark.parametrize("scheme", FORMATS)
def test_sizes(scheme, rows, K):
    q = quantize(normal(rows, K) * torch.logspace(-2, 2, K), scheme)
    assert_same_bits(dequantize(q).bfloat16().float(), dequantize(q))  # nothing is lost
    assert_widened(q)


@pytest.mark.parametrize("scheme", FORMATS)
def test_any_bytes(scheme):
    q = quantize(normal(24, 256), scheme)
    values, sf = some_bytes(*q.values.shape), some_bytes(*q.sf.shape, seed=1)
    assert_widened(QuantTensor(values.view(q.values.dtype), sf.view(q.sf.dtype), q.group))


def test_strides():
    whole = quantize(normal(40, 512), "nvfp4")
    assert_widened(QuantTensor(whole.values[3::2, 32:160], whole.sf[3::2, 4:20], whole.group))


@pytest.mark.parametrize("group", [(1, 64), (4, 32), (128, 128)])
def test_groups(group):
    sf = some_bytes(-(-24 // group[0]), 256 // group[1]) // 8 + 110
    q = QuantTensor(normal(24, 256).to(torch.float8_e4m3fn), sf.view(torch.float8_e8m0fnu), group)
    assert_widened(q)


def test_tokens_in_bf16_stay_where_they_are():
    x = normal(4, 64).bfloat16()
    assert widened(x) is x
