"""GEMMs by expert compared with torch's grouped matmul, and those bound by reading weights compared with a copy.

Every contender once per round, the L2 cache cold. Torch's FP8 has only row scales, so it is the baseline of blocks
of 128 too, and bf16 that of mxfp4. Error: sampled rows against float64 of the operands that were multiplied.
"""

from collections.abc import Callable
from typing import cast

import torch

from bench import torch_gemm
from bench.roof import kind_of
from bench.shapes import Case, GroupedShape
from bench.suites import inputs
from bench.timing import Run
from bench.trial import Bench, Trial, copy_of, time_rounds
from envoi.ops.gemm import grouped_gemm
from envoi.tune.problems import Inputs, make


def measure(case: Case, bench: Bench) -> Trial:
    """Measure one shape of gemm_grouped, gemm_weights or grouped_drawn."""
    shape = cast(GroupedShape, case.shape)
    x = make(shape, bench.device)
    offsets = cast(torch.Tensor, x.offsets)

    def ours() -> torch.Tensor:
        return grouped_gemm(x.a, x.b, offsets)

    num_rows = sum(shape.num_rows)
    used = sum(rows > 0 for rows in shape.num_rows) / len(shape.num_rows)
    num_bytes = inputs.num_bytes(x.a) + used * inputs.num_bytes(x.b) + 2.0 * num_rows * shape.n
    flops = 2.0 * num_rows * shape.n * shape.k
    kind = kind_of(shape.format)
    theirs = torch_gemm.grouped_operands(x)
    candidates: dict[str, Callable[[], Run]] = {"torch_grouped": lambda: torch_gemm.grouped_product(*theirs, x.ends)}
    if case.suite == "gemm_weights":
        candidates |= _bounds(x, shape, num_bytes)
    floor_us = bench.roof.floor_us(num_bytes, flops, kind)
    timing, baselines, missing = time_rounds(bench.clock, ours, candidates, floor_us)
    error = {"ours": inputs.grouped_error(shape, x.a, x.b, ours()), "torch": _torch_error(shape, x, theirs)}
    return Trial(timing, baselines, error, num_bytes, flops, kind, missing)


def rehearse(case: Case, device: torch.device) -> None:
    """Make the case's call once."""
    x = make(cast(GroupedShape, case.shape), device)
    grouped_gemm(x.a, x.b, cast(torch.Tensor, x.offsets))


def _bounds(x: Inputs, shape: GroupedShape, num_bytes: float) -> dict[str, Callable[[], Run]]:
    """Return a copy that moves as many bytes; for narrow weights also Envoi's GEMM in bf16."""
    copy: dict[str, Callable[[], Run]] = {"copy": lambda: copy_of(num_bytes, x.wide_a.device)}
    if shape.format == "bf16":
        return copy
    offsets = cast(torch.Tensor, x.offsets)
    return {**copy, "bf16": lambda: lambda: grouped_gemm(x.wide_a, x.wide_b, offsets)}


def _torch_error(shape: GroupedShape, x: Inputs, theirs: tuple) -> float:
    """Return torch's error; that of bf16 if torch's FP8 doesn't run."""
    for a, b in (theirs, (x.wide_a, x.wide_b)):
        try:
            got = torch_gemm.grouped_product(a, b, x.ends)()
        except (RuntimeError, ValueError, NotImplementedError):
            continue
        return inputs.grouped_error(shape, a, b, got)
    return 1.0
