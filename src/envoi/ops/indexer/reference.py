"""Reference of the indexer in torch, on any device, one query row after the other.

    for each query row r of request b, which sees L tokens:
        K[j] = e4m3(values[j]) * scale[j]                                     j < L, float32
        or, of keys in FP4, K[j, d] = e2m1(values[j, d]) * 2^(factor[j, d / 32] - 127), which has the fast mode alone
        exact:  S[h, j] = sum over d of q[r, h, d] * K[j, d]                  torch.mm in float32, no TF32
                s[j]    = sum over h of max(S[h, j], 0) * weights[r, h]       torch.sum over dim 0
        fast:   s[j]    = scale[j] * sum over h of max(S'[h, j], 0) * weights[r, h],   S' from the unscaled values
        out[r]  = the min(k, L) best j by s, as slots of the cache, the rest -1

The exact mode is the definition and keeps its bits and its order. The fast mode moves the scale out of the ReLU, which
is equal in exact arithmetic: for a negative scale max(x * scale, 0) = |scale| * max(-x, 0), so the sign goes into the
ReLU. Its selection is exact for its own scores, the lower position wins a tie, and NaN never beats a number.

Selection in two levels, by the fast mode's scores:
    blocks:     B[i] = max of s[i * block .. i * block + block - 1], NaN as -inf; the newest block, which may be
                shorter, and the k - 1 best others by B, ascending
    in blocks:  out[r] = the k best j, by s, of the tokens in given blocks
"""

from collections.abc import Iterator

import torch

from envoi.ops.indexer.layout import pages_of, to_slots, unpack_pages


def score_exact(q: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute the definition's scores [L] float32: q [H, 128] E4M3, values [L, 128] E4M3, scales [L], weights [H]."""
    k = values.float() * scales.unsqueeze(1)
    return (torch.relu(q.float() @ k.T) * weights.unsqueeze(1)).sum(dim=0)


def score_fast(q: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute the scores of `score_exact` up to rounding, with the scale outside the ReLU."""
    products = torch.relu(values.float() @ q.float().T * scales.sign().unsqueeze(1))
    return (products * weights).sum(dim=1) * scales.abs()


def best(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Return the positions of the min(k, L) best scores, best first, the lower first in a tie; NaN counts as -inf."""
    ranked = scores.masked_fill(scores.isnan(), -torch.inf).sort(descending=True, stable=True).indices
    return ranked[:k]


def select_row(
    q: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, weights: torch.Tensor, k: int, mode: str
) -> torch.Tensor:
    """Select the positions of one query row, best first."""
    if mode == "exact":
        scores = score_exact(q, values, scales, weights)
        return torch.topk(scores, min(k, len(scores))).indices
    return best(score_fast(q, values, scales, weights), k)


def indexer_topk(
    q: torch.Tensor, k_cache: torch.Tensor, weights: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor,
    k: int, mode: str, next_n: int, slots: bool, order: str,
) -> torch.Tensor:  # fmt: skip
    """Select for all query rows: [B * next_n, k] int32. Arguments as in `envoi.indexer_topk`, already checked."""
    out = torch.full((q.shape[0], k), -1, dtype=torch.int32, device=q.device)
    for request, length in enumerate(seq_lens.tolist()):
        if length <= 0:
            continue
        pages = block_table[request, : pages_of(length)]
        values, scales = unpack_pages(k_cache, pages)
        for row in range(request * next_n, (request + 1) * next_n):
            seen = length - next_n + 1 + row % next_n
            if seen <= 0:
                continue
            chosen = select_row(q[row], values[:seen], scales[:seen], weights[row], k, mode)
            if order != "score":
                chosen = chosen.sort().values
            out[row, : len(chosen)] = to_slots(chosen, pages) if slots else chosen.to(torch.int32)
    return out


def _rows(
    q: torch.Tensor, k_cache: torch.Tensor, weights: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor,
    next_n: int,
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:  # fmt: skip
    """Yield (row, its scores in the fast mode, pages of its request) of each row that sees a token."""
    for row in range(q.shape[0]):
        request = row // next_n
        seen = int(seq_lens[request]) - next_n + 1 + row % next_n
        if seen > 0:
            pages = block_table[request, : pages_of(seen)]
            values, scales = unpack_pages(k_cache, pages)
            yield row, score_fast(q[row], values[:seen], scales[:seen], weights[row]), pages


def indexer_blocks(
    q: torch.Tensor, k_cache: torch.Tensor, weights: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor,
    k: int, block: int, next_n: int,
) -> torch.Tensor:  # fmt: skip
    """Choose blocks for all query rows: [B * next_n, k] int32. Arguments as in `envoi.indexer_blocks`."""
    out = torch.full((q.shape[0], k), -1, dtype=torch.int32, device=q.device)
    for row, scores, _ in _rows(q, k_cache, weights, seq_lens, block_table, next_n):
        scores = scores.masked_fill(scores.isnan(), -torch.inf)
        padded = torch.nn.functional.pad(scores, (0, -len(scores) % block), value=-torch.inf)
        others = padded.view(-1, block).amax(1)[:-1]
        chosen = torch.cat((best(others, k - 1), torch.tensor([len(others)], device=q.device))).sort().values
        out[row, : len(chosen)] = chosen.to(torch.int32)
    return out


def indexer_topk_in_blocks(
    q: torch.Tensor, k_cache: torch.Tensor, weights: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor,
    blocks: torch.Tensor, k: int, block: int, next_n: int, slots: bool, order: str,
) -> torch.Tensor:  # fmt: skip
    """Choose tokens of blocks for all query rows: [B * next_n, k] int32, as `envoi.indexer_topk_in_blocks`."""
    out = torch.full((q.shape[0], k), -1, dtype=torch.int32, device=q.device)
    for row, scores, pages in _rows(q, k_cache, weights, seq_lens, block_table, next_n):
        tokens = (blocks[row].long()[:, None] * block + torch.arange(block, device=q.device)).flatten()
        tokens = tokens[(tokens >= 0) & (tokens < len(scores))]
        chosen = tokens[best(scores[tokens], k)]
        if order != "score":
            chosen = chosen.sort().values
        out[row, : len(chosen)] = to_slots(chosen, pages) if slots else chosen.to(torch.int32)
    return out
