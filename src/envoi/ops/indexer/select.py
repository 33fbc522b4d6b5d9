"""Choice of the indexer's implementation by mode and device: the only place that decides."""

from functools import partial
from typing import Any

import torch

from envoi.check import expect_divisible, expect_int
from envoi.ops.indexer import certificate, reference
from envoi.ops.indexer.layout import PAGE_SIZE, pages_of
from envoi.runtime import program, workspace
from envoi.runtime.devices import expect_no_capture, implementation

CACHE_ALIGNMENT = 16


def run(
    q: torch.Tensor, k_cache: torch.Tensor, weights: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor,
    k: int, mode: str, next_n: int, slots: bool, order: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Run the implementation for this mode and device; return [rows, k] int32, and errors [rows] int32."""
    orders = None
    if mode == "exact" and certificate.has_kernels(q.shape[1], k):
        orders = orders_for(q.device, q.shape[1])
    elif mode == "exact" and implementation(q.device) != "torch":
        certificate.warn_no_kernels(q.shape[1], k)
    if implementation(q.device) == "torch" or (mode == "exact" and orders is None):
        check_values(seq_lens, block_table, k_cache.shape[0])
        out = reference.indexer_topk(q, k_cache, weights, seq_lens, block_table, k, mode, next_n, slots, order)
        return out, torch.zeros(q.shape[0], dtype=torch.int32, device=q.device)
    from envoi.ops.indexer import exact, fast

    problem = _problem(q, k_cache, weights, seq_lens, block_table, k, next_n, orders is None)
    form = fast.Order(slots, order == "score", order == "any")
    return fast.topk(problem, form) if orders is None else exact.topk(problem, orders, form)


def run_blocks(
    q: torch.Tensor, k_cache: torch.Tensor, weights: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor,
    k: int, block: int, next_n: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Choose blocks: [rows, k] int32, and errors [rows] int32."""
    if implementation(q.device) == "torch":
        check_values(seq_lens, block_table, k_cache.shape[0])
        out = reference.indexer_blocks(q, k_cache, weights, seq_lens, block_table, k, block, next_n)
        return out, torch.zeros(q.shape[0], dtype=torch.int32, device=q.device)
    from envoi.ops.indexer import blocks as on_device

    return on_device.best_blocks(_problem(q, k_cache, weights, seq_lens, block_table, k, next_n), block)


def run_in_blocks(
    q: torch.Tensor, k_cache: torch.Tensor, weights: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor,
    blocks: torch.Tensor, k: int, block: int, next_n: int, slots: bool, order: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Choose tokens of blocks: [rows, k] int32, and errors [rows] int32."""
    tensors = q, k_cache, weights, seq_lens, block_table
    if implementation(q.device) == "torch":
        check_values(seq_lens, block_table, k_cache.shape[0])
        out = reference.indexer_topk_in_blocks(*tensors, blocks, k, block, next_n, slots, order)
        return out, torch.zeros(q.shape[0], dtype=torch.int32, device=q.device)
    from envoi.ops.indexer import blocks as on_device
    from envoi.ops.indexer import fast

    form = fast.Order(slots, order == "score", order == "any")
    return on_device.topk_in_blocks(_problem(*tensors, k, next_n), blocks.contiguous(), block, form)


def _problem(q, k_cache, weights, seq_lens, block_table, k: int, next_n: int, shares_tiles: bool = True) -> Any:
    """Return the call as a `fast.Problem`. Raises ValueError for a cache or a table that kernels can't read."""
    from envoi.ops.indexer import fast

    expect_divisible("k_cache.data_ptr()", k_cache.data_ptr(), CACHE_ALIGNMENT, "kernels read 16 bytes at a time")
    expect_int("block_table.shape[1]", block_table.shape[1], 0, fast.MAX_LENGTH // PAGE_SIZE, "positions in 29 bits")
    tensors = q.contiguous(), k_cache, weights.contiguous(), seq_lens.contiguous(), block_table.contiguous()
    return fast.Problem(*tensors, k, next_n, shares_tiles and implementation(q.device) == "hopper")


def orders_for(device: torch.device, num_heads: int) -> torch.Tensor | None:
    """Load the orders of adding that the exact mode's kernels need; None if torch's own operators must be used."""
    builder = program.current()
    here = device if builder is None else builder.device
    if here is None or here.type != "cuda":
        return None
    load = partial(_orders, num_heads)
    # While a call is planned no operator of torch runs in its thread.
    orders = load(here) if builder is None else workspace.in_another_thread(lambda: load(here))
    if orders is None:
        certificate.warn_uncertified(certificate.name_of(here))
        return None
    return workspace.constant(load, orders.numel(), torch.int32, device)


def _orders(num_heads: int, device: torch.device) -> Any:
    return certificate.orders(device, num_heads)


def check_values(seq_lens: torch.Tensor, block_table: torch.Tensor, num_pages: int) -> None:
    """Raise ValueError for lengths and pages that would read outside the cache. Waits for the device.

    Raises RuntimeError while a CUDA graph is captured.
    """
    why = "since torch's operators run, for want of a certificate or a kernel, and they need lengths on the host"
    expect_no_capture("mode='exact'", seq_lens.device, why)
    for request, length in enumerate(seq_lens.tolist()):
        if length < 0 or pages_of(length) > block_table.shape[1]:
            most = block_table.shape[1] * PAGE_SIZE
            raise ValueError(
                f"seq_lens: expected 0 to {most} (what block_table holds), got {length} for request {request}"
            )
        used = block_table[request, : pages_of(length)]
        if len(used) and (int(used.min()) < 0 or int(used.max()) >= num_pages):
            bad = used[(used < 0) | (used >= num_pages)][0]
            held = f"pages from 0 to {num_pages - 1}" if num_pages else "no pages, since k_cache has none"
            raise ValueError(f"block_table: expected {held}, got {int(bad)} for request {request}")
