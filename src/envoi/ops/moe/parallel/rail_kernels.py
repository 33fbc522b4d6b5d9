# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
"""Kernels around the two collectives between hosts, in Triton; within a host the kernels are those of NVLink.

mark_kernel         counts a point of the call, where the host reads it            before and after everything
pack_slots_kernel   a rank's slots, filled up, and the call's number -> parcel     before the all-gather
unpack_kernel       parcels of all hosts -> memory that this host's ranks read     after the all-gather
seal_kernel         the call's number -> end of every part that is sent            before the all-to-all
sum_hosts_kernel    rows or sums from all hosts -> token                           after the all-to-all
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from envoi.epilogues.codes_triton import widen
from envoi.ops.moe.parallel import rail
from envoi.ops.moe.parallel.combine_kernels import (
    BAD_IDS,
    LATE_AT_COMBINE,
    LATE_AT_DISPATCH,
    LOST,
    OUTCOME,
    ints,
    store_total,
)

ERROR_CODE: tl.constexpr = tl.constexpr(5)  # the entry of the head that says why a rank's arguments are refused
CALL: tl.constexpr = tl.constexpr(6)  # the entry of the head that says in which call the parcel was packed
CALL_COLUMNS: tl.constexpr = tl.constexpr(rail.CALL_COLUMNS)
BEGUN: tl.constexpr = tl.constexpr(0)  # entries of counts: see `oversee`
HOST_LOST: tl.constexpr = tl.constexpr(3)
PACKED: tl.constexpr = tl.constexpr(1024)  # slots that a program packs
HOST_SHIFT: tl.constexpr = tl.constexpr(8)  # an error code says above these bits on which host the rank is, from 1 on


class Peers(NamedTuple):
    """Ranks of this host: addresses of their memory [num_peers] int64, this rank's number among them, and the byte
    offset of the error codes."""

    addresses: Any
    local_rank: Any
    error_codes: Any


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


@triton.jit(do_not_specialize=["num_slots", "k", "error_code"])
def pack_slots_kernel(topk_ids, weights, parcel, at_ids, at_weights, num_slots, k, slot_capacity, num_topk, error_code):
    """Store this rank's slots in its parcel, num_topk for each token, -1 where there is none; and why it refuses, or 0.

    topk_ids, weights [num_slots]: k for each token. parcel: int32, from its head on; at_ids, at_weights: places of
    `slot_capacity` slots in it, in elements.
    """
    i = tl.program_id(0) * PACKED + tl.arange(0, PACKED)
    token, place = i // num_topk, i % num_topk
    given = token * k + place
    inside = (place < k) & (given < num_slots)
    tl.store(parcel + at_ids + i, tl.load(topk_ids + given, mask=inside, other=-1), mask=i < slot_capacity)
    to = (parcel + at_weights).to(tl.pointer_type(tl.float32))
    tl.store(to + i, tl.load(weights + given, mask=inside, other=0.0), mask=i < slot_capacity)
    if tl.program_id(0) == 0:
        tl.store(parcel + ERROR_CODE, error_code)


@triton.jit
def tell_peers(peers, host, code, PEERS: tl.constexpr, num_peers):
    """Send all ranks of this host the error code of the rank of `host` with this local rank; 0 sends nothing."""
    lanes = tl.arange(0, PEERS)
    there = tl.load(peers.addresses + lanes, mask=lanes < num_peers, other=0) + peers.error_codes
    value = code + ((host + 1) << HOST_SHIFT)
    tl.atomic_max(
        ints(there) + peers.local_rank, value, mask=(lanes < num_peers) & (code > 0), sem="relaxed", scope="sys"
    )


@triton.jit(do_not_specialize=["local_rank"])
def unpack_kernel(
    parcels, parcel_bytes, offsets, addresses, regions, is_here, topk_ids, weights, counts, state, late,
    local_rank, num_peers, num_experts, max_tokens, num_topk, num_words, num_sf, tokens, sf,
    PEERS: tl.constexpr, SLOTS: tl.constexpr, WORDS: tl.constexpr, SFS: tl.constexpr,
):  # fmt: skip
    """Unpack one token of one host's parcel, if an expert of it is on this host. Program: host * (max_tokens + 1) + m.

    parcels: of the ranks of this rail, parcel_bytes each, uint8; offsets: `rail.Parcel`. topk_ids, weights
    [hosts, max_tokens + 1, num_topk]: its slots, -1 if the expert is elsewhere; the last token of a host is none.
    tokens, sf: this rank's memory, as words of 4 bytes and factors, num_words and num_sf a token. is_here
    [num_experts]: 1 for experts on this host. late [hosts]: who was late. A wrong id, or a rank that refuses its
    arguments, is an error code in the memory of all of this host's ranks: `addresses`, and `regions` within it.
    """
    host, m = tl.program_id(0) // (max_tokens + 1), tl.program_id(0) % (max_tokens + 1)
    parcel = parcels + host * parcel_bytes.to(tl.int64)
    head = parcel.to(tl.pointer_type(tl.int32))
    peers = Peers(addresses, local_rank, regions.error_codes)
    lanes = tl.arange(0, SLOTS)
    real = (lanes < num_topk) & (m < max_tokens)
    given = m * num_topk + lanes
    e = tl.load((parcel + offsets.topk_ids).to(tl.pointer_type(tl.int32)) + given, mask=real, other=-1)
    fine = (e >= 0) & (e < num_experts)
    bad = tl.max(((e < -1) | (e >= num_experts)).to(tl.int32), 0)
    here = fine & (tl.load(is_here + tl.where(fine, e, 0), mask=fine, other=0) > 0)
    to = tl.program_id(0) * num_topk + lanes
    tl.store(topk_ids + to, tl.where(here | (e < -1) | (e >= num_experts), e, -1), mask=lanes < num_topk)
    w = tl.load((parcel + offsets.weights).to(tl.pointer_type(tl.float32)) + given, mask=real, other=0.0)
    tl.store(weights + to, w, mask=lanes < num_topk)
    code = tl.where(bad > 0, BAD_IDS, 0)
    if m == 0:
        refused = tl.load(head + ERROR_CODE)
        code = tl.where(refused > 0, refused, code)
        if tl.load(head + CALL) != tl.load(counts + BEGUN):
            tl.store(late + host, LATE_AT_DISPATCH)
            tl.store(state + OUTCOME, LOST)
    if code > 0:
        tell_peers(peers, host, code, PEERS, num_peers)
    if tl.max(here.to(tl.int32), 0) > 0:
        columns = tl.arange(0, WORDS)
        from_row = tl.multiple_of((parcel + offsets.tokens).to(tl.pointer_type(tl.int32)), 16)
        x = tl.load(from_row + m.to(tl.int64) * num_words + columns, mask=columns < num_words, other=0)
        to_row = tokens + tl.program_id(0).to(tl.int64) * num_words
        tl.store(to_row + columns, x, mask=columns < num_words)
        if SFS > 0:
            factors = tl.arange(0, SFS)
            from_sf = (parcel + offsets.token_sf).to(sf.dtype) + m * num_sf
            x_sf = tl.load(from_sf + factors, mask=factors < num_sf, other=0)
            tl.store(sf + tl.program_id(0) * num_sf + factors, x_sf, mask=factors < num_sf)


@triton.jit
def seal_kernel(sent, state, counts, part_columns, num_hosts, HOSTS: tl.constexpr):
    """Put the call's number at the end of each host's part, part_columns bf16; 0 if this rank has lost another."""
    hosts = tl.arange(0, HOSTS)
    ends = sent + ((hosts + 1).to(tl.int64) * part_columns - CALL_COLUMNS)
    call = tl.where(tl.load(state + OUTCOME) == LOST, 0, tl.load(counts + BEGUN))
    tl.store(ends.to(tl.pointer_type(tl.int32)), call, mask=hosts < num_hosts)


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
def sum_hosts_kernel(
    received, topk_ids, host_of, out, state, late, counts, width, part_columns, num_topk, num_experts,
    K: tl.constexpr, HOSTS: tl.constexpr, HOST_LANES: tl.constexpr, SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum what the hosts sent for a token, in float32: a row for each slot, in their order; with SUMS, of each host.

    received [HOSTS, part_columns]: rows of `width`, num_topk for each token, or one, and at the end the number of the
    sender's call. host_of [num_experts]: the host of each expert. HOST_LANES: a power of two for HOSTS.
    """
    m = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    whole = check_calls(received, state, late, tl.load(counts + BEGUN), part_columns, HOSTS, HOST_LANES)
    total = tl.zeros((BLOCK,), tl.float32)
    if SUMS:
        for host in tl.static_range(HOSTS):
            at = received + host * part_columns.to(tl.int64) + m.to(tl.int64) * width + columns
            total += widen(tl.load(at, mask=columns < width, other=0.0))
    else:
        for slot in tl.static_range(K):  # unrolled: all loads are under way before the first sum
            e = tl.load(topk_ids + m * K + slot)
            fine = (e >= 0) & (e < num_experts)
            host = tl.load(host_of + tl.where(fine, e, 0))
            at = received + host * part_columns.to(tl.int64) + (m * num_topk + slot).to(tl.int64) * width + columns
            total += widen(tl.load(at, mask=(columns < width) & fine, other=0.0))
    store_total(out, m, columns, width, tl.where(whole, total, float("nan")), state)
