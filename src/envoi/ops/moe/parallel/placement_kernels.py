# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
"""Placement in Triton: the physical expert of each choice of an expert, as `placement.place` says."""

import triton
import triton.language as tl

from envoi.ops.moe.kernels import GivenSlots, with_shared_slots

BAD_ID: tl.constexpr = tl.constexpr(-2)


@triton.jit(do_not_specialize=["num_tokens", "k", "rank", "first_shared"])
def place_kernel(
    topk_ids, topk_weights, table, tokens, stride, gate, ids_out, weights_out, num_tokens, k, width,
    rank, num_experts, num_physical, first_shared,
    NUM_SHARED: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Map choices of experts, k for each token, to physical ones. table: see `placement.Placed`."""
    given = GivenSlots(topk_ids, topk_weights, tokens, stride, gate, num_tokens, k, width)
    place, inside, m, e, w, shared = with_shared_slots(given, NUM_SHARED, SLOTS, BLOCK, GATED)
    fine = (e >= 0) & (e < num_experts)
    begin = tl.load(table + e, mask=fine, other=0)
    count = tl.load(table + e + 1, mask=fine, other=0) - begin
    replica = (m + rank) % tl.maximum(count, 1)
    there = fine & (count > 0)
    physical = tl.load(table + num_experts + 1 + begin + replica, mask=there, other=0)
    physical = tl.where(there, physical, e % num_physical)
    physical = tl.where(fine, physical, tl.where(e == -1, -1, BAD_ID))
    tl.store(ids_out + place, tl.where(shared >= 0, first_shared + shared, physical), mask=inside)
    tl.store(weights_out + place, tl.where(fine & (count == 0), float("nan"), w), mask=inside)
