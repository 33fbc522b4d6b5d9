"""Kernels of the exact mode: sums to rounding in any order, and its own selection; test_gpu checks the bits."""

import pytest
import torch

from envoi.ops.indexer import UncertifiedWarning, certificate, exact, fast, indexer_topk, reference
from envoi.ops.indexer.certificate import NUM_ORDERS, SHARED
from envoi.ops.indexer.layout import pages_of, unpack_pages
from tests.helpers.slow import mostly_slow
from tests.indexer.test_indexer import definition
from tools.oracles.indexer_workloads import one

LENGTHS = (300, 2, 65)


def scores(p: fast.Problem, order: int) -> torch.Tensor:
    space = fast.workspace(p)
    exact.score(torch.full((NUM_ORDERS + 4,), order, dtype=torch.int32), p, space, 0, p.num_rows)
    return space.logits


@pytest.mark.parametrize("heads", mostly_slow([32, 64], quick=[64]))
@pytest.mark.parametrize("order", [1, 4, 16, 1 + SHARED, 16 + SHARED])
def test_scores(order, heads):
    q, cache, weights, seq_lens, table = one(LENGTHS, num_heads=heads).tensors()
    own = scores(fast.Problem(q, cache, weights, seq_lens, table, 512, 1), order)
    for row, length in enumerate(LENGTHS):
        values, scales = unpack_pages(cache, table[row, : pages_of(length)])
        want = reference.score_exact(q[row], values[:length], scales[:length], weights[row])
        torch.testing.assert_close(own[row, :length], want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("by_score", mostly_slow([True, False], quick=[True]))
@pytest.mark.parametrize("slots", [True, False])
def test_selection(slots, by_score):
    tensors = one((700, 31, 5, 0), num_heads=32).tensors()
    p = fast.Problem(*tensors, 512, 1)
    orders = torch.ones(NUM_ORDERS + 4, dtype=torch.int32)
    own = scores(p, 1)
    out, errors = exact.topk(p, orders, fast.Order(slots, by_score))
    assert errors.tolist() == [0] * 4
    for row, length in enumerate((700, 31, 5, 0)):
        want = reference.best(own[row, :length], 512)
        want = want if by_score else want.sort().values
        if slots:
            want = tensors[4][row][want // 64].long() * 64 + want % 64
        assert out[row, : len(want)].tolist() == want.tolist()
        assert bool((out[row, len(want) :] == -1).all())


@pytest.mark.parametrize(("heads", "k"), [(7, 128), (64, 32)])
def test_without_a_kernel_the_definition_runs_and_says_so(heads, k):
    tensors = one((300, 33, 0), num_heads=heads).tensors()
    certificate.warn_no_kernels.cache_clear()
    with pytest.warns(UncertifiedWarning, match=f"these are for 32 or 64 heads .*, not for {heads} heads and k = {k}"):
        out = indexer_topk(*tensors, k=k, mode="exact")
    assert torch.equal(out, definition(*tensors, k))
