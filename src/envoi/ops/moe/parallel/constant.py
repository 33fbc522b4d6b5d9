"""MoE layer over ranks by collectives of constant size, in torch: the reference of `rail`, and what gloo takes.

    tokens = dispatch(tokens, routing)      every rank's tokens, quantised, their ids and weights
    rows   = tokens sorted by expert; L1 -> activation -> quantise -> L2 of this rank's experts, as on one rank
    out    = combine(rows)                  a row for every slot, read from its owner

Host g of G has L ranks; its rank of local rank l exchanges with the ranks l of the other hosts (a rail), and then with
the ranks of its own host. Where every rank counts as a host, the rail is the whole group, and that is all.

Sizes follow from max_tokens and num_topk alone. The result equals that of one rank, bit for bit; with presum a host
sends the sum of each token's rows, rounded, and the sums are added in their order.
"""

import threading
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from envoi.ops.moe.op import check_ids
from envoi.ops.moe.parallel.collectives import Channel, exchange_equal, gather_tensors, gather_texts
from envoi.ops.moe.parallel.counted import SentTokens, from_bytes, owners, run_local_experts, sort_by_expert, to_bytes
from envoi.ops.moe.parallel.exchange import Rows, Team
from envoi.ops.moe.parallel.load import note
from envoi.ops.moe.parallel.opening import Hosts, complaint, raise_together
from envoi.ops.moe.parallel.symmetric_memory import SharedLayout
from envoi.ops.moe.reference import combine as sum_rows
from envoi.ops.moe.reference import quantize_tokens
from envoi.ops.moe.router.reference import count_tokens
from envoi.spans import span
from envoi.types import ExpertRows, ExpertWeights

HEAD_BYTES = 16  # in front of a rank's tokens: 1 if its arguments are wrong, as int32


@dataclass(frozen=True)
class Room:
    """Sizes of a call, and this rank's connections: to all ranks, to its rail and to its host."""

    layout: SharedLayout
    channel: Channel
    hosts: Hosts


class Constant:
    """Exchange of constant sizes over gloo: see `exchange.Exchange`."""

    def __init__(self, room: Room, name: str):
        """Exchange tokens of at most the room's sizes. name: of the exchange."""
        self.room, self.name, self.presum, self.lock = room, name, room.layout.presum, threading.RLock()

    def dispatch(
        self, tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, team: Team, refusal: str
    ) -> Rows:
        """See `Exchange`."""
        room = self.room
        refusal = refusal or complaint(check_ids, topk_ids, room.layout.num_experts)
        if refusal:
            tokens = torch.zeros(0, room.layout.hidden, dtype=torch.bfloat16, device="cpu")
            topk_ids = torch.zeros(0, room.layout.num_topk, dtype=torch.int32, device="cpu")
            topk_weights = topk_ids.float()
        with span("dispatch"):
            rows = dispatch(room, pack_tokens(room.layout, tokens, topk_weights, topk_ids), team, bool(refusal))
        if rows is None:
            raise_together(gather_texts(room.channel, refusal, "exchange of refusals"), refusal)
            raise RuntimeError("dispatch: a rank refused its arguments without a reason")
        return Rows(rows.rows, rows.offsets, rows.topk_weights, topk_ids, (rows, team.rank_ends))

    def run_experts(self, received: Rows, experts: ExpertWeights) -> torch.Tensor:
        """See `Exchange`."""
        return run_local_experts(received.back[0], experts)

    def accept(self, rows: torch.Tensor, received: Rows) -> torch.Tensor:
        """See `Exchange`."""
        return rows

    def combine(self, rows: torch.Tensor, received: Rows) -> torch.Tensor:
        """See `Exchange`."""
        sorted_rows, rank_ends = received.back
        with span("combine"):
            return combine(self.room, rows, sorted_rows.pos_to_slot, received.topk_ids, rank_ends)

    def check(self) -> None:
        """See `Exchange`."""
        if self.room.channel.watch.failure is not None:
            raise self.room.channel.watch.failure


def pack_tokens(
    layout: SharedLayout, tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> SentTokens:
    """Quantise tokens [M, H] and fill up to max_tokens and num_topk, with masked slots."""
    more = layout.max_tokens - len(tokens)
    fill = (0, layout.num_topk - topk_ids.shape[1], 0, more)
    rows = quantize_tokens(pad(tokens, (0, 0, 0, more)), layout.format)
    return SentTokens(rows, pad(topk_ids, fill, value=-1), pad(topk_weights, fill))


def dispatch(room: Room, mine: SentTokens, team: Team, refused: bool) -> ExpertRows | None:
    """Gather all ranks' tokens; return the rows of this rank's experts, None if a rank refused its arguments.

    pos_to_slot of the result: the slot of each row, numbered (rank * max_tokens + token) * num_topk + place.
    """
    head = torch.tensor([int(refused), 0, 0, 0], dtype=torch.int32, device="cpu").view(torch.uint8)
    everyone = gather_by_rail(room.hosts, torch.cat([head, to_bytes(mine).flatten()]))
    if everyone[:, :HEAD_BYTES].any():
        return None
    tokens = from_bytes(everyone[:, HEAD_BYTES:].reshape(room.layout.num_ranks * room.layout.max_tokens, -1), mine)
    note(team.history, count_tokens(tokens.topk_ids, room.layout.num_experts))
    first, last = team.mine
    num_rows = int(((tokens.topk_ids >= first) & (tokens.topk_ids < last)).sum())
    return sort_by_expert(tokens, first, last, num_rows)


def combine(
    room: Room, rows: torch.Tensor, pos_to_slot: torch.Tensor, topk_ids: torch.Tensor, rank_ends: torch.Tensor
) -> torch.Tensor:
    """Send rows [P, H] bf16 back; sum those of this rank's tokens: [M, H] bf16. topk_ids [M, k]: of these tokens."""
    layout, (num_tokens, k) = room.layout, topk_ids.shape
    slots = rows.new_zeros(layout.num_ranks * layout.slot_capacity, layout.hidden)
    slots[pos_to_slot.long()] = rows
    back = return_by_rail(room.hosts, slots.view(layout.num_ranks, layout.slot_capacity, -1), layout)
    if layout.presum:
        return sum_in_order(back[:, :num_tokens], 0)
    owner = owners(topk_ids, rank_ends)
    used, token = owner < layout.num_ranks, torch.arange(num_tokens, device="cpu").unsqueeze(1)
    slot = token * layout.num_topk + torch.arange(k, device="cpu")
    host = room.hosts.grid.host[owner[used]]
    return sum_rows(back[host, slot[used]], used.flatten().nonzero()[:, 0], num_tokens, k)


def gather_by_rail(hosts: Hosts, mine: torch.Tensor) -> torch.Tensor:
    """Gather tensors of one shape from all ranks: [num_ranks, *shape]. Each crosses to another host once."""
    if hosts.inside is None:
        return gather_tensors(hosts.rail, mine, "dispatch")
    across = gather_tensors(hosts.rail, mine, "dispatch between hosts")
    inside = gather_tensors(hosts.inside, across, "dispatch within the host")
    return inside[hosts.grid.local_rank, hosts.grid.host]


def return_by_rail(hosts: Hosts, slots: torch.Tensor, layout: SharedLayout) -> torch.Tensor:
    """Send rows of slots back to their ranks: [num_ranks, S, H] by destination -> [hosts, S, H] bf16 by source host.

    A slot's row is on one rank of its owner's host; on the others it is 0. With presum the rows of a token's slots are
    summed on each host in their order, and rounded: [hosts, S / num_topk, H].
    """
    mine = slots
    if hosts.inside is not None:
        inside = exchange_equal(hosts.inside, slots[hosts.grid.grid], "combine within the host")
        # Bits of the one row that isn't 0.
        mine = inside.view(torch.int16).sum(0, dtype=torch.int16).view(slots.dtype)
    if layout.presum:
        mine = sum_in_order(mine.unflatten(1, (-1, layout.num_topk)), 2)
    return exchange_equal(hosts.rail, mine, "combine" if hosts.inside is None else "combine between hosts")


def sum_in_order(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum bf16 along a dimension, one after the other in float32, rounded once."""
    first, *others = rows.float().unbind(dim)
    total = first + 0.0  # -0 becomes 0, as where a sum begins with 0
    for row in others:
        total += row
    return total.to(rows.dtype)
