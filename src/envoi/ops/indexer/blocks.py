"""Selection in two levels on a device: the best blocks of neighbouring tokens, and the best tokens of such blocks."""

from dataclasses import replace

import torch

from envoi.ops.indexer import fast, kernel_blocks, kernel_select
from envoi.ops.indexer.fast import Order, Problem, Workspace
from envoi.ops.indexer.layout import PAGE_SIZE
from envoi.runtime.launch import launch
from envoi.runtime.math import cdiv, next_power_of_2

TILE = 1024  # scores that a program pools or gathers


def best_blocks(p: Problem, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the numbers of k blocks, ascending: [rows, k] int32; and errors [rows], as `fast.topk` does."""
    out, errors = fast.empty_outputs(p)
    if not p.num_rows:
        return out, errors
    space, least = fast.workspace(p), p.k * block
    rows = _Rows(p, len(space.logits), cdiv(p.max_length, block))
    for first, num_rows in fast.launches(p, len(space.logits)):
        if p.max_length > least:
            fast.score(p, space, first, num_rows, least)
        launch(kernel_blocks.pool_kernel, (cdiv(rows.columns * block, TILE), num_rows), (
            space.logits, rows.scores, rows.lengths, p.seq_lens, p.table, errors,
            first, num_rows, p.width, p.k_cache.shape[0], p.next_n, rows.columns, block, least, TILE // block,
        ), {"num_warps": 4})  # fmt: skip
        rows.select(space, num_rows, out[first:], Order(slots=False, by_score=False, as_torch=True))
    return out, errors


def topk_in_blocks(p: Problem, blocks: torch.Tensor, block: int, order: Order) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose tokens of blocks [rows, C] int32: [rows, k] int32, and errors [rows], as `fast.topk` does."""
    out, errors = fast.empty_outputs(p)
    count = blocks.shape[1]
    if not p.num_rows:
        return out, errors
    space = fast.workspace(p)
    rows = _Rows(p, len(space.logits), count * block)
    for first, num_rows in fast.launches(p, len(space.logits)):
        fast.score(p, space, first, num_rows)
        launch(kernel_blocks.gather_kernel, (cdiv(rows.columns, TILE), num_rows), (
            space.logits, blocks, rows.scores, rows.lengths, p.seq_lens, p.table, errors,
            first, num_rows, p.width, p.k_cache.shape[0], p.next_n, count, rows.columns, block, TILE,
        ), {"num_warps": 4})  # fmt: skip
        rows.select(space, num_rows, out[first:], replace(order, slots=False))
        launch(kernel_blocks.place_kernel, (num_rows,), (
            out, blocks, p.seq_lens, p.table, first, num_rows, p.width, p.next_n, count,
            p.k, next_power_of_2(p.k), block, order.slots,
        ), {"num_warps": 4})  # fmt: skip
    return out, errors


class _Rows:
    """Rows of scores [rows, columns] float32 with lengths [rows] int32, which stand for tokens of as many requests."""

    def __init__(self, p: Problem, num_rows: int, most: int) -> None:
        device, pages = p.q.device, max(1, cdiv(most, PAGE_SIZE))
        self.columns = pages * PAGE_SIZE
        self.scores = torch.empty(num_rows, self.columns, dtype=torch.float32, device=device)
        self.lengths = torch.empty(num_rows, dtype=torch.int32, device=device)
        self.errors = torch.empty(num_rows, dtype=torch.int32, device=device)
        table = torch.zeros(num_rows, pages, dtype=torch.int32, device=device)  # so that no page is out of the cache
        self.problem = Problem(p.q, p.k_cache, p.weights, self.lengths, table, p.k, 1)

    def select(self, space: Workspace, num_rows: int, out: torch.Tensor, order: Order) -> None:
        """Store the places of the k best scores of each row, without groups of neighbours: there are none."""
        own = replace(space, logits=self.scores, groups=None, lists=None)
        arguments = fast.select_arguments(self.problem, own, 0, num_rows, out, self.errors, order, False)
        launch(kernel_select.select_kernel, *arguments)
