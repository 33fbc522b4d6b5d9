# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
"""Triton kernels around the experts' GEMMs: move, quantise and sum rows. No size is copied to the host.

    map_kernel        topk_ids -> ids of the experts here           a program for each chunk of the slots
    shared_kernel     topk_ids, weights -> with shared experts'     a program for each chunk of the slots, or token
    sort_kernel       topk_ids -> offsets, slot_to_pos              programs for each expert and chunk of the slots
    count_kernel      topk_ids -> experts' slots in each chunk      a program for each chunk of the slots
    place_kernel      those -> what sort_kernel stores              programs for each few experts and chunk of the slots
    gather_kernel     tokens -> rows by expert, quantised           a program for each token and part of its columns
    quantize_kernel   bf16 rows -> quantised                        programs for each part of its columns
    combine_kernel    rows -> sums of tokens' slots                 a program for each token and part of its columns

Buffers have a row for each slot. Rows after the last expert's are neither written nor read.
OVERLAP: launched with `launch_pdl`, so that a program starts before the launch in front ends, and waits for that end
before it reads or writes anything. It lets the next launch start after its wait: what was launched before the launch in
front has ended by then.
`trace`: see `runtime.timeline_device`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from envoi.epilogues.codes_triton import to_e4m3, widen
from envoi.epilogues.device import bf16, divide, e4m3, e8m0_ceil, group_amax, sigmoid
from envoi.epilogues.tile_triton import group_max, round_mxfp8, times_group
from envoi.runtime.timeline_device import note_begin, note_moment
from envoi.runtime.topk import experts_at

E4M3_MAX: tl.constexpr = tl.constexpr(448.0)


@triton.jit(do_not_specialize=["num_slots", "num_ids"])  # one kernel for all calls, which a warm-up compiles
def map_kernel(topk_ids, expert_map, out, num_slots, num_ids, BLOCK: tl.constexpr):
    """Store the expert that each slot's id stands for, -1 for an id from num_ids on or below 0."""
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = experts_at(topk_ids, slots, num_slots, num_ids)
    e = tl.load(expert_map + ids, mask=ids < num_ids, other=-1)
    tl.store(out + slots, e, mask=slots < num_slots)


@triton.jit
def begin_work(OVERLAP: tl.constexpr):
    """Wait for the launch in front, and let the next start."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


class GivenSlots(NamedTuple):
    """Slots of a routing, topk_ids and topk_weights [num_tokens, k], and what weighs shared experts.

    tokens: rows `stride` apart, `width` columns; gate [width] float32. Neither is read unless the slots are GATED.
    """

    topk_ids: Any
    topk_weights: Any
    tokens: Any
    stride: Any
    gate: Any
    num_tokens: Any
    k: Any
    width: Any


@triton.jit
def with_shared_slots(
    given, NUM_SHARED: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    """Return this program's slots, of k + NUM_SHARED a token: places, whether they are, token, ids, weights, shared.

    ids: -1 for a shared expert's slot; shared: its number, or below 0. GATED: a program has the slots of one token,
    whose weight of shared experts is sigmoid(token @ gate), summed in float32; else SLOTS slots, and the weight is 1.
    """
    k, width = given.k, given.width
    total = k + NUM_SHARED
    if GATED:
        m = tl.program_id(0) + tl.zeros((SLOTS,), tl.int32)
        lane = tl.arange(0, SLOTS)
        inside = lane < total
        place = m * total + lane
        dot = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, width, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            at = given.tokens + tl.program_id(0).to(tl.int64) * given.stride + columns
            x = widen(tl.load(at, mask=columns < width, other=0.0))
            dot += x * tl.load(given.gate + columns, mask=columns < width, other=0.0)
        shared_weight = sigmoid(tl.sum(dot, 0) + tl.zeros((SLOTS,), tl.float32))
    else:
        place = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
        m = place // total
        lane = place % total
        inside = m < given.num_tokens
        shared_weight = tl.full((SLOTS,), 1.0, tl.float32)
    is_given = inside & (lane < k)
    ids = tl.load(given.topk_ids + m * k + lane, mask=is_given, other=-1)
    weights = widen(tl.load(given.topk_weights + m * k + lane, mask=is_given, other=0.0))
    return place, inside, m, ids, tl.where(lane < k, weights, shared_weight), lane - k


@triton.jit(do_not_specialize=["num_tokens", "k", "num_experts"])
def shared_kernel(
    topk_ids, topk_weights, tokens, stride, gate, ids_out, weights_out, num_tokens, k, width, num_experts,
    NUM_SHARED: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Store ids and weights of slots with those of shared experts, whose ids begin at num_experts, after a token's."""
    begin_work(OVERLAP)
    given = GivenSlots(topk_ids, topk_weights, tokens, stride, gate, num_tokens, k, width)
    place, inside, _, ids, weights, shared = with_shared_slots(given, NUM_SHARED, SLOTS, BLOCK, GATED)
    e = tl.where((ids < 0) | (ids >= num_experts), -1, ids).to(tl.int32)
    tl.store(ids_out + place, tl.where(shared >= 0, num_experts + shared, e), mask=inside)
    tl.store(weights_out + place, weights, mask=inside)


@triton.jit
def sort_kernel(
    topk_ids, offsets, slot_to_pos, num_slots, num_experts, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """Store offsets[e] and the rows of expert e's slots in chunk c, in slot order: program (e, c).

    Each program reads all ids instead of waiting for the others: no atomics, a fixed order. Counting takes a fifth of
    the time of storing rows, so only storing is divided into chunks. Programs with e = num_experts store -1 for the
    masked slots.
    """
    begin_work(OVERLAP)
    own, chunk = tl.program_id(0), tl.program_id(1)
    size = tl.cdiv(tl.cdiv(num_slots, BLOCK), tl.num_programs(1)) * BLOCK
    begin = chunk * size
    before = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num_slots, BLOCK):
        e = experts_at(topk_ids, first + tl.arange(0, BLOCK), num_slots, num_experts)
        before += (e < own + (first < begin).to(tl.int32)).to(tl.int32)
    pos = tl.sum(before, 0)
    if chunk == 0:
        tl.store(offsets + own, pos)
    for first in range(begin, min(begin + size, num_slots), BLOCK):
        slots = first + tl.arange(0, BLOCK)
        mine = experts_at(topk_ids, slots, num_slots, num_experts) == own
        upto = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(slot_to_pos + slots, tl.where(own < num_experts, pos + upto - 1, -1), mask=mine & (slots < num_slots))
        pos += tl.sum(mine.to(tl.int32), 0)


@triton.jit
def count_kernel(topk_ids, counts, num_slots, num_experts, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """Store how many slots of chunk c, BLOCK of them, each expert has, counts [chunks, EXPERTS]: program c.

    EXPERTS: num_experts or more; the columns from num_experts on are 0.
    """
    chunk = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    e = experts_at(topk_ids, chunk * BLOCK + tl.arange(0, BLOCK), num_slots, num_experts)
    is_masked = e == num_experts  # counted for expert 0, and then taken off
    found = tl.histogram(tl.where(is_masked, 0, e), EXPERTS)
    found -= tl.where(experts == 0, tl.sum(is_masked.to(tl.int32), 0), 0)
    tl.store(counts + chunk * EXPERTS + experts, found)


@triton.jit
def place_kernel(
    topk_ids, counts, offsets, slot_to_pos, num_slots, num_experts, num_chunks,
    BLOCK: tl.constexpr, EXPERTS: tl.constexpr, CHUNKS: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    """Store offsets, and the rows of the slots in chunk c of PLACED experts from p * PLACED on: program (p, c).

    Expert num_experts stands for masked slots, whose row is -1. CHUNKS: counts of so many chunks are loaded at once.
    """
    first, chunk = tl.program_id(0) * PLACED, tl.program_id(1)
    experts = tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    before = tl.zeros((EXPERTS,), tl.int32)  # in chunks before this one
    for next_chunk in range(0, num_chunks, CHUNKS):
        c = next_chunk + tl.arange(0, CHUNKS)[:, None]
        found = tl.load(counts + c * EXPERTS + experts[None, :], mask=c < num_chunks, other=0)
        total += tl.sum(found, 0)
        before += tl.sum(tl.where(c < chunk, found, 0), 0)
    begin = tl.cumsum(total, 0) - total
    if (first == 0) & (chunk == 0):
        tl.store(offsets + experts, begin, mask=experts < num_experts)
        tl.store(offsets + num_experts, tl.sum(total, 0))
    slots = chunk * BLOCK + tl.arange(0, BLOCK)
    e = experts_at(topk_ids, slots, num_slots, num_experts)
    # One scan ranks the slots of all PLACED experts: 16 bits of a number for each.
    mine = (e >= first) & (e < first + PLACED)
    shift = tl.where(mine, 16 * (e - first), 0).to(tl.int64)
    upto = (tl.cumsum(tl.where(mine, tl.cast(1, tl.int64) << shift, 0), 0) >> shift).to(tl.int32) & 0xFFFF
    pos = upto - 1
    for i in tl.static_range(PLACED):
        pos += tl.where(e == first + i, tl.sum(tl.where(experts == first + i, begin + before, 0), 0), 0)
    tl.store(slot_to_pos + slots, tl.where(e < num_experts, pos, -1), mask=mine & (slots < num_slots))


@triton.jit
def quantized(x, GROUP: tl.constexpr, POWERS: tl.constexpr, HARDWARE: tl.constexpr):
    """Quantise float32 [1, C] to bytes of E4M3 and scale factors [1, C / GROUP], bit for bit as `envoi.quant.quantize`.

    POWERS: factors are UE8M0, else float32. HARDWARE: the GPU has the cast.
    """
    amax = group_amax(group_max(tl.abs(x), GROUP))
    if POWERS:
        sf, factors = e8m0_ceil(divide(amax, E4M3_MAX))
    else:
        sf = divide(amax, E4M3_MAX)
        factors = divide(E4M3_MAX, amax)
    x = times_group(x, factors, GROUP)
    if HARDWARE:
        return e4m3(x).to(tl.uint8, bitcast=True), sf
    else:
        return to_e4m3(x), sf


@triton.jit
def store_quantized(values, sf, row, x, x_sf, width, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Store this program's part of a row, BLOCK columns and their scale factors, masked to the row's width."""
    n = tl.program_id(1)
    columns = n * BLOCK + tl.arange(0, BLOCK)[None, :]
    groups = n * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)[None, :]
    num_groups = tl.cdiv(width, GROUP)
    tl.store(values + tl.cast(row, tl.int64) * width + columns, x, mask=columns < width)
    tl.store(sf + tl.cast(row, tl.int64) * num_groups + groups, x_sf, mask=groups < num_groups)


@triton.jit
def gather_kernel(
    tokens, stride, topk_weights, slot_to_pos, rows, rows_sf, row_weights, width, k,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr, GROUP: tl.constexpr, POWERS: tl.constexpr, HARDWARE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Copy a token to the rows of its slots, and its weights to their row weights; read and quantise it only once.

    GROUP: columns that share a scale factor; 0 = copy without quantising. rows_sf: None, and rows are bf16, of MXFP8's
    numbers if GROUP isn't 0.
    """
    begin_work(OVERLAP)
    m = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(tokens + m.to(tl.int64) * stride + columns, mask=columns < width, other=0.0)
    if tl.program_id(1) == 0:
        slots = tl.arange(0, SLOTS)
        pos = tl.load(slot_to_pos + m * k + slots, mask=slots < k, other=-1)
        weights = widen(tl.load(topk_weights + m * k + slots, mask=slots < k, other=0.0))
        tl.store(row_weights + pos, weights, mask=pos >= 0)
    if rows_sf is not None:
        x, sf = quantized(widen(x), GROUP, POWERS, HARDWARE)
    elif GROUP > 0:
        x = bf16(round_mxfp8(widen(x)))
    for s in range(k):
        pos = tl.load(slot_to_pos + m * k + s)
        if pos >= 0:
            if rows_sf is not None:
                store_quantized(rows, rows_sf, pos, x, sf, width, BLOCK, GROUP)
            else:
                tl.store(rows + pos.to(tl.int64) * width + columns, x, mask=columns < width)


@triton.jit
def quantize_kernel(
    rows, values, sf, offsets, num_experts, width,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, POWERS: tl.constexpr, HARDWARE: tl.constexpr, OVERLAP: tl.constexpr,
    trace,
):  # fmt: skip
    """Quantise the rows before offsets[num_experts], those that belong to an expert."""
    begin_work(OVERLAP)
    note_begin(trace, 0, 0, 0)
    for row in range(tl.program_id(0), tl.load(offsets + num_experts), tl.num_programs(0)):
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
        x = tl.load(rows + tl.cast(row, tl.int64) * width + columns, mask=columns < width, other=0.0)
        x, x_sf = quantized(widen(x), GROUP, POWERS, HARDWARE)
        store_quantized(values, sf, row, x, x_sf, width, BLOCK, GROUP)
    note_moment(trace, 0, 0, 1)


@triton.jit
def combine_kernel(
    rows, slot_to_pos, out, width, K: tl.constexpr, BLOCK: tl.constexpr, EVICTION: tl.constexpr, OVERLAP: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Sum a token's rows in slot order, in float32, rounded once. EVICTION: what the L2 cache does with rows read.

    EARLY: slot_to_pos is there before the launch in front ends, so that it is read meanwhile.
    """
    positions = ()
    if EARLY:
        # Past the L1 cache, which may have what was there before.
        for s in tl.static_range(K):
            positions += (tl.load(slot_to_pos + tl.program_id(0) * K + s, cache_modifier=".cg"),)
    if OVERLAP:
        gdc_wait()
    m = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for s in tl.static_range(K):  # unrolled: all loads are under way before the first sum
        pos = positions[s] if EARLY else tl.load(slot_to_pos + m * K + s)
        at, mask = rows + pos.to(tl.int64) * width + columns, (columns < width) & (pos >= 0)
        total += widen(tl.load(at, mask=mask, other=0.0, eviction_policy=EVICTION))
    tl.store(out + m.to(tl.int64) * width + columns, bf16(total), mask=columns < width)
