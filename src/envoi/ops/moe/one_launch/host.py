"""Host side of the experts in one launch: supported experts, tilings of both GEMMs, the launch."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

import torch

from envoi.epilogues.api import Epilogue
from envoi.epilogues.lower import Lowered, lower
from envoi.epilogues.outputs import chunk_columns
from envoi.ops.gemm.grouping import Grouping
from envoi.ops.gemm.hopper import host as hopper
from envoi.ops.gemm.hopper import tune
from envoi.ops.gemm.hopper.config import LONG_K, PINGPONG_MAX_ROWS_LONG_K, Config, Problem, are_few, fitted, why_not
from envoi.ops.gemm.hopper.forced import Choice
from envoi.ops.gemm.hopper.pairs import l1_configs, lowered_pairs, quantize_cycles
from envoi.ops.gemm.hopper.time_model import predicted_cycles
from envoi.ops.moe.epilogues import l1_epilogues, l1_operands, l2_epilogue, l2_operands
from envoi.ops.moe.launches import Launch
from envoi.ops.moe.one_launch.config import (
    FEW,
    FEW_ROWS,
    FORMAT,
    LEAST_SHIFT,
    NUM_COUNTERS,
    SQUARE,
    UNIT_COUNTERS,
    WIDE,
)
from envoi.ops.moe.permute import empty_rows
from envoi.quant.formats import format_named
from envoi.runtime import workspace
from envoi.runtime.devices import implementation, num_sms
from envoi.runtime.math import cdiv
from envoi.runtime.timeline import UNTRACED
from envoi.types import ExpertWeights, Matrix, QuantTensor

BF16 = torch.bfloat16
# Rows of an expert, up to which one launch is taken and from which on again, and how long it may take by the model
# compared with two. It saves a launch's end and start and a search for each tile's expert, and mixes experts, which the
# model doesn't know: 2 to 19 % of the time up to 128 rows, measured on an H200, -2 to 4 % up to 256. Up to 768 it takes
# 1.00 to 1.02 of that of two; with more 0.99 to 1.01, 0.95 to 1.00 where experts are busy unequally.
MOST_ROWS, MANY_ROWS, MOST = 256, 768, 1.05
_choice = Choice()


def use_one_launch(wanted: bool | None) -> None:
    """Run L1 and L2 in one launch wherever the kernel can (True) or nowhere (False); None: where it should be faster.

    For tests and measurements. Prepared calls are forgotten.
    """
    _choice.force(wanted)


def why_not_one_launch(experts: ExpertWeights) -> str:
    """Return why one launch can't run these experts' L1 and L2, "" if it can."""
    if experts.format != FORMAT:
        return f"experts in {experts.format}, not {FORMAT}"
    if implementation(experts.device) != "hopper":
        return f"experts on {experts.device}, which is no Hopper GPU"
    if not experts.num_local_experts:
        return "no experts"
    _, in_pairs = l1_epilogues(experts)
    refusal = "" if in_pairs is None else hopper.why_not_hopper(_a_row(experts.hidden), experts.gate_up, in_pairs.ir)
    if refusal:
        return refusal
    if in_pairs is None or not hopper.takes_pairs(in_pairs.ir, experts.gate_up.shape[1], experts.num_local_experts):
        return f"experts whose L1 has no groups of 128 gated columns: {experts.activation}, {experts.intermediate} wide"
    return hopper.why_not_hopper(_a_row(experts.intermediate), experts.down, l2_epilogue(experts).ir)


@lru_cache(maxsize=64)  # tensors without memory take longer to make than all else that a call asks
def _a_row(width: int) -> Matrix:
    return empty_rows(1, width, format_named(FORMAT).activations, torch.device("meta"))


@dataclass(frozen=True)
class Planned:
    """Calls of L1 and of L2 that one launch runs, and their configs, whose stages have one shape."""

    first: hopper.Call
    first_config: Config
    second: hopper.Call
    second_config: Config


def takes_one_launch(rows: Matrix, experts: ExpertWeights, grouping: Grouping) -> bool:
    """Return True if L1 and L2 should be one launch: where it can run them and saves time, in tiles that suit both."""
    if _choice.forced is False or grouping.write_tail or why_not_one_launch(experts):
        return False
    if not _fits_search(rows.shape[0], experts.num_local_experts):
        return False
    if _choice.forced:
        return True
    tokens, num_local = grouping.likely_rows(rows.shape[0]), experts.num_local_experts
    if MOST_ROWS * num_local < tokens < MANY_ROWS * num_local:
        return False
    hidden, intermediate = experts.hidden, experts.intermediate
    in_tile, in_pairs = l1_epilogues(experts)
    problems = (
        tune.rounded(Problem(tokens, 2 * intermediate, hidden, 1, num_local, scaled=True)),
        tune.rounded(Problem(tokens, hidden, intermediate, 1, num_local, scaled=True)),
    )
    epilogues = in_tile, cast(Epilogue, in_pairs), l2_epilogue(experts)
    return _pays(problems, tuple(e.ir for e in epilogues), grouping.to is not None, num_sms(experts.device))


def _fits_search(num_rows: int, num_experts: int) -> bool:
    """Return True if an expert's last tile and its number fit an int32 of `MixedTiles.ends`, in tiles of few rows."""
    tiles = cdiv(num_rows, FEW[0].block_m) + num_experts
    return tiles * hopper.max_experts(num_experts, False) < 2**31


@tune.remember
def _pays(problems: tuple[Problem, Problem], irs: tuple[Any, ...], scattered: bool, num_sms: int) -> bool:
    """Return True if the best tiling of one launch should take at most MOST times as long as two, each in its best."""
    first, second = problems
    in_tile, in_pairs, l2 = irs
    few = are_few(second.M // second.num_groups, chunk_columns(l2))
    last = lower(l2, BF16, "gluon", False, not (scattered or few), frozenset(), (), scattered)
    tiling = _tiling(problems, (lowered_pairs(in_pairs), last), num_sms)
    own = [*l1_configs(first, in_pairs, in_tile, num_sms), tune.choose(second, last, num_sms)]
    if tiling is None or None in own:
        return False
    of_pairs, of_alone, of_l2 = (
        predicted_cycles(problem, cast(Config, config), num_sms)
        for problem, config in zip((first, first, second), own, strict=True)
    )
    two = min(of_pairs, of_alone + quantize_cycles(first)) + of_l2
    return _cycles(problems, tiling, num_sms) <= MOST * two


def run_in_one_launch(
    rows: Matrix, weights: torch.Tensor, offsets: torch.Tensor, experts: ExpertWeights, grouping: Grouping,
    progress: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Run L1 and L2 in one launch on the current stream, with the bits of two. Arguments as in `moe.run_experts`.

    progress: int32 [NUM_COUNTERS], 0 before and after, that no launch beside this one uses; None = the stream's.
    """
    count = num_sms(experts.device)
    planned = plan(cast(QuantTensor, rows), weights, offsets, experts, grouping, count)
    if progress is None:
        progress = workspace.counters(NUM_COUNTERS, experts.device)
    return run(planned, progress, count)


def run(planned: Planned, progress: torch.Tensor, num_sms: int) -> torch.Tensor:
    """Launch the kernel on the current stream; return L2's rows."""
    from envoi.ops.moe.one_launch.kernel import fused_kernel
    from envoi.runtime.launch import launch

    launch(fused_kernel, *arguments(planned, progress, num_sms))
    return planned.second.outputs[0]


def plan(
    rows: QuantTensor, weights: torch.Tensor, offsets: torch.Tensor, experts: ExpertWeights, grouping: Grouping,
    num_sms: int,
) -> Planned:  # fmt: skip
    """Return the calls on these rows and their configs, by the rows that an expert is likely to have.

    Raises ValueError for experts whose tiles don't fit shared memory.
    """
    in_pairs = cast(Epilogue, l1_epilogues(experts)[1])  # as `why_not_one_launch` has found
    operands, own = l1_operands(experts, weights), replace(grouping, to=None)
    first = hopper.call_of(rows, experts.gate_up, offsets, in_pairs.ir, BF16, operands, own)
    values, sf = first.outputs
    hidden = QuantTensor(values, sf, (1, values.shape[1] // sf.shape[1]))
    operands, l2 = l2_operands(experts, weights), l2_epilogue(experts).ir
    second = hopper.call_of(hidden, experts.down, offsets, l2, BF16, operands, grouping)
    problems = tune.rounded(hopper.problem_of(first)), tune.rounded(hopper.problem_of(second))
    tiling = _tiling(problems, (first.code, second.code), num_sms)
    if tiling is None:
        raise ValueError(f"experts: one launch has no tiling for {problems[0]} and {problems[1]}")
    return Planned(first, tiling[0], second, tiling[1])


@lru_cache(maxsize=4096)  # the model takes milliseconds
def _tiling(
    problems: tuple[Problem, Problem], codes: tuple[Lowered, Lowered], num_sms: int
) -> tuple[Config, Config] | None:
    """Return the tiling of L1 and L2 that should take least time, None if none fits."""
    # With more rows too many experts have a second tile.
    most = PINGPONG_MAX_ROWS_LONG_K if problems[0].K > LONG_K else FEW_ROWS
    is_few = most * problems[0].num_groups >= problems[0].M
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
    refused = why_not(problems[0], one, codes[0]) or why_not(problems[1], two, codes[1])
    return None if refused else (one, two)


def unit_shift(num_rows: int, num_features: int, num_experts: int, config: Config) -> int:
    """Return the log2 of how many units of L1 a counter counts, so that there are counters for all."""
    units = (cdiv(num_rows, config.block_m) + num_experts) * cdiv(num_features, config.block_n)
    return max(LEAST_SHIFT, (cdiv(units, UNIT_COUNTERS) - 1).bit_length())


def arguments(planned: Planned, progress: torch.Tensor, num_sms: int) -> Launch:
    """Build the launch of `fused_kernel`. progress: int32 [NUM_COUNTERS], 0 before and after."""
    grid, first = hopper.arguments(planned.first, planned.first_config, num_sms)
    _, second = hopper.arguments(planned.second, planned.second_config, num_sms)
    x, gate_up, *_descs, operands1, outputs1, offsets = first[:9]
    hidden, down, out, *_descs, operands2, outputs2, _offsets = second[:9]
    row_parts, row_counters, x_sf, gate_up_sf, M, N1, K1, num_experts = first[11:19]
    hidden_sf, down_sf, _, N2, K2 = second[13:18]
    row_mode, max_experts = first[-3:-1]
    shift = unit_shift(M, N1, num_experts, planned.first_config)
    arguments = (
        x, gate_up, operands1, outputs1, x_sf, gate_up_sf, hidden, down, out, operands2, outputs2, hidden_sf, down_sf,
        offsets, row_parts, row_counters, progress, shift, M, N1, K1, N2, K2, num_experts, 0, 0,
        planned.first_config, planned.first.code, planned.second_config, planned.second.code, row_mode, max_experts,
        UNTRACED,
    )  # fmt: skip
    return Launch(grid, arguments, {"num_warps": planned.first_config.num_warps})
