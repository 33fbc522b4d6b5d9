"""Exact mode on a device: torch's roundings in torch's order, then the selection of the fast mode."""

from dataclasses import replace
from functools import partial

import torch

from envoi.ops.indexer import fast, kernel_exact
from envoi.ops.indexer.fast import Order, Problem, Workspace
from envoi.runtime.devices import num_sms
from envoi.runtime.launch import launch
from envoi.runtime.math import next_power_of_2

TILE, STEP = 64, 16
PROGRAMS_PER_SM = 3


def topk(p: Problem, orders: torch.Tensor, order: Order) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose as `fast.topk` does, by exact scores. orders: from `envoi.ops.indexer.certificate`."""
    return fast.in_blocks(p, partial(score, orders), replace(order, as_torch=True))


def score(orders: torch.Tensor, p: Problem, space: Workspace, first: int, num_rows: int, least: int = 0) -> None:
    """Fill the logits and the groups of those of these rows that have more than `least` tokens."""
    bytes_, num_heads = p.k_cache.view(torch.uint8), p.q.shape[1]
    programs = min(num_rows * -(-p.max_length // TILE), PROGRAMS_PER_SM * num_sms(p.q.device))
    scratch = torch.empty(programs * num_heads * TILE, dtype=torch.float32, device=p.q.device)
    launch(kernel_exact.exact_kernel, (programs,), (
        p.q.view(torch.uint8), bytes_, bytes_.view(-1).view(torch.float32), p.weights, p.seq_lens, p.table, orders,
        scratch, space.logits, space.groups, space.counters,
        first, num_rows, p.width, p.k_cache.shape[0], p.next_n,
        num_heads, least, next_power_of_2(len(space.logits)), orders.numel() - 4, TILE, STEP,
    ), {"num_warps": 4, "num_stages": 1})  # fmt: skip
