"""Epilogues of the experts' two GEMMs, and their operands."""

from typing import Any

import torch

from envoi.epilogues.api import Epilogue
from envoi.epilogues.library import expert_l1, expert_l2, l1_output_scheme
from envoi.ops.moe.op import columns_of, rows_in_bf16, scale_of
from envoi.quant.formats import format_named
from envoi.types import ExpertWeights


def l1_operands(experts: ExpertWeights, weights: torch.Tensor) -> dict[str, Any]:
    """Return the operands of L1's epilogue. weights [P] float32: the routing weight of each row."""
    return {"weight": weights, **columns_of(experts.gate_up, experts.gate_up_bias)}


def l2_epilogue(experts: ExpertWeights, results: str | None = None) -> Epilogue:
    """Return L2's epilogue, which weights rows if L1 doesn't. results: a scheme that it quantises rows to, or None."""
    return expert_l2(experts.gate_up_bias is not None, scale_of(experts.down) is not None, results)


def l2_operands(experts: ExpertWeights, weights: torch.Tensor) -> dict[str, Any]:
    """Return the operands of L2's epilogue; with a bias in L1, rows are weighted only here."""
    operands = columns_of(experts.down, experts.down_bias)
    return operands if experts.gate_up_bias is None else {**operands, "weight": weights}


def l1_epilogues(experts: ExpertWeights) -> tuple[Epilogue, Epilogue | None]:
    """Return L1's epilogue within a tile, and one for pairs of tiles, or None.

    The first is in the scheme of L2's rows, or in bf16 where a kernel of its own has to quantise. Groups of 32 are
    quantised in any tile (`l1_output_scheme`), and stored in bf16 where L2 reads them so (`rows_in_bf16`). Groups of
    128 take a pair of tiles, where the GEMM has them and they pay (`envoi.ops.moe.choose`): gated, on Hopper, not for
    few tokens; in one launch always. A scale a row needs the row.
    """
    activation, limit, layout = experts.activation, experts.swiglu_limit, experts.gate_up_layout
    has_bias, scheme = experts.gate_up_bias is not None, format_named(experts.format).activations
    has_scale = scale_of(experts.gate_up) is not None
    in_tile = expert_l1(
        activation, limit, has_bias, l1_output_scheme(scheme), layout, has_scale=has_scale,
        in_bf16=rows_in_bf16(experts),
    )  # fmt: skip
    if scheme is None or l1_output_scheme(scheme) or scheme.group[1] == 0:
        return in_tile, None
    return in_tile, expert_l1(activation, limit, has_bias, scheme.name, layout, True)
