# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
"""What the ranks of one NVLink domain do to each other's memory, in Triton. No size comes back to the host.

    publish_kernel    tokens -> this rank's memory, quantised             where peers read them; slots counted
    announce_kernel   slots' experts, places, weights -> every peer       then the flag "dispatch", a wait for theirs
    pull_kernel       peers' tokens -> rows sorted by expert              each read once for all its experts here
    return_kernel     sums of a token's rows here -> its rank             with presum; else L2 sends all rows
    meet_kernel       the flag "combine"                                  after all rows have been sent
    sum_kernel        slots -> tokens                                     in the order of the slots, or of the ranks

Rows are sorted by (expert, source rank, slot). Each rank works out their places by itself: a source says how many slots
it has for each expert and which place a slot has among its own, so nothing is counted by atomics, and the order is the
same in every run.

Memory of a rank (`memory.Plan` says where): flags, and from every source what it announced; the tokens of this rank; a
slot for each row that comes back, or with presum, one for each rank.

Waits are bounded. A rank that is late is written to `report`, where the host can read it, and from then on every
kernel leaves at once; the output is NaN.
"""

import triton
import triton.language as tl

from envoi.epilogue.codes_triton import widen
from envoi.epilogue.device import bf16
from envoi.experts.kernel_triton import experts_at, quantized, store_quantized

# What is known of a call: `state[VERDICT]`.
FINE: tl.constexpr = tl.constexpr(0)
REFUSED: tl.constexpr = tl.constexpr(1)
LOST: tl.constexpr = tl.constexpr(2)

# What is known of each rank. `report` has two rows: who was late, and whose arguments were refused.
LATE_AT_DISPATCH: tl.constexpr = tl.constexpr(1)
LATE_AT_COMBINE: tl.constexpr = tl.constexpr(2)
REFUSED_ON_HOST: tl.constexpr = tl.constexpr(3)
BAD_IDS: tl.constexpr = tl.constexpr(4)

# Parts of a rank's memory: `memory.Plan.at` says where each begins.
FLAGS: tl.constexpr = tl.constexpr(0)
TROUBLE: tl.constexpr = tl.constexpr(1)
SIZES: tl.constexpr = tl.constexpr(2)
COUNTS: tl.constexpr = tl.constexpr(3)
IDS: tl.constexpr = tl.constexpr(4)
PLACES: tl.constexpr = tl.constexpr(5)
WEIGHTS: tl.constexpr = tl.constexpr(6)
TOKENS: tl.constexpr = tl.constexpr(7)
FACTORS: tl.constexpr = tl.constexpr(8)
RETURNS: tl.constexpr = tl.constexpr(9)

# Places in `state`.
COMERS: tl.constexpr = tl.constexpr(0)
VERDICT: tl.constexpr = tl.constexpr(1)
MOST: tl.constexpr = tl.constexpr(2)

PIECE: tl.constexpr = tl.constexpr(1024)  # slots that are counted, and announced, at once
# Slots that a program ranks, and others that it sees at once: more of either take registers, fewer take time.
RANKED: tl.constexpr = tl.constexpr(16)
BESIDE: tl.constexpr = tl.constexpr(256)
COUNTED: tl.constexpr = tl.constexpr(4096)  # counts that a program loads at once


@triton.jit
def ints(address):
    """A pointer to int32."""
    return tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 4)


@triton.jit
def now(ON_GPU: tl.constexpr):
    """Nanoseconds; the same for all threads."""
    if ON_GPU:
        lanes = tl.arange(0, 128)  # of all warps: else each would have its own time
        return tl.max(
            tl.inline_asm_elementwise("mov.u64 $0, %globaltimer; // $1", "=l,r", [lanes], tl.int64, False, 1), 0
        )
    else:
        return tl.full((), 0, tl.int64)


@triton.jit
def raise_flag(flag):
    """Everything that this program has written can be seen by whoever sees the flag."""
    tl.debug_barrier()
    tl.atomic_add(flag, 1, sem="release", scope="sys")


@triton.jit
def wait_for(flag, count, timeout_us, ON_GPU: tl.constexpr):
    """Until a flag has been raised count times, which are taken off it. False if it took longer than allowed."""
    start, timeout_ns = now(ON_GPU), tl.cast(timeout_us, tl.int64) * 1000
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    waited = start * 0  # of the type that it has in the loop
    while (seen < count) & (waited <= timeout_ns):
        waited = now(ON_GPU) - start if ON_GPU else start + timeout_ns + 1
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    came = seen >= count
    tl.atomic_add(flag, tl.where(came, -count, 0), sem="relaxed", scope="sys")
    return came


@triton.jit
def rank_slots(topk_ids, slot_ranks, first, num_slots, num_experts):
    """RANKED slots from `first` on: how many slots of their piece in front of each have its expert."""
    slots = first + tl.arange(0, RANKED)
    e = experts_at(topk_ids, slots, num_slots, num_experts)
    ranks = tl.zeros((RANKED,), tl.int32)
    for other in range(first // PIECE * PIECE, min(first + RANKED, num_slots), BESIDE):
        others = other + tl.arange(0, BESIDE)
        theirs = experts_at(topk_ids, others, num_slots, num_experts)
        ranks += tl.sum(((e[:, None] == theirs[None, :]) & (others[None, :] < slots[:, None])).to(tl.int32), 1)
    tl.store(slot_ranks + slots, tl.where(e < num_experts, ranks, -1), mask=slots < num_slots)


@triton.jit
def count_piece(topk_ids, counts, piece, num_slots, num_experts, EXPERTS: tl.constexpr):
    """How many slots of a piece each expert has; behind the last expert all others, and nobody reads that."""
    e = experts_at(topk_ids, piece * PIECE + tl.arange(0, PIECE), num_slots, num_experts)
    found = tl.histogram(e, EXPERTS)
    bins = tl.arange(0, EXPERTS)
    tl.store(counts + piece * (num_experts + 1) + bins, found, mask=bins <= num_experts)


@triton.jit(do_not_specialize=["num_slots"])
def publish_kernel(
    tokens, stride, values, sf, width, topk_ids, counts, slot_ranks, num_slots, num_experts,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, POWERS: tl.constexpr, HARDWARE: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Pieces of the slots first, counted and ranked; behind them a program a token, quantised, to where peers read it.

    GROUP: columns that share a factor; 0 = bf16 as it is.
    """
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


@triton.jit
def counted(counts, num_pieces, num_experts, EXPERTS: tl.constexpr):
    """How many slots each expert has in the first num_pieces pieces."""
    ROWS: tl.constexpr = max(1, COUNTED // EXPERTS)
    bins = tl.arange(0, EXPERTS)[None, :]
    total = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, num_pieces, ROWS):
        pieces = first + tl.arange(0, ROWS)[:, None]
        inside = (pieces < num_pieces) & (bins <= num_experts)
        total += tl.sum(tl.load(counts + pieces * (num_experts + 1) + bins, mask=inside, other=0), 0)
    return total


@triton.jit
def push_slots(
    topk_ids, slot_ranks, counts, begin, topk_weights, to, chunk, num_slots, num_experts,
    CHUNKS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """A chunk of this rank's slots to a peer; whether an id in it is neither an expert nor -1.

    begin: where each expert's slots begin among this rank's, sorted by expert.
    """
    ids_to, pos_to, weights_to = to
    bad = tl.zeros((PIECE,), tl.int32)
    for piece in range(chunk, tl.cdiv(num_slots, PIECE), CHUNKS):
        slots = piece * PIECE + tl.arange(0, PIECE)
        inside = slots < num_slots
        e = tl.load(topk_ids + slots, mask=inside, other=-1)
        fine = (e >= 0) & (e < num_experts)
        base = begin + counted(counts, piece, num_experts, EXPERTS)
        pos = tl.load(slot_ranks + slots, mask=inside, other=0) + tl.gather(base, tl.where(fine, e, 0), 0)
        tl.store(ids_to + slots, e, mask=inside)
        tl.store(pos_to + slots, tl.where(fine, pos, -1), mask=inside)
        tl.store(weights_to + slots, tl.load(topk_weights + slots, mask=inside), mask=inside)
        bad |= ((e < -1) | (e >= num_experts)).to(tl.int32)
    return tl.max(bad, 0)


@triton.jit
def places(own, at, shift, offsets, state, num_ranks, num_experts, first_expert, num_local, live, shape: tl.constexpr):
    """From all sources' counts, where each expert's rows begin, and what is added to a source's place of a slot."""
    e = tl.arange(0, shape[0])[:, None]
    s = tl.arange(0, shape[1])[None, :]
    inside = (e < num_local) & (s < num_ranks) & live
    counts = ints(own + at[COUNTS]) + s * (num_experts + 1) + first_expert + e
    begin = tl.load(counts, mask=inside, other=0, cache_modifier=".cg")
    count = tl.load(counts + 1, mask=inside, other=0, cache_modifier=".cg") - begin
    flat = tl.reshape(count, (shape[0] * shape[1],))
    before = tl.reshape(tl.cumsum(flat, 0) - flat, (shape[0], shape[1]))
    tl.store(shift + s * num_local + e, before - begin, mask=(e < num_local) & (s < num_ranks))
    tl.store(offsets + e + s, before, mask=(e < num_local) & (s == 0))
    tl.store(offsets + num_local, tl.sum(flat, 0))
    ranks = tl.arange(0, shape[1])
    num_tokens = tl.load(
        ints(own + at[SIZES]) + 2 * ranks, mask=(ranks < num_ranks) & live, other=0, cache_modifier=".cg"
    )
    tl.store(state + MOST, tl.max(num_tokens, 0))


@triton.jit
def judge(own, at, state, report, num_ranks, shape: tl.constexpr):
    """Once all peers have come, or haven't: whether the call goes on. Clears what they complained of."""
    ranks = tl.arange(0, shape[1])
    trouble = ints(own + at[TROUBLE]) + ranks
    found = tl.load(trouble, mask=ranks < num_ranks, other=0, cache_modifier=".cg")
    tl.store(report + num_ranks + ranks, found, mask=(ranks < num_ranks) & (found > 0))
    tl.store(trouble, 0, mask=(ranks < num_ranks) & (found > 0))
    verdict = tl.load(state + VERDICT, cache_modifier=".cg")
    verdict = tl.where(verdict == LOST, LOST, tl.where(tl.max(found, 0) > 0, REFUSED, FINE))
    tl.store(state + VERDICT, verdict)
    return verdict


@triton.jit(do_not_specialize=["rank", "num_tokens", "first_expert", "trouble", "timeout_us"])
def announce_kernel(
    topk_ids, slot_ranks, counts, topk_weights, peers, at, shift, offsets, state, report,
    rank, num_ranks, num_tokens, k, room, num_experts, first_expert, num_local, trouble, timeout_us,
    CHUNKS: tl.constexpr, EXPERTS: tl.constexpr, shape: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Program (p, c): chunk c of this rank's slots to peer p. The first of them waits for p, the last to come judges.

    room: slots that a rank may have. trouble: what the host has against this rank's arguments, which then aren't sent.
    """
    peer, chunk = tl.program_id(0), tl.program_id(1)
    own = tl.load(peers + rank)
    theirs = tl.load(peers + peer)
    verdict = tl.load(state + VERDICT)
    if verdict != LOST:
        mine = rank * room * 4
        to = (
            ints(theirs + at[IDS] + mine),
            ints(theirs + at[PLACES] + mine),
            ints(theirs + at[WEIGHTS] + mine).to(tl.pointer_type(tl.float32)),
        )
        own_counts = counted(counts, tl.cdiv(num_tokens * k, PIECE), num_experts, EXPERTS)
        begin = tl.cumsum(own_counts, 0) - own_counts
        bad = push_slots(
            topk_ids, slot_ranks, counts, begin, topk_weights, to, chunk, num_tokens * k, num_experts, CHUNKS, EXPERTS
        )
        trouble = tl.where(trouble > 0, trouble, tl.where(bad > 0, BAD_IDS, 0))
        tl.atomic_max(ints(theirs + at[TROUBLE]) + rank, trouble, mask=trouble > 0, sem="relaxed", scope="sys")
        if chunk == 0:
            e = tl.arange(0, EXPERTS)
            tl.store(ints(theirs + at[COUNTS]) + rank * (num_experts + 1) + e, begin, mask=e <= num_experts)
            tl.store(ints(theirs + at[SIZES]) + 2 * rank, num_tokens)
            tl.store(ints(theirs + at[SIZES]) + 2 * rank + 1, k)
        raise_flag(ints(theirs + at[FLAGS]) + rank)
    if chunk == 0:
        if verdict != LOST:
            if not wait_for(ints(own + at[FLAGS]) + peer, CHUNKS, timeout_us, ON_GPU):
                tl.store(report + peer, LATE_AT_DISPATCH)
                tl.store(state + VERDICT, LOST)
                tl.debug_barrier()
        if tl.atomic_add(state + COMERS, 1, sem="acq_rel", scope="gpu") == num_ranks - 1:
            tl.store(state + COMERS, 0)
            fine = judge(own, at, state, report, num_ranks, shape) == FINE
            places(own, at, shift, offsets, state, num_ranks, num_experts, first_expert, num_local, fine, shape)


@triton.jit
def slots_here(s, token, k, at, own, room, first_expert, num_local, SLOTS: tl.constexpr):
    """The slots of a token of rank s, their experts here, and which have one."""
    slots = tl.arange(0, SLOTS)
    slot = token * k + slots
    e = tl.load(ints(own + at[IDS]) + s * room + slot, mask=slots < k, other=-1) - first_expert
    return slots, slot, e, (e >= 0) & (e < num_local)


@triton.jit
def rows_of(s, slot, e, mine, at, own, shift, room, num_local):
    """The rows of these slots; -1 for those whose expert is elsewhere."""
    pos = tl.load(ints(own + at[PLACES]) + s * room + slot, mask=mine, other=0)
    return tl.where(mine, pos + tl.load(shift + s * num_local + e, mask=mine, other=0), -1)


@triton.jit
def pull_token(
    s, token, k, peers, at, own, shift, rows, rows_sf, row_weights, row_to,
    room, first_expert, num_local, num_words, num_sf, slot_bytes,
    SLOTS: tl.constexpr, WORDS: tl.constexpr, SFS: tl.constexpr,
):  # fmt: skip
    """A token of rank s to the rows of its experts here, if it has any."""
    slots, slot, e, mine = slots_here(s, token, k, at, own, room, first_expert, num_local, SLOTS)
    if tl.max(mine.to(tl.int32), 0) > 0:
        source = tl.load(peers + s)
        words = tl.arange(0, WORDS)
        from_row = tl.multiple_of((source + at[TOKENS]).to(rows.dtype), 16) + token.to(tl.int64) * num_words
        x = tl.load(from_row + words, mask=words < num_words, other=0)
        if SFS > 0:
            factors = tl.arange(0, SFS)
            from_sf = (source + at[FACTORS]).to(rows_sf.dtype) + token * num_sf
            sf = tl.load(from_sf + factors, mask=factors < num_sf, other=0)
        pos = rows_of(s, slot, e, mine, at, own, shift, room, num_local)
        weights = ints(own + at[WEIGHTS]).to(tl.pointer_type(tl.float32)) + s * room + slot
        tl.store(row_weights + pos, tl.load(weights, mask=mine, other=0.0), mask=mine)
        tl.store(row_to + pos, source + at[RETURNS] + slot.to(tl.int64) * slot_bytes, mask=mine)
        for i in range(k):
            row = tl.max(tl.where(slots == i, pos, -1), 0).to(tl.int64)
            if row >= 0:
                tl.store(rows + row * num_words + words, x, mask=words < num_words)
                if SFS > 0:
                    tl.store(rows_sf + row * num_sf + factors, sf, mask=factors < num_sf)


@triton.jit(do_not_specialize=["rank", "first_expert"])
def pull_kernel(
    peers, at, shift, state, rows, rows_sf, row_weights, row_to,
    rank, num_ranks, room, first_expert, num_local, num_words, num_sf, slot_bytes,
    SLOTS: tl.constexpr, WORDS: tl.constexpr, SFS: tl.constexpr,
):  # fmt: skip
    """The tokens of all ranks, one of each in turn, so that at any time the programs read from all peers.

    rows: as words of 4 bytes, num_words of them; rows_sf: num_sf factors each. Where a row will go is known here
    already.
    """
    own = tl.load(peers + rank)
    most = tl.load(state + MOST)
    for t in range(tl.program_id(0), most * num_ranks, tl.num_programs(0)):
        s, token = (t + rank) % num_ranks, t // num_ranks
        if token < tl.load(ints(own + at[SIZES]) + 2 * s):
            k = tl.load(ints(own + at[SIZES]) + 2 * s + 1)
            pull_token(
                s, token, k, peers, at, own, shift, rows, rows_sf, row_weights, row_to,
                room, first_expert, num_local, num_words, num_sf, slot_bytes, SLOTS, WORDS, SFS,
            )  # fmt: skip


@triton.jit
def return_token(
    s, token, k, peers, at, own, shift, results, width, rank, num_ranks, room, first_expert, num_local,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of a token's rows here, in the order of its slots, rounded once, to the rank that it came from."""
    slots, slot, e, mine = slots_here(s, token, k, at, own, room, first_expert, num_local, SLOTS)
    if tl.max(mine.to(tl.int32), 0) > 0:
        pos = rows_of(s, slot, e, mine, at, own, shift, room, num_local)
        to = tl.multiple_of((tl.load(peers + s) + at[RETURNS]).to(results.dtype), 16)
        to += (token * num_ranks + rank).to(tl.int64) * width
        for first in range(0, width, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            total = tl.zeros((BLOCK,), tl.float32)
            for i in range(k):
                row = tl.max(tl.where(slots == i, pos, -1), 0).to(tl.int64)
                if row >= 0:
                    total += widen(tl.load(results + row * width + columns, mask=columns < width, other=0.0))
            tl.store(to + columns, bf16(total), mask=columns < width)


@triton.jit(do_not_specialize=["rank", "first_expert"])
def return_kernel(
    peers, at, shift, state, results, width, rank, num_ranks, room, first_expert, num_local,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """With presum: the tokens of all ranks as `pull_kernel` takes them, their rows of L2's results summed."""
    own = tl.load(peers + rank)
    most = tl.load(state + MOST)
    for t in range(tl.program_id(0), most * num_ranks, tl.num_programs(0)):
        s, token = (t + rank) % num_ranks, t // num_ranks
        if token < tl.load(ints(own + at[SIZES]) + 2 * s):
            k = tl.load(ints(own + at[SIZES]) + 2 * s + 1)
            return_token(
                s, token, k, peers, at, own, shift, results, width, rank, num_ranks, room, first_expert, num_local,
                SLOTS, BLOCK,
            )  # fmt: skip


@triton.jit(do_not_specialize=["rank", "timeout_us"])
def meet_kernel(peers, at, state, report, rank, timeout_us, ON_GPU: tl.constexpr):
    """Program p: tell peer p that all rows for it have been sent, and wait for the same from it."""
    peer = tl.program_id(0)
    if tl.load(state + VERDICT) != LOST:
        raise_flag(ints(tl.load(peers + peer) + at[FLAGS]) + tl.num_programs(0) + rank)
        own = tl.load(peers + rank)
        if not wait_for(ints(own + at[FLAGS]) + tl.num_programs(0) + peer, 1, timeout_us, ON_GPU):
            tl.store(report + peer, LATE_AT_COMBINE)
            tl.store(state + VERDICT, LOST)


@triton.jit
def store_total(out, m, columns, width, total, state):
    """A part of a token, rounded once; NaN if the call failed."""
    total = tl.where(tl.load(state + VERDICT) == FINE, total, float("nan"))
    tl.store(out + m.to(tl.int64) * width + columns, bf16(total), mask=columns < width)


@triton.jit
def sum_kernel(slots, topk_ids, out, state, width, K: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of a token's slots in their order, in float32."""
    m = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for s in tl.static_range(K):  # unrolled: all loads are under way before the first sum
        used = tl.load(topk_ids + m * K + s) >= 0
        at = slots + (m.to(tl.int64) * K + s) * width + columns
        total += widen(tl.load(at, mask=(columns < width) & used, other=0.0))
    store_total(out, m, columns, width, total, state)


@triton.jit
def sum_ranks_kernel(
    returns, topk_ids, rank_ends, out, state, width, k, RANKS: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):
    """With presum: the sum of what the ranks of a token's experts sent, in the order of the ranks, in float32.

    rank_ends [RANKS]: behind each rank's last expert.
    """
    m = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slots = tl.arange(0, SLOTS)
    e = tl.load(topk_ids + m * k + slots, mask=slots < k, other=-1)
    total = tl.zeros((BLOCK,), tl.float32)
    first = 0
    for s in tl.static_range(RANKS):
        last = tl.load(rank_ends + s)
        used = tl.max(((e >= first) & (e < last)).to(tl.int32), 0) > 0
        at = returns + (m.to(tl.int64) * RANKS + s) * width + columns
        total += widen(tl.load(at, mask=(columns < width) & used, other=0.0))
        first = last
    store_total(out, m, columns, width, total, state)
