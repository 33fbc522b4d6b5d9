"""Choose the tokens that sparse attention reads: scores of a paged FP8 key cache, exact top-k.

python examples/indexer.py        on a GPU or a CPU
"""

import torch

import envoi
from envoi.ops.indexer.layout import HEAD_DIM, PAGE_SIZE, pack_cache


def main() -> torch.Tensor:
    """Return the chosen slots of the cache, [2, 512] int32, -1 where a request has fewer tokens."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    seq_lens = torch.tensor([700, 100], dtype=torch.int32, device=device)  # two requests
    pages = -(-700 // PAGE_SIZE)
    keys = torch.randn(2 * pages, PAGE_SIZE, HEAD_DIM, device=device).to(torch.float8_e4m3fn)
    scales = torch.rand(2 * pages, PAGE_SIZE, device=device)
    cache = pack_cache(keys, scales)  # [pages, 64, 1, 132]: values, then scales
    block_table = torch.arange(2 * pages, dtype=torch.int32, device=device).view(2, pages)
    q = torch.randn(2, 64, HEAD_DIM, device=device).to(torch.float8_e4m3fn)
    weights = torch.randn(2, 64, device=device)

    slots = envoi.indexer_topk(q, cache, weights, seq_lens, block_table, k=512, mode="fast")

    print(f"{tuple(slots.shape)}, chosen: {(slots >= 0).sum(1).tolist()} of {seq_lens.tolist()} tokens")
    return slots


if __name__ == "__main__":
    main()
