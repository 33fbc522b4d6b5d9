# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
"""Order of rows for the fused L1, in Triton: what `pull_kernel` finds out about rows, without their contents.

`trace`: see `runtime.timeline_device`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from envoi.moe.parallel.dispatch_kernels import note_load
from envoi.moe.parallel.fused.memory import FIRST_ARRIVALS
from envoi.moe.parallel.fused.scheduler import BLOCK_ROWS
from envoi.moe.parallel.shared_device import MAX_TOKENS, LocalExperts, Memory, ints
from envoi.runtime.timeline_device import note_begin, note_moment

ARRIVALS_AT: tl.constexpr = tl.constexpr(FIRST_ARRIVALS)
CLEARED: tl.constexpr = tl.constexpr(256)  # counters that a program resets at once


class OrderedRows(NamedTuple):
    """Buffers that `order_rows_kernel` writes: those of `FusedMemory`, and the domain's row_weights, row_destinations.

    slot_bytes: of a row that is sent back. token_bits: see `FusedMemory`."""

    row_tokens: Any
    token_rows: Any
    weights: Any
    destinations: Any
    slot_bytes: Any
    token_bits: Any


@triton.jit
def clear_counters(counters, num_rows):
    """Reset the tickets, and the arrivals of all blocks with rows."""
    used = ARRIVALS_AT + tl.cdiv(num_rows, BLOCK_ROWS)
    for first in range(tl.program_id(0) * CLEARED, used, tl.num_programs(0) * CLEARED):
        at = first + tl.arange(0, CLEARED)
        tl.store(counters + at, 0, mask=at < used)


@triton.jit
def order_tokens(memory, experts, source, first, out, TOKENS: tl.constexpr, SLOTS: tl.constexpr):
    """Find the rows of tokens [first, first + TOKENS) of a source on this rank. out: OrderedRows."""
    num_tokens = tl.load(ints(memory.own + memory.regions.sizes) + 2 * source)
    k = tl.load(ints(memory.own + memory.regions.sizes) + 2 * source + 1)
    token = first + tl.arange(0, TOKENS)[:, None]
    lane = tl.arange(0, SLOTS)[None, :]
    slot = token * k + lane
    inside = (token < num_tokens) & (lane < k)
    at = source * memory.room + slot
    expert = tl.load(ints(memory.own + memory.regions.topk_ids) + at, mask=inside, other=-1) - experts.first
    is_local = inside & (expert >= 0) & (expert < experts.count)
    row = tl.load(ints(memory.own + memory.regions.slot_pos) + at, mask=is_local, other=0)
    row += tl.load(experts.row_shift + source * experts.count + expert, mask=is_local, other=0)
    weights = ints(memory.own + memory.regions.weights).to(tl.pointer_type(tl.float32))
    tl.store(out.weights + row, tl.load(weights + at, mask=is_local, other=0.0), mask=is_local)
    returned = tl.load(memory.peers + source) + memory.regions.returned_rows
    tl.store(out.destinations + row, returned + slot.to(tl.int64) * out.slot_bytes, mask=is_local)
    number = (source << out.token_bits) + token
    first_row = tl.min(tl.where(is_local, row, 0x7FFFFFFF), 1)[:, None]
    tl.store(out.row_tokens + row, tl.where(row == first_row, number, -1), mask=is_local)
    # Local slots first, in their order, then the others.
    before = tl.cumsum(is_local.to(tl.int32), 1) - is_local.to(tl.int32)
    num_local = tl.sum(is_local.to(tl.int32), 1)[:, None]
    place = tl.where(is_local, before, num_local + lane - before)
    to = out.token_rows + number * SLOTS + place
    tl.store(to, tl.where(is_local, row, -1), mask=(token < num_tokens) & (lane >= 0))


@triton.jit(do_not_specialize=["rank", "first_expert", "token_bits"])
def order_rows_kernel(
    peers, regions, row_shift, offsets, state, history, counters, row_tokens, token_rows, row_weights, row_destinations,
    rank, num_ranks, room, num_experts, first_expert, num_local, slot_bytes, token_bits,
    TOKENS: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr, OVERLAP: tl.constexpr,
    trace,
):  # fmt: skip
    """Write which token each row has and which rows each token, weights and destinations of rows; reset counters.

    The last program, which few tokens leave idle, also adds the call to `history`. After a call that failed in dispatch
    there are no rows. OVERLAP: this kernel may start before the one ahead of it ends; once that one has ended, the next
    may start, and waits for the end of this one.
    """
    note_begin(trace, 0, 0, 0)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()  # not earlier: the next kernel reads offsets before it waits
    note_moment(trace, 0, 0, 1)
    memory = Memory(tl.load(peers + rank), peers, regions, room)
    experts = LocalExperts(first_expert, num_local, row_shift)
    out = OrderedRows(row_tokens, token_rows, row_weights, row_destinations, slot_bytes, token_bits)
    clear_counters(counters, tl.load(offsets + num_local))
    if tl.program_id(0) == tl.num_programs(0) - 1:
        note_load(memory, state, history, num_ranks, num_experts, EXPERTS)
    groups = tl.cdiv(tl.load(state + MAX_TOKENS), TOKENS)
    for t in range(tl.program_id(0), groups * num_ranks, tl.num_programs(0)):
        order_tokens(memory, experts, t % num_ranks, t // num_ranks * TOKENS, out, TOKENS, SLOTS)
    note_moment(trace, 0, 0, 2)
