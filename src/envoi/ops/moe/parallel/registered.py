"""Operator of `ExpertParallel.moe`, which finds its object by name."""

import weakref
from typing import Any

import torch

from envoi.ops.moe import op
from envoi.runtime.custom_op import operator
from envoi.types import Routing

CLOSED = "ExpertParallel: expected an open object, got one that was closed"
instances: "weakref.WeakValueDictionary[str, Any]" = weakref.WeakValueDictionary()  # open ones


@operator("moe_parallel", op.empty_out, op.mlp_flops)
def moe_parallel(
    tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, parallel: str,
    gate_up: torch.Tensor, gate_up_sf: torch.Tensor | None, gate_up_bias: torch.Tensor | None, down: torch.Tensor,
    down_sf: torch.Tensor | None, down_bias: torch.Tensor | None, format: str, activation: str,
    swiglu_limit: float | None, gate_up_bounded: bool, down_bounded: bool, order: str, gate_up_layout: str,
    gate_up_scale: torch.Tensor | None, down_scale: torch.Tensor | None, gate_up_zeros: torch.Tensor | None,
    down_zeros: torch.Tensor | None, num_shared: int, shared_gate: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Run the layer of the object of this name; the experts are `op.flatten`'s."""
    experts = op.unflatten(
        gate_up, gate_up_sf, gate_up_bias, down, down_sf, down_bias, format, activation, swiglu_limit, gate_up_bounded,
        down_bounded, order, gate_up_layout, gate_up_scale, down_scale, gate_up_zeros, down_zeros, num_shared,
        shared_gate,
    )  # fmt: skip
    if parallel not in instances:
        raise ValueError(CLOSED)
    return instances[parallel]._run(tokens, Routing(topk_weights, topk_ids, num_experts), experts)
