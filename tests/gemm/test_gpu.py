"""GEMM kernels on a GPU: every path, against float64, on sizes and inputs chosen to break them."""

from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise

import pytest
import torch

from envoi.epilogues import (
    Col,
    HalfTile,
    Row,
    Scalar,
    Tile,
    col_absmax,
    col_max,
    col_sum,
    epilogue,
    evaluate,
    halves,
    pairs,
    quantize,
    relu,
    row_absmax,
    row_max,
    row_sum,
    silu,
    softmax,
    topk,
    total_max,
    total_sum,
)
from envoi.epilogues.library import (
    absmax,
    expert_l1,
    gelu_residual,
    linear,
    scale_bias_relu,
    store,
    swiglu,
    swiglu_fp8,
    swiglu_residual,
)
from envoi.ops.gemm import gemm, grouped_gemm
from envoi.ops.gemm.hopper import tune
from envoi.ops.gemm.hopper.config import Config, fitted, why_not
from envoi.ops.gemm.reference import cut_rows, pick_expert, spread_columns
from envoi.quant import dequantize
from envoi.quant import quantize as cast_to
from envoi.runtime import prepared
from envoi.types import QuantTensor
from tests.helpers import inputs
from tests.helpers.accuracy import assert_at_most_twice, assert_same_bits, relative_error
from tools.oracles.gemm import oracle

pytestmark = pytest.mark.gpu
ROUNDINGS = 5e-7  # several float32 roundings: the effect of a sum's order if torch is exact by luck
FORMATS = {
    "bf16": (None, None), "fp8_row": ("fp8_row", "fp8_row"), "fp8_tensor": ("fp8_tensor", "fp8_tensor"),
    "fp8_block128": ("fp8_1x128", "fp8_128x128"), "mxfp8": ("mxfp8", "mxfp8"), "mxfp4": (None, "mxfp4"),
    "mxfp4_mxfp8": ("mxfp8", "mxfp4"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def poisoned():
    """Fill uninitialised memory with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


normal = partial(inputs.normal, device="cuda", dtype=torch.bfloat16)


def matrix(rows: int, columns: int, scheme: str | None, seed: int, lead: tuple[int, ...] = ()):
    x = normal(*lead, rows, columns, seed=seed)
    return x if scheme is None else cast_to(x, scheme)


def operands_for(ep, M: int, N: int, E: int | None = None) -> dict:
    values = {}
    for i, operand in enumerate(ep.ir.operands):
        columns = operand.shape.num_columns(N) if operand.shape.spans_columns else 1
        if operand.kind == "Scalar":
            values[operand.name] = 0.5 + i
        elif operand.kind == "Row":
            values[operand.name] = normal(M, seed=i + 7, dtype=torch.float32)
        elif operand.shape.rows == "1":
            values[operand.name] = normal(*([E] if E else []), columns, seed=i + 7)
        else:
            values[operand.name] = normal(M, columns, seed=i + 7)
    return values


def flat(outputs) -> list:
    outputs = list(outputs.values()) if isinstance(outputs, dict) else outputs
    outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    return [dequantize(o) if isinstance(o, QuantTensor) else o for o in outputs]


def judge(ep, got, acc, exact, operands, offsets=None) -> None:
    """Assert at most twice the error of torch, which runs the same epilogue on its own accumulators."""
    torchs = flat(evaluate(ep.ir, acc, operands, offsets))
    wants = flat(evaluate(ep.ir, exact, operands, offsets))
    for g, t, want in zip(flat(got), torchs, wants, strict=True):
        assert g.shape == want.shape
        if g.dtype == torch.int32:
            assert (g != want).float().mean() < 0.01  # near-ties may round either way
        elif g.numel():
            mine, theirs = relative_error(g, want), relative_error(t.to(g.dtype), want)
            assert mine <= 2 * theirs + ROUNDINGS, f"error {mine:.3g}, torch's {theirs:.3g}"


def torchs_product(a, b) -> torch.Tensor:
    """Return float32 accumulators of torch's kernels, by the same tensor cores."""
    if isinstance(a, torch.Tensor):
        if a.dtype == torch.float32:
            return a @ b.T
        b = b if isinstance(b, torch.Tensor) else dequantize(b).bfloat16()  # powers of two: exact in bf16
        return torch.mm(a, b.T, out_dtype=torch.float32)
    if a.sf.dtype != torch.float32:  # powers of two: exact in bf16
        return torch.mm(dequantize(a).bfloat16(), dequantize(b).bfloat16().T, out_dtype=torch.float32)
    if a.group == (1, 128) and b.group == (128, 128):
        pairs = zip(a.values.split(128, 1), b.values.split(128, 1), strict=True)
        factors = b.sf.repeat_interleave(128, 0)[: b.shape[0]]
        return sum(
            _fast(x.contiguous(), y.contiguous()) * a.sf[:, i : i + 1] * factors[:, i] for i, (x, y) in enumerate(pairs)
        )
    return _fast(a.values, b.values) * a.sf * b.sf.T


def _fast(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    one = torch.ones((), device="cuda")
    return torch._scaled_mm(a.contiguous(), b.contiguous().T, one, one, out_dtype=torch.float32, use_fast_accum=True)


def offsets_of(counts) -> torch.Tensor:
    """Return the experts' first rows and their end, for so many rows of each."""
    return torch.tensor([0, *accumulate(counts)], device="cuda", dtype=torch.int32)


def products_by_expert(rows, weights, offsets, product=torchs_product) -> tuple[torch.Tensor, torch.Tensor]:
    """Return torch's accumulators and those in float64, each expert's rows by its weights; 0 in rows of no expert."""
    acc = torch.zeros(rows.shape[0], weights.shape[-2], device="cuda")
    exact = acc.double()
    for e, (first, last) in enumerate(pairwise(offsets.tolist())):
        if last > first:
            part, weight = cut_rows(rows, first, last), pick_expert(weights, e)
            acc[first:last], exact[first:last] = product(part, weight), oracle(part, weight)
    return acc, exact


def check(ep, M: int, N: int, K: int, format: str = "bf16", **kwargs) -> None:
    of_a, of_b = FORMATS[format]
    a, b = matrix(M, K, of_a, 0), matrix(N, K, of_b, 1)
    operands = operands_for(ep, M, N)
    got = gemm(a, b, ep, **operands, **kwargs)
    judge(ep, got, torchs_product(a, b), oracle(a, b), operands)


SHAPES = [
    (1, 8, 64), (17, 130, 72), (129, 2880, 64), (64, 4096, 512), (300, 512, 2880), (1024, 1024, 1024),
    (2048, 520, 192), (4100, 264, 128),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products(shape, dtype):
    M, N, K = shape
    a, b = normal(M, K, dtype=dtype), normal(N, K, seed=1, dtype=dtype)
    assert_at_most_twice(gemm(a, b), a @ b.T, oracle(a, b))
    assert_at_most_twice(gemm(a, b, out_dtype=torch.float32), torchs_product(a, b), oracle(a, b))


@pytest.mark.parametrize("format", [f for f in FORMATS if f != "bf16"])
@pytest.mark.parametrize("shape", [(1, 256, 128), (48, 1024, 512), (640, 2304, 1152), (2049, 512, 256)], ids=str)
def test_formats(format, shape):
    check(store, *shape, format)
    check(scale_bias_relu, *shape, format)


def test_half_products_have_the_bits_of_cublas():
    for M, N, K in ((16, 512, 512), (256, 1024, 768), (2048, 1024, 512)):
        a, b = normal(M, K), normal(N, K, seed=1)
        assert_at_most_twice(gemm(a, b), torch.mm(a, b.T), oracle(a, b))
        if M > 256:
            assert_same_bits(gemm(a, b), torch.mm(a, b.T))


@epilogue
def all_reductions(acc, bias: Col, w: Row):
    h = acc + bias  # the total is one of positive terms: near 0 its error would be that of the order of the additions
    return {
        "h": h, "sum": row_sum(h) * w, "max": row_max(h), "absmax": row_absmax(h), "col": col_sum(h),
        "col_max": col_max(h), "col_absmax": col_absmax(h), "all": total_sum(relu(h)), "top": total_max(h),
    }  # fmt: skip


@epilogue
def gated(acc, bias: Col, residual: HalfTile, clamp: Scalar):
    gate, up = pairs(acc + bias)
    h = silu(gate) * up + clamp * residual
    return h, row_max(h), gate


@pytest.mark.parametrize("N", [130, 200, 328])
def test_row_reductions_of_roles_without_features(N):
    for _ in range(3):  # a counter not reset would spoil the next call
        check(absmax, 9, N, 256)
        check(all_reductions, 48, N, 512)


@epilogue
def probabilities(acc, bias: Col):
    return softmax(acc + bias)


@epilogue
def router(acc):
    values, ids = topk(acc, 4)
    return softmax(values), ids


@epilogue
def two_tiles(acc, c: Tile, d: Tile):
    return acc * c + d, acc


@epilogue
def to_rows(acc):
    return quantize(silu(acc), "fp8_e4m3", group="row")


@epilogue
def to_mx(acc):
    gate, up = pairs(acc)
    return quantize(silu(gate) * up, "fp8_e4m3", group=32), row_absmax(gate)


@epilogue
def to_packed_pairs(acc, bias: Col):
    gate, up = pairs(acc + bias)
    return quantize(silu(gate) * up, "fp4_e2m1", group=32), gate


@epilogue
def to_packed_halves(acc):
    gate, up = halves(acc)
    return quantize(gate * up, "fp4_e2m1", group=16), row_absmax(gate)


@epilogue
def to_groups(acc):
    return acc, quantize(acc / (1.0 + row_absmax(acc)), "fp8_e4m3", group=128)


@epilogue
def wide_tiles(acc, c: Tile, d: Tile):
    gate, up = pairs(acc)
    return quantize(silu(gate) * up, "fp8_e4m3", group=128), acc + c, gate, up, acc * d


@epilogue
def wide_tiles_of_long_rows(acc, c: Tile, d: Tile):
    gate, up = pairs(acc)
    return quantize(silu(gate) * up, "fp8_e4m3", group=128), acc + c, gate, up, acc * d, row_sum(relu(acc))


EPILOGUES = [
    scale_bias_relu, gelu_residual, linear, absmax, swiglu, swiglu_residual, swiglu_fp8, all_reductions, gated,
    two_tiles, to_mx, to_packed_pairs, to_packed_halves, expert_l1("swiglu_oai", 7.0, True, "mxfp8"),
    expert_l1("swiglu", None, False, "fp8_1x128"),
]  # fmt: skip


@pytest.mark.parametrize("shape", [(5, 512, 256), (129, 768, 320), (1500, 2304, 512)], ids=str)
@pytest.mark.parametrize("ep", EPILOGUES, ids=lambda ep: ep.ir.name)
def test_epilogues(ep, shape):
    check(ep, *shape)


@pytest.mark.parametrize("ep", [probabilities, router, to_rows], ids=lambda ep: ep.ir.name)
@pytest.mark.parametrize("shape", [(3, 24, 64), (130, 128, 512), (700, 256, 256), (257, 1000, 256)], ids=str)
def test_whole_rows(ep, shape):
    check(ep, *shape)


@pytest.mark.parametrize("format", ["bf16", "fp8_row"])
@pytest.mark.parametrize("shape", [(3, 256, 64), (130, 128, 512), (700, 256, 256), (257, 1024, 256)], ids=str)
def test_groups_of_whole_rows(shape, format):
    check(to_groups, *shape, format)


@pytest.mark.parametrize(
    ("ep", "N"),
    [(wide_tiles, 256), (wide_tiles, 1024), (wide_tiles_of_long_rows, 512), (wide_tiles_of_long_rows, 16640)],
)
@pytest.mark.parametrize("M", [5, 130, 600])
def test_more_tiles_than_shared_memory_holds(ep, N, M):
    check(ep, M, N, 256, out_dtype=torch.float32)


@pytest.mark.parametrize("format", ["fp8_row", "fp8_block128"])
@pytest.mark.parametrize("ep", [swiglu_fp8, gated, to_mx, probabilities, absmax], ids=lambda ep: ep.ir.name)
def test_epilogues_of_fp8(ep, format):
    check(ep, 200, 512, 1024, format)
    check(ep, 9, 512, 1024, format)


@pytest.mark.parametrize("K", [256, 384, 512, 640, 1152])
def test_blocks_left_over_from_chains_of_four(K):
    for M in (40, 300, 1500):
        check(store, M, 2304, K, "fp8_block128")


COUNTS = [[256] * 8, [0, 1, 130, 0, 64, 700, 0], [16] * 32, [0, 0], [1], [0, 3000, 5]]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("format", [name for name, (of_a, _) in FORMATS.items() if of_a != "fp8_tensor"])
def test_groups(counts, format):  # rows need a factor each
    of_a, of_b = FORMATS[format]
    P, N, K, E = sum(counts) + 3, 512, 256, len(counts)
    rows, weights = matrix(P, K, of_a, 0), matrix(N, K, of_b, 1, (E,))
    offsets = offsets_of(counts)
    for ep in (store, expert_l1("swiglu_oai", 7.0, True, "fp8_1x128"), all_reductions):
        operands = operands_for(ep, P, N, E)
        got = grouped_gemm(rows, weights, offsets, ep, **operands)
        acc, exact = products_by_expert(rows, weights, offsets)
        spread = dict(operands)
        spread_columns(ep.ir, spread, offsets, P)
        judge(ep, got, acc, exact, spread, offsets)


ROUND_SIXTY_FOUR = [0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 0, 321]


@pytest.mark.parametrize(
    "ep", [store, expert_l1("swiglu_oai", 7.0, True, "mxfp8"), all_reductions], ids=lambda ep: ep.ir.name
)
@pytest.mark.parametrize("K", [128, 640, 2048])
def test_wide_tiles_have_the_bits_of_square_ones(ep, K, monkeypatch):
    counts, N = ROUND_SIXTY_FOUR, 4096  # 544 tiles: each CTA has several, of both shapes
    P, E = sum(counts) + 70, len(counts)
    rows, weights = matrix(P, K, "fp8_1x128", 0), matrix(N, K, "fp8_128x128", 1, (E,))
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    found = []
    for wide, num_stages in ((False, 4), (True, 5), (True, 3)):
        config = Config(64, 2, 128, 128, num_stages, wide_tail_tiles=wide)
        monkeypatch.setattr(tune, "choose", lambda problem, code, *_, config=config: fitted(problem, config, code))
        found.append(flat(grouped_gemm(rows, weights, offsets, ep, **operands_for(ep, P, N, E))))
    for wide in found[1:]:
        for x, y in zip(wide, found[0], strict=True):
            assert_same_bits(x, y)


TWO_WIDTHS = {
    "64 + 32": Config(64, 2, 96, 64, 8, epilogue_columns=32),
    "128 + 32": Config(64, 2, 160, 64, 8, epilogue_columns=32),
    "128 + 32, in turns": Config(64, 2, 160, 64, 8, epilogue_columns=32, pingpong=True),
    "128 + 64, in turns": Config(64, 2, 192, 64, 8, pingpong=True),
    "128 + 64, one consumer": Config(64, 1, 192, 64, 8),
    "64 + 32, three": Config(64, 3, 96, 64, 8, epilogue_columns=32),
}  # fmt: skip


@pytest.mark.parametrize("ep", [store, scale_bias_relu, gelu_residual, swiglu, absmax], ids=lambda ep: ep.ir.name)
@pytest.mark.parametrize("name", TWO_WIDTHS)
@pytest.mark.parametrize(("M", "N"), [(200, 576), (65, 136), (513, 2064), (33, 72)])
def test_two_widths_have_the_bits_of_one(M, N, name, ep, monkeypatch):
    a, b, operands = normal(M, 1024), normal(N, 1024, seed=1), operands_for(ep, M, N)
    found = []
    for config in (Config(64, 2, 128, 64, 8, epilogue_columns=32), TWO_WIDTHS[name]):
        monkeypatch.setattr(tune, "choose", lambda problem, code, *_, config=config: fitted(problem, config, code))
        prepared.clear()
        found.append(flat(gemm(a, b, ep, **operands)))
    prepared.clear()
    for x, y in zip(*found, strict=True):
        assert_same_bits(x, y)


OVERLAPPING = {
    "one consumer": Config(64, 1, 64, 128, 6), "two consumers": Config(64, 2, 128, 128, 4),
    "in turns": Config(128, 2, 128, 64, 6, pingpong=True), "split": Config(64, 1, 64, 128, 6, split_k=2),
    "eight warps": Config(128, 2, 128, 64, 6, 8, pingpong=True, epilogue_columns=32),
    "tokens on the N side": Config(64, 1, 32, 128, 6, swap_ab=True),
    "three consumers": Config(64, 3, 128, 64, 4), "three, split": Config(64, 3, 128, 64, 4, split_k=2),
    **TWO_WIDTHS,
}  # fmt: skip


@pytest.mark.parametrize("ep", [store, gelu_residual, swiglu, absmax], ids=lambda ep: ep.ir.name)
@pytest.mark.parametrize(
    ("M", "name"),
    [(33, "tokens on the N side")]  # more tokens aren't put there
    + [(M, name) for M in (33, 65, 127, 129, 193, 321) for name in OVERLAPPING if name != "tokens on the N side"],
)
def test_tiles_that_overlap_have_the_bits_of_tiles_that_do_not(M, name, ep, monkeypatch):
    a, b = normal(M, 1024), normal(576, 1024, seed=1)
    operands = operands_for(ep, M, 576)
    found = []
    for overlap in (False, True):

        def choose(problem, code, *_, overlap=overlap):
            config = replace(fitted(problem, OVERLAPPING[name], code), tiles_overlap=overlap)
            assert not why_not(problem, config, code)
            return config

        monkeypatch.setattr(tune, "choose", choose)
        prepared.clear()
        found.append(flat(gemm(a, b, ep, **operands)))
    prepared.clear()
    for x, y in zip(*found, strict=True):
        assert_same_bits(x, y)
    judge(ep, found[1], torchs_product(a, b), oracle(a, b), operands)


def test_strides_and_addresses_that_tma_does_not_take():
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        whole = normal(300, 520).to(dtype)
        weights = normal(264, 1040, seed=1).to(dtype)
        cuts = [(whole[:288, 1:497], weights[:256, 3:499]), (whole[:288].t()[:256].t(), weights[:256, ::2][:, :256])]
        for a, b in cuts:
            if dtype == torch.bfloat16:
                assert_at_most_twice(gemm(a, b), a @ b.T, oracle(a, b))
            else:
                one = torch.ones(1, 1, device="cuda")
                qa, qb = QuantTensor(a, one, tuple(a.shape)), QuantTensor(b, one, tuple(b.shape))
                assert_at_most_twice(gemm(qa, qb), torchs_product(qa, qb).bfloat16(), oracle(qa, qb))


@pytest.mark.parametrize("M", [0, 1])
def test_nothing(M):
    assert gemm(normal(M, 64), normal(8, 64)).shape == (M, 8)
    assert torch.equal(gemm(normal(M, 0), normal(8, 0)), torch.zeros(M, 8, device="cuda", dtype=torch.bfloat16))


def test_nan_and_infinity_stay_where_they_are():
    a, b = normal(200, 256), normal(256, 256, seed=1)
    a[7, 3], a[150, 0] = float("nan"), float("inf")
    got = gemm(a, b)
    assert got[7].isnan().all()
    assert not got[150].isfinite().any()
    assert got[[i for i in range(200) if i not in (7, 150)]].isfinite().all()
    q = gemm(a, b, swiglu_fp8)
    assert dequantize(q)[7].isnan().all()
    assert dequantize(q)[:7].isfinite().all()
