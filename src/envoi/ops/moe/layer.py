"""MoE layer on one rank by kernels: sort -> gather -> L1 -> L2 -> combine."""

from dataclasses import replace

import torch

from envoi.ops.gemm.grouping import EXPERTS_ROWS
from envoi.ops.gemm.hopper_w4a16 import few
from envoi.ops.moe.choose import LayerPath, choose_layer, decode_mx_layer
from envoi.ops.moe.decode.bf16_fp8 import host as decode
from envoi.ops.moe.experts import by_kernels, run_experts
from envoi.ops.moe.permute import combine_rows, gather_rows, sort_slots
from envoi.quant.formats import format_named
from envoi.spans import span
from envoi.types import ExpertWeights


def run_layer(
    tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, experts: ExpertWeights,
    batch_invariant: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Run the whole layer on one rank, sort -> gather -> L1 -> L2 -> combine: tokens [M, H] bf16 -> [M, H] bf16.

    For few tokens other kernels run: in bf16 and fp8_block128 with the same bits; on MXFP4 and INT4 weights, unless
    batch_invariant, sums along K are split at places that depend on the routing, so that bits may differ. The host
    never waits for the device, so a CUDA graph can hold the call. Slots whose id is no expert count as masked.
    """
    if tokens.shape[0] == 0:
        return torch.empty(tokens.shape, dtype=tokens.dtype, device=tokens.device)  # a call that can be planned
    if topk_ids.numel() == 0:
        return torch.zeros(tokens.shape, dtype=tokens.dtype, device=tokens.device)
    experts = by_kernels(experts)
    num_tokens, num_topk = topk_ids.shape
    choice = choose_layer(experts, num_tokens, num_topk, batch_invariant)
    if choice.path is LayerPath.DECODE_MX:
        return few.moe(tokens, topk_weights, topk_ids, decode_mx_layer(experts))
    if choice.path is LayerPath.DECODE:
        return decode.run(tokens, topk_weights, topk_ids, experts)
    with span("permute"):
        row_map = sort_slots(topk_ids, experts.num_local_experts)
        rows, weights = gather_rows(tokens, topk_weights, row_map, format_named(experts.format).activations)
    grouping = replace(EXPERTS_ROWS, batch_invariant=batch_invariant)
    out = run_experts(rows, weights, row_map.offsets, experts, grouping, None, choice)
    with span("combine"):
        return combine_rows(out, row_map.slot_to_pos)
