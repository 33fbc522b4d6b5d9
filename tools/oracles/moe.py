"""Oracle of the MoE layer: float64, no rounding between the steps; tests and error columns compare with it."""

import torch
from torch.nn import functional

from envoi.epilogues.activation import computed
from envoi.ops.moe.packing import unpack
from envoi.types import ExpertWeights, has_gate


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


def activate(h: torch.Tensor, activation: str, limit: float | None) -> torch.Tensor:
    """Apply the activation to interleaved gate and up columns [.., 2I], or without a gate to up columns [.., I]; return
    [.., I] in the dtype of h. Formulas are torch's own, but for a user's."""
    own = ":" in activation
    if not has_gate(activation):
        if own:
            return computed(activation, h)
        return functional.silu(h) if activation == "silu" else functional.relu(h).square()
    gate, up = h[..., 0::2], h[..., 1::2]
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if own:
        return computed(activation, gate, up)
    if activation == "swiglu_oai":
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    if activation == "swiglu":
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="tanh" if activation == "geglu_tanh" else "none") * up
