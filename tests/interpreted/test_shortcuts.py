"""Shortcuts in Triton's interpreter give what it gives without them."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from tests.helpers import interpreter_shortcuts


@triton.jit
def _merge(sum, last, other_sum, other_last):
    return sum - 2 * other_sum, tl.where(other_last > 0, other_last, last + 1)  # depends on the order


@triton.jit
def _reduce(x, sums, lasts, AXIS: tl.constexpr, KEEP: tl.constexpr):
    at = tl.arange(0, 4)[:, None, None] * 16 + tl.arange(0, 8)[None, :, None] * 2 + tl.arange(0, 2)[None, None, :]
    value = tl.load(x + at)
    sum, last = tl.reduce((value, value.to(tl.int8)), AXIS, _merge, keep_dims=KEEP)
    at = tl.sum(at, AXIS, keep_dims=KEEP)
    tl.store(sums + at, sum)
    tl.store(lasts + at, last)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_slices_are_reduced_as_numbers_are(axis, keep, monkeypatch):
    x = torch.randn(64, generator=torch.Generator().manual_seed(axis)).mul(9)
    found = []
    for reduce in (interpreter.ReduceOps.generic_reduce, interpreter_shortcuts.REDUCE_NUMBERS):
        monkeypatch.setattr(interpreter.ReduceOps, "generic_reduce", reduce)
        found.append((torch.zeros(512), torch.zeros(512, dtype=torch.int8)))
        _reduce[(1,)](x, *found[-1], axis, keep)
    assert interpreter_shortcuts.REDUCE_NUMBERS is not interpreter_shortcuts.reduce_slices
    assert all(map(torch.equal, *found))
    assert all(bool(output.any()) for output in found[0])


@triton.jit
def _rows(x, out, scale, SIZE: tl.constexpr):
    columns = tl.arange(0, SIZE)
    row = tl.load(x + tl.program_id(0) * SIZE + columns)
    tl.store(out + tl.program_id(0) * SIZE + columns, row * scale + (row.to(tl.float32) > 0).to(tl.int8))


def test_sizes_and_dtypes_do_not_mix():
    """Shapes that were described before, of other dtypes; a size that isn't a power of two stays an error."""
    for size, dtype in ((4, torch.float32), (8, torch.int32), (4, torch.bfloat16), (8, torch.float32)):
        x = torch.arange(2 * size).to(dtype)
        out = torch.zeros_like(x)
        _rows[(2,)](x, out, 3, size)
        assert torch.equal(out, x * 3 + (x > 0))
    with pytest.raises(Exception, match="power of 2"):
        _rows[(1,)](torch.zeros(6), torch.zeros(6), 3, 6)


@triton.jit
def _numbers(x, out, number: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    row = tl.load(x + at)
    tl.store(out + at, (row + number) * 2 - tl.load(x) * 0.5)


def test_numbers_and_dtypes_do_not_mix():
    """The same numbers beside other dtypes and sizes, each twice; one that a dtype doesn't have stays an error."""
    for size, dtype in ((4, torch.float32), (4, torch.int32), (8, torch.int64), (4, torch.uint8), (8, torch.float32)):
        x = torch.arange(4, 4 + size).to(dtype)
        for number in (1, 1.0, 2.5, 2, 2.5, 1):
            out = torch.zeros(size)
            _numbers[(1,)](x, out, number, size)
            assert torch.equal(out, (x + number).float() * 2 - 2.0)
    with pytest.raises(Exception, match="unsigned tensor and a negative scalar"):
        _numbers[(1,)](torch.zeros(4, dtype=torch.uint8), torch.zeros(4), -1, 4)


@triton.jit
def _outer(x, y, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    a, b = tl.load(x + row), tl.load(y + column)
    tl.store(out + row * COLUMNS + column, (3 - a) * b + tl.load(x) - tl.where(a > b, a, 0) + tl.arange(0, COLUMNS))


def test_what_is_broadcast_or_cast_is_right_each_time():
    """Rows beside columns, numbers before tensors, one element, an axis less; sizes and dtypes in turn, each twice."""
    dtypes = torch.float32, torch.int32, torch.float16, torch.int64
    for rows, columns in ((4, 8), (1, 8), (8, 4), (8, 1)):
        for first, second in [*zip(dtypes, dtypes, strict=True), *zip(dtypes, reversed(dtypes), strict=True)] * 2:
            x, y = torch.arange(rows).add(2).to(first), torch.arange(columns).mul(2).sub(3).to(second)
            out = torch.zeros(rows, columns)
            _outer[(1,)](x, y, out, rows, columns)
            a, b = x.float()[:, None], y.float()[None]
            assert torch.equal(out, (3 - a) * b + x[0] - torch.where(a > b, a, 0) + torch.arange(columns))


def test_values_of_more_bytes_than_the_dtype_has_are_an_error():
    for _ in range(2):
        assert interpreter.TensorHandle(torch.zeros(2).numpy(), tl.float32).data.shape == (2,)
        with pytest.raises(ValueError, match="exceeds dtype primitive_bitwidth"):
            interpreter.TensorHandle(torch.zeros(2, dtype=torch.float64).numpy(), tl.float32)
