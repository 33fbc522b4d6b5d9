"""GEMMs with and without an epilogue compared with cuBLAS, plain torch, torch.compile and Envoi's own plain GEMM.

Every contender once per round, the L2 cache cold. Error: sampled rows against float64 of the actual operands,
quantised or not. Torch's error is that of its own result in the same format; if it has none here, that of bf16.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.nn import functional

from envoi.bench.shapes import Case, GemmShape
from envoi.bench.suites import inputs, torch_gemm
from envoi.bench.suites.endings import ENDINGS, Ending
from envoi.bench.suites.inputs import Inputs
from envoi.bench.timing import Run
from envoi.bench.trial import Bench, Trial, time_rounds
from envoi.gemm import gemm
from envoi.types import Matrix, QuantTensor

COMPILED_SUITES = ("gemm_swiglu", "gemm_quant")


def measure(case: Case, bench: Bench) -> Trial:
    """Measure one shape of gemm, gemm_swiglu, gemm_quant, gemm_epilogues or gemm_fp8."""
    shape = cast(GemmShape, case.shape)
    ending = ENDINGS[shape.epilogue]
    x = inputs.make(shape, bench.device)
    theirs = inputs.for_torch(x, shape)

    def ours() -> Any:
        return gemm(x.a, x.b, ending.fused, **x.operands)

    flops = 2.0 * shape.m * shape.n * shape.k
    num_bytes = sum(map(inputs.num_bytes, (x.a, x.b))) + shape.m * shape.n * ending.out_bytes
    num_bytes += sum(inputs.num_bytes(value) for value in x.operands.values() if isinstance(value, torch.Tensor))
    kind = "bf16" if shape.format == "bf16" else "fp8"
    floor_us = bench.roof.floor_us(num_bytes, flops, kind)
    candidates = _candidates(case.suite, x, theirs, ending, bench)
    timing, baselines, missing = time_rounds(bench.clock, ours, candidates, floor_us)
    error = {
        "ours": inputs.gemm_error(shape, x.a, x.b, x.operands, ours(), halves=False),
        "torch": _torch_error(shape, theirs, ending),
    }
    return Trial(timing, baselines, error, num_bytes, flops, kind, missing)


def _candidates(suite: str, x: Inputs, theirs: Inputs, ending: Ending, bench: Bench) -> dict[str, Callable[[], Run]]:
    found: dict[str, Callable[[], Run]] = {}
    if ending.fused is not None:
        found["plain"] = lambda: lambda: gemm(x.a, x.b)
    elif bench.on_gpu:
        found["cublas"] = lambda: torch_gemm.product(theirs.a, theirs.b)
    if ending.fused is not None or not bench.on_gpu:
        found["eager"] = lambda: lambda: _eager(theirs, ending)
    if bench.on_gpu and suite in COMPILED_SUITES and bench.compiler.limit_s != 0:
        found["compile"] = lambda: bench.compiler.run(
            lambda a, b: _tensors(ending.eager(functional.linear(a, b))), theirs.wide_a, theirs.wide_b
        )
    return found


def _eager(x: Inputs, ending: Ending) -> Any:
    return ending.eager(functional.linear(x.wide_a, x.wide_b), **x.operands)


def _torch_error(shape: GemmShape, x: Inputs, ending: Ending) -> float:
    a, b = x.a, x.b
    try:
        y = torch_gemm.product(a, b)()
    except (RuntimeError, ValueError, NotImplementedError):
        a, b = x.wide_a, x.wide_b
        y = functional.linear(a, b)
    return inputs.gemm_error(shape, a, b, x.operands, ending.eager(y, **x.operands), halves=True)


def _tensors(x: Matrix) -> tuple[torch.Tensor, ...]:
    return (x.values, x.sf) if isinstance(x, QuantTensor) else (x,)
