"""Selection in two levels on a GPU, against the float64 oracle and against the kernels' own scores."""

import pytest
import torch

from envoi.ops.indexer import fast, indexer_blocks, indexer_topk_in_blocks, reference
from tests.indexer.blocks_oracle import wrong_blocks, wrong_tokens
from tools.oracles.indexer_workloads import one, random_fp4_cache

pytestmark = pytest.mark.gpu


def tensors_of(lengths, heads, next_n, fp4):
    _, cache, _, seq_lens, table = (x.cuda() for x in one(lengths).tensors())
    source = torch.Generator("cuda").manual_seed(heads)
    rows = len(lengths) * next_n
    q = (2 * torch.randn(rows, heads, 128, generator=source, device="cuda")).to(torch.float8_e4m3fn)
    cache = random_fp4_cache(len(cache), "cuda") if fp4 else cache
    return q, cache, torch.randn(rows, heads, generator=source, device="cuda"), seq_lens, table


@pytest.mark.parametrize("fp4", [False, True])
@pytest.mark.parametrize(("heads", "next_n", "block", "k"), [
    (32, 1, 8, 2048), (32, 4, 8, 512), (2, 1, 128, 16), (64, 2, 64, 100), (16, 3, 16, 1), (32, 1, 32, 1000),
])  # fmt: skip
def test_two_levels(heads, next_n, block, k, fp4):
    tensors = tensors_of((20000, 0, 5, 3000, 40000, 16384), heads, next_n, fp4)
    blocks, errors = indexer_blocks(*tensors, k, block, next_n, return_errors=True)
    assert wrong_blocks(blocks, tensors, block, next_n) == {} and not bool(errors.any())
    for order in ("score", "any", "position"):
        out = indexer_topk_in_blocks(*tensors, blocks, 512, block, next_n, order=order)
        assert wrong_tokens(out, blocks, tensors, block, next_n) == {}
        assert torch.equal(out, indexer_topk_in_blocks(*tensors, blocks, 512, block, next_n, order=order))


@pytest.mark.parametrize("lengths", [(131072, 200000, 8192, 70), (1_000_000,)])
def test_selection_is_that_of_the_kernels_own_scores(lengths):
    tensors = tensors_of(lengths, 32, 1, True)
    p = fast.Problem(*tensors, 2048, 1)
    space = fast.workspace(p)
    fast.score(p, space, 0, len(lengths))
    blocks = indexer_blocks(*tensors, 2048, 8)
    out = indexer_topk_in_blocks(*tensors, blocks, 512, 8, output="positions")
    for row, n in enumerate(lengths):
        scores = space.logits[row, :n]
        pooled = torch.nn.functional.pad(scores, (0, -n % 8), value=-torch.inf).view(-1, 8).amax(1)
        pooled[-1] = torch.inf
        want = reference.best(pooled, 2048).sort().values
        assert torch.equal(blocks[row, : len(want)].long(), want)
        tokens = (want[:, None] * 8 + torch.arange(8, device="cuda")).flatten()
        tokens = tokens[tokens < n]
        found = tokens[reference.best(scores[tokens], 512)]
        assert torch.equal(out[row, : len(found)].long(), found)
