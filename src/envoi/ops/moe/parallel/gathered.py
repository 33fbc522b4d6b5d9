"""MoE layer over ranks by two collectives of constant size, in torch: the reference of `gathered_device`.

    tokens = dispatch(tokens, routing)      one all-gather: every rank's tokens, quantised, their ids and weights
    rows   = tokens sorted by expert; L1 -> activation -> quantise -> L2 of this rank's experts, as on one rank
    out    = combine(rows)                  one all-to-all of equal parts: a row for every slot, read from its owner

With `hosts`, each collective is two: between the ranks of the same place on all hosts, and within a host. It is the
reference of `hosts_device` too.

Sizes follow from max_tokens and num_topk alone. The result equals that of one rank, bit for bit; with presum a rank, or
with `hosts` a host, sends the sum of each token's rows, rounded, and the sums are added in their order.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from envoi.ops.moe.parallel.collectives import Channel, exchange_equal, gather_tensors
from envoi.ops.moe.parallel.counted import run_local_experts
from envoi.ops.moe.parallel.hosts import Hosts, gather_by_rail, return_by_rail, sum_in_order
from envoi.ops.moe.parallel.load import note
from envoi.ops.moe.parallel.slots import SentTokens, from_bytes, owners, sort_by_expert, to_bytes
from envoi.ops.moe.parallel.symmetric_memory import SharedLayout
from envoi.ops.moe.reference import combine as sum_rows
from envoi.ops.moe.reference import quantize_tokens
from envoi.ops.moe.router.reference import count_tokens
from envoi.spans import span
from envoi.types import ExpertRows, ExpertWeights

HEAD_BYTES = 16  # in front of a rank's tokens: 1 if its arguments are wrong, as int32


@dataclass(frozen=True)
class Room:
    """Sizes of a call. rank_ends [num_ranks] int32: one past each rank's last expert. hosts: None = all ranks alike.

    history: where a call's load is added.
    """

    layout: SharedLayout
    expert_offsets: list[int]
    rank_ends: torch.Tensor
    channel: Channel
    history: torch.Tensor
    hosts: Hosts | None = None

    @property
    def mine(self) -> tuple[int, int]:
        """First expert of this rank, and one past the last."""
        return self.expert_offsets[self.channel.rank], self.expert_offsets[self.channel.rank + 1]


def run_layer(
    room: Room, tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, experts: ExpertWeights
) -> torch.Tensor | None:
    """Run the layer on this rank's tokens [M, H] bf16: [M, H] bf16; None if a rank refused its arguments."""
    with span("dispatch"):
        rows = dispatch(room, pack_tokens(room.layout, tokens, topk_weights, topk_ids))
    if rows is None:
        return None
    done = run_local_experts(rows, experts)
    with span("combine"):
        return combine(room, done, rows.pos_to_slot, topk_ids)


def refuse(room: Room) -> None:
    """Take part in dispatch with no tokens, telling all ranks that this rank's arguments are wrong."""
    none = torch.zeros(0, room.layout.hidden, dtype=torch.bfloat16, device="cpu")
    slots = torch.zeros(0, room.layout.num_topk, dtype=torch.int32, device="cpu")
    dispatch(room, pack_tokens(room.layout, none, slots.float(), slots), refused=True)


def pack_tokens(
    layout: SharedLayout, tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> SentTokens:
    """Quantise tokens [M, H] and fill up to max_tokens and num_topk, with masked slots."""
    more = layout.max_tokens - len(tokens)
    fill = (0, layout.num_topk - topk_ids.shape[1], 0, more)
    rows = quantize_tokens(pad(tokens, (0, 0, 0, more)), layout.format)
    return SentTokens(rows, pad(topk_ids, fill, value=-1), pad(topk_weights, fill))


def dispatch(room: Room, mine: SentTokens, refused: bool = False) -> ExpertRows | None:
    """Gather all ranks' tokens; return the rows of this rank's experts, None if a rank refused its arguments.

    pos_to_slot of the result: the slot of each row, numbered (rank * max_tokens + token) * num_topk + place.
    """
    head = torch.tensor([int(refused), 0, 0, 0], dtype=torch.int32, device="cpu").view(torch.uint8)
    segment = torch.cat([head, to_bytes(mine).flatten()])
    if room.hosts is not None:
        everyone = gather_by_rail(room.hosts, segment)
    else:
        everyone = gather_tensors(room.channel, segment, "dispatch")
    if everyone[:, :HEAD_BYTES].any():
        return None
    tokens = from_bytes(everyone[:, HEAD_BYTES:].reshape(room.layout.num_ranks * room.layout.max_tokens, -1), mine)
    note(room.history, count_tokens(tokens.topk_ids, room.layout.num_experts))
    first, last = room.mine
    num_rows = int(((tokens.topk_ids >= first) & (tokens.topk_ids < last)).sum())
    return sort_by_expert(tokens, first, last, num_rows)


def combine(room: Room, rows: torch.Tensor, pos_to_slot: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
    """Send rows [P, H] bf16 back; sum those of this rank's tokens: [M, H] bf16. topk_ids [M, k]: of these tokens."""
    layout, (num_tokens, k) = room.layout, topk_ids.shape
    owner = owners(topk_ids, room.rank_ends)
    token = torch.arange(num_tokens, device="cpu").unsqueeze(1)
    if layout.presum and room.hosts is None:
        sums = sum_rows(rows, pos_to_slot, layout.num_ranks * layout.max_tokens, layout.num_topk)
        back = exchange_equal(room.channel, sums.view(layout.num_ranks, layout.max_tokens, -1), "combine")
        rank = torch.arange(layout.num_ranks, device="cpu")
        sent = (owner.unsqueeze(2) == rank).any(1)  # [M, num_ranks]
        return sum_rows(back[rank, token][sent], sent.flatten().nonzero()[:, 0], num_tokens, layout.num_ranks)
    slots = rows.new_zeros(layout.num_ranks * layout.slot_capacity, layout.hidden)
    slots[pos_to_slot.long()] = rows
    slots, used = slots.view(layout.num_ranks, layout.slot_capacity, -1), owner < layout.num_ranks
    if room.hosts is not None:
        back = return_by_rail(room.hosts, slots, layout.num_topk, layout.presum)
        if layout.presum:
            return sum_in_order(back[:, :num_tokens], 0)
        source = room.hosts.grid.host[owner[used]]
    else:
        back, source = exchange_equal(room.channel, slots, "combine"), owner[used]
    slot = token * layout.num_topk + torch.arange(k, device="cpu")
    return sum_rows(back[source, slot[used]], used.flatten().nonzero()[:, 0], num_tokens, k)
