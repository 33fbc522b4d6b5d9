"""Epilogues cut in two: which are, and that both parts together compute what the whole does."""

import pytest
import torch

from envoi.epilogues import Col, Row, Tile, epilogue, halves, pairs, quantize, relu, round_bf16, row_sum, silu
from envoi.epilogues.cut import cut
from envoi.epilogues.library import gelu_residual, store, swiglu_fp8
from envoi.epilogues.outputs import chunk_columns, output_specs
from envoi.epilogues.reference import evaluate
from envoi.types import QuantTensor
from tests.helpers.accuracy import assert_same_bits

M, N = 5, 512


@epilogue
def plain_fp8(acc):
    return quantize(acc, "fp8_e4m3", group=128)


@epilogue
def rounded(acc, weight: Row, bias: Col):
    gate, up = halves(acc + bias)
    return {"quantised": quantize(round_bf16(silu(gate) * up * weight), "fp8_e4m3", group=128)}


@epilogue
def to_mx(acc, other: Tile):
    return quantize(relu(acc) * other, "fp8_e4m3", group=32)


@epilogue
def a_row_too(acc):
    return quantize(acc, "fp8_e4m3", group=128), row_sum(acc)


@epilogue
def by_rows(acc):
    return quantize(acc, "fp8_e4m3", group="row")


@epilogue
def twice(acc):
    gate, up = pairs(acc)
    return quantize(gate, "fp8_e4m3", group=128), quantize(up, "fp8_e4m3", group=128)


def tensors_of(output: torch.Tensor | QuantTensor) -> list[torch.Tensor]:
    return [output.values, output.sf] if isinstance(output, QuantTensor) else [output]


def operands() -> dict[str, torch.Tensor]:
    return {"weight": torch.randn(M), "bias": torch.randn(N), "other": torch.randn(M, N), "residual": torch.randn(M, N)}


@pytest.mark.parametrize(
    ("ep", "divisor", "dtype"),
    [
        (swiglu_fp8, 2, torch.float32), (plain_fp8, 1, torch.float32), (to_mx, 1, torch.float32),
        (rounded, 2, torch.bfloat16),
    ],
)  # fmt: skip
def test_a_quantisation_is_the_second_part(ep, divisor, dtype):
    parts = cut(ep.ir)
    assert (parts.divisor, parts.dtype) == (divisor, dtype)
    assert [node.op for node in parts.second.nodes] == ["acc", "quantize"] and not parts.second.operands
    assert parts.first.operands == ep.ir.operands
    assert chunk_columns(parts.first) == divisor < chunk_columns(ep.ir)
    assert [spec.kind for spec in output_specs(parts.first, dtype)] == ["tile"]
    assert [name for name, _ in parts.second.outputs] == [name for name, _ in ep.ir.outputs]


@pytest.mark.parametrize("ep", [a_row_too, by_rows, twice, gelu_residual, store], ids=lambda ep: ep.ir.name)
def test_all_else_is_a_second_part(ep):
    parts = cut(ep.ir)
    assert parts.first is store.ir and parts.second is ep.ir
    assert (parts.divisor, parts.dtype) == (1, torch.float32)


@pytest.mark.parametrize(
    "ep", [swiglu_fp8, plain_fp8, to_mx, rounded, a_row_too, by_rows, twice], ids=lambda ep: ep.ir.name
)
def test_both_parts_compute_the_whole(ep):
    acc = torch.randn(M, N) * torch.logspace(-6, 6, M)[:, None]
    acc[0, 3], acc[1, 200], acc[2, :] = torch.nan, torch.inf, 0.0
    given = operands()
    parts = cut(ep.ir)
    (between,) = evaluate(parts.first, acc, given)
    assert isinstance(between, torch.Tensor) and between.shape == (M, N // parts.divisor)
    got = evaluate(parts.second, between.to(parts.dtype), given)
    for one, whole in zip(got, evaluate(ep.ir, acc, given), strict=True):
        for a, b in zip(tensors_of(one), tensors_of(whole), strict=True):
            assert_same_bits(a, b)
