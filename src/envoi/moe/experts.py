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
    Where L1's epilogue doesn't quantise (`_l1_epilogue`), one more kernel does; the bits are the same.
    """
    has_bias = experts.gate_up_bias is not None
    l1_grouping = replace(grouping, to=None)
    operands = {"weight": weights, **columns_of(experts.gate_up, experts.gate_up_bias)}
    with span("L1"):
        l1 = _l1_epilogue(rows, experts, l1_grouping)
        hidden = _run_grouped_gemm(rows, experts.gate_up, offsets, l1, operands, l1_grouping)
        scheme = format_named(experts.format).activations
        if scheme is not None and isinstance(hidden, torch.Tensor):
            hidden = quantize_rows(hidden, offsets, scheme)
    operands = columns_of(experts.down, experts.down_bias)
    if has_bias:
        operands["weight"] = weights
    l2 = expert_l2(has_bias, scale_of(experts.down) is not None)
    with span("L2"):
        return cast(torch.Tensor, _run_grouped_gemm(hidden, experts.down, offsets, l2, operands, grouping))


def _l1_epilogue(rows: Matrix, experts: ExpertWeights, grouping: Grouping) -> Epilogue:
    """Return L1's epilogue: in the scheme of L2's rows, or in bf16 where a kernel of its own has to quantise.

    Groups of 32 are quantised in any tile (`l1_output_scheme`). Groups of 128 take a pair of tiles, where the GEMM has
    them and they pay (`envoi.gemm.hopper.pairs`): gated, on Hopper, not for few tokens. A scale a row needs the row.
    """
    activation, limit, layout = experts.activation, experts.swiglu_limit, experts.gate_up_layout
    has_bias, scheme = experts.gate_up_bias is not None, format_named(experts.format).activations
    has_scale = scale_of(experts.gate_up) is not None
    in_tile = expert_l1(activation, limit, has_bias, l1_output_scheme(scheme), layout, has_scale=has_scale)
    if scheme is None or l1_output_scheme(scheme) or scheme.group[1] == 0:
        return in_tile
    in_pairs = expert_l1(activation, limit, has_bias, scheme.name, layout, True)
    return in_pairs if quantizes_in_l1(rows, experts.gate_up, in_pairs.ir, in_tile.ir, grouping) else in_tile


def _run_grouped_gemm(
    rows: Matrix, weights: Matrix, offsets: torch.Tensor, epilogue: Epilogue, operands: dict[str, Any],
    grouping: Grouping,
) -> Matrix:  # fmt: skip
    """Run a grouped GEMM whose epilogue has one output; rows that belong to no expert aren't written."""
    outputs = run_kernels(rows, weights, offsets, epilogue.ir, torch.bfloat16, operands, grouping=grouping)
    values, *sf = cast(list[torch.Tensor], outputs)
    return QuantTensor(values, sf[0], (1, values.shape[1] // sf[0].shape[1])) if sf else values
