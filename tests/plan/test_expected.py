"""Expectations of random routing against sampled routing, and bytes against tensors."""

import pytest
import torch

from envoi.plan.layer import MoeLayer, active_experts, matrix_bytes, pulled_tokens, rows_per_expert, tiles_per_expert
from envoi.quant.cast import quantize
from envoi.quant.formats import SCHEMES

SAMPLES = 40


@pytest.mark.parametrize(
    ("num_experts", "num_topk", "num_tokens", "num_ranks"),
    [(256, 6, 3, 1), (256, 6, 64, 8), (64, 8, 100, 4), (16, 2, 500, 1), (8, 8, 130, 2), (32, 1, 40, 2)],
)
def test_expectations_are_the_means_of_random_routing(num_experts, num_topk, num_tokens, num_ranks):
    layer = MoeLayer(256, 256, num_experts, num_topk, num_tokens, num_ranks)
    source = torch.Generator().manual_seed(num_experts + num_tokens)
    keys = torch.rand(SAMPLES, num_tokens * num_ranks, num_experts, generator=source)
    chosen = keys.topk(num_topk, dim=2).indices
    others = (chosen[:, num_tokens:] < layer.num_local_experts).any(2).sum(1)  # on rank 0
    assert pulled_tokens(layer) == pytest.approx(float(others.double().mean()), rel=0.03)
    ids = chosen.flatten(1)
    counts = torch.stack([row.bincount(minlength=num_experts) for row in ids])
    assert rows_per_expert(layer) == pytest.approx(float(counts.double().mean()))
    share = float((counts > 0).double().mean())
    assert active_experts(layer) / layer.num_local_experts == pytest.approx(share, abs=0.02)
    for block_m in (8, 64, 128):
        tiles = float((-(-counts // block_m)).double().mean())
        assert tiles_per_expert(layer, block_m) == pytest.approx(tiles, rel=0.02, abs=0.01)


@pytest.mark.parametrize("scheme", ["fp8_row", "fp8_1x128", "fp8_128x128", "mxfp8", "mxfp4"])
def test_bytes_are_those_of_the_tensors(scheme):
    x = quantize(torch.randn(256, 384), SCHEMES[scheme])
    stored = sum(tensor.numel() * tensor.element_size() for tensor in (x.values, x.sf))
    assert matrix_bytes(SCHEMES[scheme], 256, 384) == stored
    assert matrix_bytes(None, 256, 384) == 2 * 256 * 384
