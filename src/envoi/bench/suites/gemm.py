"""GEMMs with and without an epilogue, and grouped by expert, beside cuBLAS and plain torch.

From 1024 rows on, one call at a time with a cold L2 cache; below, in a graph of 20 calls on inputs in turn. Error:
sampled rows against float64 of the operands as they are, quantised or not; a quantised output is widened first. Torch's
error is that of its matmul in the same format; where it has none here, that of bf16 operands against float64 of those.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch.nn import functional
from torch.nn.functional import ScalingType

from envoi.bench.shapes import Case, GemmShape, GroupedShape
from envoi.bench.timing import Run, Timing
from envoi.bench.trial import Bench, Trial, compiled, copies, generator, relative_error, sample_rows, time_baselines
from envoi.epilogue import Epilogue
from envoi.epilogue.library import swiglu, swiglu_fp8
from envoi.experts.permute import take_rows
from envoi.gemm import gemm, grouped_gemm, reference
from envoi.quant import dequantize, format_named, quantize
from envoi.types import Matrix, QuantTensor

CALLS_FROM_M = 1024
FP8_GROUP = 128


@dataclass(frozen=True)
class Operands:
    """a [M, K] and b [N, K] (or [E, N, K]) in the case's format, and in bf16 for what torch doesn't have."""

    a: Matrix
    b: Matrix
    wide_a: torch.Tensor
    wide_b: torch.Tensor


EPILOGUES: dict[str, Epilogue | None] = {"gemm": None, "gemm_swiglu": swiglu, "gemm_quant": swiglu_fp8}


def measure(case: Case, bench: Bench) -> Trial:
    """One shape of gemm, gemm_swiglu, gemm_quant or gemm_grouped."""
    if isinstance(case.shape, GroupedShape):
        return _measure_grouped(case.shape, bench)
    return _measure_gemm(case.suite, cast(GemmShape, case.shape), bench)


def _measure_gemm(suite: str, shape: GemmShape, bench: Bench) -> Trial:
    ending = EPILOGUES[suite]
    finish = EAGER_ENDINGS[suite]

    def ours(x: Operands) -> Matrix:
        return gemm(x.a, x.b, ending)

    def product(x: Operands) -> torch.Tensor:
        return torch_product(x.a, x.b)

    def eager(x: Operands) -> Matrix:
        return finish(functional.linear(x.wide_a, x.wide_b))

    def unfused(x: Operands) -> Matrix:
        return finish(product(x))

    first = _operands(shape, bench.device, 0)
    num_bytes = sum(map(_num_bytes, (first.a, first.b))) + shape.m * shape.n * OUT_BYTES[suite]
    take = _timer(shape, bench, first, num_bytes)
    plain = shape.format == "bf16" and suite == "gemm"
    candidates: dict[str, Callable[[], Timing]] = {}
    if bench.on_gpu:
        candidates["cublas"] = lambda: take(product)
    if not bench.on_gpu or not plain:
        candidates["eager"] = lambda: take(eager)
    if bench.on_gpu and suite != "gemm":
        fast = compiled(lambda a, b: _tensors(finish(functional.linear(a, b))))
        candidates["compile"] = lambda: take(lambda x: fast(x.wide_a, x.wide_b))
    baselines, missing = time_baselines(candidates)
    timing = take(ours)
    error = {"ours": _gemm_error(suite, first.a, first.b, ours(first))}
    if _has_product(first):
        error["torch"] = _gemm_error(suite, first.a, first.b, unfused(first))
    else:
        error["torch"] = _gemm_error(suite, first.wide_a, first.wide_b, eager(first))
    kind = "bf16" if shape.format == "bf16" else "fp8"
    return Trial(timing, baselines, error, num_bytes, 2.0 * shape.m * shape.n * shape.k, kind, missing)


def torch_product(a: Matrix, b: Matrix) -> torch.Tensor:
    """a @ b.T in bf16 by torch's own matmul of the format. Raises where torch has none on the device."""
    if not isinstance(a, QuantTensor) or not isinstance(b, QuantTensor):
        return functional.linear(cast(torch.Tensor, a), cast(torch.Tensor, b))
    if a.sf.shape[1] == 1:
        recipes, scales = (ScalingType.RowWise, ScalingType.RowWise), (a.sf, b.sf.T)
    else:  # cuBLAS wants the scales of a block of K next to each other
        recipes, scales = (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128), (a.sf.T.contiguous().T, b.sf.T)
    return functional.scaled_mm(
        a.values, b.values.T, scales[0], recipes[0], scales[1], recipes[1],
        output_dtype=torch.bfloat16, use_fast_accum=a.sf.shape[1] == 1,
    )  # fmt: skip


def _eager_swiglu(y: torch.Tensor) -> torch.Tensor:
    return functional.silu(y[:, 0::2]) * y[:, 1::2]


def _eager_quantise(y: torch.Tensor) -> QuantTensor:
    groups = y.float().unflatten(-1, (-1, FP8_GROUP))
    sf = groups.abs().amax(-1).clamp(min=1e-30) / 448.0
    values = (groups / sf.unsqueeze(-1)).to(torch.float8_e4m3fn)
    return QuantTensor(values.flatten(-2), sf, (1, FP8_GROUP))


EAGER_ENDINGS: dict[str, Callable[[torch.Tensor], Matrix]] = {
    "gemm": lambda y: y,
    "gemm_swiglu": _eager_swiglu,
    "gemm_quant": lambda y: _eager_quantise(_eager_swiglu(y)),
}
OUT_BYTES = {"gemm": 2.0, "gemm_swiglu": 1.0, "gemm_quant": 0.5 + 2.0 / FP8_GROUP}  # per element of the product


def _timer(
    shape: GemmShape, bench: Bench, first: Operands, num_bytes: float
) -> Callable[[Callable[[Operands], object]], Timing]:
    if shape.m >= CALLS_FROM_M:
        return lambda step: bench.clock.calls(lambda: step(first))

    def take(step: Callable[[Operands], object]) -> Timing:
        def make(seed: int) -> Run:
            x = _operands(shape, bench.device, seed)
            return lambda: step(x)

        return bench.clock.graph(copies(make, bench.clock, int(num_bytes)))

    return take


def _operands(shape: GemmShape, device: torch.device, seed: int) -> Operands:
    source = generator(device, seed, shape.m, shape.n, shape.k)
    return _in_format(_normal(source, shape.m, shape.k), _normal(source, shape.n, shape.k), shape.format)


def _in_format(a: torch.Tensor, b: torch.Tensor, name: str) -> Operands:
    format = format_named(name)
    in_a = a if format.activations is None else quantize(a, format.activations)
    in_b = b if format.weights is None else quantize(b, format.weights)
    return Operands(in_a, in_b, a, b)


def _normal(source: torch.Generator, *sizes: int) -> torch.Tensor:
    x = torch.randn(sizes, generator=source, device=source.device, dtype=torch.bfloat16)
    return x.mul_(sizes[-1] ** -0.25)  # so that products are about 1


def _has_product(x: Operands) -> bool:
    try:
        torch_product(x.a, x.b)
    except (RuntimeError, ValueError, NotImplementedError):
        return False
    return True


def _gemm_error(suite: str, a: Matrix, b: Matrix, got: Matrix) -> float:
    rows = sample_rows(a.shape[0], a.device)
    want = reference.oracle(take_rows(a, rows), b)
    return relative_error(_widen(take_rows(got, rows)), want if suite == "gemm" else _eager_swiglu(want))


def _widen(x: Matrix) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else dequantize(x)


def _tensors(x: Matrix) -> tuple[torch.Tensor, ...]:
    return (x,) if isinstance(x, torch.Tensor) else (x.values, x.sf)


def _num_bytes(x: Matrix) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(x))


def _measure_grouped(shape: GroupedShape, bench: Bench) -> Trial:
    num_rows, num_experts = sum(shape.num_rows), len(shape.num_rows)
    source = generator(bench.device, num_rows, num_experts, shape.n, shape.k)
    weights = _normal(source, num_experts, shape.n, shape.k)
    x = _in_format(_normal(source, num_rows, shape.k), weights, shape.format)
    counts = torch.tensor(shape.num_rows, device=bench.device)
    ends = counts.cumsum(0).to(torch.int32)
    offsets = functional.pad(ends, (1, 0))
    calls = bench.clock.calls
    baselines, missing = time_baselines(
        {
            "eager": lambda: calls(lambda: _eager_grouped(x, shape)),
            "torch_grouped": lambda: calls(lambda: _torch_grouped(x, ends)),
        }
    )
    timing = calls(lambda: grouped_gemm(x.a, x.b, offsets))
    error = _grouped_errors(shape, x, grouped_gemm(x.a, x.b, offsets), _eager_grouped(x, shape))
    used = sum(rows > 0 for rows in shape.num_rows) / num_experts
    num_bytes = _num_bytes(x.a) + used * _num_bytes(x.b) + 2.0 * num_rows * shape.n
    kind = "bf16" if shape.format == "bf16" else "fp8"
    return Trial(timing, baselines, error, num_bytes, 2.0 * num_rows * shape.n * shape.k, kind, missing)


def _eager_grouped(x: Operands, shape: GroupedShape) -> torch.Tensor:
    parts = x.wide_a.split(list(shape.num_rows))
    return torch.cat([functional.linear(rows, weight) for rows, weight in zip(parts, x.wide_b, strict=True)])


def _torch_grouped(x: Operands, ends: torch.Tensor) -> torch.Tensor:
    """In FP8 for scales of rows on a GPU: that is what torch has; else in bf16."""
    a, b = x.a, x.b
    if isinstance(a, QuantTensor) and isinstance(b, QuantTensor) and a.sf.shape[1] == 1 and ends.is_cuda:
        row = ScalingType.RowWise
        weights = b.values.transpose(1, 2)
        return functional.scaled_grouped_mm(  # pyright: ignore[reportAttributeAccessIssue]
            a.values, weights, a.sf.squeeze(1), row, b.sf.squeeze(2), row, offs=ends, output_dtype=torch.bfloat16
        )
    return functional.grouped_mm(x.wide_a, x.wide_b.transpose(1, 2), offs=ends)


def _grouped_errors(shape: GroupedShape, x: Operands, ours: torch.Tensor, theirs: torch.Tensor) -> dict[str, float]:
    """Torch's in bf16, against float64 of the bf16 operands."""
    rows = sample_rows(sum(shape.num_rows), x.wide_a.device)
    bounds = torch.tensor(shape.num_rows, device=rows.device).cumsum(0)
    expert = torch.searchsorted(bounds, rows, right=True)
    got, want, wide = ours[rows], [], []
    for row, e in zip(rows.tolist(), expert.tolist(), strict=True):
        one = torch.tensor([row], device=rows.device)
        want.append(reference.oracle(take_rows(x.a, one), reference.pick_expert(x.b, e)))
        wide.append(reference.oracle(x.wide_a[one], x.wide_b[e]))
    return {"ours": relative_error(got, torch.cat(want)), "torch": relative_error(theirs[rows], torch.cat(wide))}
