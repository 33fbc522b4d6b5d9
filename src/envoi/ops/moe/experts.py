"""Layer on one rank by kernels: sort -> gather -> experts -> combine; experts: L1 -> activation -> quantise -> L2."""

from dataclasses import replace
from typing import Any, cast

import torch

from envoi.epilogues.api import Epilogue
from envoi.ops.gemm.backend import run_kernels
from envoi.ops.gemm.grouping import EXPERTS_ROWS, Grouping
from envoi.ops.gemm.hopper_w4a16 import few
from envoi.ops.moe.choose import Choice, LayerPath, choose_experts, choose_layer, decode_mx_layer
from envoi.ops.moe.decode.bf16_fp8 import host as decode
from envoi.ops.moe.epilogues import l1_epilogues, l1_operands, l2_epilogue, l2_operands
from envoi.ops.moe.one_launch import host as one_launch
from envoi.ops.moe.op import rows_in_bf16, rows_scheme
from envoi.ops.moe.permute import add_shared, combine_rows, gather_rows, map_ids, quantize_rows, sort_slots
from envoi.quant.cast import dequantize
from envoi.quant.formats import format_named
from envoi.spans import span
from envoi.types import ExpertWeights, Matrix, QuantTensor


def run_layer(
    tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, experts: ExpertWeights,
    batch_invariant: bool = False, expert_map: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Run the whole layer on one rank, sort -> gather -> L1 -> L2 -> combine: tokens [M, H] bf16 -> [M, H] bf16.

    For few tokens other kernels run: in bf16 and fp8_block128 with the same bits; on MXFP4 and INT4 weights, unless
    batch_invariant, sums along K are split at places that depend on the routing, so that bits may differ. The host
    never waits for the device, so a CUDA graph can hold the call. Slots whose id is no expert count as masked.
    expert_map: int32, the expert that each id stands for, or None if ids are the experts' own.
    """
    if tokens.shape[0] == 0:
        return torch.empty(tokens.shape, dtype=tokens.dtype, device=tokens.device)  # a call that can be planned
    if topk_ids.numel() == 0 and not experts.num_shared:
        return torch.zeros(tokens.shape, dtype=tokens.dtype, device=tokens.device)
    experts = by_kernels(experts)
    if expert_map is not None:
        with span("map ids"):
            topk_ids = map_ids(topk_ids, expert_map)
    if experts.num_shared:
        with span("add shared experts"):
            topk_weights, topk_ids = add_shared(tokens, topk_weights, topk_ids, experts)
    num_tokens, num_topk = topk_ids.shape
    choice = choose_layer(experts, num_tokens, num_topk, batch_invariant)
    if choice.path is LayerPath.DECODE_MX:
        out, slot_to_pos = few.rows(tokens, topk_weights, topk_ids, decode_mx_layer(experts))
        with span("combine"):
            return combine_rows(out, slot_to_pos, few=True, early=True)
    if choice.path is LayerPath.DECODE:
        return decode.run(tokens, topk_weights, topk_ids, experts)
    with span("permute"):
        row_map = sort_slots(topk_ids, experts.num_local_experts)
        scheme = format_named(experts.format).activations
        rows, weights = gather_rows(tokens, topk_weights, row_map, scheme, rows_in_bf16(experts))
    grouping = replace(EXPERTS_ROWS, batch_invariant=batch_invariant, are_offsets_early=True)
    out = run_experts(rows, weights, row_map.offsets, experts, grouping, None, choice)
    with span("combine"):
        return combine_rows(out, row_map.slot_to_pos)


def run_experts(
    rows: Matrix, weights: torch.Tensor, offsets: torch.Tensor, experts: ExpertWeights,
    grouping: Grouping = EXPERTS_ROWS, progress: torch.Tensor | None = None, choice: Choice | None = None,
) -> torch.Tensor:  # fmt: skip
    """Run L1 -> activation -> quantise -> L2 on rows [P, H] sorted by expert: [P, H] bf16, each row times its weight.

    weights [P] float32: the routing weight of each row. offsets [E + 1] int32: expert e owns rows offsets[e] :
    offsets[e + 1]. grouping: how the rows are grouped; with `to`, L2 stores each row at its address and returns `to`.
    progress: of one launch, as in `one_launch.run_in_one_launch`.
    choice: of the kernels, None to make it (`choose_experts`); the bits are the same by all that run fp8_block128.
    """
    experts = by_kernels(experts)
    choice = choice or choose_experts(experts, rows.shape[0], grouping)
    if choice.path is LayerPath.ONE_LAUNCH:
        with span("L1 and L2"):
            return one_launch.run_in_one_launch(rows, weights, offsets, experts, grouping, progress)
    with span("L1"):
        hidden = run_l1(rows, weights, offsets, experts, replace(grouping, to=None), choice)
    with span("L2"):
        operands = l2_operands(experts, weights)
        l2 = l2_epilogue(experts, grouping.results)
        out = _run_grouped_gemm(hidden, experts.down, offsets, l2, operands, grouping, choice.l2)
        return cast(torch.Tensor, out)


def by_kernels(experts: ExpertWeights) -> ExpertWeights:
    """Return experts as there are kernels for: INT4 by rows in bf16, in memory that the call takes, others unchanged.

    Kernels read INT4 in the order of fragments alone, which sizes that aren't multiples of 64, and other GPUs, don't
    have. Weights are rounded to bf16 once, as `int4_to_bf16` does.
    """
    gate_up, down = experts.gate_up, experts.down
    if experts.format != "int4" or experts.order != "rows":
        return experts
    return replace(experts, gate_up=in_bf16(gate_up), down=in_bf16(down), format="bf16")


def in_bf16(weight: Matrix) -> torch.Tensor:
    """Return weights in bf16, rounded once."""
    return weight if isinstance(weight, torch.Tensor) else dequantize(weight).to(torch.bfloat16)


def run_l1(
    rows: Matrix, weights: torch.Tensor, offsets: torch.Tensor, experts: ExpertWeights, grouping: Grouping,
    choice: Choice,
) -> Matrix:  # fmt: skip
    """Run L1 -> activation -> quantise: rows [P, H] -> hidden rows [P, I] in the scheme of L2's rows.

    Where L1's epilogue doesn't quantise (`l1_epilogues`), one more kernel does. Arguments as in `run_experts`.
    """
    operands = l1_operands(experts, weights)
    in_tile, in_pairs = l1_epilogues(experts)
    epilogue = in_pairs if choice.in_pairs and in_pairs is not None else in_tile
    hidden = _run_grouped_gemm(rows, experts.gate_up, offsets, epilogue, operands, grouping, choice.l1)
    scheme = rows_scheme(experts)
    if scheme is not None and isinstance(hidden, torch.Tensor):
        hidden = quantize_rows(hidden, offsets, scheme)
    return hidden


def _run_grouped_gemm(
    rows: Matrix, weights: Matrix, offsets: torch.Tensor, epilogue: Epilogue, operands: dict[str, Any],
    grouping: Grouping, kernels: str,
) -> Matrix:  # fmt: skip
    """Run a grouped GEMM whose epilogue has one output; rows that belong to no expert aren't written."""
    outputs = run_kernels(rows, weights, offsets, epilogue.ir, torch.bfloat16, operands, grouping, kernels)
    values, *sf = cast(list[torch.Tensor], outputs)
    return QuantTensor(values, sf[0], (1, values.shape[1] // sf[0].shape[1])) if sf else values
