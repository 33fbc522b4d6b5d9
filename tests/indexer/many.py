"""Judge like `tools.oracles.indexer.judge`, of many rows at once, if no request uses a page twice."""

import torch

from envoi.ops.indexer.layout import PAGE_SIZE
from tools.oracles.indexer import TENSOR_CORE_BAND, bounds, keys64
from tools.oracles.indexer_workloads import random_fp4_cache

NOWHERE = 2**40


def random_tensors(requests, most, heads, next_n, source, fp4_spread=None, least=1):
    """Make requests of `least` to `most` tokens on scattered pages, weights and scales of any sign, on source's device.

    Each seventh has fewer than five. fp4_spread: keys in FP4, as `random_fp4_cache` makes them.
    """
    device = source.device

    def draw(*shape):
        return torch.randn(*shape, generator=source, device=device)

    lengths = (least * (most / least) ** torch.rand(requests, generator=source, device=device)).long()
    lengths[::7] = torch.randint(0, 5, lengths[::7].shape, generator=source, device=device)
    columns, num_pages = -(-most // PAGE_SIZE), 4 * -(-most // PAGE_SIZE)
    table = torch.rand(requests, num_pages, generator=source, device=device).argsort(1)[:, :columns].int()
    behind = torch.arange(columns, device=device) * PAGE_SIZE >= lengths[:, None]
    rows = requests * next_n
    sign = torch.tensor([1.0, -1.0, 0.0], device=device)[torch.arange(rows, device=device) % 3][:, None]
    normal = draw(rows, heads)
    if fp4_spread is not None:
        cache = random_fp4_cache(num_pages, str(device), fp4_spread)
    else:
        cache = random_fp8_cache(num_pages, draw)
    return (
        (2 * draw(rows, heads, 128)).to(torch.float8_e4m3fn),
        cache,
        torch.where(sign == 0, normal, normal.abs() * sign),
        lengths.int(),
        table.masked_fill(behind, 2**31 - 1),
    )


def random_fp8_cache(num_pages, draw):
    """Make a cache of normal values and scales of any sign."""
    device = draw(1).device
    cache = torch.empty(num_pages, PAGE_SIZE * 132, dtype=torch.uint8, device=device)
    cache[:, : PAGE_SIZE * 128] = (2 * draw(num_pages, PAGE_SIZE * 128)).to(torch.float8_e4m3fn).view(torch.uint8)
    cache[:, PAGE_SIZE * 128 :] = (0.02 * draw(num_pages, PAGE_SIZE)).view(torch.uint8)
    return cache.view(num_pages, PAGE_SIZE, 1, 132)


def wrong_rows(out, tensors, next_n):
    """Find the rows that `judge` would find wrong: [rows] bool."""
    q, cache, weights, seq_lens, table = tensors
    rows = torch.arange(len(q), device=q.device)
    seen = (seq_lens.long().repeat_interleave(next_n) - next_n + 1 + rows % next_n).clamp(min=0)
    most = int(seq_lens.max().clamp(min=1))
    tokens = torch.arange(most, device=q.device)
    pages = table.long().clamp(max=cache.shape[0] - 1)[rows // next_n][:, tokens // PAGE_SIZE]
    inside = tokens < seen[:, None]
    slots = torch.where(inside, pages * PAGE_SIZE + tokens % PAGE_SIZE, NOWHERE)
    chosen, wrong = _chosen(out, slots, seen)
    scores, eps = _scores_and_band(q, cache, weights, pages, tokens)
    low, high = bounds(scores, eps)
    left_out = low.masked_fill(chosen | ~inside, -torch.inf).amax(1)
    return wrong | (left_out > high.masked_fill(~(chosen & inside), torch.inf).amin(1))


def _chosen(out, slots, seen):
    """Return the mask of chosen tokens [rows, tokens], and of rows with a wrong count, foreign or duplicate slots."""
    given = torch.arange(out.shape[1], device=out.device) < seen[:, None]
    order = slots.argsort(1)
    place = torch.searchsorted(slots.gather(1, order), out.long()).clamp(max=slots.shape[1] - 1)
    token = order.gather(1, place)
    known = slots.gather(1, token) == out
    times = torch.zeros_like(slots).scatter_add_(1, token, (given & known).long())
    wrong = ((out >= 0) != given).any(1) | (given & ~known).any(1) | (times > 1).any(1)
    return times > 0, wrong


def _scores_and_band(q, cache, weights, pages, tokens):
    """Compute the definition's scores in float64, and the most by which a float32 score may err."""
    keys = keys64(cache, torch.arange(cache.shape[0], device=cache.device))
    where = pages * PAGE_SIZE + tokens % PAGE_SIZE
    scores, eps = [], []
    for row in range(len(q)):  # one at a time: a row's products are 2 MB
        k = keys[where[row]]
        x, w = q[row].double(), weights[row].double()[:, None]
        scores.append((torch.relu(x @ k.T) * w).sum(0))
        eps.append(((x.abs() @ k.abs().T) * w.abs()).sum(0) * TENSOR_CORE_BAND)
    return torch.stack(scores), torch.stack(eps)
