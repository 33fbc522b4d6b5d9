"""Choice between one kernel and two for an epilogue that needs wide tiles.

What quantises in groups of 128 after a gate needs tiles of 256 columns: too few of them for a small product, and none
with scale factors along K. Cut in two, the product has tiles of any width, and a second kernel reads what the first
stored; it takes a launch and the time of its bytes.
"""

import torch

from envoi.epilogues.cut import Cut, cut
from envoi.epilogues.ir import IR
from envoi.epilogues.lower import lower
from envoi.epilogues.outputs import chunk_columns, rows_must_fit
from envoi.ops.gemm.hopper import tune
from envoi.ops.gemm.hopper.config import Problem, are_few
from envoi.ops.gemm.hopper.time_model import COSTS, predicted_cycles
from envoi.runtime.devices import H200

LAUNCH_US = 3.0  # of a second kernel with few rows, in a graph


@tune.remember
def pay(problem: Problem, ir: IR, num_sms: int, shipped_only: bool = False) -> bool:
    """Return True if an epilogue that a tile could hold should run in two kernels.

    shipped_only: as for `tune.choose`.
    """
    parts = cut(ir)
    whole = _best_cycles(problem, ir, torch.bfloat16, num_sms, shipped_only)
    first = _best_cycles(problem, parts.first, parts.dtype, num_sms, shipped_only)
    return first + second_cycles(problem, parts) < whole


def _best_cycles(problem: Problem, ir: IR, dtype: torch.dtype, num_sms: int, shipped_only: bool = False) -> float:
    whole_rows = rows_must_fit(ir)  # the caller has found a tile that holds them
    tma = whole_rows or not are_few(problem.M, chunk_columns(ir))
    code = lower(ir, dtype, "gluon", whole_rows, tma, frozenset())
    config = tune.choose(problem, code, num_sms, shipped_only)
    return float("inf") if config is None else predicted_cycles(problem, config, num_sms)


def second_cycles(problem: Problem, parts: Cut) -> float:
    """Return the cycles that the second kernel takes: it reads the rows and stores a byte for each element."""
    num_bytes = problem.M * problem.N / parts.divisor * (parts.dtype.itemsize + 1)
    return LAUNCH_US * H200.clock_mhz + num_bytes / COSTS.dram_bytes
