"""GEMMs of narrow numbers that become bf16 first, on a GPU: the bits of the product of what they stand for."""

import pytest
import torch

import envoi
from envoi.epilogues.library import absmax, gelu_residual, scale_bias_relu, store, swiglu, swiglu_fp8
from envoi.ops.gemm.backend import kernels_for
from envoi.quant import dequantize, quantize
from envoi.types import QuantTensor
from tests.gemm.test_gpu import flat, normal, operands_for
from tests.helpers.accuracy import assert_same_bits, relative_error
from tools.oracles.gemm import oracle

pytestmark = pytest.mark.gpu
FORMATS = [("nvfp4", "nvfp4"), (None, "nvfp4"), ("mxfp4", "mxfp4"), ("mxfp4", "mxfp8")]
SHAPES = [(1, 256, 64), (17, 512, 96), (64, 2880, 2880), (300, 264, 1056), (2049, 1536, 512)]


def matrix(scheme: str | None, rows: int, columns: int, seed: int = 0):
    x = normal(rows, columns, seed=seed)
    return x if scheme is None else quantize(x, scheme)


def in_bf16(x):
    return dequantize(x).bfloat16() if isinstance(x, QuantTensor) else x


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("for_a", "for_b"), FORMATS)
def test_bits(tidy_gpu, for_a, for_b, shape):
    M, N, K = shape
    a, b = matrix(for_a, M, K), matrix(for_b, N, K, seed=1)
    assert kernels_for("hopper", a, b, store.ir) == "widened"
    got = envoi.gemm(a, b, out_dtype=torch.float32)
    assert_same_bits(got, envoi.gemm(in_bf16(a), in_bf16(b), out_dtype=torch.float32))
    assert relative_error(got, oracle(a, b)) < 1e-6


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(
    "ending", [scale_bias_relu, gelu_residual, swiglu, absmax, swiglu_fp8], ids=lambda x: x.ir.name
)
def test_epilogues(tidy_gpu, ending, batch_invariant):
    M, N, K = 300, 512, 2048
    a, b = matrix("nvfp4", M, K), matrix("nvfp4", N, K, seed=1)
    operands = operands_for(ending, M, N) | {"batch_invariant": batch_invariant}
    got, want = (flat(envoi.gemm(x, y, ending, **operands)) for x, y in ((a, b), (in_bf16(a), in_bf16(b))))
    for x, y in zip(got, want, strict=True):
        assert_same_bits(x, y)


def test_mx_where_their_kernels_refuse_the_epilogue(tidy_gpu):
    a, b = matrix("mxfp8", 130, 1024), matrix("mxfp4", 512, 1024, seed=1)
    got, want = (flat(envoi.gemm(x, y, swiglu_fp8)) for x, y in ((a, b), (in_bf16(a), in_bf16(b))))
    for x, y in zip(got, want, strict=True):
        assert_same_bits(x, y)


def test_any_bytes(tidy_gpu):
    """NaN and infinity as factors, and the smallest ones: where the product is finite it is right."""
    generator = torch.Generator("cuda").manual_seed(0)
    q = [matrix("nvfp4", rows, 512, seed=seed) for seed, rows in enumerate((70, 264))]
    for x in q:
        x.values.copy_(torch.randint(0, 256, x.values.shape, generator=generator, device="cuda"))
        x.sf.view(torch.uint8).copy_(torch.randint(0, 256, x.sf.shape, generator=generator, device="cuda"))
        x.sf[::3].view(torch.uint8).bitwise_and_(0x77)  # no NaN
    got, want = envoi.gemm(*q, out_dtype=torch.float32), oracle(*q)
    finite = want.isfinite()
    assert 0 < finite.sum() < want.numel()
    assert torch.equal(got.isfinite(), finite)
    assert relative_error(got[finite], want[finite]) < 1e-6


def test_strides_and_a_graph(tidy_gpu):
    whole, b = matrix("nvfp4", 128, 1024), matrix("nvfp4", 264, 512, seed=1)
    a = QuantTensor(whole.values[::2, :256], whole.sf[::2, :32], whole.group)
    want = envoi.gemm(a, b)
    assert_same_bits(want, envoi.gemm(in_bf16(a), in_bf16(b)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = envoi.gemm(a, b)
    got.zero_()
    graph.replay()
    assert_same_bits(got, want)
