"""Memory that the ranks of an NVLink domain share by reading and writing each other's: layout, allocation, mapping."""

import ctypes
import importlib
import threading
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from envoi.ops.moe.one_launch.config import FORMAT, NUM_COUNTERS
from envoi.ops.moe.parallel.load import empty_history
from envoi.ops.moe.permute import empty_rows
from envoi.quant.formats import Scheme, format_named
from envoi.runtime.devices import on_gpu
from envoi.runtime.prepared import Calls
from envoi.types import Matrix, QuantTensor

ALIGN_BYTES = 256


class Regions(NamedTuple):
    """Byte offsets of the parts of a rank's memory; kernels read them by these names.

    flags [2, num_ranks] int32: dispatch, combine. Peer r raises entry r, the owner resets it.
    error_codes [num_ranks] int32: why peer r's arguments are refused; the owner clears them.
    sizes [num_ranks, 2] int32: tokens and top-k of each rank.
    slot_offsets [num_ranks, num_experts + 1] int32: where each expert's slots begin among those of a rank.
    topk_ids, slot_pos, weights [num_ranks, slot_capacity]: of every rank's slots, written by that rank.
    tokens [max_tokens, row_bytes] and token_sf: this rank's tokens, which peers read.
    returned_rows [max_tokens, num_returned, slot_bytes]: rows that peers send back, written by them.
    end: bytes in all.
    """

    flags: int
    error_codes: int
    sizes: int
    slot_offsets: int
    topk_ids: int
    slot_pos: int
    weights: int
    tokens: int
    token_sf: int
    returned_rows: int
    end: int


@dataclass(frozen=True)
class SharedLayout:
    """Sizes that all ranks of a group agree on, and the layout of the memory that follows from them.

    max_tokens: of a rank; num_topk: slots of a token, at most. format: of the experts. presum: a rank sums the rows of
    a token before it sends them back."""

    num_ranks: int
    num_experts: int
    max_tokens: int
    num_topk: int
    hidden: int
    format: str
    presum: bool = False

    @property
    def slot_capacity(self) -> int:
        """Slots that a rank may have."""
        return self.max_tokens * self.num_topk

    @property
    def scheme(self) -> Scheme | None:
        """Scheme in which tokens are sent; None: bf16."""
        return format_named(self.format).activations

    @property
    def row_bytes(self) -> int:
        """Bytes of a token as it is sent, without its scale factors."""
        return self.hidden * (2 if self.scheme is None else self.scheme.values.itemsize)

    @property
    def num_sf(self) -> int:
        """Scale factors of a token."""
        return 0 if self.scheme is None else self.hidden // self.scheme.group_for((1, self.hidden))[1]

    @property
    def token_bytes(self) -> int:
        """Bytes of a token as it is sent, with its scale factors, and the ids and weights of its slots."""
        sf_bytes = self.num_sf * (1 if self.scheme is None else self.scheme.sf.itemsize)
        return self.row_bytes + sf_bytes + 8 * self.num_topk

    @property
    def num_returned(self) -> int:
        """Most rows sent back for a token: one a slot; with presum one a rank."""
        return self.num_ranks if self.presum else self.num_topk

    @property
    def slot_bytes(self) -> int:
        """Bytes of a row that is sent back, bf16."""
        return self.hidden * 2

    @cached_property
    def regions(self) -> Regions:
        """Byte offsets of all parts, each aligned."""
        ranks, slots = self.num_ranks, self.num_ranks * self.slot_capacity * 4
        sf_bytes = self.num_sf * (1 if self.scheme is None else self.scheme.sf.itemsize)
        sizes = (
            2 * ranks * 4, ranks * 4, 2 * ranks * 4, ranks * (self.num_experts + 1) * 4, slots, slots, slots,
            self.max_tokens * self.row_bytes, self.max_tokens * sf_bytes,
            self.max_tokens * self.num_returned * self.slot_bytes,
        )  # fmt: skip
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + -(-size // ALIGN_BYTES) * ALIGN_BYTES)
        return Regions(*offsets)

    def tokens_in(self, memory: torch.Tensor, regions: Regions | None = None) -> Matrix:
        """View a rank's tokens in its memory. regions: where they are, if not where this layout has them."""
        scheme, shape, at = self.scheme, (self.max_tokens, self.hidden), regions or self.regions
        if scheme is None:
            return _view(memory, at.tokens, torch.bfloat16, shape)
        values = _view(memory, at.tokens, scheme.values, shape)
        sf = _view(memory, at.token_sf, scheme.sf, (self.max_tokens, self.num_sf))
        return QuantTensor(values, sf, scheme.group_for(shape))

    def returned_rows_in(self, memory: torch.Tensor) -> torch.Tensor:
        """View the rows sent back to a rank, in its memory: [max_tokens * num_returned, hidden] bf16."""
        shape = (self.max_tokens * self.num_returned, self.hidden)
        return _view(memory, self.regions.returned_rows, torch.bfloat16, shape)


def _view(memory: torch.Tensor, begin: int, dtype: torch.dtype, shape: tuple[int, int]) -> torch.Tensor:
    return memory[begin : begin + shape[0] * shape[1] * dtype.itemsize].view(dtype).view(shape)


@dataclass
class Domain:
    """Buffers that all calls of a rank use.

    memory: this rank's shared memory, uint8; `peers` [num_ranks] int64: addresses of all ranks'. row_shift [num_ranks,
    E], offsets [E + 1], state [4] int32: of the current call. report [2, num_ranks] int32: who was late, and whose
    arguments were refused, in memory that the host reads without waiting. rows, row_weights, row_destinations: for the
    most rows there can be, their values, routing weights, and the addresses to which L2 sends them. rank_ends
    [num_ranks]: one past each rank's last expert. history: where a call's load is added; each object has its own."""

    layout: SharedLayout
    rank: int
    expert_offsets: list[int]
    timeout_s: float
    memory: torch.Tensor
    peers: torch.Tensor
    row_shift: torch.Tensor
    offsets: torch.Tensor
    state: torch.Tensor
    report: torch.Tensor
    rows: Matrix
    row_weights: torch.Tensor
    row_destinations: torch.Tensor
    rank_ends: torch.Tensor
    history: torch.Tensor
    handle: Any = None  # keeps the peers' memory mapped
    # Kinds of kernels, see `opening.agree_on_kernels`, of which every rank has all that calls need.
    has_kernels: set[str] = field(default_factory=set)
    watch: Any = None  # `failure.Watch`: ranks report through it what they refused, and who was late
    lock: Any = field(default_factory=threading.RLock)  # one call at a time
    pending: Any = None  # what the last call has dispatched, if it is to be combined
    # In the format of `moe.one_launch`, int32 [NUM_COUNTERS], 0 between calls: its counters. Those of `workspace` are
    # for calls of a stream; these, like all memory here, for calls on any, one at a time, eager or from a graph.
    progress: torch.Tensor | None = None

    @cached_property
    def calls(self) -> Calls:
        """Prepared calls, which launch on this memory."""
        return Calls()

    @cached_property
    def codes(self) -> tuple[Any, Any]:
        """View both rows of `report` as ctypes' arrays, which are read without an operator of torch."""
        late, refused = ((ctypes.c_int32 * self.layout.num_ranks).from_address(row.data_ptr()) for row in self.report)
        return late, refused

    @property
    def first_expert(self) -> int:
        """Number of this rank's first expert among all."""
        return self.expert_offsets[self.rank]

    @property
    def on_gpu(self) -> bool:
        """False in the interpreter; device "meta" stands for a GPU."""
        return on_gpu(self.memory.device)

    @property
    def num_local(self) -> int:
        """Number of experts of this rank."""
        return self.expert_offsets[self.rank + 1] - self.first_expert


def allocate(
    layout: SharedLayout, rank: int, expert_offsets: list[int], timeout_s: float, device: torch.device,
    shared: bool = True,
) -> Domain:  # fmt: skip
    """Allocate all memory of a rank; the peers' addresses are still unknown.

    There is room for every slot of every rank, since a token may name an expert twice. shared: peers may map the
    memory; False is for several ranks in one process."""
    num_bytes = layout.regions.end
    memory = allocate_bytes(num_bytes, device, shared)
    memory[: layout.regions.tokens].zero_()
    num_local, capacity = expert_offsets[rank + 1] - expert_offsets[rank], layout.num_ranks * layout.slot_capacity

    def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    report = torch.zeros(2, layout.num_ranks, dtype=torch.int32, pin_memory=device.type == "cuda")
    domain = Domain(
        layout, rank, expert_offsets, timeout_s, memory, ints(layout.num_ranks, dtype=torch.int64),
        ints(layout.num_ranks, num_local), ints(num_local + 1), ints(4), report,
        empty_rows(capacity, layout.hidden, layout.scheme, device),
        torch.empty(capacity, dtype=torch.float32, device=device), ints(capacity, dtype=torch.int64),
        torch.tensor(expert_offsets[1:], dtype=torch.int32, device=device),
        empty_history(layout.num_experts, device),
    )  # fmt: skip
    if layout.format == FORMAT:
        domain.progress = ints(NUM_COUNTERS)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # peers raise flags here as soon as they may
    return domain


def allocate_bytes(num_bytes: int, device: torch.device, shared: bool) -> torch.Tensor:
    """Allocate uint8 [num_bytes]. shared: other processes may map it."""
    return _shareable(num_bytes, device) if shared else torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _shareable(num_bytes: int, device: torch.device) -> torch.Tensor:
    # What torch.distributed._symmetric_memory.empty calls, but that imports sympy to compute the strides: 2.9 s of an
    # opening's 3.2 where Python keeps no compiled files.
    allocator: Any = importlib.import_module("torch._C._distributed_c10d")._SymmetricMemory
    return allocator.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)


def connect(domain: Domain, group: dist.ProcessGroup) -> None:
    """Map the peers' memory. Collective; RuntimeError where the ranks can't reach each other's."""
    import torch.distributed._symmetric_memory as symmetric

    domain.handle = symmetric.rendezvous(domain.memory, group)
    set_peers(domain, list(domain.handle.buffer_ptrs))


def connect_part(domain: Domain, name: str, store: Store) -> None:
    """Map the memory of the domain's ranks, a part of a group. Collective among them; RuntimeError as in `connect`.

    name: of the part, in use nowhere else; store: one that its ranks share.
    """
    import torch.distributed._symmetric_memory as symmetric

    groups: Any = importlib.import_module("torch.distributed.distributed_c10d")
    # torch takes rank, size and store from a group that is registered by name; no backend of it is asked for.
    part = groups.ProcessGroup(store, domain.rank, domain.layout.num_ranks)
    groups._register_process_group(name, part)
    try:
        with torch.cuda.device(domain.memory.device):
            domain.handle = symmetric.rendezvous(domain.memory, name)  # pyright: ignore[reportArgumentType]
    finally:
        groups._unregister_process_group(name)
    set_peers(domain, list(domain.handle.buffer_ptrs))


def set_peers(domain: Domain, addresses: list[int]) -> None:
    """Store the addresses of all ranks' memory, as this rank sees them."""
    domain.peers.copy_(torch.tensor(addresses, dtype=torch.int64, device="cpu"))
