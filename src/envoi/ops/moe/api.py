"""Public function `envoi.moe` on one rank: check the arguments, call the operator."""

import torch

from envoi.check import expect_bool, expect_tensor
from envoi.ops.moe import choose, reference
from envoi.ops.moe.experts import run_layer
from envoi.ops.moe.op import (
    as_rows,
    check_ids,
    check_map,
    check_tokens,
    constants_of,
    empty_out,
    flatten,
    mlp_flops,
    tensors_of,
    unflatten,
    widened,
)
from envoi.runtime.custom_op import operator
from envoi.runtime.prepared import exactly, prepared
from envoi.types import ExpertWeights, Routing


def _given(tokens, routing, experts, *, batch_invariant=False, expert_map=None):
    if type(routing) is not Routing or type(experts) is not ExpertWeights:
        return None
    tensors = tokens, routing.topk_weights, routing.topk_ids, *tensors_of(experts), expert_map
    return (routing.num_experts, exactly(batch_invariant), *constants_of(experts)), tensors


@prepared(_given)
def moe(
    tokens: torch.Tensor, routing: Routing, experts: ExpertWeights, *, batch_invariant: bool = False,
    expert_map: torch.Tensor | None = None, out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None, num_sms: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Run the chosen experts on every token and sum their outputs: tokens [M, H] -> [M, H] of the same dtype.

    tokens: bf16, or fp16: fp16 tokens are rounded to bf16, which has 3 bits of mantissa less but no smaller range, and
        the result is rounded to fp16, where more than 65504 is infinite. In torch.autocast fp32 too, and the result
        has autocast's dtype. Tokens [B, S, H] are B * S tokens and give a result [B, S, H].
    routing: from `envoi.route`, or a Routing made by hand: topk_ids [M, k] int32 or int64 (-1 = masked slot),
        topk_weights [M, k] float32, or bf16 or fp16, which are widened. With tokens [B, S, H] both may be [B, S, k].
        It names routed experts alone: slots of shared ones, which `envoi.experts.with_shared` adds to experts, are the
        call's to add, in a launch of its own.
    experts: from `envoi.experts.pack`, all N of them. For experts spread over ranks see `ExpertParallel`.
    batch_invariant: give a token the same bits whatever other tokens there are and however many. On Hopper only mxfp4,
        mxfp4_fp8, mxfp4_mxfp8 and int4 need it, whose kernels for few tokens are faster and add up in another order,
        and nvfp4 if 64 doesn't divide H and I or a factor is negative or NaN, which Triton's kernels compute. `warm_up`
        doesn't compile for it.
    expert_map: where `experts` are some of the routing's, as on one rank of several: int32 [routing.num_experts], which
        of `experts` but the shared ones an id stands for, -1 for one that isn't here, whose slots count as masked.
        Takes one more launch.
    out, workspace, num_sms: as in `envoi.gemm`.

    The steps are permute -> L1 -> activation, times weight, quantise -> L2 -> combine; what each computes, and where it
    rounds, is in `envoi.ops.moe.reference`. A token whose slots are all masked gives zeros, or what its shared experts
    give. Every run gives the same bits. Raises ValueError for wrong dtypes, shapes or devices, and on a CPU for ids out
    of range. The host doesn't wait for a GPU, so that a CUDA graph can capture the call: there a slot whose id is no
    expert counts as masked.
    """
    rows, slots, dtype = as_rows(tokens, routing)
    check_tokens(rows, slots, experts)
    expect_bool("batch_invariant", batch_invariant)
    if expert_map is not None:
        expect_tensor("expert_map", expert_map, torch.int32, (routing.num_experts,), tokens.device)
    elif routing.num_experts != experts.num_routed:
        raise ValueError(
            f"experts: expected all {routing.num_experts} experts of the routing, got {experts.num_routed}; "
            "use ExpertParallel or expert_map where they are spread over ranks, envoi.router.split_identity where ids "
            "past the weights' mean the identity"
        )
    found = _moe(rows, slots.topk_weights, slots.topk_ids, *flatten(experts), batch_invariant, expert_map)
    return found if rows is tokens and dtype == found.dtype else found.to(dtype).view(tokens.shape)


@operator("moe", empty_out, mlp_flops)
def _moe(
    tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor,
    gate_up: torch.Tensor, gate_up_sf: torch.Tensor | None, gate_up_bias: torch.Tensor | None,
    down: torch.Tensor, down_sf: torch.Tensor | None, down_bias: torch.Tensor | None,
    format: str, activation: str, swiglu_limit: float | None, gate_up_bounded: bool, down_bounded: bool,
    order: str, gate_up_layout: str, gate_up_scale: torch.Tensor | None, down_scale: torch.Tensor | None,
    gate_up_zeros: torch.Tensor | None, down_zeros: torch.Tensor | None,
    num_shared: int, shared_gate: torch.Tensor | None,
    batch_invariant: bool = False, expert_map: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    experts = unflatten(
        gate_up, gate_up_sf, gate_up_bias, down, down_sf, down_bias, format, activation, swiglu_limit, gate_up_bounded,
        down_bounded, order, gate_up_layout, gate_up_scale, down_scale, gate_up_zeros, down_zeros, num_shared,
        shared_gate,
    )  # fmt: skip
    has_kernels = choose.has_kernels(topk_ids.device)
    if topk_ids.device.type == "cpu" or not has_kernels:
        check_ids(topk_ids, experts.num_routed if expert_map is None else len(expert_map))
        if expert_map is not None:
            check_map(expert_map, experts.num_routed)
    if has_kernels:
        return run_layer(tokens, topk_weights, topk_ids, experts, batch_invariant, expert_map)
    if expert_map is not None:
        topk_ids = reference.mapped(topk_ids, expert_map)
    return reference.moe(tokens, *widened(topk_weights, topk_ids), experts)
