"""MoE layer over hosts by kernels: NCCL between ranks of the same local rank, shared memory within a host.

    dispatch    pack this rank's tokens, quantised, into a parcel       a token crosses to another host once
                all-gather of the parcels along the rail
                unpack, send routing, pull                              kernels of NVLink, on the tokens of all hosts
    experts     L1 -> L2, as on one rank; L2 stores each row in the memory of its token's local rank
    combine     meet; rows, or with presum their sums within the host, all-to-all along the rail; sum

For the kernels of NVLink, a rank's tokens are those of all ranks of its rail, and experts of other hosts are masked.
Buffers are reused by the next call as there: a peer writes into this rank's memory only after this rank has announced
its next call, which the stream runs after its last read. Graphs hold a call; its host reads no size.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from envoi.ops.moe.launches import Launch, launch_kernel, warps_for
from envoi.ops.moe.parallel import dispatch as steps
from envoi.ops.moe.parallel.combine import combine_barrier, sum_arguments
from envoi.ops.moe.parallel.hosts import Grid
from envoi.ops.moe.parallel.nvlink import run_local_experts
from envoi.ops.moe.parallel.progress import BEGUN, DONE, GATHERED
from envoi.ops.moe.parallel.queued import HEAD_BYTES, QueuedBuffers, empty_counts
from envoi.ops.moe.parallel.symmetric_memory import ALIGN_BYTES, SharedLayout, allocate, allocate_bytes
from envoi.ops.moe.parallel.timeout import Watch
from envoi.ops.moe.permute import MAX_SUM_COLUMNS
from envoi.runtime.math import next_power_of_2
from envoi.spans import span
from envoi.types import ExpertWeights, Matrix

KERNELS = "envoi.ops.moe.parallel.hosts_kernels"
PACKED, HOST_SHIFT = 1024, 8  # as in hosts_kernels


class Parcel(NamedTuple):
    """Byte offsets of the parts of a parcel, what a rank sends to other hosts; in front of them is a head.

    topk_ids, weights [max_tokens, num_topk]; tokens [max_tokens, row_bytes] and token_sf. end: bytes in all.
    """

    topk_ids: int
    weights: int
    tokens: int
    token_sf: int
    end: int


@dataclass(frozen=True)
class HostsLayout:
    """Sizes that all ranks agree on. whole: those of the group; num_hosts: equally many ranks on each."""

    whole: SharedLayout
    num_hosts: int

    @property
    def max_tokens(self) -> int:
        """Most tokens of a rank."""
        return self.whole.max_tokens

    @cached_property
    def inside(self) -> SharedLayout:
        """Layout of the memory within a host: tokens of all hosts, and after those of each one that is none."""
        return replace(
            self.whole, num_ranks=self.whole.num_ranks // self.num_hosts,
            max_tokens=self.num_hosts * (self.max_tokens + 1), presum=False,
        )  # fmt: skip

    @cached_property
    def parcel(self) -> Parcel:
        """Byte offsets of the parts of a parcel, each aligned."""
        whole = self.whole
        sf_bytes = whole.num_sf * (1 if whole.scheme is None else whole.scheme.sf.itemsize)
        offsets = [HEAD_BYTES]
        for size in (
            4 * whole.slot_capacity,
            4 * whole.slot_capacity,
            self.max_tokens * whole.row_bytes,
            self.max_tokens * sf_bytes,
        ):
            offsets.append(offsets[-1] + -(-size // ALIGN_BYTES) * ALIGN_BYTES)
        return Parcel(*offsets)

    @property
    def part_columns(self) -> int:
        """Columns of bf16 that two ranks exchange in combine; the token that is none has room for the call's number."""
        rows = 1 if self.whole.presum else self.whole.num_topk
        return (self.max_tokens + 1) * rows * self.whole.hidden

    @property
    def bytes_between_hosts(self) -> tuple[int, int]:
        """Bytes that a rank sends to other hosts in a call: in dispatch, in combine."""
        others = self.num_hosts - 1
        return others * self.parcel.end, others * 2 * self.part_columns


@dataclass(kw_only=True)
class Buffers(QueuedBuffers):
    """Buffers that all calls of a rank use; parts are those of hosts.

    domain: the memory within the host. grid: see `hosts.Grid`; local_rank: this rank's. parcels [hosts, bytes] uint8;
    own_parcel: this rank's. topk_ids, weights [hosts * (max_tokens + 1), num_topk]: slots of all hosts' tokens.
    is_here, host_of [num_experts] int32: whether an expert is on this host, and its host.
    late [hosts] int32: who was late, where the host reads it.
    """

    layout: HostsLayout
    grid: Grid
    local_rank: int
    parcels: torch.Tensor
    own_parcel: torch.Tensor
    topk_ids: torch.Tensor
    weights: torch.Tensor
    is_here: torch.Tensor
    host_of: torch.Tensor
    late: torch.Tensor

    @property
    def parcel_tokens(self) -> Matrix:
        """View this rank's tokens in its parcel."""
        return _tokens_in(self.layout, self.own_parcel)

    @cached_property
    def late_codes(self) -> Any:
        """View `late` as an array of ctypes, which is read without an operator of torch."""
        return (ctypes.c_int32 * len(self.late)).from_address(self.late.data_ptr())

    def culprit(self, local_rank: int, code: int) -> tuple[int, int]:
        """Return the rank of the group that an error code in `domain.report` names, and the code by itself."""
        host = max(0, (code >> HOST_SHIFT) - 1)
        return int(self.grid.grid[local_rank, host]), code & ((1 << HOST_SHIFT) - 1)


def open_buffers(
    layout: HostsLayout, grid: Grid, rank: int, expert_offsets: Sequence[int], timeout_s: float, device: torch.device,
    shared: bool,
) -> Buffers:  # fmt: skip
    """Allocate all memory of a rank. shared: other ranks of this host will map a part of it."""
    whole, G = layout.whole, layout.num_hosts
    local_rank, host = int(grid.local_rank[rank]), int(grid.host[rank])
    first, last = expert_offsets[rank], expert_offsets[rank + 1]
    own = [first] * (local_rank + 1) + [last] * (layout.inside.num_ranks - local_rank)  # no other entry is read
    domain = allocate(layout.inside, local_rank, own, timeout_s, device, shared)
    sizes = torch.tensor(expert_offsets, device="cpu").diff()
    host_of = torch.repeat_interleave(grid.host, sizes).to(torch.int32)
    slots = G * (layout.max_tokens + 1), whole.num_topk
    parcels = torch.zeros(G, layout.parcel.end, dtype=torch.uint8, device=device)
    returned = layout.inside.returned_rows_in(domain.memory)
    # In a graph NCCL lets ranks of one machine read and write such memory in place if other processes may map it, each
    # rank for itself: where `sent` is such memory and `received` isn't, the replay never ends.
    received = allocate_bytes(2 * G * layout.part_columns, device, shared and not whole.presum).view(torch.bfloat16)
    received = received.zero_().view(G, -1)
    sent = torch.zeros_like(received) if whole.presum else returned.view(G, -1)
    counts, host_counts = empty_counts(device)
    return Buffers(
        layout=layout, domain=domain, grid=grid, local_rank=local_rank, parcels=parcels, own_parcel=parcels[host],
        head=parcels[host, :HEAD_BYTES].view(torch.int32),
        topk_ids=torch.full(slots, -1, dtype=torch.int32, device=device),
        weights=torch.zeros(slots, dtype=torch.float32, device=device),
        is_here=(host_of == host).to(torch.int32).to(device), host_of=host_of.to(device), sent=sent, received=received,
        late=torch.zeros(G, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda"),
        counts=counts, host=host_counts,
    )  # fmt: skip


def _tokens_in(layout: HostsLayout, parcel: torch.Tensor) -> Matrix:
    offsets = layout.parcel
    regions = layout.whole.regions._replace(tokens=offsets.tokens, token_sf=offsets.token_sf)
    return layout.whole.tokens_in(parcel, regions)


def connect(buffers: Buffers, rail: Any, watch: Watch) -> None:
    """Connect the ranks of this rail by both collectives, in time, and have calls overseen from now on. Collective.

    rail: a backend of NCCL that connects them, in the order of their hosts.
    """
    buffers.connect(buffers.parcels, buffers.own_parcel, rail, watch)


def run_layer(
    buffers: Buffers, tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, experts: ExpertWeights
) -> torch.Tensor:
    """Run the layer: tokens [M, H] bf16 of this rank -> [M, H] bf16; NaN if a rank was late or was refused."""
    with span("dispatch"):
        pack_parcel(buffers, tokens, topk_weights.contiguous(), topk_ids.contiguous())
        buffers.gather()
        unpack(buffers)
        send_routing(buffers)
        steps.pull_rows(buffers.domain)
    run_local_experts(buffers.domain, experts, buffers.layout.num_hosts * topk_ids.numel())
    with span("combine"):
        combine_barrier(buffers.domain)
        seal_parts(buffers)
        buffers.exchange()
        return sum_received(buffers, topk_ids)


def refuse(buffers: Buffers) -> None:
    """Take part in a call with no tokens, telling all ranks that this rank's arguments are wrong."""
    device, layout = buffers.domain.memory.device, buffers.layout
    none = torch.empty(0, 1, dtype=torch.int32, device=device)
    tokens = torch.empty(0, layout.whole.hidden, dtype=torch.bfloat16, device=device)
    pack_parcel(buffers, tokens, none.float(), none, steps.REFUSED_ON_HOST)
    buffers.gather()
    unpack(buffers)
    send_routing(buffers)
    combine_barrier(buffers.domain)
    seal_parts(buffers)
    buffers.exchange()
    buffers.mark(DONE)


def pack_parcel(
    buffers: Buffers, tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, error_code: int = 0
) -> None:
    """Store this rank's tokens, quantised, and their slots in its parcel."""
    buffers.mark(BEGUN)
    launch_kernel(KERNELS, "pack_slots_kernel", pack_arguments(buffers, topk_weights, topk_ids, error_code))
    none = torch.empty(0, topk_ids.shape[1], dtype=torch.int32, device=topk_ids.device)
    ranked = steps.empty_ranked(none, buffers.layout.whole.num_experts)  # slots are counted once all hosts' are here
    given = steps.stage_tokens_arguments(tokens, none, ranked, buffers.parcel_tokens)
    launch_kernel(steps.KERNELS, "stage_tokens_kernel", given)


def unpack(buffers: Buffers) -> None:
    """Unpack the parcels of all hosts into the memory that this host's ranks read, without slots of other hosts."""
    buffers.mark(GATHERED)
    launch_kernel(KERNELS, "unpack_kernel", unpack_arguments(buffers))


def send_routing(buffers: Buffers) -> None:
    """Send the slots of all hosts' tokens to the ranks of this host, and wait for theirs."""
    domain, ids = buffers.domain, buffers.topk_ids
    none = torch.empty(0, domain.layout.hidden, dtype=torch.bfloat16, device=ids.device)
    ranked = steps.empty_ranked(ids, domain.layout.num_experts)
    given = steps.stage_tokens_arguments(none, ids, ranked, domain.layout.tokens_in(domain.memory))
    launch_kernel(steps.KERNELS, "stage_tokens_kernel", given)
    steps.send_routing(domain, ids, buffers.weights, ranked)


def seal_parts(buffers: Buffers) -> None:
    """Complete `sent`: with presum the sums of each token's rows on this host; at the end the number of the call."""
    if buffers.layout.whole.presum:
        out = buffers.sent.view(len(buffers.topk_ids), -1)
        launch_kernel("envoi.ops.moe.parallel.combine_kernels", "sum_kernel", sum_arguments(
            buffers.domain, buffers.topk_ids, out
        ))  # fmt: skip
    launch_kernel(KERNELS, "seal_kernel", seal_arguments(buffers))


def sum_received(buffers: Buffers, topk_ids: torch.Tensor) -> torch.Tensor:
    """Sum what came for each of this rank's tokens: [M, H] bf16; NaN if the call was refused or lost."""
    buffers.mark(DONE)
    out = torch.empty(len(topk_ids), buffers.layout.whole.hidden, dtype=torch.bfloat16, device=topk_ids.device)
    if len(out):
        launch_kernel(KERNELS, "sum_hosts_kernel", sum_hosts_arguments(buffers, topk_ids.contiguous(), out))
    return out


def pack_arguments(buffers: Buffers, topk_weights: torch.Tensor, topk_ids: torch.Tensor, error_code: int) -> Launch:
    """Build the launch of `pack_slots_kernel`."""
    whole, parcel = buffers.layout.whole, buffers.layout.parcel
    arguments = (
        topk_ids, topk_weights, buffers.own_parcel.view(torch.int32), parcel.topk_ids // 4, parcel.weights // 4,
        topk_ids.numel(), topk_ids.shape[1], whole.slot_capacity, whole.num_topk, error_code,
    )  # fmt: skip
    return Launch((-(-whole.slot_capacity // PACKED),), arguments, steps.WARPS)


def unpack_arguments(buffers: Buffers) -> Launch:
    """Build the launch of `unpack_kernel`."""
    domain, layout = buffers.domain, buffers.layout
    whole, mine = layout.whole, domain.layout.tokens_in(domain.memory)
    values, sf = (mine, None) if isinstance(mine, torch.Tensor) else (mine.values, mine.sf)
    if sf is not None:
        sf = sf.view(torch.uint8) if sf.itemsize == 1 else sf.view(torch.int32)
    num_words = whole.row_bytes // 4
    arguments = (
        buffers.parcels, layout.parcel.end, layout.parcel, domain.peers, domain.layout.regions, buffers.is_here,
        buffers.topk_ids, buffers.weights, buffers.counts, domain.state, buffers.late, buffers.local_rank,
        domain.layout.num_ranks, whole.num_experts, layout.max_tokens, whole.num_topk, num_words, whole.num_sf,
        values.view(torch.int32), sf, next_power_of_2(domain.layout.num_ranks), next_power_of_2(whole.num_topk),
        next_power_of_2(num_words), next_power_of_2(whole.num_sf) if whole.num_sf else 0,
    )  # fmt: skip
    return Launch((len(buffers.topk_ids),), arguments, steps.WARPS)


def seal_arguments(buffers: Buffers) -> Launch:
    """Build the launch of `seal_kernel`."""
    G = buffers.layout.num_hosts
    arguments = (
        buffers.sent, buffers.domain.state, buffers.counts, buffers.layout.part_columns, G, next_power_of_2(G)
    )  # fmt: skip
    return Launch((1,), arguments, {"num_warps": 1})


def sum_hosts_arguments(buffers: Buffers, topk_ids: torch.Tensor, out: torch.Tensor) -> Launch:
    """Build the launch of `sum_hosts_kernel`."""
    (M, k), width, layout = topk_ids.shape, out.shape[1], buffers.layout
    whole, G, block = layout.whole, layout.num_hosts, min(MAX_SUM_COLUMNS, next_power_of_2(width))
    arguments = (
        buffers.received, topk_ids, buffers.host_of, out, buffers.domain.state, buffers.late, buffers.counts, width,
        layout.part_columns, whole.num_topk, whole.num_experts, k, G, next_power_of_2(G), whole.presum, block,
    )  # fmt: skip
    return Launch((M, -(-width // block)), arguments, warps_for(block))
