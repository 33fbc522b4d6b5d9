"""Epilogues of the library, quantised outputs, ties, scalars in memory, no columns, wide rows."""

import pytest
import torch

from envoi.epilogues import (
    Col,
    HalfCol,
    HalfTile,
    Row,
    Scalar,
    Tile,
    cast,
    col_max,
    col_sum,
    epilogue,
    library,
    pairs,
    quantize,
    round_mxfp8,
    row_absmax,
    row_max,
    row_sum,
    softmax,
    topk,
    total_absmax,
    total_max,
    total_sum,
)  # fmt: skip
from envoi.epilogues.lower import lower
from envoi.ops.gemm import gemm, grouped_gemm
from envoi.ops.gemm.grouping import Grouping
from envoi.ops.gemm.triton import host
from envoi.quant import dequantize
from envoi.quant import quantize as cast_to
from envoi.types import QuantTensor
from tests.gemm.interpreted.sides import assert_close, assert_equal, expected, run, whole
from tests.helpers.accuracy import assert_same_bits, relative_error
from tests.helpers.inputs import LOGITS, logits, normal
from tests.helpers.slow import mostly_slow

SCHEMES = [
    ("fp8_e4m3", 128, "fp8_1x128"), ("fp8_e4m3", 32, "mxfp8"), ("fp8_e4m3", "row", "fp8_row"),
    ("fp4_e2m1", 32, "mxfp4"), ("fp4_e2m1", 16, "nvfp4"),
]  # fmt: skip


def assert_same_codes(got: QuantTensor, want: QuantTensor) -> None:
    assert got.group == want.group
    for x, y in ((got.values, want.values), (got.sf, want.sf)):
        assert_same_bits(x, y) if x.dtype == torch.uint8 else assert_same_bits(x.float(), y.float())


@pytest.mark.parametrize("columns", [128, 384, 640])
def test_rows_that_are_scattered_end_with_their_own_factors(columns):
    """Also where a tile has groups after a row's last."""
    a, b, offsets = normal(5, 64), normal(1, columns, 64), torch.tensor([0, 5], dtype=torch.int32)
    room = columns + 4 * (columns // 128)
    memory = torch.full((5, -(-room // 16) * 16), 7, dtype=torch.uint8)
    to = memory.data_ptr() + memory.shape[1] * torch.arange(5)
    l2 = library.expert_l2(False, scheme="fp8_1x128").ir
    code = lower(l2, torch.bfloat16, "triton", False, False, frozenset(), scattered=True)
    host._launch(a, b, offsets, code, (), [to], 256, Grouping(write_tail=False, to=to))
    want = cast_to(a.float() @ b[0].float().T, "fp8_1x128")
    assert relative_error(memory[:, :columns].view(want.values.dtype).float(), want.values.float()) < 0.01
    assert relative_error(memory[:, columns:room].contiguous().view(torch.float32), want.sf) < 1e-3
    assert (memory[:, room:] == 7).all()


@pytest.mark.parametrize(("name", "group", "scheme"), SCHEMES)
@pytest.mark.parametrize(("m", "n"), [(19, 128), (5, 640), (0, 128)])
def test_quantised_outputs_have_the_bits_of_the_casts(name, group, scheme, m, n):
    x = normal(m, n) * torch.logspace(-14, 9, m).unsqueeze(1)
    if m:
        x[1], x[2, 5], x[3, 7], x[4, : n // 2] = 0.0, torch.nan, torch.inf, 448.0
    want, zeros = cast_to(x, scheme), torch.zeros(m, 16)

    def shifted(acc, t: Tile):
        return quantize(acc + t, name, group=group)

    def of_half(acc, t: HalfTile):
        return quantize(pairs(acc)[1] + t, name, group=group)

    assert_same_codes(gemm(zeros, torch.zeros(n, 16), epilogue(shifted), t=x), want)
    assert_same_codes(gemm(zeros, torch.zeros(2 * n, 16), epilogue(of_half), t=x), want)
    if n == 128 and m:
        finite = x.nan_to_num(0.0, 1.0)
        got = gemm(finite, torch.eye(n), epilogue(lambda acc: quantize(acc, name, group=group)))
        assert_same_codes(got, cast_to(finite, scheme))


def test_quantised_outputs_of_groups():
    x, offsets = normal(20, 256), torch.tensor([0, 7, 7, 15], dtype=torch.int32)
    weights = torch.zeros(3, 256, 16)
    for name, group, scheme in SCHEMES:
        f = epilogue(_shifted(name, group))
        got = grouped_gemm(torch.zeros(20, 16), weights, offsets, f, t=x, c=torch.ones(3, 256))
        assert_same_codes(got, cast_to(x, scheme))


def _shifted(name, group):
    def shifted(acc, t: Tile, c: Col):
        return quantize(acc + t * c, name, group=group)

    return shifted


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize(("n", "k"), mostly_slow([(24, 4), (130, 1), (300, 8)], quick=[(300, 8)]))
def test_topk_of_any_row(kind, n, k):
    def best(acc, t: Tile):
        return topk(acc + t, k)

    x, f = logits(kind, 9, n, k), epilogue(best)
    assert_equal(list(gemm(torch.zeros(9, 16), torch.zeros(n, 16), f, t=x)), list(f(torch.zeros(9, n), t=x)))


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("n", mostly_slow([24, 300], quick=[300]))
def test_softmax_of_any_row(kind, n):
    def scores(acc, t: Tile):
        return softmax(acc + t), softmax(topk(acc + t, 3)[0])

    x, f = logits(kind, 9, n, 4), epilogue(scores)
    got, zeros = run(torch.zeros(9, 16), torch.zeros(n, 16), f, t=x), torch.zeros(9, n)
    assert_close(got, list(f(zeros, t=x)), list(f(zeros.double(), t=x)))


FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [32, 320])
def test_the_library(n, dtype):
    a, b = normal(19, 64).to(dtype), normal(n, 64, seed=1).to(dtype)
    tile, half = normal(19, n, seed=2).to(dtype), normal(19, n // 2, seed=3).to(dtype)
    bias, weight = normal(n, seed=4).to(dtype), normal(19, seed=5)
    cases = [
        (library.store, {}), (library.linear, {"c": tile, "alpha": 0.5, "beta": 2.0}),
        (library.scale_bias_relu, {"alpha": 0.5, "bias": bias}),
        (library.gelu_residual, {"bias": bias, "residual": tile}), (library.absmax, {}), (library.swiglu, {}),
        (library.swiglu_residual, {"residual": half}), (library.expert_l2(True), {"weight": weight, "bias": bias}),
        (library.expert_l1("swiglu_oai", 7.0, True, None), {"weight": weight, "bias": bias}),
        (library.expert_l1("swiglu", None, False, None), {"weight": weight}),
    ]  # fmt: skip
    for f, operands in cases:
        want = expected(a, b, f, wide=True, **operands)
        assert_close(run(a, b, f, **operands), expected(a, b, f, **operands), want)


def test_experts_leave_quantised():
    offsets = [0, 3, 3, 11, 17]
    a, b = whole(19, 64).bfloat16(), whole(4, 512, 64, seed=1).bfloat16()
    operands = {"weight": whole(19, seed=2), "bias": whole(4, 512, seed=3)}
    for scheme in ("fp8_row", "fp8_1x128", "mxfp8"):
        f = library.expert_l1("swiglu", 7.0, True, scheme)
        got, want = run(a, b, f, offsets, **operands), expected(a, b, f, offsets, **operands)
        # silu differs in the last bit, which may move a scale and with it a row's codes.
        x, y = (QuantTensor(*pair, (1, 256 // pair[1].shape[-1])) for pair in (got, want))
        assert relative_error(dequantize(x), dequantize(y)) < 0.01


@pytest.mark.parametrize("layout", ["interleaved", "concat"])
def test_mxfp8_rows_kept_in_bf16_have_all_their_numbers(layout):
    offsets = [0, 3, 3, 11, 17]
    a, b = whole(17, 64).bfloat16(), whole(4, 576, 64, seed=1).bfloat16()
    a[2, 3], a[12] = torch.nan, 0.0
    weight = whole(17, seed=2) * torch.logspace(-36, 30, 17)
    weight[5] = torch.inf
    kept = library.expert_l1("swiglu", 7.0, False, "mxfp8", layout, in_bf16=True)
    values, sf = run(a, b, library.expert_l1("swiglu", 7.0, False, "mxfp8", layout), offsets, weight=weight)
    (got,) = run(a, b, kept, offsets, weight=weight)
    want = dequantize(QuantTensor(values, sf, (1, 32)))
    assert got.dtype == torch.bfloat16 and bool((want.abs() < 1e-37).any()) and bool((want.abs() > 1e30).any())
    assert_same_bits(got.float().nan_to_num(-1.0) + 0.0, want.nan_to_num(-1.0) + 0.0)
    (torchs,) = expected(a, b, kept, offsets, weight=weight)
    assert relative_error(got[13:].float(), torchs[13:].float()) < 0.01  # silu's last bit may move a scale


def test_a_value_rounded_to_mxfp8_is_computed_with():
    @epilogue
    def difference(acc):
        return acc - round_mxfp8(acc)

    a, b = normal(9, 64).bfloat16(), normal(160, 64, seed=1).bfloat16()
    acc = gemm(a, b, out_dtype=torch.float32)
    got = gemm(a, b, difference, out_dtype=torch.float32)
    assert_same_bits(got + 0.0, acc - dequantize(cast_to(acc, "mxfp8")) + 0.0)
    assert 0 < float(got.abs().max()) <= float(acc.abs().max()) / 16
    with pytest.raises(ValueError, match=r"N: expected a multiple of 32 \(output columns, mxfp8 groups\), got 24"):
        gemm(a, b[:24], difference)


def test_factors_of_mxfp8_at_their_boundaries():
    """448 times a power of two and its neighbours, float32's ends, the least factor, what isn't finite."""

    def rounded(acc, t: Tile):
        return round_mxfp8(t + acc)

    up, down = torch.tensor(torch.inf), torch.tensor(0.0)
    edges = [448.0 * torch.tensor(2.0) ** n for n in (-135, -109, -108, -20, 0, 1, 100, 119)]
    edges += [torch.finfo(torch.float32).max, 1.9375 * 2.0**127, 1e-30, 2.0**-149, 0.0, torch.inf, torch.nan]
    edges = torch.tensor([float(x) for x in edges])
    tops = torch.cat((edges, torch.nextafter(edges, up), torch.nextafter(edges, down)))
    x = normal(len(tops), 32)
    x = (x / x.abs().amax(1, keepdim=True)).clamp(-0.99, 0.99) * tops[:, None].nan_to_num(1.0, 1.0)
    x[:, 7] = -tops
    (got,) = run(torch.zeros(len(x), 16), torch.zeros(32, 16), epilogue(rounded), t=x)
    want = dequantize(cast_to(x, "mxfp8"))
    assert bool(want.isinf().any()) and bool(want.isnan().any()) and bool((want[:, 7] == x[:, 7]).any())
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(0.0, torch.inf, -torch.inf), want.nan_to_num(0.0, torch.inf, -torch.inf))


@pytest.mark.parametrize("layout", ["interleaved", "concat"])
def test_rows_rounded_first_have_the_bits_of_rows_quantised_later(layout):
    offsets = [0, 3, 3, 11, 17]
    a, b = whole(17, 64).bfloat16(), whole(4, 512, 64, seed=1).bfloat16()
    operands = {"weight": whole(17, seed=2) * 0.37}
    values, sf = run(a, b, library.expert_l1("swiglu", 7.0, False, "fp8_1x128", layout, True), offsets, **operands)
    (stored,) = run(a, b, library.expert_l1("swiglu", 7.0, False, None, layout), offsets, **operands)
    want = cast_to(stored, "fp8_1x128")
    assert_same_bits(values, want.values)
    assert_same_bits(sf, want.sf)
    (at_once, _) = run(a, b, library.expert_l1("swiglu", 7.0, False, "fp8_1x128", layout), offsets, **operands)
    assert not torch.equal(at_once.float(), values.float()), "rounding made no difference: other numbers are needed"


def test_scalars_in_memory():
    def scaled(acc, alpha: Scalar, beta: Scalar):
        return acc * alpha + beta, alpha, cast(beta * 2.0, "bf16"), alpha * beta

    f = epilogue(scaled)
    a, b = whole(5, 16), whole(24, 16, seed=1)
    for alpha in (0.25, torch.tensor(0.25), torch.tensor([[0.25]], dtype=torch.bfloat16)):
        for m in (0, 5):
            operands = {"alpha": alpha, "beta": torch.tensor(3.0)}
            assert_equal(run(a[:m], b, f, **operands), expected(a[:m], b, f, **operands))


def test_values_that_all_rows_share():
    def columns(acc, c: Col, h: HalfCol):
        return acc, c, h, -c, cast(h, "bf16"), c * 2.0, pairs(c)[1] + h

    f = epilogue(columns)
    for m, n in ((0, 24), (3, 24), (200, 300)):
        a, b, operands = whole(m, 16), whole(n, 16, seed=1), {"c": whole(n, seed=2), "h": whole(n // 2, seed=3)}
        assert_equal(run(a, b, f, **operands), expected(a, b, f, **operands))


@epilogue
def reductions(acc, r: Row):
    return (row_sum(acc), row_max(acc), row_absmax(acc), row_max(r * acc), col_sum(acc), col_max(acc), total_sum(acc),
            total_max(acc), total_absmax(acc), total_max(r))  # fmt: skip


@pytest.mark.parametrize(("m", "n"), [(0, 0), (3, 0), (0, 3), (300, 3), (3, 2880), (200, 600)])
def test_reductions_of_any_size(m, n):
    a, b, r = whole(m, 16), whole(n, 16, seed=1), whole(m, seed=2)
    assert_equal(run(a, b, reductions, r=r), expected(a, b, reductions, r=r))


@pytest.mark.parametrize("offsets", [[0], [0, 0, 0], [0, 300], [0, 120, 120, 240], [0, 0, 1, 1, 299]])
def test_reductions_of_groups(offsets):
    experts = len(offsets) - 1
    a, b, r = whole(300, 16), whole(experts, 280, 16, seed=1), whole(300, seed=2)
    assert_equal(run(a, b, reductions, offsets, r=r), expected(a, b, reductions, offsets, r=r))
