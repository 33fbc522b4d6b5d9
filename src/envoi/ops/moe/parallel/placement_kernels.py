# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Placement in Triton: the physical expert of each choice of an expert, as `placement.place` says."""

import triton
import triton.language as tl

BAD_ID: tl.constexpr = tl.constexpr(-2)


@triton.jit(do_not_specialize=["num_choices", "k", "rank"])
def place_kernel(
    topk_ids, weights, table, ids_out, weights_out, num_choices, k, rank, num_experts, num_physical, BLOCK: tl.constexpr
):
    """Map choices of experts, k for each token, to physical ones. table: see `placement.Placed`."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_choices
    e = tl.load(topk_ids + i, mask=inside, other=-1)
    fine = (e >= 0) & (e < num_experts)
    begin = tl.load(table + e, mask=fine, other=0)
    count = tl.load(table + e + 1, mask=fine, other=0) - begin
    replica = (i // k + rank) % tl.maximum(count, 1)
    there = fine & (count > 0)
    physical = tl.load(table + num_experts + 1 + begin + replica, mask=there, other=0)
    physical = tl.where(there, physical, e % num_physical)
    tl.store(ids_out + i, tl.where(fine, physical, tl.where(e == -1, -1, BAD_ID)), mask=inside)
    w = tl.load(weights + i, mask=inside, other=0.0)
    tl.store(weights_out + i, tl.where(fine & (count == 0), float("nan"), w), mask=inside)
