"""Choice of the kernel that quantises L1's rows in groups of 128: L1 itself, by pairs of tiles, or one after it.

A pair of tiles is the unit of work of an L1 that quantises. It saves the other kernel, which reads bf16 and stores
E4M3; it costs time where the last, partly filled round of the persistent loop is one of pairs.
"""

import torch

from envoi.epilogues.ir import IR
from envoi.epilogues.lower import Lowered, lower
from envoi.epilogues.outputs import chunk_columns
from envoi.ops.gemm.grouping import Grouping
from envoi.ops.gemm.hopper import tune
from envoi.ops.gemm.hopper.config import Config, Problem, are_few
from envoi.ops.gemm.hopper.forced import Choice
from envoi.ops.gemm.hopper.host import scaling, takes_pairs, why_not_hopper
from envoi.ops.gemm.hopper.time_model import COSTS, predicted_cycles
from envoi.runtime.devices import num_sms
from envoi.types import Matrix

_choice = Choice()


def use_pairs(wanted: bool | None) -> None:
    """Quantise by pairs wherever the kernel can (True) or nowhere (False); None: where it should be faster, as always.

    For tests and measurements. Prepared calls are forgotten.
    """
    _choice.force(wanted)


def quantizes_in_pairs(rows: Matrix, weights: Matrix, in_pairs: IR, in_bf16: IR, grouping: Grouping) -> bool:
    """Return True if a grouped GEMM should run in_pairs, whose output is quantised, and not in_bf16 and a kernel after.

    False wherever pairs can't be quantised: other formats, N not a multiple of 256, an epilogue without gate and up.
    """
    N, K = weights.shape[-2:]
    if why_not_hopper(rows, weights, in_pairs) or scaling(rows, weights) != "blocks":
        return False
    if not takes_pairs(in_pairs, N, weights.shape[0]):
        return False
    if _choice.forced is not None:
        return _choice.forced
    problem = Problem(grouping.likely_rows(rows.shape[0]), N, K, 1, weights.shape[0], scaled=True)
    return pairs_pay(tune.rounded(problem), in_pairs, in_bf16, num_sms(rows.device))


@tune.remember
def pairs_pay(problem: Problem, in_pairs: IR, in_bf16: IR, num_sms: int) -> bool:
    """Return True if an L1 that quantises should take less time than one in bf16 and the kernel that quantises.

    Where tokens are so few that weights take the M side, reading weights bounds the time: pairs have tokens there.
    """
    pairs, alone = l1_configs(problem, in_pairs, in_bf16, num_sms)
    if pairs is None or alone is None or alone.swap_ab:
        return False
    cycles = predicted_cycles(problem, alone, num_sms) + quantize_cycles(problem)
    return predicted_cycles(problem, pairs, num_sms) < cycles


def l1_configs(problem: Problem, in_pairs: IR, in_bf16: IR, num_sms: int) -> tuple[Config | None, Config | None]:
    """Return the configs of an L1 that quantises and of one in bf16, each None if none fits."""
    tma = not are_few(problem.M // problem.num_groups, chunk_columns(in_bf16))
    alone = lower(in_bf16, torch.bfloat16, "gluon", False, tma, frozenset())
    return tune.choose(problem, lowered_pairs(in_pairs), num_sms), tune.choose(problem, alone, num_sms)


def lowered_pairs(in_pairs: IR) -> Lowered:
    """Return the epilogue of an L1 that quantises, in the kernel's code."""
    return lower(in_pairs, torch.bfloat16, "gluon", False, False, frozenset(), paired=True)


def quantize_cycles(problem: Problem) -> float:
    """Return the cycles that a kernel takes to read rows of N / 2 columns in bf16 and store them in E4M3."""
    return COSTS.launch + problem.M * problem.N / 2 * 3 / COSTS.dram_bytes
