"""MoE layer over ranks by three collectives of rows in counted numbers. Only the counts are copied to the host.

Over NCCL all that follows the counts is queued on the device at once; the host waits for the rows at the very end.

    numbers  = agree(routing)                     one all-gather: what each rank has for each expert and each rank
    rows     = dispatch(tokens, routing)          a token is sent once to each rank that owns one of its experts
    hidden   = L1(rows), activation, quantise     as on one rank
    rows     = L2(hidden)
    out      = combine(rows)                      every row is sent back, and each token's slots summed in their order

The result equals that of one rank, bit for bit: see `slots`.
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch

from envoi.ops.moe import reference
from envoi.ops.moe.choose import has_kernels
from envoi.ops.moe.experts import run_experts
from envoi.ops.moe.parallel.collectives import Channel, end_collectives, error_of, exchange_rows, gather_tensors
from envoi.ops.moe.parallel.progress import HostMarks, oversee_queue
from envoi.ops.moe.parallel.slots import (
    SentTokens,
    from_bytes,
    needed_by,
    owners,
    positions,
    sort_by_expert,
    sum_slots,
    to_bytes,
)
from envoi.ops.moe.reference import quantize_tokens
from envoi.ops.moe.router.reference import count_tokens
from envoi.spans import span
from envoi.types import ExpertRows, ExpertWeights


@dataclass(frozen=True)
class Numbers:
    """Numbers that all ranks know of a call, on the host.

    refused: for each rank, 1 if its arguments are wrong. k: slots of a token, by rank.
    tokens [num_ranks, num_ranks]: tokens that a rank (row) sends to a rank. slots [num_ranks, num_ranks]: their slots
    whose experts are there, which is the number of rows sent back. experts [num_experts]: slots of all ranks.
    """

    refused: list[int]
    k: list[int]
    tokens: torch.Tensor
    slots: torch.Tensor
    experts: torch.Tensor


@dataclass(frozen=True)
class Received:
    """Rows of this rank's experts, and the way back.

    back [P]: the row of each slot, in the order in which they are sent back: (source rank, slot)."""

    rows: ExpertRows
    back: torch.Tensor


def agree(
    channel: Channel, topk_ids: torch.Tensor | None, expert_offsets: list[int], rank_ends: torch.Tensor
) -> Numbers:
    """Gather every rank's numbers. topk_ids: None if the host refuses this rank's arguments. Collective."""
    num_ranks, num_experts = channel.num_ranks, expert_offsets[-1]
    mine = torch.zeros(2 + num_ranks + num_experts, dtype=torch.int32, device=rank_ends.device)
    mine[0] = 1
    if topk_ids is not None:
        bad = (topk_ids < -1) | (topk_ids >= num_experts)
        known = topk_ids.masked_fill(bad, -1)
        mine[0], mine[1] = bad.any(), topk_ids.shape[1]
        mine[2 : 2 + num_ranks] = needed_by(owners(known, rank_ends), num_ranks).sum(1)
        mine[2 + num_ranks :] = count_tokens(known, num_experts)
    everyone = gather_tensors(channel, mine, "dispatch: exchange of counts").cpu()  # the only wait for the device
    sizes = [last - first for first, last in pairwise(expert_offsets)]
    counts = everyone[:, 2 + num_ranks :]
    by_rank = torch.stack([part.sum(1) for part in counts.split(sizes, 1)], 1)
    refused, k = everyone[:, 0].tolist(), everyone[:, 1].tolist()
    return Numbers(refused, k, everyone[:, 2 : 2 + num_ranks], by_rank, counts.sum(0))


def oversee_calls(channel: Channel) -> None:
    """Let hosts wait for peers that compile, and end collectives that wait for a lost one. channel: over NCCL."""
    channel.watch.wait_for_compilers()
    channel.watch.broken = partial(error_of, channel.data)
    oversee_queue(channel.watch, HostMarks.on(channel.device), partial(end_collectives, channel.data))


def run_layer(
    tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, experts: ExpertWeights,
    numbers: Numbers, expert_offsets: list[int], rank_ends: torch.Tensor, channel: Channel,
) -> torch.Tensor:  # fmt: skip
    """Run the layer on this rank's tokens [M, H] bf16: [M, H] bf16."""
    mine = expert_offsets[channel.rank], expert_offsets[channel.rank + 1]
    with span("dispatch"):
        owner = owners(topk_ids, rank_ends)
        sent = SentTokens(quantize_tokens(tokens, experts.format), topk_ids, topk_weights)
        received = dispatch(sent, owner, numbers, mine, channel)
    rows = run_local_experts(received.rows, experts)
    with span("combine"):
        out = combine(rows[received.back], owner, numbers, channel)
    channel.watch.finish()
    return out


def run_local_experts(rows: ExpertRows, experts: ExpertWeights) -> torch.Tensor:
    """Run this rank's experts by the implementation that one rank would choose, so that the bits are the same."""
    if has_kernels(rows.offsets.device):
        return run_experts(rows.rows, rows.topk_weights, rows.offsets, experts)
    return reference.expert_mlp(rows, experts)


def dispatch(
    tokens: SentTokens, owner: torch.Tensor, numbers: Numbers, mine: tuple[int, int], channel: Channel
) -> Received:
    """Send each token to the ranks that need it; sort the rows received by expert.

    mine: first expert here, one past the last. owner [M, k]: the rank of each slot's expert.
    """
    send, receive = numbers.tokens[channel.rank].tolist(), numbers.tokens[:, channel.rank].tolist()
    num_rows = int(numbers.slots[:, channel.rank].sum())
    needed = positions(needed_by(owner, channel.num_ranks), sum(send)) % max(1, len(owner))
    packed = exchange_rows(channel, to_bytes(tokens)[needed], send, receive, "dispatch")
    came = from_bytes(packed, tokens)
    rows = sort_by_expert(came, *mine, num_rows)
    return Received(rows, rows.pos_to_slot.argsort())


def combine(rows: torch.Tensor, owner: torch.Tensor, numbers: Numbers, channel: Channel) -> torch.Tensor:
    """Send rows [P, H] bf16, by (source rank, slot), back; sum those of this rank's tokens: [M, H] bf16."""
    send, receive = numbers.slots[:, channel.rank].tolist(), numbers.slots[channel.rank].tolist()
    packed = exchange_rows(channel, rows.view(torch.uint8), send, receive, "combine")
    pos_to_slot = owner.flatten().sort(stable=True).indices[: sum(receive)]
    return sum_slots(packed.view(rows.dtype), pos_to_slot.to(torch.int32), *owner.shape)
