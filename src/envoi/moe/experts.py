"""Experts by kernels: L1 GEMM -> activation -> quantise -> L2 GEMM on rows sorted by expert."""

from dataclasses import replace
from typing import Any, cast

import torch

from envoi.epilogue.api import Epilogue
from envoi.epilogue.library import expert_l1, expert_l2, l1_output_scheme
from envoi.gemm.backend import run_kernels
from envoi.gemm.grouping import EXPERTS_ROWS, Grouping
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
    Where L1 can't quantise in its epilogue (`l1_output_scheme`), one more kernel does.
    """
    scheme = format_named(experts.format).activations
    l1_scheme = l1_output_scheme(scheme)
    has_bias = experts.gate_up_bias is not None
    l1 = expert_l1(experts.activation, experts.swiglu_limit, has_bias, l1_scheme, experts.gate_up_layout)
    operands = {"weight": weights, "bias": experts.gate_up_bias} if has_bias else {"weight": weights}
    with span("L1"):
        hidden = _run_grouped_gemm(rows, experts.gate_up, offsets, l1, operands, replace(grouping, to=None))
        if scheme is not None and l1_scheme is None:
            hidden = quantize_rows(cast(torch.Tensor, hidden), offsets, scheme)
    operands = {"weight": weights, "bias": experts.down_bias} if has_bias else {}
    l2 = expert_l2(has_bias)
    with span("L2"):
        return cast(torch.Tensor, _run_grouped_gemm(hidden, experts.down, offsets, l2, operands, grouping))


def _run_grouped_gemm(
    rows: Matrix, weights: Matrix, offsets: torch.Tensor, epilogue: Epilogue, operands: dict[str, Any],
    grouping: Grouping,
) -> Matrix:  # fmt: skip
    """Run a grouped GEMM whose epilogue has one output; rows that belong to no expert aren't written."""
    outputs = run_kernels(rows, weights, offsets, epilogue.ir, torch.bfloat16, operands, grouping=grouping)
    values, *sf = cast(list[torch.Tensor], outputs)
    return QuantTensor(values, sf[0], (1, values.shape[1] // sf[0].shape[1])) if sf else values
