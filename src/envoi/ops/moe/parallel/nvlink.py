"""MoE layer over the ranks of one NVLink domain: kernels read and write peers' memory. A CUDA graph can hold a call.

    dispatch    stage_tokens   tokens, quantised, to where peers read them; slots counted and ranked
                send_routing   slots to every peer, wait for theirs, compute where rows go
                pull_rows      peers' tokens -> domain.rows, sorted by (expert, source rank, slot)
    experts     L1 -> L2, as on one rank; L2 stores each row in the memory of its token's rank
    combine     wait until peers have sent all rows of this rank's tokens, and sum them

With presum L2's rows stay here, and `send_partial_sums` sends one sum for each token and rank instead. Rows of experts
that aren't Envoi's are here too, until `send_rows`.

The next call reuses the memory without a further barrier: a rank stages its next tokens only after all ranks have
passed the combine barrier, so after all have pulled; and it runs its next L2 only after all have sent their next
routing, so after all have summed. Within a rank the order of one stream keeps calls apart.
"""

import ctypes
import importlib
import itertools
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.distributed.distributed_c10d import Store

from envoi.ops.gemm.grouping import Grouping
from envoi.ops.moe.choose import has_kernels, l2_quantises
from envoi.ops.moe.experts import run_experts
from envoi.ops.moe.launches import launch_kernel, warps_for
from envoi.ops.moe.one_launch.config import FORMAT, NUM_COUNTERS
from envoi.ops.moe.parallel.load import empty_history
from envoi.ops.moe.permute import MAX_SUM_COLUMNS, RowBuffers, empty_rows
from envoi.quant.formats import SCHEMES, Scheme, format_named
from envoi.runtime.devices import casts_e4m3, num_sms, on_gpu
from envoi.runtime.math import cdiv, next_power_of_2
from envoi.runtime.prepared import Calls
from envoi.runtime.timeline import UNTRACED
from envoi.types import ExpertWeights, Matrix, QuantTensor

LATE_STEPS = {1: "dispatch", 2: "combine"}  # codes in the first row of `report`, and the step that timed out
DISPATCH_KERNELS = "envoi.ops.moe.parallel.dispatch_kernels"
REFUSED_ON_HOST = 3  # in `report`, as in combine_kernels
COMBINE_KERNELS = "envoi.ops.moe.parallel.combine_kernels"
MAX_SENT_COLUMNS = 2048  # columns of a partial sum that are sent at a time
PIECE, RANKED = 1024, 16  # slots, as in dispatch_kernels
MAX_CHUNKS = 32  # programs that send slots to one peer
PROGRAMS_PER_SM = 8  # programs that pull or send rows, 4 warps each
WARPS = {"num_warps": 4}
ALIGN_BYTES = 256  # of the parts of a rank's memory


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
    """Sizes that all ranks agree on, and the layout of a rank's memory. max_tokens: of a rank; num_topk: of a token.

    format: of the experts. presum: a rank sums the rows of a token before it sends them back. results: the scheme of
    the rows that are sent back, None for bf16; with presum None."""

    num_ranks: int
    num_experts: int
    max_tokens: int
    num_topk: int
    hidden: int
    format: str
    presum: bool = False
    results: str | None = None

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
    def sf_bytes(self) -> int:
        """Bytes of a token's scale factors."""
        return self.num_sf * (1 if self.scheme is None else self.scheme.sf.itemsize)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token as it is sent, with its scale factors, and the ids and weights of its slots."""
        return self.row_bytes + self.sf_bytes + 8 * self.num_topk

    @property
    def num_returned(self) -> int:
        """Most rows sent back for a token: one a slot; with presum one a rank."""
        return self.num_ranks if self.presum else self.num_topk

    @property
    def slot_bytes(self) -> int:
        """Bytes of a row that is sent back: in bf16, or values and behind them their scale factors."""
        if self.results is None:
            return self.hidden * 2
        return cdiv(self.hidden + self.hidden // self.group * 4, 16) * 16

    @property
    def group(self) -> int:
        """Columns of a row sent back that share a scale factor, 0 in bf16."""
        return 0 if self.results is None else SCHEMES[self.results].group[1]

    @cached_property
    def regions(self) -> Regions:
        """Byte offsets of all parts, each aligned."""
        ranks, slots = self.num_ranks, self.num_ranks * self.slot_capacity * 4
        sizes = (
            2 * ranks * 4, ranks * 4, 2 * ranks * 4, ranks * (self.num_experts + 1) * 4, slots, slots, slots,
            self.max_tokens * self.row_bytes, self.max_tokens * self.sf_bytes,
            self.max_tokens * self.num_returned * self.slot_bytes,
        )  # fmt: skip
        return Regions(*aligned_offsets(0, sizes))

    def tokens_in(self, memory: torch.Tensor, regions: Regions | None = None) -> Matrix:
        """View a rank's tokens in its memory. regions: where they are, if not where this layout has them."""
        scheme, shape, at = self.scheme, (self.max_tokens, self.hidden), regions or self.regions
        if scheme is None:
            return _view(memory, at.tokens, torch.bfloat16, shape)
        values = _view(memory, at.tokens, scheme.values, shape)
        sf = _view(memory, at.token_sf, scheme.sf, (self.max_tokens, self.num_sf))
        return QuantTensor(values, sf, scheme.group_for(shape))

    def returned_rows_in(self, memory: torch.Tensor) -> torch.Tensor:
        """View the rows sent back to a rank, in its memory: [max_tokens * num_returned, hidden] bf16, or of bytes."""
        dtype, rows = torch.uint8 if self.results else torch.bfloat16, self.max_tokens * self.num_returned
        return _view(memory, self.regions.returned_rows, dtype, (rows, self.slot_bytes // dtype.itemsize))


def aligned_offsets(first: int, sizes: Iterable[int]) -> list[int]:
    """Return where parts of these sizes begin in bytes, aligned, the first at `first`; and where the last ends."""
    return [*itertools.accumulate((-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in sizes), initial=first)]


def as_ctypes(codes: torch.Tensor) -> Any:
    """View int32 in the host's memory as an array of ctypes, which is read without an operator of torch."""
    return (ctypes.c_int32 * len(codes)).from_address(codes.data_ptr())


def _view(memory: torch.Tensor, begin: int, dtype: torch.dtype, shape: tuple[int, int]) -> torch.Tensor:
    return memory[begin : begin + shape[0] * shape[1] * dtype.itemsize].view(dtype).view(shape)


@dataclass
class Domain:
    """Buffers that all calls of a rank use.

    memory: this rank's shared memory, uint8; `peers` [num_ranks] int64: addresses of all ranks'. row_shift [num_ranks,
    E], offsets [E + 1], state [4] int32: of the current call. report [2, num_ranks] int32: who was late, and whose
    arguments were refused, in memory that the host reads without waiting. rows, row_weights, row_destinations: for the
    most rows there can be: values, routing weights, addresses to which L2 sends them. rank_ends [num_ranks]: one past
    each rank's last expert. history: where a call's load is added; each object has its own."""

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
    # Kinds of kernels, see `opening.Peer`, of which every rank has all that calls need.
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
        """View both rows of `report` as arrays of ctypes: who was late, and whose arguments were refused."""
        return as_ctypes(self.report[0]), as_ctypes(self.report[1])

    @property
    def first_expert(self) -> int:
        """Number of this rank's first expert among all."""
        return self.expert_offsets[self.rank]

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
    memory = allocate_bytes(layout.regions.end, device, shared)
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
        torch.tensor(expert_offsets[1:], dtype=torch.int32, device=device), empty_history(layout.num_experts, device),
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


def connect(domain: Domain, group: Any) -> None:
    """Map the peers' memory. Collective; RuntimeError where the ranks can't reach each other's. group: or its name."""
    import torch.distributed._symmetric_memory as symmetric

    domain.handle = symmetric.rendezvous(domain.memory, group)
    set_peers(domain, list(domain.handle.buffer_ptrs))


def connect_part(domain: Domain, name: str, store: Store) -> None:
    """Map the memory of the domain's ranks, a part of a group with a unique name and a store; see `connect`."""
    groups: Any = importlib.import_module("torch.distributed.distributed_c10d")
    # torch takes rank, size and store from a group that is registered by name; no backend of it is asked for.
    part = groups.ProcessGroup(store, domain.rank, domain.layout.num_ranks)
    groups._register_process_group(name, part)
    try:
        with torch.cuda.device(domain.memory.device):
            connect(domain, name)
    finally:
        groups._unregister_process_group(name)


def set_peers(domain: Domain, addresses: list[int]) -> None:
    """Store the addresses of all ranks' memory, as this rank sees them."""
    domain.peers.copy_(torch.tensor(addresses, dtype=torch.int64, device="cpu"))


class RankedSlots(NamedTuple):
    """Slots of a rank, counted and ranked in pieces of PIECE.

    slot_ranks [M, k] int32: earlier slots of the slot's piece with the same expert; -1 = masked.
    counts [pieces, num_experts + 1] int32: slots of each expert in each piece.
    """

    slot_ranks: torch.Tensor
    counts: torch.Tensor


def dispatch(
    domain: Domain, tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, error_code: int = 0
) -> None:
    """Send this rank's tokens [M, H] bf16 to their experts' ranks; fill domain.rows with the tokens for its own.

    error_code: why this rank's arguments are refused, if there are no tokens for it; tells all peers.
    """
    ranked = stage_tokens(domain, tokens, topk_ids)
    send_routing(domain, topk_ids.contiguous(), topk_weights.contiguous(), ranked, error_code)
    if not error_code:
        pull_rows(domain)


def stage_tokens(domain: Domain, tokens: torch.Tensor, topk_ids: torch.Tensor, to: Matrix | None = None) -> RankedSlots:
    """Store this rank's tokens, quantised, where peers read them, or in `to`; count and rank its slots."""
    tokens, topk_ids = tokens if tokens.stride(1) == 1 else tokens.contiguous(), topk_ids.contiguous()
    shape = (-(-topk_ids.numel() // PIECE), domain.layout.num_experts + 1)
    slot_ranks, counts = (torch.empty(x, dtype=torch.int32, device=topk_ids.device) for x in (topk_ids.shape, shape))
    (num_pieces, width_of_counts), (M, width) = shape, tokens.shape
    out = RowBuffers.of(domain.layout.tokens_in(domain.memory) if to is None else to, width)
    arguments = (
        tokens, tokens.stride(0), out.values, out.sf, width, topk_ids, counts, slot_ranks, topk_ids.numel(),
        width_of_counts - 1, out.block, *out.form, next_power_of_2(width_of_counts), UNTRACED,
    )  # fmt: skip
    grid = (num_pieces * (PIECE // RANKED + 1) + M, -(-width // out.block))
    launch_kernel(DISPATCH_KERNELS, "stage_tokens_kernel", grid, arguments, warps_for(out.block))
    return RankedSlots(slot_ranks, counts)


def num_chunks(layout: SharedLayout) -> int:
    """Number of programs that send slots to one peer, the same on all ranks, since a flag counts them."""
    return min(MAX_CHUNKS, max(1, -(-layout.slot_capacity // PIECE)))


def send_routing(
    domain: Domain, topk_ids: torch.Tensor, topk_weights: torch.Tensor, ranked: RankedSlots, error_code: int = 0
) -> None:
    """Send experts, positions and weights of this rank's slots to every peer, and wait for theirs."""
    layout = domain.layout
    chunks = num_chunks(layout)
    arguments = (
        topk_ids, *ranked, topk_weights, domain.peers, layout.regions, domain.row_shift,
        domain.offsets, domain.state, domain.report, domain.rank, layout.num_ranks, *topk_ids.shape,
        layout.slot_capacity, layout.num_experts, domain.first_expert, domain.num_local, error_code,
        int(domain.timeout_s * 1e6), chunks, next_power_of_2(layout.num_experts + 1), next_power_of_2(domain.num_local),
        next_power_of_2(layout.num_ranks), on_gpu(domain.memory.device), UNTRACED,
    )  # fmt: skip
    launch_kernel(DISPATCH_KERNELS, "send_routing_kernel", (layout.num_ranks, chunks), arguments, WARPS)


def pull_rows(domain: Domain) -> None:
    """Read the peers' tokens for this rank's experts into domain.rows."""
    layout, (values, sf) = domain.layout, words_of(domain.rows)
    num_words = layout.row_bytes // 4
    arguments = (
        domain.peers, layout.regions, domain.row_shift, domain.state, domain.history, values, sf,
        domain.row_weights, domain.row_destinations, domain.rank, layout.num_ranks, layout.slot_capacity,
        layout.num_experts, domain.first_expert, domain.num_local, num_words, layout.num_sf, layout.slot_bytes,
        next_power_of_2(layout.num_topk), next_power_of_2(num_words),
        next_power_of_2(layout.num_sf) if layout.num_sf else 0, next_power_of_2(layout.num_experts), UNTRACED,
    )  # fmt: skip
    launch_kernel(DISPATCH_KERNELS, "pull_kernel", _loop_grid(values), arguments, WARPS)


def words_of(rows: Matrix) -> tuple[torch.Tensor, torch.Tensor | None]:
    """View rows as words of 4 bytes, and their scale factors as bytes or words."""
    if isinstance(rows, torch.Tensor):
        return rows.view(torch.int32), None
    return rows.values.view(torch.int32), rows.sf.view(torch.uint8 if rows.sf.itemsize == 1 else torch.int32)


def _loop_grid(rows: torch.Tensor) -> tuple[int]:
    return (PROGRAMS_PER_SM * num_sms(rows.device),)


def why_not_kernels(experts: ExpertWeights) -> str:
    """Return the reason why the kernels can't be used with these experts, "" if they can."""
    if not has_kernels(experts.device):
        return f"no kernels on {experts.device}"
    return "" if experts.hidden % 16 == 0 else f"hidden {experts.hidden} isn't a multiple of 16"


def run_local_experts(domain: Domain, experts: ExpertWeights, num_slots: int) -> torch.Tensor:
    """Run this rank's experts on domain.rows. L2 sends rows to their slots; with presum they are returned.

    Where L2's kernels can't quantise rows as they are to be sent, `send_rows` does.

    num_slots: this rank's slots, an estimate of the others'; only the choice of a config depends on it.
    """
    layout = domain.layout
    expected = layout.num_ranks * (num_slots or layout.slot_capacity) * domain.num_local // layout.num_experts
    is_apart = layout.results is not None and not l2_quantises(experts, layout.results)
    to, results = (None, None) if layout.presum or is_apart else (domain.row_destinations, layout.results)
    grouping = Grouping(write_tail=False, expected=expected, to=to, results=results)
    rows = run_experts(domain.rows, domain.row_weights, domain.offsets, experts, grouping, domain.progress)
    if is_apart:
        send_rows(domain, rows)
    return rows


def combine(domain: Domain, rows: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
    """Return this rank's tokens [M, H] bf16. rows: the experts' result, which with presum is still here."""
    if domain.layout.presum:
        send_partial_sums(domain, rows)
    combine_barrier(domain)
    return sum_rows(domain, topk_ids)


def send_partial_sums(domain: Domain, rows: torch.Tensor) -> None:
    """Sum each token's rows on this rank and send the sum to the token's rank; only with presum.

    rows: L2's output, sorted by expert.
    """
    layout = domain.layout
    arguments = (
        domain.peers, layout.regions, domain.row_shift, domain.state, rows, layout.hidden, domain.rank,
        layout.num_ranks, layout.slot_capacity, domain.first_expert, domain.num_local, next_power_of_2(layout.num_topk),
        min(MAX_SENT_COLUMNS, next_power_of_2(layout.hidden)), UNTRACED,
    )  # fmt: skip
    launch_kernel(COMBINE_KERNELS, "send_partial_sums_kernel", _loop_grid(rows), arguments, WARPS)


def send_rows(domain: Domain, rows: torch.Tensor) -> None:
    """Send rows [P, H] bf16, which L2 hasn't sent, to the ranks of their tokens; without presum."""
    width, group = domain.layout.hidden, domain.layout.group
    block = max(group, min(MAX_SENT_COLUMNS, next_power_of_2(width)))
    casts = group > 0 and casts_e4m3(domain.memory.device)
    arguments = rows, domain.row_destinations, domain.offsets, width, domain.num_local, block, group, casts
    launch_kernel(COMBINE_KERNELS, "send_rows_kernel", _loop_grid(rows), arguments, WARPS)


def combine_barrier(domain: Domain) -> None:
    """Signal to all peers that their rows have been sent, and wait for their signals."""
    arguments = (
        domain.peers, domain.layout.regions, domain.state, domain.report, domain.rank, int(domain.timeout_s * 1e6),
        on_gpu(domain.memory.device), UNTRACED,
    )  # fmt: skip
    launch_kernel(COMBINE_KERNELS, "combine_barrier_kernel", (domain.layout.num_ranks,), arguments, WARPS)


def sum_rows(domain: Domain, topk_ids: torch.Tensor) -> torch.Tensor:
    """Sum the rows sent back for each of this rank's tokens: [M, H] bf16; NaN if the call failed."""
    out = torch.empty(len(topk_ids), domain.layout.hidden, dtype=torch.bfloat16, device=topk_ids.device)
    if len(out):
        sum_into(out, domain, topk_ids)
    return out


def sum_into(out: torch.Tensor, domain: Domain, topk_ids: torch.Tensor) -> None:
    """Sum the rows sent back for the tokens of these slots into out [M, H] bf16, with presum one row a rank."""
    (M, k), width = topk_ids.shape, out.shape[1]
    group = domain.layout.group
    block = max(group, min(MAX_SUM_COLUMNS * (2 if group else 1), next_power_of_2(width)))
    rows, topk_ids, grid = domain.layout.returned_rows_in(domain.memory), topk_ids.contiguous(), (M, -(-width // block))
    if domain.layout.presum:
        kernel, arguments = "sum_ranks_kernel", (
            rows, topk_ids, domain.rank_ends, out, domain.state, width, k, domain.layout.num_ranks, next_power_of_2(k),
            block, UNTRACED,
        )  # fmt: skip
    else:
        form = k, block, group, group > 0 and casts_e4m3(out.device)
        kernel, arguments = "sum_kernel", (rows, topk_ids, out, domain.state, width, rows.shape[1], *form, UNTRACED)
    launch_kernel(COMBINE_KERNELS, kernel, grid, arguments, warps_for(block))
