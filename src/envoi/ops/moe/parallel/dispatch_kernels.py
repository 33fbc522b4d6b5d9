# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
"""Dispatch over NVLink, in Triton: tokens to the ranks that own their experts. No size is copied to the host.

stage_tokens_kernel   tokens -> this rank's memory, quantised            where peers read them; slots counted, ranked
send_routing_kernel   slots' experts, positions, weights -> every peer   then the flag "dispatch", a wait for theirs
pull_kernel           peers' tokens -> rows sorted by expert             a token is read once for all its experts here

Rows are sorted by (expert, source rank, slot). Each rank computes their positions by itself: a source says how many
slots it has for each expert and the position of each among its own, so nothing is counted by atomics, and the order is
the same in every run. `trace`, a kernel's last parameter: see `runtime.timeline_device`."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from envoi.epilogues.codes_triton import widen
from envoi.ops.moe.kernels import quantized, store_quantized
from envoi.ops.moe.parallel import load
from envoi.ops.moe.parallel.combine_kernels import (
    ARRIVALS,
    BAD_IDS,
    FINE,
    LATE_AT_DISPATCH,
    LOST,
    MAX_TOKENS,
    OUTCOME,
    REFUSED,
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
from envoi.runtime.topk import experts_at

PIECE: tl.constexpr = tl.constexpr(1024)  # slots that are counted, and sent, at once
# Slots that a program ranks, and slots that it compares them with at once: more need registers, fewer need time.
RANKED: tl.constexpr = tl.constexpr(16)
COMPARED: tl.constexpr = tl.constexpr(256)
COUNTED: tl.constexpr = tl.constexpr(4096)  # counts that a program loads at once
HISTORY: tl.constexpr = tl.constexpr(load.HISTORY)


class SourceSlots(NamedTuple):
    """Slots of this rank's tokens, as `send_routing_kernel` sends them.

    topk_ids, weights, ranks [num_slots]: expert, routing weight, and how many earlier slots of its piece have the same
    expert. counts [pieces, num_experts + 1]: slots of each expert in each piece.
    """

    topk_ids: Any
    weights: Any
    ranks: Any
    counts: Any
    num_slots: Any
    num_experts: Any


class SlotRegions(NamedTuple):
    """Parts of a peer's memory to which this rank's slots are sent."""

    topk_ids: Any
    slot_pos: Any
    weights: Any


class Placement(NamedTuple):
    """Outputs of dispatch for the kernels after it. offsets [E + 1]: see `compute_row_offsets`. state [4]."""

    offsets: Any
    state: Any


class PulledRows(NamedTuple):
    """Rows that `pull_kernel` writes. words: values as words of 4 bytes, num_words a row; sf: num_sf factors, or None.

    weights: routing weights. destinations: the addresses to which L2 sends rows, slots of slot_bytes at their sources.
    """

    words: Any
    sf: Any
    weights: Any
    destinations: Any
    num_words: Any
    num_sf: Any
    slot_bytes: Any


@triton.jit
def rank_slots(topk_ids, slot_ranks, first, num_slots, num_experts):
    """Count, for RANKED slots from `first` on, the earlier slots of their piece that have the same expert."""
    slots = first + tl.arange(0, RANKED)
    e = experts_at(topk_ids, slots, num_slots, num_experts)
    ranks = tl.zeros((RANKED,), tl.int32)
    for other in range(first // PIECE * PIECE, min(first + RANKED, num_slots), COMPARED):
        others = other + tl.arange(0, COMPARED)
        theirs = experts_at(topk_ids, others, num_slots, num_experts)
        ranks += tl.sum(((e[:, None] == theirs[None, :]) & (others[None, :] < slots[:, None])).to(tl.int32), 1)
    tl.store(slot_ranks + slots, tl.where(e < num_experts, ranks, -1), mask=slots < num_slots)


@triton.jit
def count_piece(topk_ids, counts, piece, num_slots, num_experts, EXPERTS: tl.constexpr):
    """Count the slots of a piece by expert; the last bin, which is never read, counts slots of no expert."""
    e = experts_at(topk_ids, piece * PIECE + tl.arange(0, PIECE), num_slots, num_experts)
    found = tl.histogram(e, EXPERTS)
    bins = tl.arange(0, EXPERTS)
    tl.store(counts + piece * (num_experts + 1) + bins, found, mask=bins <= num_experts)


@triton.jit(do_not_specialize=["num_slots"])
def stage_tokens_kernel(
    tokens, stride, values, sf, width, topk_ids, counts, slot_ranks, num_slots, num_experts,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, POWERS: tl.constexpr, HARDWARE: tl.constexpr, EXPERTS: tl.constexpr,
    trace,
):  # fmt: skip
    """Count and rank the slots, piece by piece, and store each token, quantised, where peers read it.

    The first programs count and rank; the others take one token each. GROUP: columns that share a factor; 0 = bf16.
    """
    note_begin(trace, 0, 0, 0)
    per_piece: tl.constexpr = PIECE // RANKED + 1
    piece, part = tl.program_id(0) // per_piece, tl.program_id(0) % per_piece
    m = tl.program_id(0) - tl.cdiv(num_slots, PIECE) * per_piece
    if m < 0:
        if tl.program_id(1) == 0:
            if part < PIECE // RANKED:
                rank_slots(topk_ids, slot_ranks, piece * PIECE + part * RANKED, num_slots, num_experts)
            if part == PIECE // RANKED:
                count_piece(topk_ids, counts, piece, num_slots, num_experts, EXPERTS)
    else:
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
        x = tl.load(tokens + m.to(tl.int64) * stride + columns, mask=columns < width, other=0.0)
        if GROUP > 0:
            x, x_sf = quantized(widen(x), GROUP, POWERS, HARDWARE)
            store_quantized(values, sf, m, x, x_sf, width, BLOCK, GROUP)
        else:
            tl.store(values + m.to(tl.int64) * width + columns, x, mask=columns < width)
    note_moment(trace, 0, 0, 1)


@triton.jit
def count_pieces(counts, num_pieces, num_experts, EXPERTS: tl.constexpr):
    """Sum the slots of each expert over the first num_pieces pieces: int32 [EXPERTS]."""
    ROWS: tl.constexpr = max(1, COUNTED // EXPERTS)
    bins = tl.arange(0, EXPERTS)[None, :]
    total = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, num_pieces, ROWS):
        pieces = first + tl.arange(0, ROWS)[:, None]
        inside = (pieces < num_pieces) & (bins <= num_experts)
        total += tl.sum(tl.load(counts + pieces * (num_experts + 1) + bins, mask=inside, other=0), 0)
    return total


@triton.jit
def send_slots(source, begin, to, chunk, CHUNKS: tl.constexpr, EXPERTS: tl.constexpr):
    """Send every CHUNKS-th piece of this rank's slots, from `chunk` on, to a peer. Returns 1 if one has a bad id.

    source: SourceSlots. begin [EXPERTS]: the first position of each expert among this rank's slots sorted by expert.
    to: SlotRegions. A bad id is neither an expert nor -1.
    """
    bad = tl.zeros((PIECE,), tl.int32)
    for piece in range(chunk, tl.cdiv(source.num_slots, PIECE), CHUNKS):
        slots = piece * PIECE + tl.arange(0, PIECE)
        inside = slots < source.num_slots
        e = tl.load(source.topk_ids + slots, mask=inside, other=-1)
        fine = (e >= 0) & (e < source.num_experts)
        base = begin + count_pieces(source.counts, piece, source.num_experts, EXPERTS)
        pos = tl.load(source.ranks + slots, mask=inside, other=0) + tl.gather(base, tl.where(fine, e, 0), 0)
        tl.store(to.topk_ids + slots, e, mask=inside)
        tl.store(to.slot_pos + slots, tl.where(fine, pos, -1), mask=inside)
        tl.store(to.weights + slots, tl.load(source.weights + slots, mask=inside), mask=inside)
        bad |= ((e < -1) | (e >= source.num_experts)).to(tl.int32)
    return tl.max(bad, 0)


@triton.jit
def compute_row_offsets(
    memory, experts, to, num_ranks, num_experts, live, LOCAL_LANES: tl.constexpr, RANK_LANES: tl.constexpr
):
    """Compute, from the slots of all sources, the first row of each local expert. to: Placement.

    offsets [count + 1]: expert e owns rows offsets[e] : offsets[e + 1]. row_shift [num_ranks, count]: added to a
    source's position of a slot, it gives the slot's row. state[MAX_TOKENS]: the most tokens of a rank. All are 0
    if the call has failed (live is False). LOCAL_LANES, RANK_LANES: powers of two of at least count and num_ranks.
    """
    e = tl.arange(0, LOCAL_LANES)[:, None]
    s = tl.arange(0, RANK_LANES)[None, :]
    inside = (e < experts.count) & (s < num_ranks) & live
    counts = ints(memory.own + memory.regions.slot_offsets) + s * (num_experts + 1) + experts.first + e
    begin = tl.load(counts, mask=inside, other=0, cache_modifier=".cg")
    count = tl.load(counts + 1, mask=inside, other=0, cache_modifier=".cg") - begin
    flat = tl.reshape(count, (LOCAL_LANES * RANK_LANES,))
    before = tl.reshape(tl.cumsum(flat, 0) - flat, (LOCAL_LANES, RANK_LANES))
    tl.store(experts.row_shift + s * experts.count + e, before - begin, mask=(e < experts.count) & (s < num_ranks))
    tl.store(to.offsets + e + s, before, mask=(e < experts.count) & (s == 0))
    tl.store(to.offsets + experts.count, tl.sum(flat, 0))
    ranks = tl.arange(0, RANK_LANES)
    num_tokens = tl.load(
        ints(memory.own + memory.regions.sizes) + 2 * ranks, mask=(ranks < num_ranks) & live, other=0,
        cache_modifier=".cg",
    )  # fmt: skip
    tl.store(to.state + MAX_TOKENS, tl.max(num_tokens, 0))


@triton.jit
def decide_outcome(memory, state, report, num_ranks, RANK_LANES: tl.constexpr):
    """Decide, once every peer has arrived or timed out, whether the call continues; report and clear error codes."""
    ranks = tl.arange(0, RANK_LANES)
    error_codes = ints(memory.own + memory.regions.error_codes) + ranks
    found = tl.load(error_codes, mask=ranks < num_ranks, other=0, cache_modifier=".cg")
    tl.store(report + num_ranks + ranks, found, mask=(ranks < num_ranks) & (found > 0))
    tl.store(error_codes, 0, mask=(ranks < num_ranks) & (found > 0))
    outcome = tl.load(state + OUTCOME, cache_modifier=".cg")
    outcome = tl.where(outcome == LOST, LOST, tl.where(tl.max(found, 0) > 0, REFUSED, FINE))
    tl.store(state + OUTCOME, outcome)
    return outcome


@triton.jit(do_not_specialize=["rank", "num_tokens", "first_expert", "error_code", "timeout_us"])
def send_routing_kernel(
    topk_ids, slot_ranks, counts, topk_weights, peers, regions, row_shift, offsets, state, report,
    rank, num_ranks, num_tokens, k, slot_capacity, num_experts, first_expert, num_local, error_code, timeout_us,
    CHUNKS: tl.constexpr, EXPERTS: tl.constexpr, LOCAL_LANES: tl.constexpr, RANK_LANES: tl.constexpr,
    ON_GPU: tl.constexpr, trace,
):  # fmt: skip
    """Send this rank's slots to every peer and wait for theirs. Program (p, c): chunk c of the slots, to peer p.

    The first program of each peer waits for it; the last of those to finish decides the outcome and computes offsets.
    slot_capacity: slots that a rank may have. error_code: why the host refuses this rank's arguments, which then aren't
    sent; 0.
    """
    note_begin(trace, 0, 0, 0)
    peer, chunk = tl.program_id(0), tl.program_id(1)
    own = tl.load(peers + rank)
    theirs = tl.load(peers + peer)
    memory = Memory(own, peers, regions, slot_capacity)
    outcome = tl.load(state + OUTCOME)
    if outcome != LOST:
        mine = rank * slot_capacity * 4
        to = SlotRegions(
            ints(theirs + regions.topk_ids + mine),
            ints(theirs + regions.slot_pos + mine),
            ints(theirs + regions.weights + mine).to(tl.pointer_type(tl.float32)),
        )
        own_counts = count_pieces(counts, tl.cdiv(num_tokens * k, PIECE), num_experts, EXPERTS)
        begin = tl.cumsum(own_counts, 0) - own_counts
        source = SourceSlots(topk_ids, topk_weights, slot_ranks, counts, num_tokens * k, num_experts)
        bad = send_slots(source, begin, to, chunk, CHUNKS, EXPERTS)
        error_code = tl.where(error_code > 0, error_code, tl.where(bad > 0, BAD_IDS, 0))
        tl.atomic_max(
            ints(theirs + regions.error_codes) + rank, error_code, mask=error_code > 0, sem="relaxed", scope="sys"
        )
        if chunk == 0:
            e = tl.arange(0, EXPERTS)
            tl.store(ints(theirs + regions.slot_offsets) + rank * (num_experts + 1) + e, begin, mask=e <= num_experts)
            tl.store(ints(theirs + regions.sizes) + 2 * rank, num_tokens)
            tl.store(ints(theirs + regions.sizes) + 2 * rank + 1, k)
        raise_flag(ints(theirs + regions.flags) + rank)
    note_moment(trace, 0, 0, 1)
    if chunk == 0:
        if outcome != LOST:
            if not wait_for(ints(own + regions.flags) + peer, CHUNKS, timeout_us, ON_GPU):
                tl.store(report + peer, LATE_AT_DISPATCH)
                tl.store(state + OUTCOME, LOST)
                tl.debug_barrier()
        note_moment(trace, 0, 0, 2)
        if tl.atomic_add(state + ARRIVALS, 1, sem="acq_rel", scope="gpu") == num_ranks - 1:
            tl.store(state + ARRIVALS, 0)
            fine = decide_outcome(memory, state, report, num_ranks, RANK_LANES) == FINE
            experts = LocalExperts(first_expert, num_local, row_shift)
            to = Placement(offsets, state)
            compute_row_offsets(memory, experts, to, num_ranks, num_experts, fine, LOCAL_LANES, RANK_LANES)
    note_moment(trace, 0, 0, 3)


@triton.jit
def pull_token(memory, experts, token, rows, SLOTS: tl.constexpr, WORDS: tl.constexpr, SFS: tl.constexpr):
    """Copy a SourceToken to the rows of its experts on this rank, if it has any. rows: PulledRows."""
    found = token_slots(memory, experts, token, SLOTS)
    if tl.max(found.is_local.to(tl.int32), 0) > 0:
        base = tl.load(memory.peers + token.source)
        columns = tl.arange(0, WORDS)
        from_row = tl.multiple_of((base + memory.regions.tokens).to(rows.words.dtype), 16)
        from_row += token.token.to(tl.int64) * rows.num_words
        x = tl.load(from_row + columns, mask=columns < rows.num_words, other=0)
        if SFS > 0:
            factors = tl.arange(0, SFS)
            from_sf = (base + memory.regions.token_sf).to(rows.sf.dtype) + token.token * rows.num_sf
            sf = tl.load(from_sf + factors, mask=factors < rows.num_sf, other=0)
        pos = row_positions(memory, experts, token.source, found)
        weights = ints(memory.own + memory.regions.weights).to(tl.pointer_type(tl.float32))
        weights = weights + token.source * memory.slot_capacity + found.slot
        tl.store(rows.weights + pos, tl.load(weights, mask=found.is_local, other=0.0), mask=found.is_local)
        returned = base + memory.regions.returned_rows
        tl.store(rows.destinations + pos, returned + found.slot.to(tl.int64) * rows.slot_bytes, mask=found.is_local)
        for i in range(token.k):
            row = tl.max(tl.where(found.lane == i, pos, -1), 0).to(tl.int64)
            if row >= 0:
                tl.store(rows.words + row * rows.num_words + columns, x, mask=columns < rows.num_words)
                if SFS > 0:
                    tl.store(rows.sf + row * rows.num_sf + factors, sf, mask=factors < rows.num_sf)


@triton.jit
def note_load(memory, state, history, num_ranks, num_experts, EXPERTS: tl.constexpr):
    """Add this call's slots of each expert, of all ranks, to the history; nothing if the call failed. One program.

    history [HISTORY + 1, num_experts] int32: see `load.empty_history`.
    """
    if tl.load(state + OUTCOME) == FINE:
        e = tl.arange(0, EXPERTS)
        total = tl.zeros((EXPERTS,), tl.int32)
        for source in range(num_ranks):
            begin = ints(memory.own + memory.regions.slot_offsets) + source * (num_experts + 1) + e
            total += tl.load(begin + 1, mask=e < num_experts, other=0, cache_modifier=".cg")
            total -= tl.load(begin, mask=e < num_experts, other=0, cache_modifier=".cg")
        call = tl.atomic_add(history + HISTORY * num_experts, 1, sem="relaxed", scope="gpu")
        tl.store(history + (call & (HISTORY - 1)) * num_experts + e, total, mask=e < num_experts)


@triton.jit(do_not_specialize=["rank", "first_expert"])
def pull_kernel(
    peers, regions, row_shift, state, history, rows, rows_sf, row_weights, row_destinations,
    rank, num_ranks, slot_capacity, num_experts, first_expert, num_local, num_words, num_sf, slot_bytes,
    SLOTS: tl.constexpr, WORDS: tl.constexpr, SFS: tl.constexpr, EXPERTS: tl.constexpr, trace,
):  # fmt: skip
    """Pull the tokens of all ranks into rows, one token of each rank in turn, so that all peers are read at any time.

    rows: as words of 4 bytes, num_words of them; rows_sf: num_sf factors each. The address that L2 will send each row
    to is known here already. The last program, which few tokens leave idle, also adds the call to `history`."""
    note_begin(trace, 0, 0, 0)
    own = tl.load(peers + rank)
    most = tl.load(state + MAX_TOKENS)
    memory = Memory(own, peers, regions, slot_capacity)
    experts = LocalExperts(first_expert, num_local, row_shift)
    out = PulledRows(rows, rows_sf, row_weights, row_destinations, num_words, num_sf, slot_bytes)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        note_load(memory, state, history, num_ranks, num_experts, EXPERTS)
    for t in range(tl.program_id(0), most * num_ranks, tl.num_programs(0)):
        source, token = (t + rank) % num_ranks, t // num_ranks
        if token < tl.load(ints(own + regions.sizes) + 2 * source):
            k = tl.load(ints(own + regions.sizes) + 2 * source + 1)
            pull_token(memory, experts, SourceToken(source, token, k), out, SLOTS, WORDS, SFS)
    note_moment(trace, 0, 0, 1)
