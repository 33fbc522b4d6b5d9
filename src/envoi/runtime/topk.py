# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Slots of tokens in device code."""

import triton
import triton.language as tl


@triton.jit
def experts_at(topk_ids, slots, num_slots, num_experts):
    """Return the expert of each slot; num_experts for a masked slot, and past the last slot."""
    e = tl.load(topk_ids + slots, mask=slots < num_slots, other=-1)
    return tl.where((e < 0) | (e >= num_experts), num_experts, e).to(tl.int32)
