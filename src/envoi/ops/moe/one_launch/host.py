"""Host side of the experts in one launch: tilings of both GEMMs, the launch. When it runs: `envoi.ops.moe.choose`."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import cast

import torch

from envoi.epilogues.api import Epilogue
from envoi.epilogues.lower import Lowered
from envoi.ops.gemm.grouping import Grouping
from envoi.ops.gemm.hopper import host as hopper
from envoi.ops.gemm.hopper import tune
from envoi.ops.gemm.hopper.config import LONG_K, PINGPONG_MAX_ROWS_LONG_K, Config, Problem, fitted, why_not
from envoi.ops.gemm.hopper.time_model import predicted_cycles
from envoi.ops.moe.epilogues import l1_epilogues, l1_operands, l2_epilogue, l2_operands
from envoi.ops.moe.one_launch.config import FEW, FEW_ROWS, LEAST_SHIFT, NUM_COUNTERS, SQUARE, UNIT_COUNTERS, WIDE
from envoi.runtime import workspace
from envoi.runtime.devices import num_sms
from envoi.runtime.math import cdiv
from envoi.runtime.timeline import UNTRACED
from envoi.types import ExpertWeights, Matrix, QuantTensor

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Planned:
    """Calls of L1 and of L2 that one launch runs, and their configs, whose stages have one shape."""

    first: hopper.Call
    first_config: Config
    second: hopper.Call
    second_config: Config


def run_in_one_launch(
    rows: Matrix, weights: torch.Tensor, offsets: torch.Tensor, experts: ExpertWeights, grouping: Grouping,
    progress: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Run L1 and L2 in one launch on the current stream, with the bits of two. Arguments as in `experts.run_experts`.

    progress: int32 [NUM_COUNTERS], 0 before and after, that no launch beside this one uses; None = the stream's.
    """
    from envoi.ops.moe.one_launch.kernel import fused_kernel
    from envoi.runtime.launch import launch

    count = num_sms(experts.device)
    planned = plan(cast(QuantTensor, rows), weights, offsets, experts, grouping, count)
    if progress is None:
        progress = workspace.counters(NUM_COUNTERS, experts.device)
    options = {"num_warps": planned.first_config.num_warps}
    launch(fused_kernel, *arguments(planned, progress, count), options)
    return planned.second.outputs[0]


def plan(
    rows: QuantTensor, weights: torch.Tensor, offsets: torch.Tensor, experts: ExpertWeights, grouping: Grouping,
    num_sms: int,
) -> Planned:  # fmt: skip
    """Return the calls on these rows and their configs, by the rows that an expert is likely to have.

    Raises ValueError for experts whose tiles don't fit shared memory.
    """
    in_pairs = cast(Epilogue, l1_epilogues(experts)[1])  # `choose` has found it
    operands, own = l1_operands(experts, weights), replace(grouping, to=None)
    first = hopper.call_of(rows, experts.gate_up, offsets, in_pairs.ir, BF16, operands, own)
    values, sf = first.outputs
    hidden = QuantTensor(values, sf, (1, values.shape[1] // sf.shape[1]))
    operands, l2 = l2_operands(experts, weights), l2_epilogue(experts, grouping.results).ir
    second = hopper.call_of(hidden, experts.down, offsets, l2, BF16, operands, grouping)
    problems = tune.rounded(hopper.problem_of(first)), tune.rounded(hopper.problem_of(second))
    tiling = tiling_of(problems, (first.code, second.code), num_sms)
    if tiling is None:
        raise ValueError(f"experts: one launch has no tiling for {problems[0]} and {problems[1]}")
    return Planned(first, tiling[0], second, tiling[1])


@lru_cache(maxsize=4096)  # the model takes milliseconds
def tiling_of(
    problems: tuple[Problem, Problem], codes: tuple[Lowered, Lowered], num_sms: int
) -> tuple[Config, Config] | None:
    """Return the tiling of L1 and L2 that should take least time, None if none fits."""
    # With more rows too many experts have a second tile.
    most = PINGPONG_MAX_ROWS_LONG_K if problems[0].K > LONG_K else FEW_ROWS
    is_few = most * problems[0].num_groups >= problems[0].M
    fit = [_fitted(problems, codes, wanted) for wanted in ((FEW,) if is_few else (FEW, WIDE, SQUARE))]
    return min((one for one in fit if one), key=lambda one: cycles_of(problems, one, num_sms), default=None)


def cycles_of(problems: tuple[Problem, Problem], tiling: tuple[Config, Config], num_sms: int) -> float:
    """Return the cycles that L1 and L2 take by the model of time."""
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


def arguments(planned: Planned, progress: torch.Tensor, num_sms: int) -> tuple[tuple[int], tuple]:
    """Return the grid and the arguments of `fused_kernel`. progress: int32 [NUM_COUNTERS], 0 before and after."""
    grid, first = hopper.arguments(planned.first, planned.first_config, num_sms)
    _, second = hopper.arguments(planned.second, planned.second_config, num_sms)
    x, gate_up, *_descs, operands1, outputs1, offsets = first[:9]
    hidden, down, out, *_descs, operands2, outputs2, _offsets = second[:9]
    row_parts, row_counters, x_sf, gate_up_sf, M, N1, K1, num_experts = first[11:19]
    hidden_sf, down_sf, _, N2, K2 = second[13:18]
    x_rest, hidden_rest = first[20], second[20]
    row_mode, max_experts = first[-3:-1]
    shift = unit_shift(M, N1, num_experts, planned.first_config)
    arguments = (
        x, gate_up, operands1, outputs1, x_sf, gate_up_sf, hidden, down, out, operands2, outputs2, hidden_sf, down_sf,
        x_rest, hidden_rest, offsets, row_parts, row_counters, progress, shift, M, N1, K1, N2, K2, num_experts,
        planned.first_config, planned.first.code, planned.second_config, planned.second.code, row_mode, max_experts,
        UNTRACED,
    )  # fmt: skip
    return grid, arguments
