"""`envoi.moe` on one rank: check, call the operator."""

import torch

from envoi.experts import launch, reference
from envoi.experts.op import check_ids, check_tokens, flatten, unflatten
from envoi.operators import operator
from envoi.types import ExpertWeights, Routing


def moe(tokens: torch.Tensor, routing: Routing, experts: ExpertWeights) -> torch.Tensor:
    """Run the chosen experts on every token and sum their outputs: tokens [M, H] bf16 -> [M, H] bf16.

    routing: from `envoi.route`, or a Routing made by hand: topk_ids [M, k] int32 (-1 = masked slot), topk_weights
        [M, k] float32.
        A shared expert is a slot like any other, of weight 1 for instance.
    experts: from `envoi.experts.pack`; all N of them live here. For experts spread over ranks see `ExpertParallel`.

    The steps are permute -> L1 -> activation, times weight, quantise -> L2 -> combine; what each computes, and where it
    rounds, is in `envoi.experts.reference`. A token whose slots are all masked gives zeros. Bitwise the same in every
    run.
    Raises ValueError for wrong dtypes, shapes or devices, and on a CPU for ids out of range. A GPU isn't waited for,
    so that a CUDA graph can capture the call: there a slot whose id no expert has counts as masked.
    """
    check_tokens(tokens, routing, experts)
    if routing.num_experts != experts.num_local_experts:
        raise ValueError(
            f"experts: expected all {routing.num_experts} experts of the routing, got {experts.num_local_experts}; "
            "use ExpertParallel where they are spread over ranks"
        )
    return _moe(tokens, routing.topk_weights, routing.topk_ids, *flatten(experts))


def _moe_fake(tokens, *arguments):
    return torch.empty_like(tokens, memory_format=torch.contiguous_format)


@operator("moe", _moe_fake)
def _moe(
    tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor,
    gate_up: torch.Tensor, gate_up_sf: torch.Tensor | None, gate_up_bias: torch.Tensor | None,
    down: torch.Tensor, down_sf: torch.Tensor | None, down_bias: torch.Tensor | None,
    format: str, activation: str, swiglu_limit: float | None, gate_up_tame: bool, down_tame: bool,
    order: str,
) -> torch.Tensor:  # fmt: skip
    experts = unflatten(
        gate_up, gate_up_sf, gate_up_bias, down, down_sf, down_bias, format, activation, swiglu_limit, gate_up_tame,
        down_tame, order,
    )  # fmt: skip
    if topk_ids.device.type == "cpu" or not launch.supported(topk_ids.device):
        check_ids(topk_ids, experts.num_local_experts)
    if launch.supported(topk_ids.device):
        return launch.moe(tokens, topk_weights, topk_ids, experts)
    return reference.moe(tokens, topk_weights, topk_ids, experts)
