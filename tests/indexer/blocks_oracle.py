"""Oracle of the selection in two levels, in float64, with the band in which rounding may decide either way."""

import torch

from envoi.ops.indexer.layout import PAGE_SIZE
from tools.oracles.indexer import TENSOR_CORE_BAND, band, keys64, scores64


def scores_of(tensors, row, next_n):
    """Return what a row sees: its scores in float64, most errors, slots of its tokens."""
    q, cache, weights, seq_lens, table = tensors
    n = max(0, int(seq_lens[row // next_n]) - next_n + 1 + row % next_n)
    pages = table[row // next_n, : -(-n // PAGE_SIZE)].long()
    keys = keys64(cache, pages)[:n]
    slots = (pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=pages.device)).flatten()[:n]
    return scores64(q[row], keys, weights[row]), band(q[row], keys, weights[row], TENSOR_CORE_BAND), slots


def not_the_best(chosen, scores, eps, num):
    """Return what is wrong with a choice [num], by index, of the best of scores whose errors are up to eps."""
    if len(chosen) != num or len(set(chosen.tolist())) != num:
        return f"{len(set(chosen.tolist()))} different ones, expected {num}"
    mask = torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
    mask[chosen] = True
    worst = (scores + eps)[mask].min() if num else torch.inf
    return "a better one left out" if bool((scores - eps > worst)[~mask].any()) else ""


def wrong_blocks(out, tensors, block, next_n=1):
    """Return what is wrong with rows of blocks [rows, k], by row."""
    found = {}
    for row in range(len(out)):
        scores, eps, _ = scores_of(tensors, row, next_n)
        num_blocks, own = -(-len(scores) // block), out[row]
        own = own[own >= 0].long()
        want = min(num_blocks, out.shape[1])
        if len(own) != want or bool((out[row, want:] != -1).any()) or bool((own[1:] <= own[:-1]).any()):
            found[row] = f"{own.tolist()[:5]} .. aren't {want} ascending blocks"
        elif want and int(own[-1]) != num_blocks - 1:
            found[row] = "the newest block is missing"
        elif want:
            pad = (0, -len(scores) % block)
            low, high = (torch.nn.functional.pad(x, pad, value=-torch.inf).view(-1, block).amax(1)[:-1] for x in (
                scores - eps, scores + eps))  # fmt: skip
            problem = not_the_best(own[:-1], (low + high) / 2, (high - low) / 2, want - 1)
            found |= {row: problem} if problem else {}
    return found


def wrong_tokens(out, blocks, tensors, block, next_n=1):
    """Return what is wrong with rows of slots [rows, k] chosen in blocks [rows, C], by row."""
    found = {}
    for row in range(len(out)):
        scores, eps, slots = scores_of(tensors, row, next_n)
        tokens = (blocks[row].long()[:, None] * block + torch.arange(block, device=out.device)).flatten()
        tokens = tokens[(tokens >= 0) & (tokens < len(scores))]
        want = min(len(tokens), out.shape[1])
        own = out[row, :want].long()
        places = (slots[tokens][None, :] == own[:, None]).int()
        if bool((out[row, want:] != -1).any()) or bool((places.sum(1) != 1).any()):
            found[row] = f"expected {want} slots of the blocks' tokens and then -1"
        elif want:
            problem = not_the_best(places.argmax(1), scores[tokens], eps[tokens], want)
            found |= {row: problem} if problem else {}
    return found
