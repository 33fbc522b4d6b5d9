"""MoE layer over ranks by two collectives of constant size, by kernels. The host reads no size; a graph can hold it.

    dispatch    stage tokens, slots in this rank's segment         kernels of NVLink, for a domain of one rank
                all-gather of the segments                         tokens, quantised, their slots, sizes, error code
                settle, pull                                       rows sorted by expert, from the local copies
    experts     L1 -> L2, as on one rank; L2 stores each row where it is sent from
    combine     all-to-all of equal parts, sum                     a row for every slot; with presum a sum of each rank

Kernels and collectives follow one another on one stream, so buffers are reused by the next call without more.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch

from envoi.ops.moe.launches import Launch, launch_kernel, warps_for
from envoi.ops.moe.parallel import dispatch as steps
from envoi.ops.moe.parallel.collectives import Channel
from envoi.ops.moe.parallel.combine import send_partial_sums
from envoi.ops.moe.parallel.nvlink import run_local_experts
from envoi.ops.moe.parallel.progress import BEGUN, DONE, GATHERED
from envoi.ops.moe.parallel.queued import CALL_COLUMNS, HEAD_BYTES, QueuedBuffers, empty_counts
from envoi.ops.moe.parallel.symmetric_memory import ALIGN_BYTES, Domain, Regions, SharedLayout, allocate, set_peers
from envoi.ops.moe.permute import MAX_SUM_COLUMNS
from envoi.runtime.math import next_power_of_2
from envoi.spans import span
from envoi.types import ExpertWeights

KERNELS = "envoi.ops.moe.parallel.gathered_kernels"


@dataclass(frozen=True)
class GatheredLayout(SharedLayout):
    """Layout of the memory that holds all ranks' segments, then sizes and slot offsets of all ranks.

    Addresses count from the segment of rank `rank`, after its head.
    """

    rank: int = 0

    @cached_property
    def segment(self) -> SharedLayout:
        """Layout of a segment, without its head: the memory of a domain of one rank, up to its tokens."""
        return SharedLayout(1, self.num_experts, self.max_tokens, self.num_topk, self.hidden, self.format)

    @property
    def segment_bytes(self) -> int:
        """Bytes of a segment, with its head."""
        return HEAD_BYTES + self.segment.regions.returned_rows

    @property
    def slot_stride(self) -> int:
        """Distance, in slots, between two ranks' slots: they are in their segments."""
        return self.segment_bytes // 4

    @property
    def part_columns(self) -> int:
        """Columns that two ranks exchange in combine: rows, then the number of the call."""
        return (self.max_tokens if self.presum else self.slot_capacity) * self.hidden + CALL_COLUMNS

    @cached_property
    def regions(self) -> Regions:
        """Byte offsets of all parts; of a part that segments have, in segment 0."""
        of, before = self.segment.regions, self.rank * self.segment_bytes
        sizes = self.num_ranks * self.segment_bytes
        offsets = sizes + -(-8 * self.num_ranks // ALIGN_BYTES) * ALIGN_BYTES
        end = offsets + 4 * self.num_ranks * (self.num_experts + 1)
        own = before + HEAD_BYTES
        return Regions(
            of.flags, of.error_codes, sizes - own, offsets - own, of.topk_ids - before, of.slot_pos - before,
            of.weights - before, of.tokens, of.token_sf, 0, end,
        )  # fmt: skip


@dataclass(kw_only=True)
class Buffers(QueuedBuffers):
    """Buffers that all calls of a rank use; parts are those of ranks.

    domain: all ranks' segments and this rank's rows. solo: this rank's segment, as a domain of one rank.
    segments [num_ranks, segment_bytes] uint8.
    """

    solo: Domain
    segments: torch.Tensor

    @property
    def layout(self) -> GatheredLayout:
        """Sizes that all ranks agree on."""
        return cast(GatheredLayout, self.domain.layout)


def open_buffers(
    layout: SharedLayout, rank: int, expert_offsets: list[int], timeout_s: float, device: torch.device
) -> Buffers:
    """Allocate all memory of a rank."""
    sizes = layout.num_ranks, layout.num_experts, layout.max_tokens, layout.num_topk, layout.hidden, layout.format
    gathered = GatheredLayout(*sizes, layout.presum, rank)
    domain = allocate(gathered, rank, expert_offsets, timeout_s, device, shared=False)
    domain.memory.zero_()
    segments = domain.memory[: layout.num_ranks * gathered.segment_bytes].view(layout.num_ranks, -1)
    set_peers(domain, [segment.data_ptr() + HEAD_BYTES for segment in segments])
    shape = layout.num_ranks, gathered.part_columns
    sent, received = (torch.empty(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    parts = torch.tensor([part.data_ptr() for part in sent], dtype=torch.int64, device="cpu")
    domain.results = parts.to(device)
    solo, (counts, host) = _solo(gathered, segments[rank], domain), empty_counts(device)
    return Buffers(
        domain=domain, solo=solo, segments=segments, head=solo.state, sent=sent, received=received, counts=counts,
        host=host,
    )  # fmt: skip


def connect(buffers: Buffers, channel: Channel) -> None:
    """Connect the ranks by both collectives, in time, and have calls overseen from now on. Collective."""
    buffers.connect(buffers.segments, buffers.segments[buffers.domain.rank], channel.data, channel.watch)


def _solo(layout: GatheredLayout, segment: torch.Tensor, domain: Domain) -> Domain:
    """Return the domain of one rank whose memory is a segment; its state and report are the segment's head."""
    head, memory = segment[:HEAD_BYTES].view(torch.int32), segment[HEAD_BYTES:]

    def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=memory.device)

    num_experts, none = layout.num_experts, ints(0)
    solo = Domain(
        layout.segment, 0, [0, num_experts], domain.timeout_s, memory, ints(1, dtype=torch.int64), ints(1, num_experts),
        ints(num_experts + 1), head[:4], head[4:6].view(2, 1), none, none, none, none, none,
    )  # fmt: skip
    set_peers(solo, [memory.data_ptr()])
    return solo


def run_layer(
    buffers: Buffers, tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, experts: ExpertWeights
) -> torch.Tensor:
    """Run the layer: tokens [M, H] bf16 of this rank -> [M, H] bf16; NaN if a rank was late or was refused."""
    with span("dispatch"):
        dispatch(buffers, tokens, topk_weights, topk_ids)
    rows = run_local_experts(buffers.domain, experts, topk_ids.numel())
    with span("combine"):
        return combine(buffers, rows, topk_ids)


def dispatch(buffers: Buffers, tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> None:
    """Send this rank's tokens [M, H] bf16 to all ranks; fill domain.rows with the tokens for its own experts."""
    fill_segment(buffers, tokens, topk_weights, topk_ids)
    buffers.gather()
    place_rows(buffers)


def combine(buffers: Buffers, rows: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
    """Return this rank's tokens [M, H] bf16. rows: the experts' result."""
    fill_parts(buffers, rows)
    buffers.exchange()
    return sum_received(buffers, topk_ids)


def refuse(buffers: Buffers) -> None:
    """Take part in a call with no tokens, telling all peers that this rank's arguments are wrong."""
    buffers.mark(BEGUN)
    steps.refuse(buffers.solo)
    buffers.gather()
    place_rows(buffers)
    buffers.exchange()
    buffers.mark(DONE)


def fill_segment(buffers: Buffers, tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> None:
    """Store this rank's tokens, quantised, and their slots in its segment."""
    buffers.mark(BEGUN)
    ranked = steps.stage_tokens(buffers.solo, tokens, topk_ids)
    steps.send_routing(buffers.solo, topk_ids.contiguous(), topk_weights.contiguous(), ranked)


def place_rows(buffers: Buffers) -> None:
    """Sort the gathered tokens of this rank's experts into domain.rows."""
    buffers.mark(GATHERED)
    launch_kernel(KERNELS, "settle_kernel", settle_arguments(buffers))
    steps.pull_rows(buffers.domain)


def fill_parts(buffers: Buffers, rows: torch.Tensor) -> None:
    """Store in `sent` what L2 hasn't: with presum, the sums of each token's rows."""
    if buffers.layout.presum:
        send_partial_sums(buffers.domain, rows)


def sum_received(buffers: Buffers, topk_ids: torch.Tensor) -> torch.Tensor:
    """Sum the rows that came for each of this rank's tokens: [M, H] bf16; NaN if the call was refused or lost."""
    buffers.mark(DONE)
    out = torch.empty(len(topk_ids), buffers.layout.hidden, dtype=torch.bfloat16, device=topk_ids.device)
    if len(out):
        launch_kernel(KERNELS, "sum_received_kernel", sum_arguments(buffers, topk_ids, out))
    return out


def settle_arguments(buffers: Buffers) -> Launch:
    """Build the launch of `settle_kernel`."""
    domain, layout = buffers.domain, buffers.layout
    arguments = (
        domain.peers, layout.segment.regions, layout.regions, domain.row_shift, domain.offsets, domain.state,
        domain.report, buffers.counts, domain.results, layout.part_columns, domain.rank, layout.num_ranks,
        layout.slot_stride, layout.num_experts, domain.first_expert, domain.num_local,
        next_power_of_2(layout.num_experts + 1), next_power_of_2(domain.num_local), next_power_of_2(layout.num_ranks),
    )  # fmt: skip
    return Launch((1,), arguments, steps.WARPS)


def sum_arguments(buffers: Buffers, topk_ids: torch.Tensor, out: torch.Tensor) -> Launch:
    """Build the launch of `sum_received_kernel`."""
    (M, k), width, layout = topk_ids.shape, out.shape[1], buffers.layout
    block = min(MAX_SUM_COLUMNS, next_power_of_2(width))
    domain, lanes = buffers.domain, (next_power_of_2(layout.num_ranks), next_power_of_2(k))
    arguments = (
        buffers.received, topk_ids.contiguous(), domain.rank_ends, out, domain.state, domain.report, buffers.counts,
        width, layout.part_columns, k, layout.num_ranks, *lanes, layout.presum, block,
    )  # fmt: skip
    return Launch((M, -(-width // block)), arguments, warps_for(block))
