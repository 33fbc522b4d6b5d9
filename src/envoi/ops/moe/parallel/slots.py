"""Order of slots and rows between ranks, and tokens as bytes, in torch on any device. Nothing waits for the device.

A slot is a token's place for one expert; slots are numbered token * k + place, over all received tokens. Owners sort
the rows of their slots by (expert, source rank, slot): the order in which one rank would hold the tokens of all ranks,
concatenated. So the bits are those of one rank.
"""

from dataclasses import dataclass

import torch

from envoi.ops.moe.choose import has_kernels
from envoi.ops.moe.permute import combine_rows
from envoi.ops.moe.reference import combine, take_rows
from envoi.types import ExpertRows, Matrix, QuantTensor


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


def positions(mask: torch.Tensor, count: int) -> torch.Tensor:
    """Return where a mask is True, int64 [count]. count: how often it is, as the host knows it."""
    return torch.nonzero_static(mask.flatten(), size=count)[:, 0]


def sort_by_expert(tokens: SentTokens, first: int, last: int, num_rows: int) -> ExpertRows:
    """Gather the rows of experts first .. last - 1. num_rows: how many there are.

    pos_to_slot of the result: the slot of each row, numbered over all tokens.
    """
    ids, num_local = tokens.topk_ids.flatten(), last - first
    local = torch.where((ids >= first) & (ids < last), ids - first, num_local)
    ranked, order = local.sort(stable=True)
    experts = torch.arange(num_local + 1, dtype=ranked.dtype, device=ranked.device)
    # Up to num_rows, and so within the rows also where a lost peer's exchange was ended and ids are whatever was there.
    offsets = torch.searchsorted(ranked[:num_rows], experts, out_int32=True)
    order = order[:num_rows]
    rows = take_rows(tokens.rows, order // max(tokens.topk_ids.shape[1], 1))
    return ExpertRows(rows, offsets, order.to(torch.int32), tokens.weights.flatten()[order])


def sum_slots(rows: torch.Tensor, pos_to_slot: torch.Tensor, num_tokens: int, k: int) -> torch.Tensor:
    """Sum rows [P, H] bf16 to tokens [num_tokens, H] in slot order, in float32, rounded once."""
    if not has_kernels(rows.device) or not num_tokens * k:
        return combine(rows, pos_to_slot, num_tokens, k)
    slot_to_pos = torch.full((num_tokens, k), -1, dtype=torch.int32, device=rows.device)
    count = torch.arange(len(pos_to_slot), dtype=torch.int32, device=rows.device)
    slot_to_pos.view(-1)[pos_to_slot.long()] = count
    return combine_rows(rows, slot_to_pos)


def to_bytes(tokens: SentTokens) -> torch.Tensor:
    """Concatenate each token's parts as bytes: uint8 [T, B]."""
    parts = [*_parts(tokens.rows), tokens.topk_ids, tokens.weights]
    return torch.cat([_seen_as(part, torch.uint8) for part in parts], dim=1)


def from_bytes(packed: torch.Tensor, like: SentTokens) -> SentTokens:
    """Inverse of `to_bytes`; `like` gives the dtypes and widths."""
    # Copies, always: one row's columns are contiguous where they are, at any byte, and so can't be seen as float32.
    columns, start = [], 0
    for part in (*_parts(like.rows), like.topk_ids, like.weights):
        width = part.shape[1] * part.element_size()
        own = packed[:, start : start + width].clone(memory_format=torch.contiguous_format)
        columns.append(_seen_as(own, part.dtype))
        start += width
    if isinstance(like.rows, torch.Tensor):
        return SentTokens(*columns)
    return SentTokens(QuantTensor(columns[0], columns[1], like.rows.group), *columns[2:])


def _seen_as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the bytes of a matrix [T, C] as elements of another dtype, [T, bytes of a row / bytes of an element]."""
    if x.numel():
        return x.contiguous().view(dtype)
    # Without an element any strides count as contiguous, also those that `view` refuses.
    return x.new_empty(len(x), x.shape[1] * x.element_size() // dtype.itemsize, dtype=dtype)


def _parts(rows: Matrix) -> list[torch.Tensor]:
    return [rows] if isinstance(rows, torch.Tensor) else [rows.values, rows.sf]
