"""MoE layer over ranks by three collectives of rows in counted numbers. Only the counts are copied to the host.

Over NCCL all that follows the counts is queued on the device at once; the host waits for the rows at the very end.

    numbers  = agree(routing)                     one all-gather: what each rank has for each expert and each rank
    rows     = dispatch(tokens, routing)          a token is sent once to each rank that owns one of its experts
    hidden   = L1(rows), activation, quantise     as on one rank
    rows     = L2(hidden)
    out      = combine(rows)                      every row is sent back, and each token's slots summed in their order

A slot is a token's place for one expert; slots are numbered token * k + place, over all received tokens. Owners sort
the rows of their slots by (expert, source rank, slot): the order in which one rank would hold the tokens of all ranks,
concatenated. So the result has the bits of one rank.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch

from envoi.ops.moe import reference
from envoi.ops.moe.choose import has_kernels
from envoi.ops.moe.experts import run_experts
from envoi.ops.moe.op import check_ids
from envoi.ops.moe.parallel import collectives
from envoi.ops.moe.parallel.collectives import Channel
from envoi.ops.moe.parallel.exchange import Rows, Team
from envoi.ops.moe.parallel.failure import BEGUN, DONE, GATHERED, in_background, oversee
from envoi.ops.moe.parallel.load import note
from envoi.ops.moe.parallel.placement import place
from envoi.ops.moe.permute import combine_rows
from envoi.ops.moe.reference import combine as sum_rows
from envoi.ops.moe.reference import quantize_tokens, take_rows
from envoi.ops.moe.router.reference import count_tokens
from envoi.spans import span
from envoi.types import ExpertRows, ExpertWeights, Matrix, QuantTensor


@dataclass(frozen=True)
class SentTokens:
    """Tokens of one rank or several as they are sent, in the order of their ranks.

    rows [T, H]: quantised. topk_ids [T, k] int32, weights [T, k] float32: of their slots, over the experts of all
    ranks; -1 = masked."""

    rows: Matrix
    topk_ids: torch.Tensor
    weights: torch.Tensor


def owners(topk_ids: torch.Tensor, rank_ends: torch.Tensor) -> torch.Tensor:
    """Return the rank that owns each slot's expert, int32, the number of ranks for a masked slot.

    rank_ends [num_ranks] int32: one past each rank's last expert. Slots whose id is no expert count as masked.
    """
    ranks = torch.bucketize(topk_ids, rank_ends, out_int32=True, right=True)
    return torch.where(topk_ids < 0, len(rank_ends), ranks)


def needed_by(owner: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Tell which ranks need which tokens: bool [num_ranks, M]. owner [M, k]: as `owners` returns it."""
    needed = torch.zeros(len(owner), num_ranks + 1, dtype=torch.bool, device=owner.device)
    return needed.scatter_(1, owner.long(), True)[:, :num_ranks].t()


def sort_by_expert(tokens: SentTokens, first: int, last: int, num_rows: int) -> ExpertRows:
    """Gather the rows of experts first .. last - 1. num_rows: how many there are.

    pos_to_slot of the result: the slot of each row, numbered over all tokens.
    """
    ids, num_local = tokens.topk_ids.flatten(), last - first
    local = torch.where((ids >= first) & (ids < last), ids - first, num_local)
    ranked, order = local.sort(stable=True)
    experts = torch.arange(num_local + 1, dtype=ranked.dtype, device=ranked.device)
    offsets = torch.searchsorted(ranked, experts, out_int32=True)
    order = order[:num_rows]
    rows = take_rows(tokens.rows, order // max(tokens.topk_ids.shape[1], 1))
    return ExpertRows(rows, offsets, order.to(torch.int32), tokens.weights.flatten()[order])


def sum_slots(rows: torch.Tensor, pos_to_slot: torch.Tensor, num_tokens: int, k: int) -> torch.Tensor:
    """Sum rows [P, H] bf16 to tokens [num_tokens, H] in slot order, in float32, rounded once."""
    if not has_kernels(rows.device) or not num_tokens * k:
        return sum_rows(rows, pos_to_slot, num_tokens, k)
    slot_to_pos = torch.full((num_tokens, k), -1, dtype=torch.int32, device=rows.device)
    slot_to_pos.view(-1)[pos_to_slot.long()] = torch.arange(len(pos_to_slot), dtype=torch.int32, device=rows.device)
    return combine_rows(rows, slot_to_pos)


def to_bytes(tokens: SentTokens) -> torch.Tensor:
    """Concatenate each token's parts as bytes: uint8 [T, B]."""
    return torch.cat([_seen_as(part, torch.uint8) for part in _parts(tokens)], dim=1)


def from_bytes(packed: torch.Tensor, like: SentTokens) -> SentTokens:
    """Inverse of `to_bytes`; `like` gives the dtypes and widths."""
    parts = _parts(like)
    widths = [part.shape[1] * part.element_size() for part in parts]
    # Copies, always: one row's columns are contiguous where they are, at any byte, and so can't be seen as float32.
    own = (columns.clone(memory_format=torch.contiguous_format) for columns in packed.split(widths, 1))
    rows, *others = (_seen_as(columns, part.dtype) for columns, part in zip(own, parts, strict=True))
    if not isinstance(like.rows, torch.Tensor):
        return SentTokens(QuantTensor(rows, others[0], like.rows.group), *others[1:])
    return SentTokens(rows, *others)


def _seen_as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the bytes of a matrix [T, C] as elements of another dtype, [T, bytes of a row / bytes of an element]."""
    if x.numel():
        return x.contiguous().view(dtype)
    # Without an element any strides count as contiguous, also those that `view` refuses.
    return x.new_empty(len(x), x.shape[1] * x.element_size() // dtype.itemsize, dtype=dtype)


def _parts(tokens: SentTokens) -> list[torch.Tensor]:
    rows = [tokens.rows] if isinstance(tokens.rows, torch.Tensor) else [tokens.rows.values, tokens.rows.sf]
    return [*rows, tokens.topk_ids, tokens.weights]


@dataclass(frozen=True)
class Numbers:
    """Numbers that all ranks know of a call, on the host. refused: by rank, 1 if its arguments are wrong.

    k: slots of a token, by rank.
    tokens [num_ranks, num_ranks]: tokens that a rank (row) sends to a rank. slots [num_ranks, num_ranks]: their slots
    whose experts are there, which is the number of rows sent back. experts [num_experts]: slots of all ranks.
    """

    refused: list[int]
    k: list[int]
    tokens: torch.Tensor
    slots: torch.Tensor
    experts: torch.Tensor


def agree(
    channel: Channel, topk_ids: torch.Tensor | None, expert_offsets: Sequence[int], rank_ends: torch.Tensor
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
    everyone = collectives.gather_tensors(channel, mine, "dispatch: exchange of counts").cpu()
    sizes = [last - first for first, last in pairwise(expert_offsets)]
    counts = everyone[:, 2 + num_ranks :]
    by_rank = torch.stack([part.sum(1) for part in counts.split(sizes, 1)], 1)
    refused, k = everyone[:, :2].T.tolist()
    return Numbers(refused, k, everyone[:, 2 : 2 + num_ranks], by_rank, counts.sum(0))


class Counted:
    """Exchange of as many rows as there are, between all ranks alike. Methods are those of `exchange.OnDevice`.

    counts [4] int32, pinned, since the driver may wait for the device: collectives that the host has queued (BEGUN),
    and of these the device has done (DONE); GATHERED is one more between a call's two. See `oversee`.
    """

    name, presum, results = "counted", False, "bf16"

    def __init__(self, channel: Channel):
        """Let hosts wait for peers that compile, and end collectives that wait for a lost one, where NCCL sends."""
        self.lock, self.channel = threading.RLock(), channel
        self.pending: Rows | None = None
        self.counts = torch.zeros(4, dtype=torch.int32, device="cpu", pin_memory=channel.device.type == "cuda")
        self._done = torch.zeros(2, dtype=torch.int32, device=channel.device)
        self._ahead = torch.tensor([1, 0], dtype=torch.int32, device=channel.device)
        if channel.queues:
            channel.watch.wait_for_compilers()
            channel.watch.broken = partial(collectives.error_of, channel.data)
            end = partial(collectives.end_collectives, channel.data)
            channel.watch.end = partial(in_background, end)  # NCCL takes a second for it
            oversee(self, self.counts, channel.watch, lambda: None)

    def note(self, dispatched: Rows | None) -> None:
        """Set `pending`."""
        self.pending = dispatched

    def dispatch(
        self, tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, team: Team, refusal: str
    ) -> Rows:
        """Send this rank's tokens; see `OnDevice.dispatch`. Raises ValueError on all ranks if one refuses."""
        channel, rank_ends, given = self.channel, team.rank_ends, topk_ids
        if team.placed is not None and not refusal:
            topk_weights, topk_ids = place(team.placed, topk_weights, topk_ids, tokens)
        numbers = agree(channel, None if refusal else topk_ids, team.expert_offsets, rank_ends)
        if any(numbers.refused):
            refusal = refusal or collectives.complaint(check_ids, given, team.num_experts)
            collectives.refuse_together(channel, refusal, "exchange of refusals")
        collectives.same_everywhere("routing.topk_ids: num_topk", numbers.k)
        note(team.history, numbers.experts)
        mine = channel.rank
        send, receive = numbers.tokens[mine].tolist(), numbers.tokens[:, mine].tolist()
        with span("dispatch"):
            owner = owners(topk_ids, rank_ends)
            needed = needed_by(owner, channel.num_ranks).flatten()
            needed = torch.nonzero_static(needed, size=sum(send))[:, 0] % max(1, len(owner))
            sent = SentTokens(quantize_tokens(tokens, team.format), topk_ids, topk_weights)
            with self.queued(0):
                packed = collectives.exchange_rows(channel, to_bytes(sent)[needed], send, receive, "dispatch")
            first, last = team.expert_offsets[mine : mine + 2]
            rows = sort_by_expert(from_bytes(packed, sent), first, last, int(numbers.slots[:, mine].sum()))
        return Rows(rows.rows, rows.offsets, rows.topk_weights, topk_ids, (rows, owner, numbers))

    @contextmanager
    def queued(self, number: int) -> Iterator[None]:
        """Count a collective that is queued within the context, number 0 or 1 of its call, here and on the device."""
        self.counts[BEGUN] += 1
        begun = int(self.counts[BEGUN])
        try:
            yield
        finally:  # also if it is interrupted: what isn't counted would never be done
            if number == 0:
                torch.add(self._ahead, begun, out=self._done)
            else:
                self._done[1:].fill_(begun)
            self.counts[GATHERED : DONE + 1].copy_(self._done, non_blocking=True)

    def run_experts(self, received: Rows, experts: ExpertWeights) -> torch.Tensor:
        """Run this rank's experts on the rows."""
        return run_local_experts(received.back[0], experts)

    def combine(self, rows: torch.Tensor, received: Rows, by_others: bool = False) -> torch.Tensor:
        """Send rows back in the order of (source rank, slot); see `OnDevice.combine`."""
        (came, owner, numbers), mine = received.back, self.channel.rank
        send, receive = numbers.slots[:, mine].tolist(), numbers.slots[mine].tolist()
        with span("combine"):
            back = rows[came.pos_to_slot.argsort()].view(torch.uint8)
            with self.queued(1):
                packed = collectives.exchange_rows(self.channel, back, send, receive, "combine")
            pos_to_slot = owner.flatten().sort(stable=True).indices[: sum(receive)]
            out = sum_slots(packed.view(rows.dtype), pos_to_slot.to(torch.int32), *owner.shape)
        if self.channel.queues:
            self.channel.watch.wait_for_device(self.counts, "combine")
        return out

    def check(self) -> None:
        """Raise the error of an earlier call."""
        if self.channel.watch.failure is not None:
            raise self.channel.watch.failure


def run_local_experts(rows: ExpertRows, experts: ExpertWeights) -> torch.Tensor:
    """Run this rank's experts by the implementation that one rank would choose, so that the bits are the same."""
    if has_kernels(rows.offsets.device):
        return run_experts(rows.rows, rows.topk_weights, rows.offsets, experts)
    return reference.expert_mlp(rows, experts)
