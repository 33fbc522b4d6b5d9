"""Hopper kernel for MX weights, widened in registers, on a GPU: against float64, on inputs chosen to break it."""

import pytest
import torch

from envoi.epilogues import (
    Col,
    Row,
    col_absmax,
    col_max,
    col_sum,
    epilogue,
    row_absmax,
    row_max,
    row_sum,
    total_max,
    total_sum,
)
from envoi.epilogues.library import absmax, expert_l1, scale_bias_relu, store, swiglu, swiglu_fp8
from envoi.ops.gemm import gemm, grouped_gemm
from envoi.ops.gemm.hopper_mx import config as configs
from envoi.ops.gemm.hopper_mx import host
from envoi.ops.gemm.reference import cut_rows, pick_expert, spread_columns
from envoi.quant import dequantize, quantize
from envoi.quant.pack import with_checked_scales
from envoi.types import QuantTensor
from tests.gemm.test_gpu import (
    all_reductions,
    judge,
    normal,
    offsets_of,
    operands_for,
    poisoned,
    probabilities,
    products_by_expert,
    torchs_product,
)
from tests.helpers.accuracy import relative_error
from tools.oracles.gemm import oracle

__all__ = ["poisoned"]
pytestmark = pytest.mark.gpu


@epilogue
def sums_and_peaks(acc, bias: Col, w: Row):
    """Return reductions without total_sum: near 0 its error is that of the order of the additions."""
    h = acc + bias
    return {
        "h": h, "sum": row_sum(h) * w, "max": row_max(h), "absmax": row_absmax(h), "col": col_sum(h),
        "col_max": col_max(h), "col_absmax": col_absmax(h), "top": total_max(h),
    }  # fmt: skip


WEIGHTS = ["mxfp4", "mxfp8"]
BITS = {"mxfp4": 4, "mxfp8": 8}
EPILOGUES = [store, scale_bias_relu, swiglu, swiglu_fp8, absmax, all_reductions, probabilities]


def mx(rows: int, columns: int, scheme: str, seed: int, lead: tuple[int, ...] = ()) -> QuantTensor:
    return quantize(normal(*lead, rows, columns, seed=seed), scheme)


def mx_weights(rows: int, columns: int, scheme: str, *lead: int) -> QuantTensor:
    x = with_checked_scales(mx(rows, columns, scheme, 1, lead))
    assert x.scales_at_most_2
    return x


def product(a, b) -> torch.Tensor:
    """Return torch's accumulators: both operands exact in bf16."""
    if isinstance(a, torch.Tensor):
        return torch.mm(a, dequantize(b).bfloat16().T, out_dtype=torch.float32)
    return torchs_product(a, b)


SHAPES = [(1, 8, 32), (16, 4096, 1024), (33, 130, 96), (64, 512, 2880), (300, 768, 512)]


@pytest.mark.parametrize(
    ("ep", "shape"),
    [
        pytest.param(ep, shape, id=f"{ep.ir.name}-{shape}")
        for ep in EPILOGUES
        for shape in SHAPES
        if shape[1] % (256 if ep is swiglu_fp8 else 2) == 0
    ],
)
@pytest.mark.parametrize("scheme", WEIGHTS)
def test_plain(scheme, ep, shape):
    M, N, K = shape
    a, b = mx(M, K, "mxfp8", 0), mx_weights(N, K, scheme)
    operands = operands_for(ep, M, N)
    judge(ep, gemm(a, b, ep, **operands), product(a, b), oracle(a, b), operands)


@pytest.mark.parametrize("scheme", WEIGHTS)
def test_tokens_in_bf16(scheme):
    a, b = normal(40, 1024), mx_weights(512, 1024, scheme)
    judge(store, gemm(a, b), product(a, b), oracle(a, b), {})


COUNTS = [[16] * 32, [0, 1, 130, 0, 64, 70, 0], [64] * 8, [0, 0], [1], [0, 500, 5]]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(
    "ep", [store, expert_l1("swiglu_oai", 7.0, True, "mxfp8"), sums_and_peaks], ids=lambda e: e.ir.name
)
@pytest.mark.parametrize("scheme", WEIGHTS)
def test_groups(scheme, ep, counts):
    P, N, K, E = sum(counts) + 3, 512, 320, len(counts)
    rows, weights = mx(P, K, "mxfp8", 0), mx_weights(N, K, scheme, E)
    offsets = offsets_of(counts)
    operands = operands_for(ep, P, N, E)
    got = grouped_gemm(rows, weights, offsets, ep, **operands)
    acc, exact = products_by_expert(rows, weights, offsets, product)
    spread = dict(operands)
    spread_columns(ep.ir, spread, offsets, P)
    judge(ep, got, acc, exact, spread, offsets)


@pytest.mark.parametrize("tokens", [16, 64, 192])
@pytest.mark.parametrize("ep", [store, expert_l1("swiglu_oai", 7.0, True, "mxfp8")], ids=lambda e: e.ir.name)
@pytest.mark.parametrize("scheme", WEIGHTS)
def test_as_chosen_for_many_experts(scheme, ep, tokens):
    P, N, K, E = 32 * tokens, 4096, 512, 32
    rows, weights = mx(P, K, "mxfp8", 0), mx_weights(N, K, scheme, E)
    offsets = torch.arange(0, P + 1, tokens, dtype=torch.int32, device="cuda")
    operands = operands_for(ep, P, N, E)
    got = grouped_gemm(rows, weights, offsets, ep, **operands)
    parts = [(cut_rows(rows, e * tokens, (e + 1) * tokens), pick_expert(weights, e)) for e in range(E)]
    acc, exact = torch.cat([product(*p) for p in parts]), torch.cat([oracle(*p) for p in parts])
    spread = dict(operands)
    spread_columns(ep.ir, spread, offsets, P)
    judge(ep, got, acc, exact, spread, offsets)


@epilogue
def everything(acc):
    return total_sum(acc)


def test_the_sum_of_all_experts():
    rows, weights = mx(515, 320, "mxfp8", 0), mx(512, 320, "mxfp4", 1, (32,))
    offsets = torch.arange(0, 513, 16, dtype=torch.int32, device="cuda")
    got = grouped_gemm(rows, weights, offsets, everything)
    parts = [oracle(cut_rows(rows, 16 * e, 16 * e + 16), pick_expert(weights, e)) for e in range(32)]
    exact = torch.stack(parts)
    assert (got - exact.sum()).abs() <= 1e-7 * exact.abs().sum()


@pytest.mark.parametrize(
    ("rows_per_consumer", "block_y"),
    [
        (rows, block_y)
        for rows in (configs.NARROW, configs.WIDE)
        for block_y in configs.TOKEN_TILES
        if rows == configs.NARROW or block_y <= configs.DEEP_TOKENS  # others are never chosen
    ],
)
@pytest.mark.parametrize("num_consumers", [1, 2])
@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("scheme", WEIGHTS)
def test_every_config(scheme, bounded, num_consumers, rows_per_consumer, block_y):
    a, b = mx(150, 1536, "mxfp8", 0), mx(320, 1536, scheme, 1)
    config = config_of(scheme, num_consumers, block_y, rows_per_consumer, bounded)
    (got,) = host.run_gemm(a, b, None, store.ir, torch.bfloat16, {}, config)
    judge(store, got, product(a, b), oracle(a, b), {})


def config_of(scheme, num_consumers, block_y, rows_per_consumer, bounded=False) -> configs.MxConfig:
    stages, bits = configs.MAX_STAGES, BITS[scheme]
    config = configs.MxConfig(num_consumers, block_y, stages, rows_per_consumer, bits=bits, scales_at_most_2=bounded)
    return configs.fitted(config)


@pytest.mark.parametrize(
    ("rows_per_consumer", "block_y"), [(configs.NARROW, 32), (configs.WIDE, 32), (configs.NARROW, 128)]
)
@pytest.mark.parametrize("scheme", WEIGHTS)
def test_factors_at_both_ends(scheme, rows_per_consumer, block_y):
    a, b = mx(20, 256, "mxfp8", 0), mx(256, 256, scheme, 1)
    sf = b.sf.view(torch.uint8).clone()
    sf[3, 2] = 255
    least = {"mxfp4": 0, "mxfp8": 10}[scheme]  # below, E4M3's smallest would be rounded
    for row, byte in ((5, 127), (6, 128), (7, 129), (8, 230), (9, 134), (10, 135), (70, 20), (71, least), (130, 200)):
        sf[row] = byte
    b = QuantTensor(b.values, sf.view(torch.float8_e8m0fnu), b.group)
    assert not with_checked_scales(b).scales_at_most_2
    config = config_of(scheme, 2, block_y, rows_per_consumer)
    (got,) = host.run_gemm(a, b, None, store.ir, torch.float32, {}, config)
    want = oracle(a, b)
    assert got[:, 3].isnan().all()
    rest = [i for i in range(256) if i != 3]
    assert got[:, rest].isfinite().all()
    assert max(relative_error(got[:, i], want[:, i]) for i in rest) < 1e-6


@pytest.mark.parametrize("scheme", WEIGHTS)
def test_factors_that_are_at_most_2(scheme):
    a, b = mx(20, 256, "mxfp8", 0), mx(256, 256, scheme, 1)
    sf = torch.arange(10, 129, dtype=torch.uint8, device="cuda").repeat(3)[:256, None].expand(256, 8).contiguous()
    b = with_checked_scales(QuantTensor(b.values, sf.view(torch.float8_e8m0fnu), b.group))
    assert b.scales_at_most_2
    (got,) = host.run_gemm(a, b, None, store.ir, torch.float32, {}, config_of(scheme, 2, 32, configs.WIDE, True))
    want = oracle(a, b)
    assert max(relative_error(got[:, i], want[:, i]) for i in range(256)) < 1e-6


def test_a_nan_among_weights_of_8_bits():
    a, b = mx(20, 256, "mxfp8", 0), mx(256, 256, "mxfp8", 1)
    values = b.values.view(torch.uint8).clone()
    values[3, 77], values[200, 0] = 0x7F, 0xFF
    b = with_checked_scales(QuantTensor(values.view(torch.float8_e4m3fn), b.sf, b.group))
    assert not b.scales_at_most_2
    got = gemm(a, b)
    assert got[:, [3, 200]].isnan().all()
    assert got[:, [i for i in range(256) if i not in (3, 200)]].isfinite().all()


def test_nan_tokens_stay_where_they_are():
    values, b = normal(48, 512), mx(256, 512, "mxfp4", 1)
    values[7, 100] = float("nan")
    got = gemm(quantize(values, "mxfp8"), b)
    assert got[7].isnan().all()
    assert got[[i for i in range(48) if i != 7]].isfinite().all()
