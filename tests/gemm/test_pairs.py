"""Every pair of schemes on the torch path, against float64 products of the dequantised operands."""

from itertools import pairwise, product

import pytest
import torch

from envoi.ops.gemm import gemm, grouped_gemm
from envoi.quant import SCHEMES, dequantize, quantize
from envoi.types import QuantTensor
from tests.helpers.accuracy import relative_error

# M or N equal to the number of groups along K, of 16, 32 or 128 columns: a dimension of size one broadcasts silently.
SHAPES = [(8, 64, 256), (16, 8, 256), (5, 136, 256), (2, 2, 256), (4, 16, 128), (24, 24, 768), (6, 12, 384)]
TOLERANCE = 3e-6


def uneven(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Return values whose scale factors differ strongly between rows and between groups."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return x * torch.logspace(-3, 3, rows)[:, None] * torch.logspace(-1, 1, columns)


def oracle(a: QuantTensor, b: QuantTensor) -> torch.Tensor:
    return dequantize(a, torch.float64) @ dequantize(b, torch.float64).mT


@pytest.mark.parametrize(("for_a", "for_b"), [*product(SCHEMES, SCHEMES)])
def test_a_product_of_any_two_schemes(for_a, for_b):
    for m, n, k in SHAPES:
        a, b = quantize(uneven(m, k, 0), for_a), quantize(uneven(n, k, 1).flip(0), for_b)
        assert relative_error(gemm(a, b, out_dtype=torch.float32), oracle(a, b)) < TOLERANCE, (m, n, k)


@pytest.mark.parametrize(("for_a", "for_b"), [(a, b) for a, b in product(SCHEMES, SCHEMES) if SCHEMES[a].group[0] == 1])
def test_a_grouped_product_of_any_two_schemes(for_a, for_b):
    bounds = [0, 8, 8, 16]
    rows = quantize(uneven(16, 256, 0), for_a)
    weights = quantize(torch.stack([uneven(8, 256, seed) for seed in (1, 2, 3)]), for_b)
    got = grouped_gemm(rows, weights, torch.tensor(bounds, dtype=torch.int32), out_dtype=torch.float32)
    wide, stack = dequantize(rows, torch.float64), dequantize(weights, torch.float64)
    want = torch.cat([wide[first:last] @ stack[e].T for e, (first, last) in enumerate(pairwise(bounds))])
    assert relative_error(got, want) < TOLERANCE


def test_a_scale_inside_a_block_may_have_any_extent():
    """Test scale factors of any extent: E8M0 over 64 columns with float32 over 128, and over two blocks at once."""
    a = quantize(uneven(4, 512, 0), "fp8_1x128")
    for columns in (64, 256):
        b = quantize(uneven(4, 512, 1), "mxfp8")
        b = QuantTensor(b.values, b.sf[:, :: columns // 32].contiguous(), (1, columns))
        assert relative_error(gemm(a, b, out_dtype=torch.float32), oracle(a, b)) < TOLERANCE
