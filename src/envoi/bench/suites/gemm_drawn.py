"""GEMMs drawn from published models' layers, in any format with any epilogue, beside torch in the same format.

Baselines and error are those of the suites with fixed sizes (`gemm.py`); with an epilogue, eager multiplies in the
case's format too, on weights whose gate and up rows are concatenated before they are quantised.
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
from envoi.quant.pack import deinterleave_gate_up
from envoi.types import Matrix, QuantTensor

COMPILED = ("swiglu", "swiglu_fp8")


def measure(case: Case, bench: Bench) -> Trial:
    """Measure one case of gemm_drawn."""
    shape = cast(GemmShape, case.shape)
    ending = ENDINGS[shape.epilogue]
    x = inputs.make(shape, bench.device)
    theirs = _for_torch(x, shape)

    def ours() -> Any:
        return gemm(x.a, x.b, ending.fused, **x.operands)

    product, (a, b) = _product(theirs)
    flops, num_bytes = 2.0 * shape.m * shape.n * shape.k, _num_bytes(shape, x, ending)
    kind = "bf16" if shape.format == "bf16" else "fp8"
    candidates = _candidates(x, theirs, product, shape.epilogue, bench)
    floor_us = bench.roof.floor_us(num_bytes, flops, kind)
    timing, baselines, missing = time_rounds(bench.clock, ours, candidates, floor_us)
    error = {
        "ours": inputs.gemm_error(shape, x.a, x.b, x.operands, ours(), halves=False),
        "torch": inputs.gemm_error(shape, a, b, x.operands, ending.eager(product(), **x.operands), halves=True),
    }
    return Trial(timing, baselines, error, num_bytes, flops, kind, missing)


def rehearse(case: Case, device: torch.device) -> None:
    """Make the case's calls once, with its epilogue and without."""
    shape = cast(GemmShape, case.shape)
    x, fused = inputs.make(shape, device), ENDINGS[shape.epilogue].fused
    gemm(x.a, x.b, fused, **x.operands)
    if fused is not None:
        gemm(x.a, x.b)


def _candidates(
    x: Inputs, theirs: Inputs, product: Run, epilogue: str, bench: Bench
) -> dict[str, Callable[[], Run]]:  # fmt: skip
    ending = ENDINGS[epilogue]

    def invariant() -> Any:
        return gemm(x.a, x.b, ending.fused, batch_invariant=True, **x.operands)

    if ending.fused is None:
        return {"cublas" if bench.on_gpu else "eager": lambda: product, "batch_invariant": lambda: invariant}
    found: dict[str, Callable[[], Run]] = {
        "batch_invariant": lambda: invariant,
        "plain": lambda: lambda: gemm(x.a, x.b),
        "eager": lambda: lambda: ending.eager(product(), **x.operands),
    }
    wide = not isinstance(x.a, QuantTensor)
    if bench.on_gpu and wide and epilogue in COMPILED and bench.compiler.limit_s != 0:
        found["compile"] = lambda: bench.compiler.run(
            lambda a, b: _tensors(ending.eager(functional.linear(a, b))), theirs.wide_a, theirs.wide_b
        )
    return found


def _for_torch(x: Inputs, shape: GemmShape) -> Inputs:
    """Return the inputs with gate and up concatenated, if the epilogue has them, in the same format."""
    if not ENDINGS[shape.epilogue].halves:
        return x
    return inputs.in_format(x.wide_a, deinterleave_gate_up(x.wide_b).contiguous(), shape.format)


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
