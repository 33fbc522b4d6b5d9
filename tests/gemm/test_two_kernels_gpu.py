"""Epilogues cut in two on a GPU: the bits of one kernel, where one could run them too, and right ones elsewhere."""

import pytest
import torch

from envoi import gemm
from envoi.epilogues import Col, Row, Tile, epilogue, halves, pairs, quantize, round_bf16, silu
from envoi.epilogues.library import swiglu_fp8
from envoi.quant import SCHEMES
from envoi.quant import quantize as cast_to
from envoi.runtime import prepared
from envoi.types import QuantTensor
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.choices import force, forced

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("tidy_gpu")]


@epilogue
def rounded(acc, weight: Row, bias: Col):
    gate, up = halves(acc + bias)
    return quantize(round_bf16(silu(gate) * up * weight), "fp8_e4m3", group=128)


@epilogue
def of_a_tile(acc, other: Tile):
    gate, up = pairs(acc + other)
    return quantize(gate * up, "fp8_e4m3", group=128)


@pytest.fixture(autouse=True)
def _as_always():
    yield
    prepared.clear()


def matrix(rows: int, columns: int, scheme: str, seed: int) -> torch.Tensor | QuantTensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, device="cuda").bfloat16()
    return x if scheme == "bf16" else cast_to(x, SCHEMES[scheme])


def operands_of(ep, M: int, N: int) -> dict[str, torch.Tensor]:
    shapes = {"weight": (M,), "bias": (N,), "other": (M, N)}
    return {o.name: torch.randn(shapes[o.name], device="cuda").bfloat16() for o in ep.ir.operands}


def ways(ep, a, b) -> list[QuantTensor]:
    """Return the outputs by one kernel and by two."""
    operands = operands_of(ep, a.shape[0], b.shape[0])
    found = []
    for wanted in (False, True):
        with forced(two_kernels=wanted):
            out = gemm(a, b, ep, **operands)
        assert isinstance(out, QuantTensor)
        found.append(out)
    return found


@pytest.mark.parametrize("ep", [swiglu_fp8, rounded, of_a_tile], ids=lambda ep: ep.ir.name)
@pytest.mark.parametrize("scheme", ["bf16", "fp8_row"])
@pytest.mark.parametrize("M", [1, 63, 64, 200, 1500])
def test_two_have_the_bits_of_one(ep, scheme, M):
    N, K = 1024, 256  # K of a few steps isn't split
    a, b = matrix(M, K, scheme, 0), matrix(N, K, scheme, 1)
    one, two = ways(ep, a, b)
    assert_same_bits(one.values, two.values)
    assert_same_bits(one.sf, two.sf)


def test_what_no_number_stands_for_stays_in_its_group():
    a, b = matrix(100, 256, "bf16", 0), matrix(1024, 256, "bf16", 1)
    assert isinstance(a, torch.Tensor)
    a[7, 3] = torch.nan
    for out in ways(swiglu_fp8, a, b):
        assert out.sf[7].isnan().all() and out.sf[:7].isfinite().all() and out.sf[8:].isfinite().all()


@pytest.mark.parametrize("scheme", ["bf16", "fp8_block128"])
def test_replayed_prepared_and_plain(scheme, monkeypatch):
    of_a, of_b = ("fp8_1x128", "fp8_128x128") if scheme == "fp8_block128" else (scheme, scheme)
    b = matrix(4096, 1024, of_b, 1)
    force(monkeypatch, two_kernels=True)
    inputs = [matrix(37, 1024, of_a, seed) for seed in range(3)]
    want = [gemm(a, b, swiglu_fp8) for a in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [gemm(a, b, swiglu_fp8) for a in inputs]
    for out in captured:
        out.values.view(torch.uint8).fill_(0x7F)
        out.sf.fill_(torch.nan)
    graph.replay()
    again = [gemm(a, b, swiglu_fp8) for a in inputs]  # prepared by now
    for a, b_, c in zip(want, captured, again, strict=True):
        for x in (b_, c):
            assert_same_bits(x.values, a.values)
            assert_same_bits(x.sf, a.sf)
