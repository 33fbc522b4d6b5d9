# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
"""Combine over NVLink, in Triton: send rows to the ranks of their tokens, and sum them there.

send_partial_sums_kernel   sums of a token's rows here -> its rank     only with presum; else L2 sends every row itself
combine_barrier_kernel     the flag "combine", a wait for the peers'   after all rows have been sent
sum_kernel                 rows of a token's slots -> token            in the order of the slots
sum_ranks_kernel           partial sums of a token -> token            with presum: in the order of the ranks

`trace`, a kernel's last parameter: see `runtime.timeline_device`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from envoi.epilogues.codes_triton import widen
from envoi.epilogues.device import bf16
from envoi.ops.moe.parallel.shared_device import (
    FINE,
    LATE_AT_COMBINE,
    LOST,
    MAX_TOKENS,
    OUTCOME,
    LocalExperts,
    Memory,
    SourceToken,
    ints,
    raise_flag,
    row_positions,
    token_slots,
    wait_for,
)
from envoi.runtime.timeline_device import note_begin, note_moment


class ResultRows(NamedTuple):
    """L2's rows on this rank [P, width] bf16, sorted by expert, and which of num_ranks this rank is.

    to: [num_ranks] int64, the address of each source's sums on this rank; None: they go to the source's memory."""

    rows: Any
    to: Any
    width: Any
    rank: Any
    num_ranks: Any


@triton.jit
def send_partial_sum(
    memory, experts, token, results, SLOTS: tl.constexpr, BLOCK: tl.constexpr, GATHERED: tl.constexpr
):  # fmt: skip
    """Sum a SourceToken's rows on this rank in the order of its slots, round once, and send the sum to its rank."""
    found = token_slots(memory, experts, token, SLOTS)
    width = results.width
    if tl.max(found.is_local.to(tl.int32), 0) > 0:
        pos = row_positions(memory, experts, token.source, found)
        if GATHERED:
            to = tl.multiple_of(tl.load(results.to + token.source).to(results.rows.dtype), 16)
            to += token.token.to(tl.int64) * width
        else:
            to = tl.multiple_of(
                (tl.load(memory.peers + token.source) + memory.regions.returned_rows).to(results.rows.dtype), 16
            )
            to += (token.token * results.num_ranks + results.rank).to(tl.int64) * width
        for first in range(0, width, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            total = tl.zeros((BLOCK,), tl.float32)
            for i in range(token.k):
                row = tl.max(tl.where(found.lane == i, pos, -1), 0).to(tl.int64)
                if row >= 0:
                    total += widen(tl.load(results.rows + row * width + columns, mask=columns < width, other=0.0))
            tl.store(to + columns, bf16(total), mask=columns < width)


@triton.jit(do_not_specialize=["rank", "first_expert"])
def send_partial_sums_kernel(
    peers, regions, row_shift, state, results, to, width, rank, num_ranks, slot_capacity, first_expert, num_local,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, trace,
):  # fmt: skip
    """Send each token's sum of L2's rows on this rank, in the order of `pull_kernel`; only with presum.

    to: None over NVLink; else [num_ranks] int64, the address of each source's sums on this rank."""
    note_begin(trace, 0, 0, 0)
    own = tl.load(peers + rank)
    most = tl.load(state + MAX_TOKENS)
    memory = Memory(own, peers, regions, slot_capacity)
    experts = LocalExperts(first_expert, num_local, row_shift)
    rows = ResultRows(results, to, width, rank, num_ranks)
    for t in range(tl.program_id(0), most * num_ranks, tl.num_programs(0)):
        source, token = (t + rank) % num_ranks, t // num_ranks
        if token < tl.load(ints(own + regions.sizes) + 2 * source):
            k = tl.load(ints(own + regions.sizes) + 2 * source + 1)
            send_partial_sum(memory, experts, SourceToken(source, token, k), rows, SLOTS, BLOCK, to is not None)
    note_moment(trace, 0, 0, 1)


@triton.jit(do_not_specialize=["rank", "timeout_us"])
def combine_barrier_kernel(peers, regions, state, report, rank, timeout_us, ON_GPU: tl.constexpr, trace):
    """Signal to peer p (program p) that all its rows have been sent, and wait for p's signal; a late p is reported."""
    note_begin(trace, 0, 0, 0)
    peer = tl.program_id(0)
    if tl.load(state + OUTCOME) != LOST:
        raise_flag(ints(tl.load(peers + peer) + regions.flags) + tl.num_programs(0) + rank)
        own = tl.load(peers + rank)
        if not wait_for(ints(own + regions.flags) + tl.num_programs(0) + peer, 1, timeout_us, ON_GPU):
            tl.store(report + peer, LATE_AT_COMBINE)
            tl.store(state + OUTCOME, LOST)
    note_moment(trace, 0, 0, 1)


@triton.jit
def store_total(out, m, columns, width, total, state):
    """Store a part of a token, rounded once; NaN if the call failed."""
    total = tl.where(tl.load(state + OUTCOME) == FINE, total, float("nan"))
    tl.store(out + m.to(tl.int64) * width + columns, bf16(total), mask=columns < width)


@triton.jit
def sum_kernel(slots, topk_ids, out, state, width, K: tl.constexpr, BLOCK: tl.constexpr, trace):
    """Sum the rows of a token's slots in their order, in float32. slots [M * K, width]: where L2 sent them."""
    note_begin(trace, 0, 0, 0)
    m = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for s in tl.static_range(K):  # unrolled: all loads are under way before the first sum
        used = tl.load(topk_ids + m * K + s) >= 0
        at = slots + (m.to(tl.int64) * K + s) * width + columns
        total += widen(tl.load(at, mask=(columns < width) & used, other=0.0))
    store_total(out, m, columns, width, total, state)
    note_moment(trace, 0, 0, 1)


@triton.jit
def sum_ranks_kernel(
    partial_sums, topk_ids, rank_ends, out, state, width, k,
    RANKS: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, trace,
):  # fmt: skip
    """Sum the partial sums of a token, in the order of the ranks that sent them, in float32; only with presum.

    partial_sums [M * RANKS, width]. rank_ends [RANKS]: one past each rank's last expert.
    """
    note_begin(trace, 0, 0, 0)
    m = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slots = tl.arange(0, SLOTS)
    e = tl.load(topk_ids + m * k + slots, mask=slots < k, other=-1)
    total = tl.zeros((BLOCK,), tl.float32)
    first = 0
    for s in tl.static_range(RANKS):
        last = tl.load(rank_ends + s)
        used = tl.max(((e >= first) & (e < last)).to(tl.int32), 0) > 0
        at = partial_sums + (m.to(tl.int64) * RANKS + s) * width + columns
        total += widen(tl.load(at, mask=(columns < width) & used, other=0.0))
        first = last
    store_total(out, m, columns, width, total, state)
    note_moment(trace, 0, 0, 1)


@triton.jit(do_not_specialize=["num_local"])
def send_rows_kernel(rows, destinations, offsets, width, num_local, BLOCK: tl.constexpr):
    """Store row r of rows [P, width] bf16 at the address destinations[r], as L2 does, for all rows of experts here.

    offsets [num_local + 1] int32: the last one is the number of rows, 0 if the call has failed.
    """
    for row in range(tl.program_id(0), tl.load(offsets + num_local), tl.num_programs(0)):
        to = tl.multiple_of(tl.load(destinations + row).to(rows.dtype), 16)
        source = rows + tl.cast(row, tl.int64) * width
        for first in range(0, width, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            x = tl.load(source + columns, mask=columns < width, other=0.0)
            tl.store(to + columns, x, mask=columns < width)
