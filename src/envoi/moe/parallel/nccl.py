"""MoE layer over ranks by NCCL or gloo, step by step. Each rank owns a run of consecutive experts.

    rows, plan = dispatch(tokens, routing)        send every row to the rank that owns its expert
    hidden     = L1(rows), activation, quantise   as on one rank
    rows       = L2(hidden)
    out        = combine(rows, plan)              send every row back, sum each token's slots in slot order

An owner sorts the received rows by (expert, source rank, slot): the order in which one rank would hold the tokens of
all ranks, concatenated. So the result equals that of one rank, bit for bit.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch

from envoi.moe import reference, reference_permute
from envoi.moe.experts import run_experts
from envoi.moe.layer import has_kernels
from envoi.moe.parallel.collectives import Channel, exchange_rows, from_bytes, to_bytes
from envoi.moe.reference import quantize_tokens
from envoi.spans import span
from envoi.types import ExpertRows, ExpertWeights


@dataclass(frozen=True)
class DispatchPlan:
    """Record of a dispatch with which combine sends every row back.

    counts [num_ranks, N] int64: rows of each rank for each expert.
    pos_to_slot [P] int32: the slot of each row that this rank sent.
    sorted_to_received [Q]: position in the received buffer of each row that this rank works on.
    send_counts, recv_counts: rows sent to and received from each rank.
    """

    counts: torch.Tensor
    pos_to_slot: torch.Tensor
    sorted_to_received: torch.Tensor
    send_counts: list[int]
    recv_counts: list[int]


def run_layer(
    tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor,
    experts: ExpertWeights, counts: torch.Tensor, expert_offsets: list[int], channel: Channel,
) -> torch.Tensor:  # fmt: skip
    """Run the layer on this rank's tokens [M, H] bf16: [M, H] bf16. counts [num_ranks, N]: rows by rank and expert."""
    with span("dispatch"):
        rows, plan = dispatch(tokens, topk_weights, topk_ids, experts.format, counts, expert_offsets, channel)
    num_tokens, k = topk_ids.shape
    rows = _mlp(rows, experts)
    with span("combine"):
        return combine(rows, plan, num_tokens, k, channel)


def _mlp(rows: ExpertRows, experts: ExpertWeights) -> torch.Tensor:
    """Run this rank's experts by the implementation that one rank would choose, so that the bits are the same."""
    if has_kernels(rows.offsets.device):
        return run_experts(rows.rows, rows.topk_weights, rows.offsets, experts)
    return reference.expert_mlp(rows, experts)


def dispatch(
    tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor,
    format: str, counts: torch.Tensor, expert_offsets: list[int], channel: Channel,
) -> tuple[ExpertRows, DispatchPlan]:  # fmt: skip
    """Quantise, sort by expert and send; sort the received rows by (expert, source rank, slot).

    expert_offsets: rank r owns experts expert_offsets[r] : expert_offsets[r + 1].
    """
    mine = reference_permute.permute(quantize_tokens(tokens, format), topk_weights, topk_ids, counts.shape[1])
    first, last = expert_offsets[channel.rank], expert_offsets[channel.rank + 1]
    sizes = [last - first for first, last in pairwise(expert_offsets)]
    send_counts = [int(part.sum()) for part in counts[channel.rank].split(sizes)]
    for_me = counts[:, first:last]
    recv_counts = for_me.sum(1).tolist()
    packed = to_bytes(mine.rows, mine.topk_weights)
    received = exchange_rows(channel, packed, send_counts, recv_counts, "dispatch")
    order = _by_expert(for_me).to(tokens.device)
    rows, weights = from_bytes(received[order], mine.rows)
    offsets = torch.nn.functional.pad(for_me.sum(0).cumsum(0), (1, 0)).to(tokens.device, torch.int32)
    plan = DispatchPlan(counts, mine.pos_to_slot, order, send_counts, recv_counts)
    return ExpertRows(rows, offsets, order.to(torch.int32), weights), plan


def combine(rows: torch.Tensor, plan: DispatchPlan, num_tokens: int, k: int, channel: Channel) -> torch.Tensor:
    """Send back rows [Q, H] bf16 of this rank's experts; sum those of its tokens: [num_tokens, H] bf16."""
    back = torch.empty_like(rows)
    back[plan.sorted_to_received] = rows
    packed = exchange_rows(channel, back.view(torch.uint8), plan.recv_counts, plan.send_counts, "combine")
    return reference_permute.combine(packed.view(rows.dtype), plan.pos_to_slot, num_tokens, k)


def _by_expert(counts: torch.Tensor) -> torch.Tensor:
    """Return the order by (expert, source, slot) of rows received by (source, expert, slot): counts [num_ranks, E]."""
    expert_of_run = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
    return expert_of_run.repeat_interleave(counts.flatten()).sort(stable=True).indices
