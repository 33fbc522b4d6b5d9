"""Reference of permute, the experts and combine in torch, on any device.

    permute:  rows in the order of (expert, slot); masked slots have no row
    combine:  out[m] = sum over slots s of rows[slot_to_pos[m, s]], in slot order, float32, rounded once

    for each expert e, for each of its rows r with routing weight w:
        gate, up = split(gate_up[e] @ r + gate_up_bias[e])                    float32
        gate = min(gate, limit), up = clip(up, -limit, limit)                 if there is a limit
        h = silu(gate) * up * w            (swiglu_oai: (up + 1) * gate * sigmoid(1.702 * gate) * w)
        h = quantise(h)                                                       as the format says; bf16 otherwise
        out = down[e] @ h + w * down_bias[e]                                  float32, rounded to bf16 once

geglu has gelu(gate), geglu_tanh its approximation by tanh, in place of silu(gate); without a gate h = silu(up) * w or
relu(up)^2 * w. split takes every other value, or in the layout "concat" the first half and the second.
Shared experts have slots after those of the routing, of weight 1 or sigmoid(token @ shared_gate) in float32.
The routing weight is applied before the second GEMM, which is linear in it, so that combine is a plain sum. The kernels
(`envoi.ops.moe.experts`) round h to bf16 before they quantise it in groups of a row or of 128: in the formats fp8_row,
fp8_block128 and mxfp4_fp8. Both products are of nvfp4's weights without their scales, by which the sums are multiplied
in float32. int4's weights are rounded to bf16, once, as the kernels for many tokens do; those for few tokens multiply
integers, and sums by factors in float32.
"""

from dataclasses import replace

import torch

from envoi.epilogues.library import expert_l1
from envoi.ops.gemm import grouped_gemm
from envoi.ops.moe.epilogues import l1_operands, l2_epilogue, l2_operands
from envoi.ops.moe.op import scale_of
from envoi.quant.bits import as_bytes
from envoi.quant.cast import dequantize, quantize
from envoi.quant.formats import format_named
from envoi.quant.fragments import to_rows
from envoi.spans import span
from envoi.types import ExpertRows, ExpertWeights, Matrix, QuantTensor


def quantize_tokens(tokens: torch.Tensor, format: str) -> Matrix:
    """Quantise bf16 tokens [M, H] in the format's activation scheme; return them unchanged if it has none."""
    scheme = format_named(format).activations
    return tokens if scheme is None else quantize(tokens, scheme, "tokens")


def expert_mlp(rows: ExpertRows, experts: ExpertWeights) -> torch.Tensor:
    """Run L1 -> activation -> quantise -> L2 on sorted rows: [P, H] bf16, each multiplied by its routing weight."""
    scheme = format_named(experts.format).activations
    has_bias, has_scale = experts.gate_up_bias is not None, scale_of(experts.gate_up) is not None
    left_as, layout = scheme.name if scheme else None, experts.gate_up_layout
    l1 = expert_l1(experts.activation, experts.swiglu_limit, has_bias, left_as, layout, has_scale=has_scale)
    weights = rows.topk_weights
    gate_up, down = _by_rows(experts.gate_up), _by_rows(experts.down)
    with span("L1"):
        hidden = grouped_gemm(rows.rows, gate_up, rows.offsets, l1, **l1_operands(experts, weights))
    with span("L2"):
        operands, l2 = l2_operands(experts, weights), l2_epilogue(experts)
        return grouped_gemm(hidden, down, rows.offsets, l2, out_dtype=torch.bfloat16, **operands)


def _by_rows(weight: Matrix) -> Matrix:
    """Return a weight in rows, without its scale: packed on a Hopper GPU it may be in the order of its kernels.

    INT4 is rounded to bf16.
    """
    if isinstance(weight, QuantTensor) and weight.integers:
        return dequantize(weight).to(torch.bfloat16)
    return weight if isinstance(weight, torch.Tensor) else to_rows(replace(weight, scale=None))


def moe(
    tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, experts: ExpertWeights
) -> torch.Tensor:
    """Run the whole layer on one rank: tokens [M, H] bf16 -> [M, H] bf16."""
    if experts.num_shared:
        shared = experts.num_routed, experts.num_shared, experts.shared_gate
        topk_weights, topk_ids = with_shared(tokens, topk_weights, topk_ids, *shared)
    with span("permute"):
        rows = permute(quantize_tokens(tokens, experts.format), topk_weights, topk_ids, experts.num_local_experts)
    out = expert_mlp(rows, experts)
    with span("combine"):
        return combine(out, rows.pos_to_slot, *topk_ids.shape)


def with_shared(
    tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, first: int, num_shared: int,
    gate: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return weights and ids of a token's slots followed by those of shared experts, numbered from `first` on."""
    shape = len(tokens), num_shared
    ids = torch.arange(first, first + shape[1], dtype=topk_ids.dtype, device=topk_ids.device).expand(shape)
    if gate is None:
        weights = topk_weights.new_ones(shape)
    else:
        weights = (tokens.float() @ gate).sigmoid().unsqueeze(1).expand(shape)
    return torch.cat((topk_weights, weights), 1), torch.cat((topk_ids, ids), 1)


def mapped(topk_ids: torch.Tensor, expert_map: torch.Tensor) -> torch.Tensor:
    """Return expert_map[topk_ids], of the ids' dtype; -1 for what is no index. expert_map: int32 [ids]."""
    extended = torch.nn.functional.pad(expert_map, (0, 1), value=-1)  # its last, so that -1 as an index gives -1
    return extended[topk_ids.clamp(-1, len(expert_map))].to(topk_ids.dtype)


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
