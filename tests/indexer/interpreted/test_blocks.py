"""Kernels of the selection in two levels against the float64 oracle, and against the reference where sums are exact."""

import pytest
import torch

from envoi.ops.indexer import fast, indexer_blocks, indexer_topk_in_blocks, reference
from tests.indexer.blocks_oracle import wrong_blocks, wrong_tokens
from tools.oracles.indexer_workloads import one, random_fp4_cache

LENGTHS = (1500, 0, 65, 3, 128)


@pytest.mark.parametrize(("block", "k", "heads"), [(8, 32, 32), (16, 1, 4), (128, 4, 2)])
def test_two_levels(block, k, heads):
    q, cache, weights, seq_lens, table = one(LENGTHS, num_heads=heads).tensors()
    tensors = q, random_fp4_cache(len(cache)), weights, seq_lens, table
    blocks, errors = indexer_blocks(*tensors, k, block, return_errors=True)
    assert wrong_blocks(blocks, tensors, block) == {} and not bool(errors.any())
    for order in ("score", "position"):
        out = indexer_topk_in_blocks(*tensors, blocks, 100, block, order=order)
        assert wrong_tokens(out, blocks, tensors, block) == {}


def whole_numbers(lengths, next_n):
    """Make a call whose scores have no rounding, and few values: many ties, and some NaN."""
    _, cache, _, seq_lens, table = one(lengths).tensors()
    source = torch.Generator().manual_seed(1)
    rows = len(lengths) * next_n
    q = torch.randint(-1, 2, (rows, 4, 128), generator=source).float()
    q[:, :, 4:] = 0
    cache = random_fp4_cache(len(cache), spread=0).clone()
    raw = cache.view(torch.uint8).view(len(cache), -1)
    raw[:, 4096:] = 127
    raw[:, 4096 + 4 * 11] = 255  # NaN in a token of each page
    return q.to(torch.float8_e4m3fn), cache, torch.ones(rows, 4), seq_lens, table


@pytest.mark.parametrize(("next_n", "step"), [(1, 8), (3, 2)])
def test_ties_go_to_the_lower_and_nan_is_last(next_n, step, monkeypatch):
    monkeypatch.setattr(fast, "MAX_BLOCKS", step)  # rows of a launch
    tensors = whole_numbers((700, 2, 400), next_n)
    blocks = indexer_blocks(*tensors, 20, 8, next_n)
    assert torch.equal(blocks, reference.indexer_blocks(*tensors, 20, 8, next_n))
    blocks[0, 5:] = -1
    for order, slots in (("score", True), ("position", False), ("any", True)):
        out = indexer_topk_in_blocks(
            *tensors, blocks, 50, 8, next_n, order=order, output="slots" if slots else "positions"
        )
        assert torch.equal(out, reference.indexer_topk_in_blocks(*tensors, blocks, 50, 8, next_n, slots, order))


def test_bad_requests():
    q, cache, weights, seq_lens, table = one((300, 100, 700, 200), num_heads=32).tensors()
    table, seq_lens = table.clone(), seq_lens.clone()
    table[0, 2], seq_lens[1] = cache.shape[0], -1
    seq_lens[2] = table.shape[1] * 64 + 1
    blocks, errors = indexer_blocks(q, cache, weights, seq_lens, table, 5, 8, return_errors=True)
    assert errors.tolist() == [2, 1, 1, 0] and bool((blocks[:3] == -1).all()) and bool((blocks[3] >= 0).all())
    some = torch.arange(6, dtype=torch.int32).expand(4, -1).contiguous()
    out, errors = indexer_topk_in_blocks(q, cache, weights, seq_lens, table, some, 5, 8, return_errors=True)
    assert errors.tolist() == [2, 1, 1, 0] and bool((out[:3] == -1).all()) and bool((out[3] >= 0).all())
