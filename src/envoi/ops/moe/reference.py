"""Reference of the experts in torch, on any device.

    for each expert e, for each of its rows r with routing weight w:
        gate, up = split(gate_up[e] @ r + gate_up_bias[e])                    float32
        gate = min(gate, limit), up = clip(up, -limit, limit)                 if there is a limit
        h = silu(gate) * up * w            (swiglu_oai: (up + 1) * gate * sigmoid(1.702 * gate) * w)
        h = quantise(h)                                                       as the format says; bf16 otherwise
        out = down[e] @ h + w * down_bias[e]                                  float32, rounded to bf16 once

geglu has gelu(gate), geglu_tanh its approximation by tanh, in place of silu(gate); without a gate h = silu(up) * w or
relu(up)^2 * w. split takes every other value, or in the layout "concat" the first half and the second.
The routing weight is applied before the second GEMM, which is linear in it, so that combine is a plain sum. The kernels
(`envoi.ops.moe.experts`) round h to bf16 before they quantise it to fp8_row or fp8_block128. Both products are of
nvfp4's weights without their scales, by which the sums are multiplied in float32.
"""

from dataclasses import replace
from typing import Any

import torch

from envoi.epilogues.library import expert_l1, expert_l2
from envoi.ops.gemm import grouped_gemm
from envoi.ops.moe.op import columns_of, scale_of
from envoi.ops.moe.reference_permute import combine, permute
from envoi.quant.cast import quantize
from envoi.quant.formats import format_named
from envoi.quant.fragments import to_rows
from envoi.spans import span
from envoi.types import ExpertRows, ExpertWeights, Matrix


def quantize_tokens(tokens: torch.Tensor, format: str) -> Matrix:
    """Quantise bf16 tokens [M, H] in the format's activation scheme; return them unchanged if it has none."""
    scheme = format_named(format).activations
    return tokens if scheme is None else quantize(tokens, scheme, "tokens")


def expert_mlp(rows: ExpertRows, experts: ExpertWeights) -> torch.Tensor:
    """Run L1 -> activation -> quantise -> L2 on sorted rows: [P, H] bf16, each multiplied by its routing weight."""
    scheme = format_named(experts.format).activations
    has_bias, has_scale = experts.gate_up_bias is not None, scale_of(experts.gate_up) is not None
    left_as = scheme.name if scheme else None
    layout = experts.gate_up_layout
    l1 = expert_l1(experts.activation, experts.swiglu_limit, has_bias, left_as, layout, has_scale=has_scale)
    l1_operands: dict[str, Any] = {**columns_of(experts.gate_up, experts.gate_up_bias)}
    l2_operands: dict[str, Any] = {**columns_of(experts.down, experts.down_bias)}
    if has_bias:
        l2_operands["weight"] = rows.topk_weights
    gate_up, down = _by_rows(experts.gate_up), _by_rows(experts.down)
    with span("L1"):
        hidden = grouped_gemm(rows.rows, gate_up, rows.offsets, l1, weight=rows.topk_weights, **l1_operands)
    with span("L2"):
        return grouped_gemm(
            hidden, down, rows.offsets, expert_l2(has_bias, has_scale), out_dtype=torch.bfloat16, **l2_operands
        )  # fmt: skip


def _by_rows(weight: Matrix) -> Matrix:
    """Return a weight in rows, without its scale: packed on a Hopper GPU it may be in the order of its kernels."""
    return weight if isinstance(weight, torch.Tensor) else to_rows(replace(weight, scale=None))


def moe(
    tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, experts: ExpertWeights
) -> torch.Tensor:
    """Run the whole layer on one rank: tokens [M, H] bf16 -> [M, H] bf16."""
    with span("permute"):
        rows = permute(quantize_tokens(tokens, experts.format), topk_weights, topk_ids, experts.num_local_experts)
    out = expert_mlp(rows, experts)
    with span("combine"):
        return combine(out, rows.pos_to_slot, *topk_ids.shape)
