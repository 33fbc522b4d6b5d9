"""Host side of the experts in one launch: supported experts, tilings of both GEMMs, the launch."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import cast

import torch

from envoi.epilogue.api import Epilogue
from envoi.epilogue.library import expert_l2
from envoi.epilogue.lower import Lowered
from envoi.gemm.grouping import Grouping
from envoi.gemm.hopper import host as hopper
from envoi.gemm.hopper import tune
from envoi.gemm.hopper.config import Config, Problem, fitted, supports
from envoi.gemm.hopper.time_model import predicted_cycles
from envoi.moe.experts import l1_epilogues, l2_operands
from envoi.moe.launches import Launch
from envoi.moe.op import columns_of, scale_of
from envoi.moe.parallel.fused.config import (
    FEW,
    FEW_ROWS,
    FORMAT,
    LEAST_SHIFT,
    MAX_HIDDEN,
    MAX_SLOTS,
    SQUARE,
    UNIT_COUNTERS,
    WIDE,
    PullConfig,
    Pulled,
)
from envoi.moe.parallel.symmetric_memory import Domain
from envoi.moe.permute import empty_rows
from envoi.quant.formats import format_named
from envoi.runtime.devices import implementation, num_sms
from envoi.runtime.math import cdiv
from envoi.runtime.timeline import UNTRACED
from envoi.types import ExpertWeights, QuantTensor

BF16 = torch.bfloat16


def supports_fused(experts: ExpertWeights, num_topk: int) -> str:
    """Return why one launch can't run these experts, "" if it can."""
    if experts.format != FORMAT:
        return f"experts in {experts.format}, not {FORMAT}"
    if implementation(experts.device) != "hopper":
        return f"experts on {experts.device}, which is no Hopper GPU"
    if num_topk > MAX_SLOTS:
        return f"num_topk {num_topk}, more than {MAX_SLOTS}"
    if experts.hidden > MAX_HIDDEN:
        return f"hidden {experts.hidden}, more than {MAX_HIDDEN}"
    if not experts.num_local_experts:
        return ""  # this rank has no rows, and launches no experts
    rows = empty_rows(1, experts.hidden, format_named(FORMAT).activations, torch.device("meta"))
    _, in_pairs = l1_epilogues(experts)
    refusal = "" if in_pairs is None else hopper.supports_hopper(rows, experts.gate_up, in_pairs.ir)
    if refusal:
        return refusal
    if in_pairs is None or not hopper.takes_pairs(in_pairs.ir, experts.gate_up.shape[1], experts.num_local_experts):
        return f"experts whose L1 has no groups of 128 gated columns: {experts.activation}, {experts.intermediate} wide"
    hidden = empty_rows(1, experts.intermediate, format_named(FORMAT).activations, torch.device("meta"))
    return hopper.supports_hopper(hidden, experts.down, _l2(experts).ir)


def _l2(experts: ExpertWeights) -> Epilogue:
    return expert_l2(experts.gate_up_bias is not None, scale_of(experts.down) is not None)


@dataclass(frozen=True)
class FusedExperts:
    """Calls of L1 and of L2 that one launch runs, and their configs, whose stages have one shape."""

    first: hopper.Call
    first_config: Config
    second: hopper.Call
    second_config: Config


def run_fused(domain: Domain, experts: ExpertWeights, grouping: Grouping) -> torch.Tensor:
    """Pull the tokens of this rank's experts and run them, on the current stream; the bits of pull and `run_experts`.

    grouping: as `run_experts` takes it; with `to`, L2 stores each row at its address and returns `to`.
    """
    from envoi.moe.parallel.fused.kernel import fused_kernel
    from envoi.runtime.launch import launch

    planned = plan_fused(domain, experts, grouping, num_sms(experts.device))
    launch(fused_kernel, *fused_arguments(domain, planned, num_sms(experts.device)))
    return planned.second.outputs[0]


def plan_fused(domain: Domain, experts: ExpertWeights, grouping: Grouping, num_sms: int) -> FusedExperts:
    """Return the calls on domain.rows and their configs, by the rows that an expert is likely to have.

    Raises ValueError for experts whose tiles don't fit shared memory.
    """
    rows, offsets, weights = cast(QuantTensor, domain.rows), domain.offsets, domain.row_weights
    in_pairs = cast(Epilogue, l1_epilogues(experts)[1])  # as `supports_fused` has found
    operands, own = {"weight": weights, **columns_of(experts.gate_up, experts.gate_up_bias)}, replace(grouping, to=None)
    first, _ = hopper.planned(rows, experts.gate_up, offsets, in_pairs.ir, BF16, operands, num_sms, own)
    values, sf = first.outputs
    hidden = QuantTensor(values, sf, (1, values.shape[1] // sf.shape[1]))
    operands = l2_operands(experts, weights)
    second, _ = hopper.planned(hidden, experts.down, offsets, _l2(experts).ir, BF16, operands, num_sms, grouping)
    problems = tune.rounded(hopper.problem_of(first)), tune.rounded(hopper.problem_of(second))
    tiling = _tiling(problems, (first.code, second.code), num_sms)
    if tiling is None:
        raise ValueError(f"experts: one launch has no tiling for {problems[0]} and {problems[1]}")
    return FusedExperts(first, tiling[0], second, tiling[1])


@lru_cache(maxsize=4096)  # the model takes milliseconds
def _tiling(
    problems: tuple[Problem, Problem], codes: tuple[Lowered, Lowered], num_sms: int
) -> tuple[Config, Config] | None:
    """Return the tiling of L1 and L2 that should take least time, None if none fits."""
    is_few = FEW_ROWS * problems[0].num_groups >= problems[0].M
    fit = [_fitted(problems, codes, wanted) for wanted in ((FEW,) if is_few else (FEW, WIDE, SQUARE))]
    return min((one for one in fit if one), key=lambda one: _cycles(problems, one, num_sms), default=None)


def _cycles(problems: tuple[Problem, Problem], tiling: tuple[Config, Config], num_sms: int) -> float:
    return sum(predicted_cycles(problem, config, num_sms) for problem, config in zip(problems, tiling, strict=True))


def _fitted(
    problems: tuple[Problem, Problem], codes: tuple[Lowered, Lowered], wanted: tuple[Config, Config]
) -> tuple[Config, Config] | None:
    """Return both configs with as many stages as fit either GEMM; None if they can't run them."""
    fit = [fitted(problem, config, code) for problem, config, code in zip(problems, wanted, codes, strict=True)]
    num_stages = min(config.num_stages for config in fit)
    one, two = (replace(config, num_stages=num_stages, columns_ahead=False) for config in fit)
    refused = supports(problems[0], one, codes[0]) or supports(problems[1], two, codes[1])
    return None if refused else (one, two)


def unit_shift(num_rows: int, num_features: int, num_experts: int, config: Config) -> int:
    """Return the log2 of how many units of L1 a counter counts, so that there are counters for all."""
    units = (cdiv(num_rows, config.block_m) + num_experts) * cdiv(num_features, config.block_n)
    return max(LEAST_SHIFT, (cdiv(units, UNIT_COUNTERS) - 1).bit_length())


def fused_arguments(domain: Domain, planned: FusedExperts, num_sms: int) -> Launch:
    """Build the launch of `fused_kernel`."""
    grid, first = hopper.arguments(planned.first, planned.first_config, num_sms)
    _, second = hopper.arguments(planned.second, planned.second_config, num_sms)
    x, gate_up, *_descs, operands1, outputs1, offsets = first[:9]
    hidden, down, out, *_descs, operands2, outputs2, _offsets = second[:9]
    row_parts, row_counters, x_sf, gate_up_sf, M, N1, K1, num_experts = first[11:19]
    hidden_sf, down_sf, _, N2, K2 = second[13:18]
    row_mode, max_experts = first[-3:-1]
    layout, rows = domain.layout, cast(QuantTensor, domain.rows)
    to = Pulled(
        domain.peers, domain.row_shift, domain.state, domain.history, rows.values.view(torch.int32),
        rows.sf.view(torch.int32), domain.row_weights, domain.row_destinations, layout.num_ranks, layout.slot_stride,
        domain.num_local,
    )  # fmt: skip
    pulled = PullConfig(layout.row_bytes // 4, layout.num_sf, layout.num_topk, layout.num_experts, layout.slot_bytes)
    shift = unit_shift(M, N1, num_experts, planned.first_config)
    arguments = (
        x, gate_up, operands1, outputs1, x_sf, gate_up_sf, hidden, down, out, operands2, outputs2, hidden_sf, down_sf,
        offsets, row_parts, row_counters, domain.progress, shift, M, N1, K1, N2, K2, num_experts,
        to, layout.regions, domain.rank, domain.first_expert,
        planned.first_config, planned.first.code, planned.second_config, planned.second.code, row_mode, max_experts,
        pulled, UNTRACED,
    )  # fmt: skip
    return Launch(grid, arguments, {"num_warps": planned.first_config.num_warps, "launch_cooperative_grid": True})
