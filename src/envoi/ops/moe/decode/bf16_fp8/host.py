"""Launches of an MoE layer for few tokens on Hopper: L1 -> L2 -> combine; the three overlap."""

from dataclasses import dataclass
from typing import Any

import torch

from envoi.epilogues.api import Epilogue
from envoi.epilogues.library import expert_l1, expert_l2
from envoi.epilogues.lower import Lowered, lower
from envoi.epilogues.outputs import operand_tensors
from envoi.ops.gemm.hopper.host import as_stored
from envoi.ops.moe.decode.bf16_fp8.config import CTAS, FEATURES, DecodeConfig, configs_of
from envoi.ops.moe.permute import combine_rows
from envoi.runtime import devices
from envoi.runtime.program import Launch
from envoi.runtime.tma import as_one_matrix, descriptor, halves_descriptor
from envoi.spans import span
from envoi.types import ExpertWeights, Matrix

ALIGNED = 16  # elements and bytes: rows of tokens are copied in pieces of 16 bytes


@dataclass(frozen=True)
class Routed:
    """Slots of a call: topk_weights and topk_ids [num_tokens, num_topk], contiguous, of at least one slot."""

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor


@dataclass(frozen=True)
class Buffers:
    """Buffers of one call: P = num_tokens * num_topk rows."""

    row_weights: torch.Tensor  # float32 [P]
    slot_to_pos: torch.Tensor  # int32 [num_tokens, num_topk]
    hidden: torch.Tensor  # bf16 [P, I]
    rows: torch.Tensor  # bf16 [P, H]


def run(
    tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, experts: ExpertWeights
) -> torch.Tensor:
    """Run the layer on tokens [M, H] bf16, and return [M, H] bf16, the bits of the kernels for many tokens.

    topk_ids and topk_weights [M, k] have at least one slot. Slots whose id no expert has count as masked.
    """
    from envoi.runtime.launch import launch

    tokens = aligned(tokens)
    routed = Routed(topk_weights.contiguous(), topk_ids.contiguous())
    buffers = empty_buffers(tokens, topk_ids, experts)
    l1, l2 = configs_of(experts, *topk_ids.shape)
    for name, call in (
        ("L1", l1_launch(tokens, routed, experts, buffers, l1)),
        ("L2", l2_launch(routed, experts, buffers, l2)),
    ):
        with span(name):
            launch(*call)
    with span("combine"):
        return combine_rows(buffers.rows, buffers.slot_to_pos, few=True)


def aligned(tokens: torch.Tensor) -> torch.Tensor:
    """Return tokens [M, H] whose rows begin at multiples of 16 bytes and of 16 elements: themselves, or a copy."""
    fits = tokens.stride(1) == 1 and tokens.stride(0) % ALIGNED == 0 and tokens.data_ptr() % ALIGNED == 0
    return tokens if fits else tokens.clone(memory_format=torch.contiguous_format)


def empty_buffers(tokens: torch.Tensor, topk_ids: torch.Tensor, experts: ExpertWeights) -> Buffers:
    """Allocate the buffers of a call."""
    H, P, intermediate, device = tokens.shape[1], topk_ids.numel(), experts.down.shape[-1], tokens.device
    return Buffers(
        torch.empty(P, dtype=torch.float32, device=device),
        torch.empty(topk_ids.shape, dtype=torch.int32, device=device),
        torch.empty(P, intermediate, dtype=torch.bfloat16, device=device),
        torch.empty(P, H, dtype=torch.bfloat16, device=device),
    )


def l1_launch(
    tokens: torch.Tensor, routed: Routed, experts: ExpertWeights, buffers: Buffers, config: DecodeConfig
) -> Launch:
    """Build the launch of L1: tokens by the slots' ids -> activations by expert."""
    has_bias = experts.gate_up_bias is not None
    epilogue = expert_l1(experts.activation, experts.swiglu_limit, has_bias, None, experts.gate_up_layout)
    given = {"weight": buffers.row_weights, "bias": experts.gate_up_bias}
    return _launch((tokens, buffers.hidden), routed, experts.gate_up, epilogue, given, buffers, config)


def l2_launch(routed: Routed, experts: ExpertWeights, buffers: Buffers, config: DecodeConfig) -> Launch:
    """Build the launch of L2: activations by expert -> rows."""
    epilogue = expert_l2(experts.down_bias is not None)
    given = {"weight": buffers.row_weights, "bias": experts.down_bias}
    return _launch((buffers.hidden, buffers.rows), routed, experts.down, epilogue, given, buffers, config)


def _launch(
    sides: tuple[torch.Tensor, torch.Tensor], routed: Routed, weights: Matrix, epilogue: Epilogue,
    given: dict[str, Any], buffers: Buffers, config: DecodeConfig,
) -> Launch:  # fmt: skip
    """Build the launch of a GEMM. sides: its tokens and its output. given: what its epilogue may load."""
    from envoi.ops.moe.decode.bf16_fp8.kernel import few_kernel

    (x, out), ir, num_experts = sides, epilogue.ir, weights.shape[0]
    tensors, pointers = operand_tensors(ir, {operand.name: given[operand.name] for operand in ir.operands}, num_experts)
    code = lower(ir, torch.bfloat16, "gluon", False, False, pointers)
    desc, sf = _weights(weights, code, config)
    arguments = (
        desc, sf, x, x.stride(0), tensors or (0,), (out,), routed.topk_ids, routed.topk_weights, buffers.row_weights,
        buffers.slot_to_pos, weights.shape[-2], num_experts, routed.topk_ids.numel(), config, code,
    )  # fmt: skip
    grid, options = (CTAS * devices.num_sms(x.device),), {"num_warps": 4, "launch_pdl": not config.is_l1}
    return Launch(few_kernel, grid, arguments, options)


def _weights(weights: Matrix, code: Lowered, config: DecodeConfig) -> tuple[Any, torch.Tensor | None]:
    """Return the TMA descriptor of a GEMM's weights, and their scale factors."""
    values, sf = (weights, None) if isinstance(weights, torch.Tensor) else (weights.values, weights.sf)
    if code.takes_halves:
        desc = halves_descriptor(values, FEATURES, config.step)
    else:
        desc = descriptor(as_one_matrix(values), FEATURES, config.step)
    return desc, None if sf is None else as_stored([sf.contiguous()])[0]
