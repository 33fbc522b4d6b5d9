"""Experts by kernels: L1 GEMM -> activation -> quantise -> L2 GEMM on rows sorted by expert."""

from dataclasses import replace
from typing import Any, cast

import torch

from envoi.epilogue.api import Epilogue
from envoi.epilogue.library import expert_l1, expert_l2, l1_output_scheme
from envoi.gemm.backend import quantizes_in_l1, run_kernels
from envoi.gemm.grouping import EXPERTS_ROWS, Grouping
from envoi.moe.op import columns_of, scale_of
from envoi.moe.permute import quantize_rows
from envoi.quant.formats import format_named
from envoi.spans import span
from envoi.types import ExpertWeights, Matrix, QuantTensor


def run_experts(
    rows: Matrix, weights: torch.Tensor, offsets: torch.Tensor, experts: ExpertWeights,
    grouping: Grouping = EXPERTS_ROWS,
) -> torch.Tensor:  # fmt: skip
    """Run L1 -> activation -> quantise -> L2 on rows [P, H] sorted by expert: [P, H] bf16, each row times its weight.

    weights [P] float32: the routing weight of each row. offsets [E + 1] int32: expert e owns rows offsets[e] :
    offsets[e + 1]. grouping: how the rows are grouped; with `to`, L2 stores each row at its address and returns `to`.
    Where L1's epilogue doesn't quantise (`l1_epilogues`), one more kernel does; the bits are the same.
    """
    with span("L1"):
        hidden = run_l1(rows, weights, offsets, experts, replace(grouping, to=None))
    with span("L2"):
        return run_l2(hidden, weights, offsets, experts, grouping)


def run_l1(
    rows: Matrix, weights: torch.Tensor, offsets: torch.Tensor, experts: ExpertWeights, grouping: Grouping
) -> Matrix:
    """Run L1 -> activation -> quantise: rows [P, H] -> hidden rows [P, I] in the scheme of L2's rows.

    Arguments as in `run_experts`.
    """
    operands = {"weight": weights, **columns_of(experts.gate_up, experts.gate_up_bias)}
    in_tile, in_pairs = l1_epilogues(experts)
    epilogue = in_tile
    if in_pairs is not None and quantizes_in_l1(rows, experts.gate_up, in_pairs.ir, in_tile.ir, grouping):
        epilogue = in_pairs
    hidden = _run_grouped_gemm(rows, experts.gate_up, offsets, epilogue, operands, grouping)
    scheme = format_named(experts.format).activations
    if scheme is not None and isinstance(hidden, torch.Tensor):
        hidden = quantize_rows(hidden, offsets, scheme)
    return hidden


def run_l2(
    hidden: Matrix, weights: torch.Tensor, offsets: torch.Tensor, experts: ExpertWeights, grouping: Grouping
) -> torch.Tensor:
    """Run L2 on hidden rows [P, I]: [P, H] bf16, each row times its weight. Arguments as in `run_experts`."""
    l2 = expert_l2(experts.gate_up_bias is not None, scale_of(experts.down) is not None)
    rows = _run_grouped_gemm(hidden, experts.down, offsets, l2, l2_operands(experts, weights), grouping)
    return cast(torch.Tensor, rows)


def l2_operands(experts: ExpertWeights, weights: torch.Tensor) -> dict[str, Any]:
    """Return the operands of L2's epilogue; with a bias in L1, rows are weighted only here."""
    operands = columns_of(experts.down, experts.down_bias)
    return operands if experts.gate_up_bias is None else {**operands, "weight": weights}


def l1_epilogues(experts: ExpertWeights) -> tuple[Epilogue, Epilogue | None]:
    """Return L1's epilogue within a tile, and one for pairs of tiles, or None.

    The first is in the scheme of L2's rows, or in bf16 where a kernel of its own has to quantise. Groups of 32 are
    quantised in any tile (`l1_output_scheme`). Groups of 128 take a pair of tiles, where the GEMM has them and they pay
    (`envoi.gemm.hopper.pairs`): gated, on Hopper, not for few tokens. A scale a row needs the row.
    """
    activation, limit, layout = experts.activation, experts.swiglu_limit, experts.gate_up_layout
    has_bias, scheme = experts.gate_up_bias is not None, format_named(experts.format).activations
    has_scale = scale_of(experts.gate_up) is not None
    in_tile = expert_l1(activation, limit, has_bias, l1_output_scheme(scheme), layout, has_scale=has_scale)
    if scheme is None or l1_output_scheme(scheme) or scheme.group[1] == 0:
        return in_tile, None
    return in_tile, expert_l1(activation, limit, has_bias, scheme.name, layout, True)


def _run_grouped_gemm(
    rows: Matrix, weights: Matrix, offsets: torch.Tensor, epilogue: Epilogue, operands: dict[str, Any],
    grouping: Grouping,
) -> Matrix:  # fmt: skip
    """Run a grouped GEMM whose epilogue has one output; rows that belong to no expert aren't written."""
    outputs = run_kernels(rows, weights, offsets, epilogue.ir, torch.bfloat16, operands, grouping=grouping)
    values, *sf = cast(list[torch.Tensor], outputs)
    return QuantTensor(values, sf[0], (1, values.shape[1] // sf[0].shape[1])) if sf else values
