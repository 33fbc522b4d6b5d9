"""Tokens as bytes: what one rank packs another unpacks, whatever the number of tokens and the width."""

import pytest
import torch

from envoi.ops.moe.parallel.counted import SentTokens, from_bytes, to_bytes
from envoi.quant import quantize
from tests.helpers.accuracy import assert_same_bits


@pytest.mark.parametrize("num_rows", [0, 1, 2, 5])
@pytest.mark.parametrize(("scheme", "hidden"), [(None, 24), ("fp8_row", 24), ("fp8_1x128", 256), ("mxfp8", 96)])
def test_tokens_come_back(scheme, hidden, num_rows):
    source = torch.Generator().manual_seed(0)
    rows = torch.randn(num_rows, hidden, generator=source).bfloat16()
    rows = rows if scheme is None else quantize(rows, scheme)
    ids = torch.randint(-1, 8, (num_rows, 3), generator=source, dtype=torch.int32)
    sent = SentTokens(rows, ids, torch.rand(num_rows, 3, generator=source))
    packed = to_bytes(sent)
    # A part of a longer message: one row of a width that 4 doesn't divide is contiguous, at any byte.
    got = from_bytes(torch.cat((packed, packed))[:num_rows], sent)
    assert_same_bits(got.topk_ids, ids)
    assert_same_bits(got.weights, sent.weights)
    if isinstance(rows, torch.Tensor):
        assert_same_bits(got.rows, rows)
    else:
        assert_same_bits(got.rows.values.view(torch.uint8), rows.values.view(torch.uint8))
        assert_same_bits(got.rows.sf.view(torch.uint8), rows.sf.view(torch.uint8))
        assert got.rows.group == rows.group


@pytest.mark.parametrize("num_rows", [0, 1, 2])
@pytest.mark.parametrize("k", [0, 2])
def test_any_strides(num_rows, k):
    """Without an element each strides count as contiguous, and may not be such as another dtype has."""
    rows = torch.randn(8, 24).bfloat16().T.contiguous().T[:num_rows]
    ids = torch.ones(8, 1, dtype=torch.int32)[:num_rows].expand(num_rows, k)
    weights = torch.rand(num_rows, 5)[:, ::2][:, :k]
    sent = SentTokens(rows, ids, weights)
    got = from_bytes(to_bytes(sent), sent)
    for mine, want in zip((got.rows, got.topk_ids, got.weights), (rows, ids, weights), strict=True):
        assert_same_bits(mine, want.contiguous())
