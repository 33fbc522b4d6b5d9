"""MoE layer on one rank by kernels: sort -> gather -> L1 -> L2 -> combine."""

from dataclasses import replace
from typing import cast

import torch

from envoi.ops.gemm.grouping import EXPERTS_ROWS
from envoi.ops.gemm.hopper_w4a16 import few
from envoi.ops.moe.decode.bf16_fp8 import host as decode
from envoi.ops.moe.experts import by_kernels, run_experts
from envoi.ops.moe.permute import combine_rows, gather_rows, sort_slots
from envoi.quant.formats import format_named
from envoi.runtime.devices import implementation
from envoi.spans import span
from envoi.types import ExpertWeights, QuantTensor

FEW_ACTIVATIONS = ("swiglu", "swiglu_oai")  # of the kernels for few tokens, which take no other epilogue


def has_kernels(device: torch.device) -> bool:
    """Tell whether kernels run on this device; else torch computes the layer (`envoi.ops.moe.reference`)."""
    return implementation(device) != "torch"


def run_layer(
    tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, experts: ExpertWeights,
    batch_invariant: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Run the whole layer on one rank, sort -> gather -> L1 -> L2 -> combine: tokens [M, H] bf16 -> [M, H] bf16.

    For few tokens other kernels run: in bf16 and fp8_block128 with the same bits; on MXFP4 and INT4 weights, unless
    batch_invariant, sums along K are split at places that depend on the routing, so that bits may differ. The host
    never waits for the device, so a CUDA graph can hold the call. Slots whose id is no expert count as masked.
    """
    if topk_ids.numel() == 0:
        return torch.zeros(tokens.shape, dtype=tokens.dtype, device=tokens.device)
    experts = by_kernels(experts)
    few_tokens = None if batch_invariant else few_layer(experts)
    if few_tokens is not None and not few.why_not(few_tokens, *topk_ids.shape):
        return few.moe(tokens, topk_weights, topk_ids, few_tokens)
    if implementation(tokens.device) == "hopper" and not decode.why_not(experts, *topk_ids.shape):
        return decode.run(tokens, topk_weights, topk_ids, experts)
    with span("permute"):
        row_map = sort_slots(topk_ids, experts.num_local_experts)
        rows, weights = gather_rows(tokens, topk_weights, row_map, format_named(experts.format).activations)
    grouping = replace(EXPERTS_ROWS, batch_invariant=batch_invariant)
    out = run_experts(rows, weights, row_map.offsets, experts, grouping)
    with span("combine"):
        return combine_rows(out, row_map.slot_to_pos)


def few_layer(experts: ExpertWeights) -> few.Layer | None:
    """Return the experts as the kernels for few tokens take them, None if they don't: they read MXFP4 and INT4."""
    if experts.order not in few.ORDERS or not isinstance(experts.gate_up, QuantTensor):
        return None
    if experts.gate_up.sf.dtype == torch.float8_e4m3fn or experts.activation not in FEW_ACTIVATIONS:
        return None
    return few.Layer(
        experts.gate_up, cast(QuantTensor, experts.down), experts.gate_up_bias, experts.down_bias, experts.activation,
        experts.swiglu_limit,
    )  # fmt: skip
