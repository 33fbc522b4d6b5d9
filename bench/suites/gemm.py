"""GEMMs with and without an epilogue compared with cuBLAS, plain torch, torch.compile and Envoi's own plain GEMM.

Sizes are fixed or, in gemm_drawn, drawn from published models' layers. Every contender once per round, the L2 cache
cold. Eager multiplies in the case's format too, on weights whose gate and up rows are concatenated before they are
quantised. Error: sampled rows against float64 of the actual operands, quantised or not. Torch's error is that of its
own result in the same format; if it has none here, that of bf16.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.nn import functional

from bench import torch_gemm
from bench.roof import kind_of
from bench.shapes import Case, GemmShape
from bench.suites import inputs
from bench.suites.endings import ENDINGS, Ending
from bench.timing import Run
from bench.trial import Bench, Trial, time_rounds
from envoi.ops.gemm import gemm
from envoi.tune.problems import Inputs, make
from envoi.types import Matrix, QuantTensor

COMPILED = ("swiglu", "swiglu_fp8")
NEEDS_FORMAT = ("gemm", "gemm_fp8")  # suites whose baseline is torch's product in the case's format, or missing


def measure(case: Case, bench: Bench) -> Trial:
    """Measure one case of gemm, gemm_swiglu, gemm_quant, gemm_epilogues, gemm_fp8 or gemm_drawn."""
    shape = cast(GemmShape, case.shape)
    ending = ENDINGS[shape.epilogue]
    x = make(shape, bench.device)
    theirs = inputs.for_torch(x, shape)

    def ours() -> Any:
        return gemm(x.a, x.b, ending.fused, **x.operands)

    product, (a, b) = _product(theirs)
    flops, num_bytes = 2.0 * shape.m * shape.n * shape.k, _num_bytes(shape, x, ending)
    kind = kind_of(shape.format)
    floor_us = bench.roof.floor_us(num_bytes, flops, kind)
    candidates = _candidates(case, x, theirs, product, bench)
    timing, baselines, missing = time_rounds(bench.clock, ours, candidates, floor_us)
    error = {
        "ours": inputs.gemm_error(shape, x.a, x.b, x.operands, ours(), halves=False),
        "torch": inputs.gemm_error(shape, a, b, x.operands, ending.eager(product(), **x.operands), halves=True),
    }
    return Trial(timing, baselines, error, num_bytes, flops, kind, missing)


def rehearse(case: Case, device: torch.device) -> None:
    """Make the case's calls once, with its epilogue and without."""
    shape = cast(GemmShape, case.shape)
    x, fused = make(shape, device), ENDINGS[shape.epilogue].fused
    gemm(x.a, x.b, fused, **x.operands)
    if fused is not None:
        gemm(x.a, x.b)


def _candidates(case: Case, x: Inputs, theirs: Inputs, product: Run, bench: Bench) -> dict[str, Callable[[], Run]]:
    """Return the baselines; in a suite of drawn sizes also Envoi where bits mustn't follow the number of tokens."""
    found = _others(case, x, theirs, product, bench)
    if case.suite == "gemm_drawn":
        fused = ENDINGS[cast(GemmShape, case.shape).epilogue].fused
        found["batch_invariant"] = lambda: lambda: gemm(x.a, x.b, fused, batch_invariant=True, **x.operands)
    return found


def _others(case: Case, x: Inputs, theirs: Inputs, product: Run, bench: Bench) -> dict[str, Callable[[], Run]]:
    epilogue = cast(GemmShape, case.shape).epilogue
    ending = ENDINGS[epilogue]
    if ending.fused is None and bench.on_gpu:
        in_format = case.suite in NEEDS_FORMAT
        return {"cublas": lambda: torch_gemm.product(theirs.a, theirs.b) if in_format else product}
    found: dict[str, Callable[[], Run]] = {} if ending.fused is None else {"plain": lambda: lambda: gemm(x.a, x.b)}
    found["eager"] = lambda: lambda: ending.eager(product(), **x.operands)
    wide = not isinstance(x.a, QuantTensor)
    if bench.on_gpu and wide and epilogue in COMPILED and bench.compiler.limit_s != 0:
        found["compile"] = lambda: bench.compiler.run(
            lambda a, b: _tensors(ending.eager(functional.linear(a, b))), theirs.wide_a, theirs.wide_b
        )
    return found


def _product(x: Inputs) -> tuple[Callable[[], torch.Tensor], tuple[Matrix, Matrix]]:
    """Return torch's product and its operands: in their format, or in bf16 where torch has no such product."""
    try:
        product = torch_gemm.product(x.a, x.b)
        product()
    except (RuntimeError, ValueError, NotImplementedError):
        return lambda: functional.linear(x.wide_a, x.wide_b), (x.wide_a, x.wide_b)
    return product, (x.a, x.b)


def _num_bytes(shape: GemmShape, x: Inputs, ending: Ending) -> float:
    found = sum(map(inputs.num_bytes, (x.a, x.b))) + shape.m * shape.n * ending.out_bytes
    return found + sum(inputs.num_bytes(value) for value in x.operands.values() if isinstance(value, torch.Tensor))


def _tensors(x: Any) -> tuple[torch.Tensor, ...]:
    return (x.values, x.sf) if isinstance(x, QuantTensor) else (x,)
