"""Reference of permute and combine on one rank: data movement, bitwise, and one fp32 sum.

permute:  rows in the order of (expert, slot); masked slots have no row
combine:  out[m] = sum over slots s of rows[slot_to_pos[m, s]], in slot order, float32, rounded once
"""

import torch

from envoi.quant.bits import as_bytes
from envoi.types import ExpertRows, Matrix, QuantTensor


def take_rows(x: Matrix, index: torch.Tensor) -> Matrix:
    """Return the rows `index` of a matrix whose scale factors, if any, belong to single rows; else raise ValueError."""
    if isinstance(x, torch.Tensor):
        return x[index]
    if x.group[0] != 1:
        raise ValueError(f"rows: expected scale factors of single rows, got groups of {x.group[0]} rows")
    values, sf = (as_bytes(part)[index].view(part.dtype) for part in (x.values, x.sf))
    return QuantTensor(values, sf, x.group, x.scale)


def sort_slots(topk_ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort topk_ids [M, k]: return pos_to_slot int32 [P] and offsets int32 [N + 1]; P slots aren't masked."""
    flat = torch.where(topk_ids < 0, num_experts, topk_ids).flatten()
    ranked, order = flat.sort(stable=True)
    # Offsets are where each id would be inserted, so masked slots, sorted last, are past offsets[N].
    offsets = torch.searchsorted(ranked, torch.arange(num_experts + 1, device=flat.device, dtype=ranked.dtype))
    return order[: int(offsets[-1])].to(torch.int32), offsets.to(torch.int32)


def permute(tokens: Matrix, topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_experts: int) -> ExpertRows:
    """Gather the rows of each expert: tokens [M, H] -> ExpertRows with P rows."""
    pos_to_slot, offsets = sort_slots(topk_ids, num_experts)
    slots = pos_to_slot.long()
    rows = take_rows(tokens, slots // max(topk_ids.shape[1], 1))
    return ExpertRows(rows, offsets, pos_to_slot, topk_weights.flatten()[slots])


def combine(rows: torch.Tensor, pos_to_slot: torch.Tensor, num_tokens: int, k: int) -> torch.Tensor:
    """Sum rows [P, H] to tokens [num_tokens, H] of the rows' dtype, in slot order, in fp32, rounded once."""
    slots = rows.new_zeros(num_tokens * k, rows.shape[1])
    slots[pos_to_slot.long()] = rows
    slots = slots.view(num_tokens, k, rows.shape[1])
    out = torch.zeros(num_tokens, rows.shape[1], dtype=torch.float32, device=rows.device)
    for slot in range(k):
        out += slots[:, slot].float()
    return out.to(rows.dtype)
