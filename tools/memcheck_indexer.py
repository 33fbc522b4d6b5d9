"""Run the indexer under compute-sanitizer with lengths and pages that point outside the cache:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tools/memcheck_indexer.py

Every tensor then is an allocation of its own, so that a read one byte past the cache or the table is an error.
Exit status 1 if an error code isn't the documented one.
"""

import sys

import torch

from envoi.indexer import indexer_topk
from envoi.indexer.workloads import one

LENGTHS = (300, 100, 700, 200, 64, 0, 2200)
BAD_PAGES = ((0, 2, 2**31 - 1), (2, 10, -5), (4, 0, -(2**31)))
BAD_LENGTHS = ((1, -1), (3, 2**31 - 1))
WANT = [2, 1, 2, 1, 2, 0, 0]


def hostile(num_heads: int) -> tuple[torch.Tensor, ...]:
    """Return requests of which five are invalid; the last uses the last page of the cache."""
    q, cache, weights, seq_lens, table = (x.cuda() for x in one(LENGTHS, num_heads=num_heads).tensors())
    table[6, 34] = cache.shape[0] - 1
    for request, column, page in BAD_PAGES:
        table[request, column] = page
    for request, length in BAD_LENGTHS:
        seq_lens[request] = length
    return q, cache, weights, seq_lens, table


def main() -> int:
    """Run both modes, both numbers of heads, all rows at once and one by one; return the exit status."""
    wrong = 0
    for num_heads in (64, 32):
        tensors = hostile(num_heads)
        for mode in ("fast", "exact"):
            _, errors = indexer_topk(*tensors, k=512, mode=mode, return_errors=True)
            wrong += errors.tolist() != WANT
        q, cache, weights, seq_lens, table = tensors
        for row in range(len(LENGTHS)):
            only = slice(row, row + 1)
            _, errors = indexer_topk(
                q[only], cache, weights[only], seq_lens[only].clone(), table[only], mode="fast", return_errors=True
            )
            wrong += errors.tolist() != WANT[only]
    print(f"memcheck_indexer: {wrong} calls with error codes that aren't the documented ones")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
