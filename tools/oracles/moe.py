"""Oracle of the MoE layer: float64, no rounding between the steps; tests and error columns compare with it."""

import torch

from envoi.epilogues.activation import activate
from envoi.ops.moe.packing import unpack
from envoi.types import ExpertWeights


def moe_oracle(
    tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, experts: ExpertWeights
) -> torch.Tensor:
    """Compute the layer in float64 [M, H] on the weights as packed, so without the format's rounding of them."""
    gate_up, down, gate_up_bias, down_bias = unpack(experts, "interleaved", torch.float64)
    out = torch.zeros(tokens.shape, dtype=torch.float64, device=tokens.device)
    for expert in range(experts.num_local_experts):
        token, slot = (topk_ids == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        h = tokens[token].double() @ gate_up[expert].T
        if gate_up_bias is not None:
            h = h + gate_up_bias[expert]
        y = activate(h, experts.activation, experts.swiglu_limit) @ down[expert].T
        if down_bias is not None:
            y = y + down_bias[expert]
        out.index_add_(0, token, y * topk_weights[token, slot].double().unsqueeze(1))
    return out
