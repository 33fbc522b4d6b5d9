"""Products: sizes, strides, formats, groups."""

import pytest
import torch

from envoi.epilogues import Col, Row, epilogue
from envoi.epilogues.library import store
from envoi.ops.gemm import gemm, reference
from envoi.quant import quantize
from envoi.types import QuantTensor
from tests.gemm.interpreted.sides import assert_close, assert_equal, expected, run, whole
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.inputs import normal
from tools.oracles.gemm import oracle

FLOATS = [torch.bfloat16, torch.float16, torch.float32]
# For a, for b.
PAIRINGS = [
    ("fp8_row", "fp8_row"), ("fp8_tensor", "fp8_tensor"), ("fp8_1x128", "fp8_128x128"), ("mxfp8", "mxfp8"),
    ("mxfp8", "mxfp4"), ("nvfp4", "nvfp4"), ("fp8_1x128", "fp8_row"), ("fp8_row", "mxfp8"), ("fp8_1x128", "fp8_1x128"),
    ("fp8_tensor", "fp8_128x128"), (None, "mxfp8"), (None, "mxfp4"), (None, "nvfp4"), (None, None),
]  # fmt: skip
GROUPS = {
    "even": [0, 8, 16, 24, 32], "empty experts": [0, 0, 30, 30, 32], "one takes all": [0, 0, 32, 32, 32],
    "no rows": [0, 0, 0, 0, 0], "rows behind the last": [0, 5, 9, 9, 20], "all behind the last": [0, 0, 0, 0, 0],
}  # fmt: skip


def cast(x: torch.Tensor, scheme: str | None):
    return x.bfloat16() if scheme is None else quantize(x, scheme)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("n", "k"), [(8, 64), (130, 72)])
@pytest.mark.parametrize("m", [0, 1, 17, 129])
def test_sizes(m, n, k, dtype):
    a, b = normal(m, k).to(dtype), normal(n, k, seed=1).to(dtype)
    got = gemm(a, b)
    assert got.dtype == dtype
    assert_close([got], expected(a, b, store), expected(a, b, store, wide=True), 0.0)
    a, b = whole(m, k).to(dtype), whole(n, k, seed=1).to(dtype)
    assert_equal(run(a, b, store), expected(a, b, store))


@pytest.mark.parametrize(("m", "n", "k"), [(0, 0, 64), (5, 0, 64), (0, 8, 0), (5, 8, 0), (1, 1, 1)])
def test_nothing_to_do(m, n, k):
    assert_same_bits(gemm(torch.ones(m, k), torch.ones(n, k)), torch.full((m, n), float(k)))


def test_strides():
    a, b = whole(72, 40).T, whole(200, 150, seed=1)[1::5, 3:147:2]
    c = whole(60, seed=2)[20:]
    ending = epilogue(_with_operands)
    assert not a.is_contiguous() and not b.is_contiguous()
    spread = {"r": whole(80, seed=3)[::2], "c": c.repeat_interleave(2)[::2]}
    packed = {name: value.contiguous() for name, value in spread.items()}
    assert_equal(run(a, b, ending, **spread), expected(a.contiguous(), b.contiguous(), ending, **packed))


def _with_operands(acc, r: Row, c: Col):
    return acc * r + c


@pytest.mark.parametrize(("for_a", "for_b"), PAIRINGS)
@pytest.mark.parametrize("m", [17, 70])
def test_formats(for_a, for_b, m):
    a, b = cast(normal(m, 256), for_a), cast(normal(130, 256, seed=1), for_b)
    got, want = gemm(a, b, out_dtype=torch.float32), reference.accumulate(a, b)
    assert_close([got], [want], [oracle(a, b)], 5e-8)


def test_scale_factors_over_uncommon_groups():
    for group_k, rows in ((48, 3), (96, 7), (192, 1)):
        a = QuantTensor(whole(20, 192).to(torch.float8_e4m3fn), normal(20, 192 // group_k).abs(), (1, group_k))
        b = QuantTensor(
            whole(24, 192, seed=1).to(torch.float8_e4m3fn),
            normal(-(-24 // rows), 192 // group_k).abs(),
            (rows, group_k),
        )
        assert_close([gemm(a, b, out_dtype=torch.float32)], [reference.accumulate(a, b)], [oracle(a, b)])


def test_strided_quantised_operands():
    q = quantize(normal(40, 256), "fp8_1x128")
    a = QuantTensor(q.values[::2], q.sf[::2], q.group)
    w = quantize(normal(24, 256, seed=1), "mxfp4")
    b = QuantTensor(w.values.T.contiguous().T, w.sf.view(torch.uint8).T.contiguous().T.view(w.sf.dtype), w.group)
    b8 = quantize(normal(24, 256, seed=1), "fp8_1x128")
    assert_same_bits(gemm(a, b8), gemm(QuantTensor(a.values.contiguous(), a.sf.contiguous(), a.group), b8))
    x = normal(5, 256).bfloat16()
    assert_same_bits(gemm(x, b), gemm(x, w))


def test_nan_and_infinity_stay_in_their_rows():
    a, b = whole(20, 64), whole(40, 64, seed=1).abs() + 1
    a[3, 7], a[4, 9], a[5, 9] = torch.nan, torch.inf, -torch.inf
    assert_equal(run(a, b, store), expected(a, b, store))
    q = quantize(a, "mxfp8")
    assert bool(gemm(q, quantize(b, "mxfp4"))[3].isnan().all())


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize(("for_a", "for_b"), [(None, None), ("fp8_row", "fp8_row"), ("fp8_1x128", "fp8_128x128"),
                                              ("mxfp8", "mxfp4"), (None, "mxfp4")])  # fmt: skip
def test_groups(name, for_a, for_b):
    offsets = GROUPS[name]
    rows, experts = 0 if name == "no rows" else 32, len(offsets) - 1
    a, b = cast(normal(rows, 128), for_a), cast(normal(experts, 24, 128, seed=1), for_b)
    ending = epilogue(_with_operands)
    values = {"r": whole(rows, seed=2), "c": whole(experts, 24, seed=3)}
    want = expected(a, b, ending, offsets, wide=True, **values)
    assert_close(run(a, b, ending, offsets, **values), expected(a, b, ending, offsets, **values), want, 1e-7)


@pytest.mark.parametrize("rows", [0, 1, 32])
def test_no_experts(rows):
    a, b = whole(rows, 64), whole(0, 24, 64)
    ending = epilogue(_with_operands)
    values = {"r": whole(rows, seed=2), "c": whole(0, 24)}
    assert_equal(run(a, b, ending, [0], **values), [torch.zeros(rows, 24)])
