"""Exchange with a rail: NCCL between ranks of the same local rank on all hosts, shared memory within a host.

    dispatch    pack this rank's tokens, quantised, into a parcel       a token crosses to another host once
                all-gather of the parcels along the rail
                unpack, send routing, pull                              kernels of NVLink, on the tokens of all hosts
    experts     L1 -> L2, as on one rank; L2 stores each row in the memory of its token's local rank
    combine     meet; rows, or with presum their sums within the host, all-to-all along the rail; sum

For the kernels of NVLink, a rank's tokens are those of all ranks of its rail, and experts of other hosts are masked.
Where every rank counts as a host, the rail is the whole group, and the domain within a host is this rank alone.
Buffers are reused by the next call as there: a peer writes into this rank's memory only after this rank has announced
its next call, which the stream runs after its last read. Both collectives have constant sizes and are queued on the
stream like the kernels: graphs hold a call; its host reads no size. The device counts the points that calls pass, and a
thread of the host watches them: see `oversee`.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from envoi.ops.moe.launches import Launch, launch_kernel, warps_for
from envoi.ops.moe.parallel import nvlink
from envoi.ops.moe.parallel.collectives import backend_of, end_collectives, queued_exchange, queued_gather
from envoi.ops.moe.parallel.failure import Watch
from envoi.ops.moe.parallel.nvlink import combine_barrier, sum_arguments
from envoi.ops.moe.parallel.opening import Grid
from envoi.ops.moe.parallel.oversee import BEGUN, DONE, GATHERED, oversee
from envoi.ops.moe.parallel.symmetric_memory import ALIGN_BYTES, Domain, SharedLayout, allocate, allocate_bytes
from envoi.ops.moe.permute import MAX_SUM_COLUMNS
from envoi.runtime.math import next_power_of_2
from envoi.runtime.prepared import Calls
from envoi.runtime.program import take_step
from envoi.types import Matrix

KERNELS = "envoi.ops.moe.parallel.rail_kernels"
PACKED, HOST_SHIFT = 1024, 8  # as in rail_kernels
HEAD_BYTES = 256  # in front of a parcel: state [4] int32, report [2] int32
CALL_COLUMNS = 8  # bf16 columns at the end of a part, which begin with the call's number


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


def nothing() -> None:
    """Stand for a collective that isn't connected."""


@dataclass(kw_only=True)
class Rail:
    """Buffers that all calls of a rank use, and the two collectives that they queue; parts are those of hosts.

    domain: the memory within the host. grid: see `hosts.Grid`; local_rank: this rank's. parcels [hosts, bytes] uint8;
    own_parcel: this rank's; head int32: its beginning. topk_ids, weights [hosts * (max_tokens + 1), num_topk]: slots of
    all hosts' tokens. is_here, host_of [num_experts] int32: whether an expert is on this host, and its host.
    sent, received [hosts, part_columns] bf16: of combine. late [hosts] int32: who was late, where the host reads it.
    counts, host [4] int32: how often calls have passed each point, on the device and where the host reads it.
    gathering, exchanging: the two collectives, on the current stream, set by `connect`.
    """

    layout: HostsLayout
    domain: Domain
    grid: Grid
    local_rank: int
    parcels: torch.Tensor
    own_parcel: torch.Tensor
    head: torch.Tensor
    topk_ids: torch.Tensor
    weights: torch.Tensor
    is_here: torch.Tensor
    host_of: torch.Tensor
    sent: torch.Tensor
    received: torch.Tensor
    late: torch.Tensor
    counts: torch.Tensor
    host: torch.Tensor
    gathering: Callable[[], object] = nothing
    exchanging: Callable[[], object] = nothing

    @property
    def calls_begun(self) -> int:
        """Count the calls that the device has begun."""
        return int(self.host[BEGUN])

    @cached_property
    def calls(self) -> Calls:
        """Prepared calls, which launch on this memory."""
        return Calls()

    @property
    def parcel_tokens(self) -> Matrix:
        """View this rank's tokens in its parcel."""
        offsets, whole = self.layout.parcel, self.layout.whole
        regions = whole.regions._replace(tokens=offsets.tokens, token_sf=offsets.token_sf)
        return whole.tokens_in(self.own_parcel, regions)

    @cached_property
    def late_codes(self) -> Any:
        """View `late` as an array of ctypes, which is read without an operator of torch."""
        return (ctypes.c_int32 * len(self.late)).from_address(self.late.data_ptr())

    def culprit(self, local_rank: int, code: int) -> tuple[int, int]:
        """Return the rank of the group that an error code in `domain.report` names, and the code by itself."""
        host = max(0, (code >> HOST_SHIFT) - 1)
        return int(self.grid.grid[local_rank, host]), code & ((1 << HOST_SHIFT) - 1)

    def connect(self, group: Any, watch: Watch) -> None:
        """Connect the ranks by both collectives, in time, and have calls overseen from now on. Collective.

        group: of NCCL, or a backend of it, that connects the ranks of the rail, in the order of their hosts.
        """
        backend = backend_of(group)
        self.domain.watch = watch
        self.gathering = queued_gather(backend, self.parcels, self.own_parcel)
        self.exchanging = queued_exchange(backend, self.received, self.sent)
        watch.wait(lambda: group._allgather_base(self.parcels, self.own_parcel), "opening the group")
        watch.wait(lambda: group.alltoall_base(self.received, self.sent, [], []), "opening the group")
        # A collective that waits for a lost peer has no other end, and no other one can follow it.
        oversee(self, self.host, watch, partial(end_collectives, group))

    def gather(self) -> None:
        """Gather the parcels of all hosts. Collective along the rail; the host doesn't wait for it."""
        take_step(self.gathering)

    def exchange(self) -> None:
        """Send part i of `sent` to host i. Collective along the rail; the host doesn't wait for it."""
        take_step(self.exchanging)

    def mark(self, point: int) -> None:
        """Count that a call has passed a point."""
        arguments = self.counts, self.host, self.domain.state, self.head, point
        launch_kernel(KERNELS, "mark_kernel", Launch((1,), arguments, {"num_warps": 1}))


def open_rail(
    layout: HostsLayout, grid: Grid, rank: int, expert_offsets: Sequence[int], timeout_s: float, device: torch.device,
    shared: bool,
) -> Rail:  # fmt: skip
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
    pinned = device.type == "cuda"
    late, points = (torch.zeros(n, dtype=torch.int32, device="cpu", pin_memory=pinned) for n in (G, 4))
    return Rail(
        layout=layout, domain=domain, grid=grid, local_rank=local_rank, parcels=parcels, own_parcel=parcels[host],
        head=parcels[host, :HEAD_BYTES].view(torch.int32),
        topk_ids=torch.full(slots, -1, dtype=torch.int32, device=device),
        weights=torch.zeros(slots, dtype=torch.float32, device=device),
        is_here=(host_of == host).to(torch.int32).to(device), host_of=host_of.to(device), sent=sent, received=received,
        late=late, counts=torch.zeros(4, dtype=torch.int32, device=device), host=points,
    )  # fmt: skip


def dispatch(rail: Rail, tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> None:
    """Send this rank's tokens [M, H] bf16 to their experts' hosts; fill domain.rows with the tokens for its own."""
    pack_parcel(rail, tokens, topk_weights.contiguous(), topk_ids.contiguous())
    rail.gather()
    unpack(rail)
    send_routing(rail)
    nvlink.pull_rows(rail.domain)


def combine(rail: Rail, topk_ids: torch.Tensor) -> torch.Tensor:
    """Return this rank's tokens [M, H] bf16, once the experts' rows have been sent to their local ranks."""
    combine_barrier(rail.domain)
    seal_parts(rail)
    rail.exchange()
    return sum_received(rail, topk_ids)


def refuse(rail: Rail) -> None:
    """Take part in a call with no tokens, telling all ranks that this rank's arguments are wrong."""
    device, layout = rail.domain.memory.device, rail.layout
    none = torch.empty(0, 1, dtype=torch.int32, device=device)
    tokens = torch.empty(0, layout.whole.hidden, dtype=torch.bfloat16, device=device)
    pack_parcel(rail, tokens, none.float(), none, nvlink.REFUSED_ON_HOST)
    rail.gather()
    unpack(rail)
    send_routing(rail)
    combine_barrier(rail.domain)
    seal_parts(rail)
    rail.exchange()
    rail.mark(DONE)


def pack_parcel(
    rail: Rail, tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, error_code: int = 0
) -> None:
    """Store this rank's tokens, quantised, and their slots in its parcel."""
    rail.mark(BEGUN)
    launch_kernel(KERNELS, "pack_slots_kernel", pack_arguments(rail, topk_weights, topk_ids, error_code))
    none = torch.empty(0, topk_ids.shape[1], dtype=torch.int32, device=topk_ids.device)
    ranked = nvlink.empty_ranked(none, rail.layout.whole.num_experts)  # slots are counted once all hosts' are here
    given = nvlink.stage_tokens_arguments(tokens, none, ranked, rail.parcel_tokens)
    launch_kernel(nvlink.DISPATCH_KERNELS, "stage_tokens_kernel", given)


def unpack(rail: Rail) -> None:
    """Unpack the parcels of all hosts into the memory that this host's ranks read, without slots of other hosts."""
    rail.mark(GATHERED)
    launch_kernel(KERNELS, "unpack_kernel", unpack_arguments(rail))


def send_routing(rail: Rail) -> None:
    """Send the slots of all hosts' tokens to the ranks of this host, and wait for theirs."""
    domain, ids = rail.domain, rail.topk_ids
    none = torch.empty(0, domain.layout.hidden, dtype=torch.bfloat16, device=ids.device)
    ranked = nvlink.empty_ranked(ids, domain.layout.num_experts)
    given = nvlink.stage_tokens_arguments(none, ids, ranked, domain.layout.tokens_in(domain.memory))
    launch_kernel(nvlink.DISPATCH_KERNELS, "stage_tokens_kernel", given)
    nvlink.send_routing(domain, ids, rail.weights, ranked)


def seal_parts(rail: Rail) -> None:
    """Complete `sent`: with presum the sums of each token's rows on this host; at the end the number of the call."""
    if rail.layout.whole.presum:
        out = rail.sent.view(len(rail.topk_ids), -1)
        launch_kernel(nvlink.COMBINE_KERNELS, "sum_kernel", sum_arguments(
            rail.domain, rail.topk_ids, out
        ))  # fmt: skip
    launch_kernel(KERNELS, "seal_kernel", seal_arguments(rail))


def sum_received(rail: Rail, topk_ids: torch.Tensor) -> torch.Tensor:
    """Sum what came for each of this rank's tokens: [M, H] bf16; NaN if the call was refused or lost."""
    rail.mark(DONE)
    out = torch.empty(len(topk_ids), rail.layout.whole.hidden, dtype=torch.bfloat16, device=topk_ids.device)
    if len(out):
        launch_kernel(KERNELS, "sum_hosts_kernel", sum_hosts_arguments(rail, topk_ids.contiguous(), out))
    return out


def pack_arguments(rail: Rail, topk_weights: torch.Tensor, topk_ids: torch.Tensor, error_code: int) -> Launch:
    """Build the launch of `pack_slots_kernel`."""
    whole, parcel = rail.layout.whole, rail.layout.parcel
    arguments = (
        topk_ids, topk_weights, rail.own_parcel.view(torch.int32), parcel.topk_ids // 4, parcel.weights // 4,
        topk_ids.numel(), topk_ids.shape[1], whole.slot_capacity, whole.num_topk, error_code,
    )  # fmt: skip
    return Launch((-(-whole.slot_capacity // PACKED),), arguments, nvlink.WARPS)


def unpack_arguments(rail: Rail) -> Launch:
    """Build the launch of `unpack_kernel`."""
    domain, layout = rail.domain, rail.layout
    whole, mine = layout.whole, domain.layout.tokens_in(domain.memory)
    values, sf = (mine, None) if isinstance(mine, torch.Tensor) else (mine.values, mine.sf)
    if sf is not None:
        sf = sf.view(torch.uint8) if sf.itemsize == 1 else sf.view(torch.int32)
    num_words = whole.row_bytes // 4
    arguments = (
        rail.parcels, layout.parcel.end, layout.parcel, domain.peers, domain.layout.regions, rail.is_here,
        rail.topk_ids, rail.weights, rail.counts, domain.state, rail.late, rail.local_rank,
        domain.layout.num_ranks, whole.num_experts, layout.max_tokens, whole.num_topk, num_words, whole.num_sf,
        values.view(torch.int32), sf, next_power_of_2(domain.layout.num_ranks), next_power_of_2(whole.num_topk),
        next_power_of_2(num_words), next_power_of_2(whole.num_sf) if whole.num_sf else 0,
    )  # fmt: skip
    return Launch((len(rail.topk_ids),), arguments, nvlink.WARPS)


def seal_arguments(rail: Rail) -> Launch:
    """Build the launch of `seal_kernel`."""
    G = rail.layout.num_hosts
    arguments = (
        rail.sent, rail.domain.state, rail.counts, rail.layout.part_columns, G, next_power_of_2(G)
    )  # fmt: skip
    return Launch((1,), arguments, {"num_warps": 1})


def sum_hosts_arguments(rail: Rail, topk_ids: torch.Tensor, out: torch.Tensor) -> Launch:
    """Build the launch of `sum_hosts_kernel`."""
    (M, k), width, layout = topk_ids.shape, out.shape[1], rail.layout
    whole, G, block = layout.whole, layout.num_hosts, min(MAX_SUM_COLUMNS, next_power_of_2(width))
    arguments = (
        rail.received, topk_ids, rail.host_of, out, rail.domain.state, rail.late, rail.counts, width,
        layout.part_columns, whole.num_topk, whole.num_experts, k, G, next_power_of_2(G), whole.presum, block,
    )  # fmt: skip
    return Launch((M, -(-width // block)), arguments, warps_for(block))
