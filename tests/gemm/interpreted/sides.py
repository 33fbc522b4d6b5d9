"""References for the kernels, and inputs."""

import torch

from envoi.epilogues.reference import evaluate
from envoi.ops.gemm import gemm, grouped_gemm, reference
from envoi.ops.gemm.reference import spread_columns
from envoi.types import Matrix, QuantTensor
from tests.helpers.accuracy import assert_same_bits, relative_error
from tools.oracles.gemm import oracle


def whole(*shape: int, seed: int = 0, top: int = 2) -> torch.Tensor:
    """Return whole numbers, whose products and sums are exact."""
    return torch.randint(-top, top + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


def flat(outputs) -> list[torch.Tensor]:
    outputs = outputs.values() if isinstance(outputs, dict) else outputs
    outputs = outputs if isinstance(outputs, (tuple, list)) or not isinstance(outputs, torch.Tensor) else [outputs]
    outputs = [outputs] if isinstance(outputs, QuantTensor) else outputs
    return [part for x in outputs for part in ((x.values, x.sf) if isinstance(x, QuantTensor) else (x,))]


def run(a: Matrix, b: Matrix, ending, offsets: list[int] | None = None, **operands) -> list[torch.Tensor]:
    """Return the kernels' outputs, flat."""
    if offsets is None:
        return flat(gemm(a, b, ending, **operands))
    return flat(grouped_gemm(a, b, torch.tensor(offsets, dtype=torch.int32), ending, **operands))


def expected(a: Matrix, b: Matrix, ending, offsets: list[int] | None = None, *, wide=False, out_dtype=None, **operands):
    """Return the reference's outputs, flat; `wide` in float64."""
    ir = ending.ir
    bounds = None if offsets is None else torch.tensor(offsets, dtype=torch.int32)
    if offsets is None:
        acc = oracle(a, b) if wide else reference.accumulate(a, b)
    elif wide:
        acc = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
        for e in range(b.shape[0]):
            first, last = offsets[e], offsets[e + 1]
            if last > first:
                mine = reference.cut_rows(a, first, last), reference.pick_expert(b, e)
                acc[first:last] = oracle(*mine)
    else:
        acc = reference.accumulate_groups(a, b, offsets)
    if bounds is not None:
        spread_columns(ir, operands, bounds, a.shape[0])
    return flat(evaluate(ir, acc, operands, bounds))


def assert_equal(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    """Assert equal bits except for the signs of zeros; float32 references are first rounded like the output."""
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        assert (x.shape, x.dtype) == (y.shape, x.dtype)
        assert_same_bits(x.double() + 0.0, y.to(x.dtype).double() + 0.0)


def assert_close(got: list[torch.Tensor], torchs: list[torch.Tensor], oracle: list[torch.Tensor], slack=2e-7) -> None:
    """Assert errors at most twice torch's. slack: error that float32 functions may add."""
    assert len(got) == len(torchs) == len(oracle)
    for x, y, z in zip(got, torchs, oracle, strict=True):
        assert x.shape == y.shape
        mine, theirs = relative_error(x, z), relative_error(y.to(x.dtype), z)
        assert mine <= 2 * theirs + slack, f"error {mine:.3g}, torch's {theirs:.3g}"
