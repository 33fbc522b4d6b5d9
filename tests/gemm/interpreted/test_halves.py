"""Epilogues of halves: the kernel computes columns j and N / 2 + j of the product in one tile."""

from dataclasses import replace

import pytest
import torch

from envoi.epilogues import Col, HalfCol, HalfTile, Row, epilogue, halves, pairs, quantize, row_absmax, silu
from envoi.quant import quantize as cast_to
from envoi.quant.formats import FORMATS
from envoi.types import Matrix, QuantTensor
from tests.gemm.interpreted.sides import assert_close, expected, run, whole
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.inputs import normal
from tests.helpers.slow import mostly_slow

OFFSETS = [0, 7, 7, 20]


def gated(split):
    """Make epilogues of gate and up from either split: elementwise, by columns, quantised, over whole rows."""

    def plain(acc):
        gate, up = split(acc)
        return silu(gate) * up

    def biased(acc, weight: Row, bias: Col, scale: HalfCol, residual: HalfTile):
        gate, up = split(acc * weight + bias)
        left, _ = split(bias)
        return silu(gate) * up * scale + residual, gate + left

    def quantised(acc, bias: Col):
        gate, up = split(acc + bias)
        return quantize(silu(gate) * up, "fp8_e4m3", group=32)

    def by_row(acc):
        gate, up = split(acc)
        return quantize(gate * up, "fp8_e4m3", group="row"), row_absmax(gate)

    return {f.__name__: epilogue(f) for f in (plain, biased, quantised, by_row)}


HALVES, PAIRS = gated(halves), gated(pairs)


def interleaved(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.stack(x.chunk(2, dim), dim % x.dim() + 1).flatten(dim % x.dim(), dim % x.dim() + 1)


def operands_of(name: str, n: int) -> dict[str, torch.Tensor]:
    known = {
        "weight": normal(20, seed=3), "bias": normal(3, n, seed=4), "scale": normal(3, n // 2, seed=5),
        "residual": normal(20, n // 2, seed=6),
    }  # fmt: skip
    return {operand.name: known[operand.name] for operand in HALVES[name].ir.operands}


def assert_equal_bits(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for x, y in zip(got, want, strict=True):
        assert_same_bits(x, y) if x.dtype.itemsize > 1 else assert_same_bits(x.view(torch.uint8), y.view(torch.uint8))


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("n", mostly_slow([64, 192, 320, 832], quick=[64, 320]))
def test_concatenated_weights_give_the_bits_of_interleaved_ones(name, n):
    # Whole numbers: the interpreter's sums follow a column's place, unless they are exact.
    rows, weights = whole(20, 48), whole(3, n, 48, seed=1)
    operands = operands_of(name, n)
    moved = {key: interleaved(x, -1) if key == "bias" else x for key, x in operands.items()}
    got = run(rows, weights, HALVES[name], OFFSETS, **operands)
    assert_equal_bits(got, run(rows, interleaved(weights, 1), PAIRS[name], OFFSETS, **moved))
    single = {key: x[0] if key in ("bias", "scale") else x for key, x in operands.items()}
    moved = {key: interleaved(x, -1) if key == "bias" else x for key, x in single.items()}
    got = run(rows, weights[0], HALVES[name], **single)
    assert_equal_bits(got, run(rows, interleaved(weights[0], 0), PAIRS[name], **moved))


@pytest.mark.parametrize("name", ["plain", "biased"])
def test_against_the_reference(name):
    rows, weights, operands = normal(20, 48), normal(3, 320, 48, seed=1), operands_of(name, 320)
    got = run(rows, weights, HALVES[name], OFFSETS, **operands)
    want, wide = (expected(rows, weights, HALVES[name], OFFSETS, wide=wide, **operands) for wide in (False, True))
    assert_close(got, want, wide)


def sides(format: str, n: int) -> tuple[Matrix, Matrix]:
    rows, weights = normal(20, 256), normal(3, n, 256, seed=1)
    weights[:, n // 2 :] *= 2.0**-6  # another factor for up than for gate
    if format == "bf16":
        return rows.bfloat16(), weights.bfloat16()
    schemes = FORMATS[format]
    rows = rows.bfloat16() if schemes.activations is None else cast_to(rows, schemes.activations)
    return rows, cast_to(weights, schemes.weights)


@pytest.mark.parametrize("format", [name for name in FORMATS if name != "int4"])  # which is widened before them
@pytest.mark.parametrize("n", mostly_slow([256, 768], quick=[768]))
def test_every_format(format, n):
    rows, weights = sides(format, n)
    got = run(rows, weights, HALVES["plain"], OFFSETS)
    want, wide = (expected(rows, weights, HALVES["plain"], OFFSETS, wide=wide) for wide in (False, True))
    assert_close(got, want, wide)


def test_factors_of_blocks_may_be_powers_of_two():
    rows, weights = sides("fp8_block128", 512)
    assert isinstance(weights, QuantTensor)
    powers = torch.exp2(weights.sf.log2().round())
    weights = replace(weights, sf=powers)
    in_bytes = replace(weights, sf=powers.to(torch.float8_e8m0fnu))
    assert_equal_bits(*(run(rows, x, HALVES["plain"], OFFSETS) for x in (weights, in_bytes)))
