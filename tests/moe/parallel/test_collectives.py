"""Rows as bytes: what one rank packs another unpacks, whatever the number of rows and the width."""

import pytest
import torch

from envoi.moe.parallel.collectives import from_bytes, to_bytes
from envoi.quant import quantize
from tests.helpers.accuracy import assert_same_bits


@pytest.mark.parametrize("num_rows", [0, 1, 2, 5])
@pytest.mark.parametrize(("scheme", "hidden"), [(None, 24), ("fp8_row", 24), ("fp8_1x128", 256), ("mxfp8", 96)])
def test_rows_come_back(scheme, hidden, num_rows):
    source = torch.Generator().manual_seed(0)
    rows = torch.randn(num_rows, hidden, generator=source).bfloat16()
    rows = rows if scheme is None else quantize(rows, scheme)
    weights = torch.rand(num_rows, generator=source)
    packed = to_bytes(rows, weights)
    # A part of a longer message: one row of a width that 4 doesn't divide is contiguous, at any byte.
    received = torch.cat((packed, packed))[:num_rows]
    got, got_weights = from_bytes(received, rows)
    assert_same_bits(got_weights, weights)
    if isinstance(rows, torch.Tensor):
        assert_same_bits(got, rows)
    else:
        assert_same_bits(got.values.view(torch.uint8), rows.values.view(torch.uint8))
        assert_same_bits(got.sf.view(torch.uint8), rows.sf.view(torch.uint8))
        assert got.group == rows.group
