# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
"""Kernels around the two collectives of constant size, in Triton; the others are those of NVLink.

mark_kernel            counts a point of the call, in memory that the host reads      before and after everything
settle_kernel          all ranks' sizes and error codes -> rows of this rank          after the all-gather
sum_received_kernel    rows of a token from their owners -> token                     after the all-to-all
"""

import triton
import triton.language as tl

from envoi.epilogues.codes_triton import widen
from envoi.ops.moe.parallel import queued
from envoi.ops.moe.parallel.combine_kernels import store_total
from envoi.ops.moe.parallel.dispatch_kernels import Placement, compute_row_offsets
from envoi.ops.moe.parallel.shared_device import (
    FINE,
    LATE_AT_COMBINE,
    LATE_AT_DISPATCH,
    LOST,
    OUTCOME,
    REFUSED,
    LocalExperts,
    Memory,
    ints,
)

HEAD_BYTES: tl.constexpr = tl.constexpr(queued.HEAD_BYTES)
ERROR_CODE: tl.constexpr = tl.constexpr(5)  # the entry of the head that says why a rank's arguments are refused
CALL: tl.constexpr = tl.constexpr(6)  # the entry of the head that says in which call the segment was written
CALL_COLUMNS: tl.constexpr = tl.constexpr(queued.CALL_COLUMNS)
BEGUN: tl.constexpr = tl.constexpr(0)  # entries of counts: see `progress`
HOST_LOST: tl.constexpr = tl.constexpr(3)


@triton.jit
def mark_kernel(counts, host, state, head, POINT: tl.constexpr):
    """Add 1 to counts[POINT], and write it to host[POINT], which the host reads without waiting.

    Where a call begins, its number goes into the head of this rank's segment. A call that the host has given up, by
    host[HOST_LOST], is lost from here on.
    """
    count = tl.load(counts + POINT) + 1
    tl.store(counts + POINT, count)
    tl.store(host + POINT, count)
    if POINT == BEGUN:
        tl.store(head + CALL, count)
    if tl.load(host + HOST_LOST) != 0:
        tl.store(state + OUTCOME, LOST)


@triton.jit(do_not_specialize=["rank", "first_expert"])
def settle_kernel(
    peers, segment, regions, row_shift, offsets, state, report, counts, parts, part_columns,
    rank, num_ranks, slot_capacity, num_experts, first_expert, num_local, EXPERTS: tl.constexpr,
    LOCAL_LANES: tl.constexpr, RANK_LANES: tl.constexpr,
):  # fmt: skip
    """Decide from all ranks' error codes whether the call goes on, and compute where its rows go. One program.

    peers: addresses of the gathered segments, after their heads. segment: `Regions` within a segment; regions: those of
    this rank, in which sizes and slot_offsets are written here. Clears this rank's own error code.
    parts: addresses of what combine sends to each rank, part_columns bf16 each: the call's number is put at their end,
    0 if this rank has lost another. A segment of another call is one of a rank that is late.
    """
    own = tl.load(peers + rank)
    ranks = tl.arange(0, RANK_LANES)
    inside = ranks < num_ranks
    sources = tl.load(peers + ranks, mask=inside, other=0)
    codes = tl.load(ints(sources - HEAD_BYTES) + ERROR_CODE, mask=inside, other=0)
    tl.store(report + num_ranks + ranks, codes, mask=inside & (codes > 0))
    outcome = tl.where(tl.max(codes, 0) > 0, REFUSED, FINE)
    call = tl.load(counts + BEGUN)
    late = inside & (tl.load(ints(sources - HEAD_BYTES) + CALL, mask=inside, other=0) != call)
    tl.store(report + ranks, LATE_AT_DISPATCH, mask=late)
    lost = (tl.load(state + OUTCOME) == LOST) | (tl.max(late.to(tl.int32), 0) > 0)
    outcome = tl.where(lost, LOST, outcome)
    tl.store(state + OUTCOME, outcome)
    ends = tl.load(parts + ranks, mask=inside, other=0) + 2 * (part_columns - CALL_COLUMNS).to(tl.int64)
    tl.store(ints(ends), tl.where(lost, 0, call), mask=inside)
    for field in tl.static_range(2):  # tokens and k
        size = tl.load(ints(sources + segment.sizes) + field, mask=inside, other=0)
        tl.store(ints(own + regions.sizes) + 2 * ranks + field, size, mask=inside)
    e = tl.arange(0, EXPERTS)
    for source in range(num_ranks):
        begin = tl.load(ints(tl.load(peers + source) + segment.slot_offsets) + e, mask=e <= num_experts, other=0)
        tl.store(ints(own + regions.slot_offsets) + source * (num_experts + 1) + e, begin, mask=e <= num_experts)
    tl.debug_barrier()  # this program reads again what its other threads have written
    tl.store(ints(own - HEAD_BYTES) + ERROR_CODE, 0)
    memory = Memory(own, peers, regions, slot_capacity)
    experts = LocalExperts(first_expert, num_local, row_shift)
    to, fine = Placement(offsets, state, report), outcome == FINE
    compute_row_offsets(memory, experts, to, num_ranks, num_experts, fine, LOCAL_LANES, RANK_LANES)


@triton.jit
def check_calls(received, state, report, call, part_columns, RANKS: tl.constexpr, RANK_LANES: tl.constexpr):
    """Return True if every rank's part is one of this call; report those that are late or have given the call up."""
    ranks = tl.arange(0, RANK_LANES)
    inside = ranks < RANKS
    ends = received + ((ranks + 1).to(tl.int64) * part_columns - CALL_COLUMNS)
    came = tl.load(ends.to(tl.pointer_type(tl.int32)), mask=inside, other=0)
    late = inside & (came != call) & (tl.load(state + OUTCOME) != LOST)
    tl.store(report + ranks, LATE_AT_COMBINE, mask=late)
    return tl.max(late.to(tl.int32), 0) == 0


@triton.jit
def sum_received_kernel(
    received, topk_ids, rank_ends, out, state, report, counts, width, part_columns,
    K: tl.constexpr, RANKS: tl.constexpr, RANK_LANES: tl.constexpr, SLOT_LANES: tl.constexpr, PRESUM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum what the ranks sent for a token, in float32: a row for each slot, in their order; with PRESUM, of each rank.

    received [RANKS, part_columns]: rows of `width`, then the number of the sender's call. rank_ends [RANKS]: one past
    each rank's last expert. RANK_LANES, SLOT_LANES: powers of two for RANKS and K.
    """
    m = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    whole = check_calls(received, state, report, tl.load(counts + BEGUN), part_columns, RANKS, RANK_LANES)
    total = tl.zeros((BLOCK,), tl.float32)
    if PRESUM:
        slots = tl.arange(0, SLOT_LANES)
        e = tl.load(topk_ids + m * K + slots, mask=slots < K, other=-1)
        first = 0
        for rank in tl.static_range(RANKS):
            last = tl.load(rank_ends + rank)
            used = tl.max(((e >= first) & (e < last)).to(tl.int32), 0) > 0
            at = received + rank * part_columns.to(tl.int64) + m.to(tl.int64) * width + columns
            total += widen(tl.load(at, mask=(columns < width) & used, other=0.0))
            first = last
    else:
        ranks = tl.arange(0, RANK_LANES)
        ends = tl.load(rank_ends + ranks, mask=ranks < RANKS, other=2147483647)
        for slot in tl.static_range(K):  # unrolled: all loads are under way before the first sum
            e = tl.load(topk_ids + m * K + slot)
            owner = tl.sum((ends <= e).to(tl.int32), 0)
            at = received + owner * part_columns.to(tl.int64) + (m * K + slot).to(tl.int64) * width + columns
            total += widen(tl.load(at, mask=(columns < width) & (e >= 0) & (owner < RANKS), other=0.0))
    store_total(out, m, columns, width, tl.where(whole, total, float("nan")), state)
