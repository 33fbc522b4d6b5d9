"""The exact mode on a device: torch's roundings in torch's order, then the selection of the fast mode."""

from typing import Any

import torch

from envoi.indexer import fast, kernel_exact
from envoi.indexer.fast import Problem, Workspace

exact: Any = kernel_exact  # constants arrive in its parameters as plain values

TILE, STEP = 64, 16
PROGRAMS_PER_SM = 4


def topk(p: Problem, slots: bool, ordered: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """As `fast.topk`."""
    return fast.in_blocks(p, score, slots, ordered, nan_first=True)


def score(p: Problem, space: Workspace, first: int, num_rows: int) -> None:
    """Fill the logits and histograms of these rows."""
    if p.max_length:
        grid, arguments, options = arguments_of(p, space, first, num_rows)
        exact.exact_kernel[grid](*arguments, **options)


def arguments_of(p: Problem, space: Workspace, first: int, num_rows: int) -> tuple[tuple[int], tuple, dict]:
    """The grid of `exact_kernel`, its arguments, its options."""
    bytes_, num_heads = p.k_cache.view(torch.uint8), p.q.shape[1]
    programs = min(num_rows * -(-p.max_length // TILE), PROGRAMS_PER_SM * fast.num_sms(p.q.device))
    scratch = torch.empty(programs * num_heads * TILE, dtype=torch.float32, device=p.q.device)
    return (programs,), (
        p.q.view(torch.uint8), bytes_, bytes_.view(-1).view(torch.float32), p.weights, p.seq_lens, p.table, scratch,
        space.logits, space.histogram, space.counters,
        first, num_rows, p.next_n, p.width, p.k_cache.shape[0],
        num_heads, fast.power_of_two(fast.rows_at_once(p)), fast.copies(p), TILE, STEP,
    ), {"num_warps": 4, "num_stages": 1}  # fmt: skip
