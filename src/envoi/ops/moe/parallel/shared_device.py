# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
"""Device code that dispatch and combine share: shared memory by name, flags between ranks, bounded waits.

Flags are in the memory of the rank that waits. A peer adds 1 (release, system scope) once everything that it wrote
before may be read; the waiting rank subtracts the count that it waited for, so a flag is 0 between calls. A wait that
takes longer than the timeout gives up: the late rank is written to `report`, `state[OUTCOME]` becomes LOST, every later
kernel returns at once, and the output is NaN."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

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
    `symmetric_memory.Regions`, the byte offset of each part. slot_capacity: slots that a rank may have.
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
