# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
"""Combine over NVLink, in Triton: send rows to the ranks of their tokens, and sum them there. And what dispatch shares.

send_partial_sums_kernel   sums of a token's rows here -> its rank     only with presum; else L2 sends every row itself
send_rows_kernel           rows of experts that aren't Envoi's         to where L2 would send them
combine_barrier_kernel     the flag "combine", a wait for the peers'   after all rows have been sent
sum_kernel                 rows of a token's slots -> token            in the order of the slots
sum_ranks_kernel           partial sums of a token -> token            with presum: in the order of the ranks

Flags are in the memory of the rank that waits. A peer adds 1 (release, system scope) once everything that it wrote
before may be read; the waiting rank subtracts the count that it waited for, so a flag is 0 between calls. A wait that
takes longer than the timeout gives up: the late rank is written to `report`, `state[OUTCOME]` becomes LOST, every later
kernel returns at once, and the output is NaN. `trace`, a kernel's last parameter: see `runtime.timeline_device`."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from envoi.epilogues.codes_triton import from_e4m3, widen
from envoi.epilogues.device import bf16
from envoi.ops.moe.kernels import quantized
from envoi.runtime.timeline_device import note_begin, note_moment

# Outcome of a call so far: `state[OUTCOME]`.
FINE: tl.constexpr = tl.constexpr(0)
REFUSED: tl.constexpr = tl.constexpr(1)
LOST: tl.constexpr = tl.constexpr(2)

# Error codes. `report` has two rows with one code a rank: who was late, and whose arguments were refused.
LATE_AT_DISPATCH: tl.constexpr = tl.constexpr(1)
LATE_AT_COMBINE: tl.constexpr = tl.constexpr(2)
REFUSED_ON_HOST: tl.constexpr = tl.constexpr(3)
BAD_IDS: tl.constexpr = tl.constexpr(4)

# Entries of `state`, int32.
ARRIVALS: tl.constexpr = tl.constexpr(0)  # peers that dispatch has heard from; 0 between calls
OUTCOME: tl.constexpr = tl.constexpr(1)
MAX_TOKENS: tl.constexpr = tl.constexpr(2)  # the most tokens that a rank has in this call


class Memory(NamedTuple):
    """Shared memory as seen by one rank's kernel.

    own: address of this rank's memory. peers [num_ranks] int64: addresses of all ranks' memory. regions:
    `nvlink.Regions`, the byte offset of each part. slot_capacity: slots that a rank may have.
    """

    own: Any
    peers: Any
    regions: Any
    slot_capacity: Any


class LocalExperts(NamedTuple):
    """Experts of this rank: first .. first + count - 1 of all.

    row_shift [num_ranks, count]: added to a source's position of a slot, it gives the slot's row on this rank.
    """

    first: Any
    count: Any
    row_shift: Any


class SourceToken(NamedTuple):
    """Token number `token` of rank `source`; k: its slots."""

    source: Any
    token: Any
    k: Any


class TokenSlots(NamedTuple):
    """Slots of a SourceToken.

    lane: 0, 1, .. within the token. slot: token * k + lane. expert: local number of the slot's expert. is_local: True
    if this rank owns that expert."""

    lane: Any
    slot: Any
    expert: Any
    is_local: Any


@triton.jit
def ints(address):
    """Return a pointer to int32."""
    return tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 4)


@triton.jit
def now(ON_GPU: tl.constexpr):
    """Read the GPU's clock in nanoseconds, one value for all threads; 0 in the interpreter."""
    if ON_GPU:
        lanes = tl.arange(0, 128)  # over all warps: else each would read its own time
        return tl.max(
            tl.inline_asm_elementwise("mov.u64 $0, %globaltimer; // $1", "=l,r", [lanes], tl.int64, False, 1), 0
        )
    else:
        return tl.full((), 0, tl.int64)


@triton.jit
def raise_flag(flag):
    """Add 1 to a flag (release): a reader that sees it may read everything that this program wrote before."""
    tl.debug_barrier()
    tl.atomic_add(flag, 1, sem="release", scope="sys")


@triton.jit
def wait_for(flag, count, timeout_us, ON_GPU: tl.constexpr):
    """Wait until a flag has been raised `count` times, then subtract count. Returns False after the timeout."""
    start, timeout_ns = now(ON_GPU), tl.cast(timeout_us, tl.int64) * 1000
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    waited = start * 0  # int64, the type that it has in the loop
    while (seen < count) & (waited <= timeout_ns):
        waited = now(ON_GPU) - start if ON_GPU else start + timeout_ns + 1
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    came = seen >= count
    tl.atomic_add(flag, tl.where(came, -count, 0), sem="relaxed", scope="sys")
    return came


@triton.jit
def token_slots(memory, experts, token, SLOTS: tl.constexpr):
    """Read the slots of a SourceToken and find those whose experts this rank owns."""
    lane = tl.arange(0, SLOTS)
    slot = token.token * token.k + lane
    ids = ints(memory.own + memory.regions.topk_ids)
    expert = tl.load(ids + token.source * memory.slot_capacity + slot, mask=lane < token.k, other=-1) - experts.first
    return TokenSlots(lane, slot, expert, (expert >= 0) & (expert < experts.count))


@triton.jit
def row_positions(memory, experts, source, token):
    """Return the rows of a token's slots on this rank, -1 for slots whose expert is elsewhere. token: TokenSlots."""
    positions = ints(memory.own + memory.regions.slot_pos)
    pos = tl.load(positions + source * memory.slot_capacity + token.slot, mask=token.is_local, other=0)
    shift = tl.load(experts.row_shift + source * experts.count + token.expert, mask=token.is_local, other=0)
    return tl.where(token.is_local, pos + shift, -1)


class ResultRows(NamedTuple):
    """L2's rows on this rank [P, width] bf16, sorted by expert, and which of num_ranks this rank is."""

    rows: Any
    width: Any
    rank: Any
    num_ranks: Any


@triton.jit
def send_partial_sum(memory, experts, token, results, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum a SourceToken's rows on this rank in the order of its slots, round once, and send the sum to its rank."""
    found = token_slots(memory, experts, token, SLOTS)
    width = results.width
    if tl.max(found.is_local.to(tl.int32), 0) > 0:
        pos = row_positions(memory, experts, token.source, found)
        to = (tl.load(memory.peers + token.source) + memory.regions.returned_rows).to(results.rows.dtype)
        to = tl.multiple_of(to, 16) + (token.token * results.num_ranks + results.rank).to(tl.int64) * width
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
    peers, regions, row_shift, state, results, width, rank, num_ranks, slot_capacity, first_expert, num_local,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, trace,
):  # fmt: skip
    """Send each token's sum of L2's rows on this rank, in the order of `pull_kernel`; only with presum."""
    note_begin(trace, 0, 0, 0)
    own = tl.load(peers + rank)
    most = tl.load(state + MAX_TOKENS)
    memory = Memory(own, peers, regions, slot_capacity)
    experts = LocalExperts(first_expert, num_local, row_shift)
    rows = ResultRows(results, width, rank, num_ranks)
    for t in range(tl.program_id(0), most * num_ranks, tl.num_programs(0)):
        source, token = (t + rank) % num_ranks, t // num_ranks
        if token < tl.load(ints(own + regions.sizes) + 2 * source):
            k = tl.load(ints(own + regions.sizes) + 2 * source + 1)
            send_partial_sum(memory, experts, SourceToken(source, token, k), rows, SLOTS, BLOCK)
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
def load_row(row, columns, groups, width, used, GROUP: tl.constexpr, HARDWARE: tl.constexpr):
    """Return columns of a row that was sent back, float32; 0 unless used.

    row: bf16 values, or with GROUP E4M3 and behind them float32 factors: groups [G, 1] of columns [G, GROUP].
    """
    if GROUP:
        x = tl.load(row + columns, mask=used & (columns < width), other=0)
        x = x.to(tl.float8e4nv, bitcast=True).to(tl.float32) if HARDWARE else from_e4m3(x)
        factors = (row + width).to(tl.pointer_type(tl.float32)) + groups
        return x * tl.load(factors, mask=used & (groups < width // GROUP), other=0.0)
    else:
        return widen(tl.load(row + columns, mask=used & (columns < width), other=0.0))


@triton.jit
def sum_kernel(
    slots, topk_ids, out, state, width, stride,
    K: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, HARDWARE: tl.constexpr, trace,
):  # fmt: skip
    """Sum the rows of a token's slots in their order, in float32.

    slots: where L2 sent row i, at slots + i * stride, as in `load_row`.
    """
    note_begin(trace, 0, 0, 0)
    m = tl.program_id(0)
    if GROUP:
        groups = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)[:, None]
        columns = groups * GROUP + tl.arange(0, GROUP)[None, :]
    else:
        groups = 0
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros(columns.shape, tl.float32)
    for s in tl.static_range(K):  # unrolled: all loads are under way before the first sum
        used = tl.load(topk_ids + m * K + s) >= 0
        total += load_row(slots + (m.to(tl.int64) * K + s) * stride, columns, groups, width, used, GROUP, HARDWARE)
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
def send_rows_kernel(
    rows, destinations, offsets, width, num_local, BLOCK: tl.constexpr, GROUP: tl.constexpr, HARDWARE: tl.constexpr
):
    """Store row r of rows [P, width] bf16 at the address destinations[r], as L2 does, for all rows of experts here.

    offsets [num_local + 1] int32: the last one is the number of rows, 0 if the call has failed. With GROUP rows are
    quantised, see `load_row`.
    """
    for row in range(tl.program_id(0), tl.load(offsets + num_local), tl.num_programs(0)):
        to = tl.load(destinations + row)
        source = rows + tl.cast(row, tl.int64) * width
        for first in range(0, width, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            x = tl.load(source + columns, mask=columns < width, other=0.0)
            if GROUP:
                values, sf = quantized(tl.reshape(widen(x), (1, BLOCK)), GROUP, False, HARDWARE)
                values = tl.reshape(values, (BLOCK,))
                groups = first // GROUP + tl.arange(0, BLOCK // GROUP)[None, :]
                factors = (to + width).to(tl.pointer_type(tl.float32)) + groups
                tl.store(factors, sf, mask=groups < width // GROUP)
                tl.store(tl.multiple_of(to.to(tl.pointer_type(tl.uint8)), 16) + columns, values, mask=columns < width)
            else:
                tl.store(tl.multiple_of(to.to(rows.dtype), 16) + columns, x, mask=columns < width)
