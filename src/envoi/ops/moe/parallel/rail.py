"""Exchange with a rail: NCCL between ranks of the same local rank on all hosts, shared memory within a host.

    dispatch    pack this rank's tokens, quantised, into a parcel       a token crosses to another host once
                all-gather of the parcels along the rail
                unpack, send routing, pull                              kernels of NVLink, on the tokens of all hosts
    experts     L1 -> L2, as on one rank; L2 stores each row in the memory of its token's local rank
    combine     meet; rows, or with presum their sums within the host, all-to-all along the rail; sum

Host g of G has L ranks; its rank of local rank l exchanges with the ranks l of the other hosts, its rail. Where every
rank counts as a host, the rail is the whole group, and the domain within a host is this rank alone. For the kernels of
NVLink, a rank's tokens are those of all ranks of its rail, and experts of other hosts are masked. Buffers are reused by
the next call as there: a peer writes into this rank's memory only after this rank has announced its next call, which
the stream runs after its last read. Both collectives have constant sizes and are queued on the stream like the kernels:
graphs hold a call; its host reads no size. The device counts the points that calls pass: `failure.oversee`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from envoi.ops.moe.launches import launch_kernel, warps_for
from envoi.ops.moe.parallel import nvlink
from envoi.ops.moe.parallel.collectives import backend_of, end_collectives, queued_exchange, queued_gather
from envoi.ops.moe.parallel.failure import BEGUN, DONE, GATHERED, Watch, oversee
from envoi.ops.moe.parallel.nvlink import Domain, SharedLayout
from envoi.ops.moe.permute import MAX_SUM_COLUMNS
from envoi.runtime.math import next_power_of_2
from envoi.runtime.program import take_step

KERNELS = "envoi.ops.moe.parallel.rail_kernels"
PACKED, HOST_SHIFT = 1024, 8  # as in rail_kernels
HEAD_BYTES = 256  # in front of a parcel: state [4] int32, report [2] int32
CALL_COLUMNS = 8  # bf16 columns at the end of a part, which begin with the call's number


@dataclass(frozen=True)
class Grid:
    """Hosts of a group. host, local_rank [num_ranks] int64: each rank's host, and its number there.

    grid [local ranks, hosts] int64: the rank at each.
    """

    host: torch.Tensor
    local_rank: torch.Tensor
    grid: torch.Tensor

    @staticmethod
    def of(names: Sequence[str]) -> "Grid":
        """Arrange the ranks by the names of their hosts, equally many on each, in the order of the ranks."""
        order = list(dict.fromkeys(names))
        host = [order.index(x) for x in names]
        local_rank = [names[:rank].count(names[rank]) for rank in range(len(names))]
        grid = torch.empty(len(names) // len(order), len(order), dtype=torch.int64, device="cpu")
        for rank, (x, y) in enumerate(zip(local_rank, host, strict=True)):
            grid[x, y] = rank
        return Grid(torch.tensor(host, device="cpu"), torch.tensor(local_rank, device="cpu"), grid)


class Parcel(NamedTuple):
    """Byte offsets of the parts of a parcel, what a rank sends to other hosts, behind its head; end: bytes in all."""

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

    @cached_property
    def inside(self) -> SharedLayout:
        """Layout of the memory within a host: tokens of all hosts, and after those of each one that is none."""
        return replace(
            self.whole, num_ranks=self.whole.num_ranks // self.num_hosts, presum=False,
            max_tokens=self.num_hosts * (self.whole.max_tokens + 1),
        )  # fmt: skip

    @cached_property
    def parcel(self) -> Parcel:
        """Byte offsets of the parts of a parcel, each aligned."""
        whole, slots = self.whole, 4 * self.whole.slot_capacity
        tokens = self.whole.max_tokens * whole.row_bytes, self.whole.max_tokens * whole.sf_bytes
        return Parcel(*nvlink.aligned_offsets(HEAD_BYTES, (slots, slots, *tokens)))

    @property
    def part_columns(self) -> int:
        """Columns of bf16 that two ranks exchange in combine; the token that is none has room for the call's number."""
        rows = 1 if self.whole.presum else self.whole.num_topk
        return (self.whole.max_tokens + 1) * rows * self.whole.hidden

    @property
    def bytes_between_hosts(self) -> tuple[int, int]:
        """Bytes that a rank sends to other hosts in a call: in dispatch, in combine."""
        others = self.num_hosts - 1
        return others * self.parcel.end, others * 2 * self.part_columns


@dataclass(kw_only=True)
class Rail:
    """Buffers that all calls of a rank use, and the two collectives that they queue; parts are those of hosts.

    domain: the memory within the host. grid: of the group; local_rank: this rank's. parcels [hosts, bytes] uint8;
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
    gathering: Callable[[], object] = lambda: None
    exchanging: Callable[[], object] = lambda: None

    @cached_property
    def late_codes(self) -> Any:
        """View `late` as an array of ctypes."""
        return nvlink.as_ctypes(self.late)

    def culprit(self, local_rank: int, code: int) -> tuple[int, int]:
        """Return the rank of the group that an error code in `domain.report` names, and the code by itself."""
        host = max(0, (code >> HOST_SHIFT) - 1)
        return int(self.grid.grid[local_rank, host]), code & ((1 << HOST_SHIFT) - 1)

    def connect(self, group: Any, watch: Watch) -> None:
        """Connect the ranks by both collectives, in time, and have calls overseen from now on. Collective.

        group: of NCCL, or a backend of it, of the ranks of the rail, in the order of their hosts.
        """
        backend = backend_of(group)
        self.gathering = queued_gather(backend, self.parcels, self.own_parcel)
        self.exchanging = queued_exchange(backend, self.received, self.sent)
        watch.wait(lambda: group._allgather_base(self.parcels, self.own_parcel), "opening the group")
        watch.wait(lambda: group.alltoall_base(self.received, self.sent, [], []), "opening the group")
        # A collective that waits for a lost peer has no other end, and no other one can follow it.
        oversee(self, self.host, watch, partial(end_collectives, group))

    def gather(self) -> None:
        """Queue the collective that gathers the parcels of all hosts."""
        take_step(self.gathering)

    def exchange(self) -> None:
        """Queue the collective that sends part i of `sent` to host i."""
        take_step(self.exchanging)

    def mark(self, point: int) -> None:
        """Count that a call has passed a point."""
        arguments = self.counts, self.host, self.domain.state, self.head, point
        launch_kernel(KERNELS, "mark_kernel", (1,), arguments, {"num_warps": 1})


def open_rail(
    layout: HostsLayout, grid: Grid, rank: int, expert_offsets: Sequence[int], timeout_s: float, device: torch.device,
    shared: bool,
) -> Rail:  # fmt: skip
    """Allocate all memory of a rank. shared: other ranks of this host will map a part of it."""
    whole, G = layout.whole, layout.num_hosts
    local_rank, host = int(grid.local_rank[rank]), int(grid.host[rank])
    first, last = expert_offsets[rank], expert_offsets[rank + 1]
    own = [first] * (local_rank + 1) + [last] * (layout.inside.num_ranks - local_rank)  # no other entry is read
    domain = nvlink.allocate(layout.inside, local_rank, own, timeout_s, device, shared)
    sizes = torch.tensor(expert_offsets, device="cpu").diff()
    host_of = torch.repeat_interleave(grid.host, sizes).to(torch.int32)
    slots = G * (layout.whole.max_tokens + 1), whole.num_topk
    parcels = torch.zeros(G, layout.parcel.end, dtype=torch.uint8, device=device)
    returned = layout.inside.returned_rows_in(domain.memory)
    # In a graph NCCL lets ranks of one machine read and write such memory in place if other processes may map it, each
    # rank for itself: where `sent` is such memory and `received` isn't, the replay never ends.
    received = nvlink.allocate_bytes(2 * G * layout.part_columns, device, shared and not whole.presum)
    received = received.view(torch.bfloat16).zero_().view(G, -1)
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


def dispatch(
    rail: Rail, tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, error_code: int = 0
) -> None:
    """Send this rank's tokens [M, H] bf16 to their experts' hosts; fill domain.rows with the tokens for its own."""
    pack_parcel(rail, tokens, topk_weights.contiguous(), topk_ids.contiguous(), error_code)
    rail.gather()
    unpack(rail)
    send_routing(rail)
    if not error_code:
        nvlink.pull_rows(rail.domain)


def combine(rail: Rail, rows: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
    """Return this rank's tokens [M, H] bf16. rows: not read, the experts' have been sent to their local ranks."""
    nvlink.combine_barrier(rail.domain)
    seal_parts(rail)
    rail.exchange()
    return sum_received(rail, topk_ids)


def pack_parcel(
    rail: Rail, tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, error_code: int = 0
) -> None:
    """Store this rank's tokens, quantised, and their slots in its parcel."""
    rail.mark(BEGUN)
    whole, parcel = rail.layout.whole, rail.layout.parcel
    arguments = (
        topk_ids, topk_weights, rail.own_parcel.view(torch.int32), parcel.topk_ids // 4, parcel.weights // 4,
        topk_ids.numel(), topk_ids.shape[1], whole.slot_capacity, whole.num_topk, error_code,
    )  # fmt: skip
    launch_kernel(KERNELS, "pack_slots_kernel", (-(-whole.slot_capacity // PACKED),), arguments, nvlink.WARPS)
    regions = whole.regions._replace(tokens=parcel.tokens, token_sf=parcel.token_sf)
    place = whole.tokens_in(rail.own_parcel, regions)
    nvlink.stage_tokens(rail.domain, tokens, topk_ids[:0], place)  # slots are counted once all hosts' are here


def unpack(rail: Rail) -> None:
    """Unpack the parcels of all hosts into the memory that this host's ranks read, without slots of other hosts."""
    rail.mark(GATHERED)
    domain, layout = rail.domain, rail.layout
    whole, (values, sf) = layout.whole, nvlink.words_of(domain.layout.tokens_in(domain.memory))
    num_words = whole.row_bytes // 4
    arguments = (
        rail.parcels, layout.parcel.end, layout.parcel, domain.peers, domain.layout.regions, rail.is_here,
        rail.topk_ids, rail.weights, rail.counts, domain.state, rail.late, rail.local_rank,
        domain.layout.num_ranks, whole.num_experts, layout.whole.max_tokens, whole.num_topk, num_words, whole.num_sf,
        values, sf, next_power_of_2(domain.layout.num_ranks), next_power_of_2(whole.num_topk),
        next_power_of_2(num_words), next_power_of_2(whole.num_sf) if whole.num_sf else 0,
    )  # fmt: skip
    launch_kernel(KERNELS, "unpack_kernel", (len(rail.topk_ids),), arguments, nvlink.WARPS)


def send_routing(rail: Rail) -> None:
    """Send the slots of all hosts' tokens to the ranks of this host, and wait for theirs."""
    domain, none = rail.domain, rail.domain.memory.new_empty(0, rail.layout.whole.hidden, dtype=torch.bfloat16)
    nvlink.send_routing(domain, rail.topk_ids, rail.weights, nvlink.stage_tokens(domain, none, rail.topk_ids))


def seal_parts(rail: Rail) -> None:
    """Complete `sent`: with presum the sums of each token's rows on this host; at the end the number of the call."""
    if rail.layout.whole.presum:
        nvlink.sum_into(rail.sent.view(len(rail.topk_ids), -1), rail.domain, rail.topk_ids)
    G = rail.layout.num_hosts
    arguments = rail.sent, rail.domain.state, rail.counts, rail.layout.part_columns, G, next_power_of_2(G)
    launch_kernel(KERNELS, "seal_kernel", (1,), arguments, {"num_warps": 1})


def sum_received(rail: Rail, topk_ids: torch.Tensor) -> torch.Tensor:
    """Sum what came for each of this rank's tokens: [M, H] bf16; NaN if the call was refused or lost."""
    rail.mark(DONE)
    (M, k), whole, G = topk_ids.shape, rail.layout.whole, rail.layout.num_hosts
    width, block = whole.hidden, min(MAX_SUM_COLUMNS, next_power_of_2(whole.hidden))
    out = torch.empty(M, width, dtype=torch.bfloat16, device=topk_ids.device)
    if M:
        arguments = (
            rail.received, topk_ids.contiguous(), rail.host_of, out, rail.domain.state, rail.late, rail.counts, width,
            rail.layout.part_columns, whole.num_topk, whole.num_experts, k, G, next_power_of_2(G), whole.presum, block,
        )  # fmt: skip
        launch_kernel(KERNELS, "sum_hosts_kernel", (M, -(-width // block)), arguments, warps_for(block))
    return out
