"""Epilogue language: tracing, printing, evaluation, refusals."""

import fractions
import gc
import inspect
import math
import operator
import random
import re
import statistics
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import envoi
import envoi.epilogues as language
from envoi.epilogues import (
    Col,
    EpilogueError,
    HalfCol,
    HalfTile,
    Row,
    Scalar,
    Tile,
    cast,
    clip,
    col_absmax,
    col_max,
    col_sum,
    epilogue,
    evaluate,
    exp,
    exp2,
    gelu,
    halves,
    hardswish,
    leaky_relu,
    log,
    log2,
    maximum,
    minimum,
    pairs,
    quantize,
    relu,
    round_bf16,
    row_absmax,
    row_max,
    row_sum,
    rsqrt,
    sigmoid,
    silu,
    softmax,
    softplus,
    sqrt,
    tanh,
    topk,
    total_absmax,
    total_max,
    total_sum,
    vocabulary,
    where,
)  # fmt: skip
from envoi.epilogues.library import (
    absmax,
    expert_l1,
    expert_l2,
    gelu_residual,
    linear,
    scale_bias_relu,
    store,
    swiglu,
    swiglu_fp8,
    swiglu_residual,
)  # fmt: skip
from envoi.epilogues.operations import OPERATIONS as TABLE
from envoi.epilogues.operations import ROW_TILE_CUDA, in_row_tiles
from envoi.quant import quantize as cast_to
from envoi.types import QuantTensor
from tests.helpers.accuracy import assert_at_most_twice, assert_same_bits, relative_error

M, N = 7, 64
SOURCE = torch.Generator().manual_seed(0)
ACC = torch.randn(M, N, generator=SOURCE) * 3


def test_the_ir_prints_itself():
    @epilogue
    def scale(acc, alpha: Scalar, bias: Col):
        return relu(alpha * acc + bias)

    assert str(scale.ir) == (
        "epilogue scale(acc, alpha: Scalar, bias: Col)\n"
        "  %0 tile f32 = acc\n"
        "  %1 scalar f32 = load name='alpha'\n"
        "  %2 col f32 = load name='bias'\n"
        "  %3 tile f32 = mul %1, %0\n"
        "  %4 tile f32 = add %3, %2\n"
        "  %5 tile f32 = relu %4\n"
        "  return %5"
    )
    assert str(swiglu_fp8.ir).splitlines()[-2:] == [
        "  %5 tile/2 quantised = quantize %4, scheme='fp8_1x128'",
        "  return %5",
    ]


def test_the_decorator_has_two_names():
    assert envoi.epilogue is language.epilogue is epilogue


def test_the_earlier_name_of_the_language_works_and_warns():
    with pytest.warns(DeprecationWarning, match=r"envoi\.epilogue\.silu is envoi\.epilogues\.silu now"):
        from envoi.epilogue import silu as earlier
    assert earlier is language.silu
    with pytest.raises(ImportError):
        from envoi.epilogue import nothing  # noqa: F401


OPERATIONS = {
    "add": (lambda x: x + 1.5, lambda x: x + 1.5),
    "radd": (lambda x: 1.5 + x, lambda x: x + 1.5),
    "sub": (lambda x: x - 0.1, lambda x: x - 0.1),
    "rsub": (lambda x: 0.1 - x, lambda x: 0.1 - x),
    "mul": (lambda x: x * 0.3, lambda x: x * 0.3),
    "div": (lambda x: x / 0.7, lambda x: x / 0.7),
    "rdiv": (lambda x: 2.0 / (abs(x) + 1), lambda x: 2 / (x.abs() + 1)),
    "neg": (lambda x: -x, lambda x: -x),
    "abs": (lambda x: abs(x), lambda x: x.abs()),
    "pow": (lambda x: x**3, lambda x: x * x * x),
    "exp": (exp, torch.exp),
    "exp2": (exp2, lambda x: (x * math.log(2)).exp()),
    "log": (lambda x: log(abs(x) + 1), lambda x: (x.abs() + 1).log()),
    "log2": (lambda x: log2(abs(x) + 1), lambda x: (x.abs() + 1).log() / math.log(2)),
    "sqrt": (lambda x: sqrt(abs(x)), lambda x: x.abs().sqrt()),
    "rsqrt": (lambda x: rsqrt(abs(x) + 1), lambda x: 1 / (x.abs() + 1).sqrt()),
    "tanh": (tanh, lambda x: (1 - (-2 * x).exp()) / (1 + (-2 * x).exp())),
    "sigmoid": (sigmoid, lambda x: 1 / (1 + (-x).exp())),
    "relu": (relu, lambda x: x * (x > 0)),
    "silu": (silu, lambda x: x / (1 + (-x).exp())),
    "gelu": (gelu, lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))),
    "gelu tanh": (lambda x: gelu(x, "tanh"),
                  lambda x: 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh())),
    "hardswish": (hardswish, lambda x: x * (x + 3).clamp(0, 6) / 6),
    "leaky_relu": (lambda x: leaky_relu(x, 0.2), lambda x: torch.where(x > 0, x, 0.2 * x)),
    "softplus": (softplus, lambda x: (1 + x.exp()).log()),
    "minimum": (lambda x: minimum(x, 0.5), lambda x: x.clamp(max=0.5)),
    "maximum": (lambda x: maximum(-0.5, x), lambda x: x.clamp(min=-0.5)),
    "round_bf16": (lambda x: round_bf16(x * 0.3), lambda x: (x * 0.3).float().bfloat16()),
    "clip": (lambda x: clip(x, -1.0, 2.0), lambda x: x.clamp(-1, 2)),
    "where": (lambda x: where((x > 1) | (x <= -1), x, 0.0), lambda x: x * ((x > 1) | (x <= -1))),
    "masks": (lambda x: where(~((x < 1) & (x >= -1)) & (x != 5), 1.0, where(x == 0, 3.0, 2.0)),
              lambda x: torch.where((x >= 1) | (x < -1), 1.0, 2.0)),
    "even": (lambda x: pairs(x)[0], lambda x: x[:, ::2]),
    "odd": (lambda x: pairs(x)[1], lambda x: x[:, 1::2]),
    "pairs of pairs": (lambda x: pairs(pairs(x)[1])[0], lambda x: x[:, 1::4]),
    "left": (lambda x: halves(x)[0] * 1.0, lambda x: x[:, : x.shape[1] // 2]),
    "right": (lambda x: halves(x * 2)[1], lambda x: 2 * x[:, x.shape[1] // 2 :]),
    "pairs of halves": (lambda x: pairs(halves(x)[1])[0], lambda x: x[:, x.shape[1] // 2 :: 2]),
    "row_sum": (row_sum, lambda x: x.sum(1)),
    "row_max": (row_max, lambda x: x.max(1).values),
    "row_absmax": (row_absmax, lambda x: x.abs().max(1).values),
    "col_sum": (col_sum, lambda x: x.sum(0)),
    "col_max": (col_max, lambda x: x.max(0).values),
    "col_absmax": (col_absmax, lambda x: x.abs().max(0).values),
    "total_sum": (total_sum, lambda x: x.sum()),
    "total_max": (total_max, lambda x: x.max()),
    "total_absmax": (total_absmax, lambda x: x.abs().max()),
    "softmax": (softmax, lambda x: x.softmax(1)),
    "normalise": (lambda x: x / row_absmax(x), lambda x: x / x.abs().max(1, keepdim=True).values),
    "softmax of topk": (lambda x: softmax(topk(x, 4)[0]), lambda x: x.topk(4).values.softmax(1)),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation(name):
    function, formula = OPERATIONS[name]
    ending = epilogue(lambda acc: function(acc))
    for acc in (ACC, ACC * 0.01, ACC.double()):
        got = ending(acc)
        assert got.dtype == acc.dtype
        assert relative_error(got, formula(acc.double())) < (1e-5 if acc.dtype == torch.float32 else 1e-12)


WITH_NUMBERS = {
    "number + x": lambda x, number: number + x, "x + number": lambda x, number: x + number,
    "number - x": lambda x, number: number - x, "x - number": lambda x, number: x - number,
    "number * x": lambda x, number: number * x, "x * number": lambda x, number: x * number,
    "number / x": lambda x, number: number / x, "x / number": lambda x, number: x / number,
    "number < x": lambda x, number: where(number < x, x, 0), "x < number": lambda x, number: where(x < number, x, 0),
    "x <= number": lambda x, number: where(x <= number, x, 0),
    "x >= number": lambda x, number: where(x >= number, 0, x),
    "x == number": lambda x, number: where(number == x, x / 3, 3), "x != number": lambda x, number: where(
        x != number, 3 / x, number),
    "minimum": lambda x, number: minimum(number, x), "maximum": lambda x, number: maximum(x, number),
    "powers": lambda x, number: number / x**5 - x**-3 * number,
    "masks": lambda x, number: where(~((x > number) & (number >= -x)) | (abs(-x) < 1), x / number, number / x),
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_NUMBERS)
@pytest.mark.parametrize("number", [3, 3.0, 0.1, -7, 1e-3, 10**20])
def test_numbers_in_every_place(name, number):
    function = WITH_NUMBERS[name]
    ending = epilogue(lambda acc: function(acc, number))
    x = torch.randn(31, 129, generator=torch.Generator().manual_seed(1)).double()
    x[0, :6] = torch.tensor([float(number), 0.0, -0.0, math.inf, -math.inf, math.nan])
    for acc in (x, x * 1e-4):
        want = function(acc, float(number))
        torch.testing.assert_close(ending(acc), want, rtol=1e-12, atol=1e-12, equal_nan=True)


def extremes(dtype: torch.dtype) -> torch.Tensor:
    """Return 4096 numbers of every magnitude, shuffled."""
    source = torch.Generator().manual_seed(2)
    x = torch.randn(4096, generator=source, dtype=torch.float64)
    x[2048:] *= torch.empty(2048, dtype=torch.float64).uniform_(-40, 40, generator=source).exp()
    info = torch.finfo(dtype)
    edges = [0.0, math.inf, math.nan, info.max, info.tiny, info.tiny / 8, 1.0, 3.0, 20.0, 88.7, 127.9, 149.5, 709.7]
    x[: 2 * len(edges)] = torch.tensor(edges + [-edge for edge in edges], dtype=torch.float64)
    return x.to(dtype)[torch.randperm(4096, generator=source)]


ATTRIBUTES = {
    "pow": [{"exponent": exponent} for exponent in (-3, -1, 0, 2, 3, 4, 5, 10)], "leaky_relu": [{"slope": 0.01}],
    "gelu": [{"approximate": "none"}, {"approximate": "tanh"}],
}  # fmt: skip
ELEMENT = [
    pytest.param(op, attributes, id=" ".join([op, *map(str, attributes.values())]))
    for op, operation in TABLE.items() if operation.step == "element" and operation.takes == "f32"
    for attributes in ATTRIBUTES.get(op, [{}])
]  # fmt: skip


@pytest.mark.parametrize(("op", "attributes"), ELEMENT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bits_do_not_depend_on_the_place(op, attributes, dtype):
    number = torch.full((1, 1), 0.3, dtype=dtype)

    def run(x):
        if op in ("add", "sub", "mul", "div", "minimum", "maximum", "lt", "le", "gt", "ge", "eq", "ne"):
            return torch.stack((TABLE[op].torch(x, number), TABLE[op].torch(number, x)))
        return TABLE[op].torch(x, **attributes).unsqueeze(0)

    x = extremes(dtype).unsqueeze(0)
    whole = run(x)
    assert_same_bits(torch.cat([run(x[:, i : i + 1]) for i in range(4096)], 2), whole)
    for start in (1, 3, 5, 7, 13, 30, 2047):
        for size in (1, 2, 3, 7, 9, 15, 17, 31, 33, 63, 1000):
            assert_same_bits(run(x[:, start : start + size]), whole[..., start : start + size])
    assert_same_bits(run(torch.stack((x, -x), 2).flatten(1)[:, 0::2]), whole)
    assert_same_bits(run(x.view(32, 128).T).mT.flatten(1), whole.flatten(1))


REBUILT = {
    "exp2": (exp2, torch.exp2, torch.exp2),
    "sigmoid": (sigmoid, torch.sigmoid, torch.sigmoid),
    "silu": (silu, torch.nn.functional.silu, torch.nn.functional.silu),
    "softplus": (softplus, torch.nn.functional.softplus, torch.nn.functional.softplus),
    # torch's own functions cancel far below 0, in float64 too.
    "gelu": (gelu, torch.nn.functional.gelu, lambda x: 0.5 * x * torch.erfc(x * -math.sqrt(0.5))),
    "gelu tanh": (lambda x: gelu(x, "tanh"), lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
                  lambda x: x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))),
    **{f"power {n}": ((lambda x, n=n: TABLE["pow"].torch(x, n)), (lambda x, n=n: x**n), (lambda x, n=n: x**n))
       for n in (-3, 0, 1, 4, 5, 10)},
}  # fmt: skip


@pytest.mark.parametrize("name", REBUILT)
def test_rebuilt_functions_are_as_good_as_torchs(name):
    mine, torchs, oracle = REBUILT[name]
    x = torch.rand(1, 4000, generator=torch.Generator().manual_seed(3)) + 1
    for exponent in range(-30, 30):
        for band in (x * 2.0**exponent, -x * 2.0**exponent):
            want = oracle(band.double())
            inside = want.abs() <= torch.finfo(torch.float32).max
            assert_same_bits(mine(band)[~inside], want[~inside].float())
            assert_at_most_twice(mine(band)[inside], torchs(band)[inside], want[inside])
    edges = torch.tensor([[math.inf, -math.inf, math.nan, 0.0, -0.0, 3.4e38, -3.4e38]])
    assert_same_bits(mine(edges), torchs(edges.double()).float())


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("N", [18, 4096, 40000])  # torch splits the sum of a single row of 40000 over threads
@pytest.mark.parametrize("op", [row_sum, row_max, row_absmax, softmax, lambda x: topk(x, 3)[0],
                                lambda x: row_sum(pairs(x)[1]), lambda x: softmax(pairs(x)[0])])  # fmt: skip
def test_a_rows_bits_do_not_depend_on_the_other_rows(op, N, two_threads):
    x = torch.randn(9, N, generator=torch.Generator().manual_seed(4))
    whole = op(x)
    for first, last in ((0, 1), (4, 5), (8, 9), (1, 3), (2, 9)):
        assert_same_bits(op(x[first:last]), whole[first:last])


def test_operands_of_every_kind_and_dtype():
    @epilogue
    def mixed(acc, alpha: Scalar, r: Row, c: Col, t: Tile, hc: HalfCol, ht: HalfTile, beta: Scalar = 0.5):
        even, odd = pairs(acc * alpha + r * c - t)
        return {"sum": even + hc * beta, "product": odd * ht}

    r, c, t = torch.randn(M).half(), torch.randn(N).bfloat16(), torch.randn(M, N).double().float()
    hc, ht = torch.randn(N // 2), torch.randn(M, N // 2).bfloat16()
    for alpha in (0.25, torch.tensor([0.25])):
        got = mixed(ACC, alpha=alpha, r=r, c=c, t=t, hc=hc, ht=ht)
        x = ACC * 0.25 + r.float()[:, None] * c.float() - t
        assert_same_bits(got["sum"], x[:, 0::2] + hc * 0.5)
        assert_same_bits(got["product"], x[:, 1::2] * ht.float())


def test_several_outputs_keep_their_form():
    both = epilogue(lambda acc: (acc, relu(acc)))(ACC)
    assert isinstance(both, tuple)
    assert_same_bits(both[1], ACC.relu())
    named = epilogue(lambda acc: {"pre": acc, "low": cast(acc, "fp16")})(ACC)
    assert list(named) == ["pre", "low"]
    assert named["low"].dtype == torch.float16


@pytest.mark.parametrize(
    ("values", "group", "scheme"),
    [("fp8_e4m3", 128, "fp8_1x128"), ("fp8_e4m3", 32, "mxfp8"), ("fp8_e4m3", "row", "fp8_row"),
     ("fp4_e2m1", 32, "mxfp4"), ("fp4_e2m1", 16, "nvfp4")],
)  # fmt: skip
def test_quantised_outputs_have_the_bits_of_the_casts(values, group, scheme):
    acc = torch.randn(5, 256, generator=SOURCE)
    got = epilogue(lambda x: quantize(silu(x), values, group=group))(acc)
    want = cast_to(silu(acc), scheme)
    assert isinstance(got, QuantTensor)
    assert_same_bits(got.values.view(torch.uint8), want.values.view(torch.uint8))
    assert_same_bits(got.sf.view(torch.uint8), want.sf.view(torch.uint8))
    assert got.group == want.group


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp8_e4m3"])
def test_casts(dtype):
    got = epilogue(lambda x: cast(x * 1000, dtype))(ACC)
    limit = 448.0 if dtype == "fp8_e4m3" else 1e9
    assert_same_bits(got.float(), (ACC * 1000).clamp(-limit, limit).to(got.dtype).float())


def test_a_half_precision_accumulator_is_widened_by_value():
    acc = torch.full((2, 8), 37.0, dtype=torch.float16)
    assert store(acc).dtype == torch.float32
    assert bool((store(acc) == 37.0).all())


@pytest.mark.parametrize("k", [1, 3, 8])
def test_topk_is_exact_and_the_lower_column_wins(k):
    rows = [
        [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], [-3.0, 2.0, 2.0, -1.0, 2.0, 0.0, -0.0, 5.0],
        [math.nan, 1.0, math.nan, 2.0, -5.0, -7.0, 0.0, 1.0], [-math.inf] * 8,
        [-9.0, -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0], [math.nan] * 8, [math.inf, 1.0, math.inf] + [0.0] * 5,
    ]  # fmt: skip
    values, ids = epilogue(lambda x: topk(x, k))(torch.tensor(rows))
    assert ids.dtype == torch.int32
    for row, got_values, got_ids in zip(rows, values.tolist(), ids.tolist(), strict=True):
        able = [i for i, x in enumerate(row) if not math.isnan(x) and x != -math.inf]
        want = sorted(able, key=lambda i: (-row[i], i))[:k]
        assert got_ids == want + [-1] * (k - len(want))
        assert got_values == [row[i] for i in want] + [-math.inf] * (k - len(want))


def test_softmax_leaves_out_minus_infinity():
    acc = torch.tensor([[0.0, -math.inf, 0.0, 0.0], [-math.inf] * 4])
    got = epilogue(lambda x: softmax(x))(acc)
    torch.testing.assert_close(got, torch.tensor([[1 / 3, 0, 1 / 3, 1 / 3], [0.0] * 4]))


def test_nan_is_passed_on():
    acc = ACC.clone()
    acc[2, 3] = math.nan
    for function in (lambda x: minimum(x, 0.0), lambda x: maximum(x, 0.0), lambda x: clip(x, -1.0, 1.0)):
        assert epilogue(lambda x: function(x))(acc)[2, 3].isnan()  # noqa: B023
    for function in (row_sum, row_max, row_absmax):
        assert epilogue(lambda x: function(x))(acc).isnan().tolist() == [row == 2 for row in range(M)]  # noqa: B023
    for function in (col_sum, col_max, col_absmax):
        assert epilogue(lambda x: function(x))(acc).isnan().tolist() == [col == 3 for col in range(N)]  # noqa: B023


def test_column_reductions_by_group():
    ending = epilogue(lambda x: (col_sum(x), col_max(x), col_absmax(x)))
    offsets = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    total, top, size = evaluate(ending.ir, ACC, {}, offsets)
    assert_same_bits(total, torch.stack([ACC[:3].sum(0), torch.zeros(N), ACC[3:].sum(0)]))
    assert_same_bits(top, torch.stack([ACC[:3].amax(0), torch.full((N,), -math.inf), ACC[3:].amax(0)]))
    assert_same_bits(size[1], torch.zeros(N))


@pytest.mark.parametrize("rows", [0, 1, 255, 256, 257, 600])
def test_row_tiles_are_of_one_shape(rows):
    x, shapes = torch.randn(600, 7)[:rows, ::2], []

    def doubled(tile: torch.Tensor) -> torch.Tensor:
        shapes.append((*tile.shape, tile.is_contiguous()))
        return 2 * tile

    assert torch.equal(in_row_tiles(doubled, x), 2 * x)
    assert set(shapes) == {(ROW_TILE_CUDA if rows else 0, 4, True)}


def test_totals_leave_out_rows_of_no_expert():
    ending = epilogue(lambda x: (total_sum(x), total_max(x), total_absmax(x), total_max(row_sum(x))))
    for last in (0, 1, 4, 7):
        acc = ACC.clone()
        acc[last:] = 1e6
        mine = ACC[:last]
        want = (mine.sum(1).sum(), mine.max() if last else -math.inf, mine.abs().max() if last else 0.0,
                mine.sum(1).max() if last else -math.inf)  # fmt: skip
        for offsets in ([0, last], [0, 0, last // 2, last]):
            got = evaluate(ending.ir, acc, {}, torch.tensor(offsets, dtype=torch.int32))
            torch.testing.assert_close(torch.stack(got), torch.tensor(want))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp8_e4m3"])
def test_casts_have_the_shapes_of_what_they_cast(dtype):
    def kinds(acc, s: Scalar, r: Row, c: Col, h: HalfCol):
        return tuple(cast(x, dtype) for x in (s, r, c, h, row_sum(acc), acc))

    operands = {"s": 2.0, "r": torch.ones(M), "c": torch.ones(N), "h": torch.ones(N // 2)}
    got = epilogue(kinds)(ACC, **operands)
    assert [list(x.shape) for x in got] == [[], [M], [N], [N // 2], [M], [M, N]]


def test_helpers_loops_and_constants_are_fine():
    factor = 0.5

    def twice(x):
        return x + x

    @epilogue
    def looped(acc):
        for _ in range(3):
            acc = twice(acc) * factor
        return acc if factor < 1 else -acc

    assert_same_bits(looped(ACC), ACC)


def test_keys_tell_what_is_computed():
    assert epilogue(lambda x: x * 2).ir.key == epilogue(lambda y: 2.0 and y * 2).ir.key
    assert epilogue(lambda x: x * 2).ir.key != epilogue(lambda x: x * 3).ir.key
    assert epilogue(lambda x: x * 0.0).ir.key != epilogue(lambda x: x * -0.0).ir.key


def test_the_same_operation_is_done_once():
    ir = epilogue(lambda x: silu(x) * silu(x) + silu(x)).ir
    assert [node.op for node in ir.nodes] == ["acc", "silu", "mul", "add"]
    both = epilogue(lambda x: (x * 0.0, x * -0.0))(ACC)
    assert not torch.equal(torch.signbit(both[0]), torch.signbit(both[1]))


def test_library():
    gate, up = ACC[:, 0::2], ACC[:, 1::2]
    h = gate / (1 + (-gate).exp()) * up
    bias, tile, half = torch.randn(N), torch.randn(M, N), torch.randn(M, N // 2)
    assert_same_bits(swiglu(ACC), h)
    assert_same_bits(swiglu_residual(ACC, residual=half), h + half)
    assert_same_bits(scale_bias_relu(ACC, alpha=0.5, bias=bias), (ACC * 0.5 + bias).relu())
    assert_same_bits(linear(ACC, c=tile, alpha=2.0, beta=0.5), ACC * 2 + tile * 0.5)
    assert_same_bits(gelu_residual(ACC, bias=bias, residual=tile), gelu(ACC + bias) + tile)
    assert_same_bits(absmax(ACC)[1], ACC.abs().amax(1))
    weight = torch.rand(M)
    assert_same_bits(expert_l1("swiglu", None, False, None)(ACC, weight=weight), (h * weight[:, None]).bfloat16())
    assert_same_bits(expert_l2(True)(ACC, weight=weight, bias=bias), ACC + weight[:, None] * bias)
    assert expert_l1("swiglu", None, False, None) is expert_l1("swiglu", None, False, None)
    concat = expert_l1("swiglu_oai", 7.0, True, None, "concat")
    moved, moved_bias = torch.cat((gate, ACC[:, 1::2]), 1), torch.cat((bias[0::2], bias[1::2]))
    want = expert_l1("swiglu_oai", 7.0, True, None)(ACC, weight=weight, bias=bias)
    assert_same_bits(concat(moved, weight=weight, bias=moved_bias), want)


def test_experts_know_their_activations_and_schemes():
    with pytest.raises(ValueError, match="activation: expected one of 'swiglu', 'swiglu_oai', .*, got 'bogus'"):
        expert_l1("bogus", None, False, None)
    for scheme in ("bogus", "mxfp4", "bf16"):
        with pytest.raises(ValueError, match=f"scheme: expected one of 'fp8_row', .*, got '{scheme}'"):
            expert_l1("swiglu", None, True, scheme)
    with pytest.raises(ValueError, match="gate_up_layout: expected one of 'interleaved', 'concat', got 'mixed'"):
        expert_l1("swiglu", None, True, None, "mixed")


def with_a_tile(acc, t: Tile):
    return halves(acc + t)[0]


TENSOR = torch.ones(N)
LINES = Path(__file__).read_text().splitlines()
BRANCH, INDEX, NUMBER = "can't decide a branch", "can't be indexed, counted or iterated over", "become a Python number"
REFUSED = {
    "if": (lambda acc: acc if acc > 0 else -acc, BRANCH),
    "while": (lambda acc: [acc for _ in iter(lambda: bool(acc), False)], BRANCH),
    "and": (lambda acc: acc > 0 and acc, BRANCH),
    "not": (lambda acc: not acc, BRANCH),
    "chained comparison": (lambda acc: where(0 < acc < 1, acc, 0.0), BRANCH),
    "in": (lambda acc: acc in [1, 2], BRANCH),
    "index": (lambda acc: acc[0], INDEX),
    "iterate": (lambda acc: sum(acc), INDEX),
    "len": (lambda acc: len(acc), INDEX),
    "float": (lambda acc: float(acc), NUMBER),
    "int": (lambda acc: int(acc), NUMBER),
    "math": (lambda acc: math.exp(acc), NUMBER),
    "round": (lambda acc: round(acc), NUMBER),
    "torch": (lambda acc: torch.sin(acc), "only envoi.epilogue's functions"),
    "numpy": (lambda acc: np.exp(acc), "only envoi.epilogue's functions"),
    "numpy array": (lambda acc: np.ones(3) * acc, "only envoi.epilogue's functions"),
    "captured tensor": (lambda acc: acc * TENSOR, "make it a parameter"),
    "captured tensor first": (lambda acc: TENSOR * acc, "make it a parameter"),
    "method": (lambda acc: acc.relu(), "has no attribute 'relu'; write relu(x)"),
    "method of no function": (lambda acc: acc.erf(), "'erf'; use the functions of envoi.epilogues.vocabulary"),
    "helper of the vocabulary": (lambda acc: acc._apply(), "'_apply'; use the functions of envoi.epilogues.vocabulary"),
    "shape": (lambda acc: acc * acc.shape[0], "has no attribute 'shape'; sizes and devices aren't known while tracing"),
    "transposed": (lambda acc: acc.T, "has no attribute 'T'; transpose what gemm returns"),
    "to float": (lambda acc: acc.float(), "has no attribute 'float'; values are float32; cast(x, \"bf16\") says how"),
    "dtype": (lambda acc: acc * acc.dtype, "has no attribute 'dtype'; values are float32"),
    "method that reduces": (lambda acc: acc.sum(), "has no attribute 'sum'; row_sum(x), row_max(x), col_sum(x)"),
    "clamp": (lambda acc: acc.clamp(0, 1), "has no attribute 'clamp'; use clip(x, low, high)"),
    "function of numpy on a number": (lambda acc: np.power(np.float32(2), acc), "only envoi.epilogue's functions"),
    "reduction of numpy": (lambda acc: np.add.reduce(acc), "only envoi.epilogue's functions"),
    "remainder": (lambda acc: acc % 2, "this operator isn't in the language"),
    "matmul": (lambda acc: acc @ acc, "this operator isn't in the language"),
    "power of itself": (lambda acc: acc**acc, "expected a constant int as the exponent"),
    "text": (lambda acc: acc + "1", "expected a value of the epilogue or a number, got str"),
    "boolean": (lambda acc: acc + True, "expected a value of the epilogue or a number, got bool"),
    "constant": (lambda acc: 1.0, "expected to return values of the epilogue"),
    "nothing": (lambda acc: None, "expected to return values of the epilogue"),
    "empty": (lambda acc: (), "expected to return values of the epilogue"),
    "mask": (lambda acc: acc > 0, "a mask can't be returned"),
    "arithmetic on a mask": (lambda acc: (acc > 0) * acc, "mul: expected f32, got bool"),
    "condition of numbers": (lambda acc: where(acc, acc, acc), "where: expected bool, got f32"),
    "arithmetic on ids": (lambda acc: topk(acc, 2)[1] + 1, "add: expected f32, got i32"),
    "after cast": (lambda acc: cast(acc, "bf16") + 1, "cast can only be returned"),
    "after quantize": (lambda acc: relu(quantize(acc, "fp8_e4m3", 32)), "quantize can only be returned"),
    "after col_sum": (lambda acc: acc - col_sum(acc), "only known when the kernel ends"),
    "after total_max": (lambda acc: acc / total_max(acc), "only known when the kernel ends"),
    "two widths": (lambda acc: pairs(acc)[0] + acc, "annotate its operands HalfCol or HalfTile"),
    "topk of a width": (lambda acc: topk(acc, 3)[0] + topk(acc, 4)[0], "expected values of one width"),
    "reduction of a row": (lambda acc: row_sum(row_sum(acc)), "expected a tile"),
    "topk of topk": (lambda acc: topk(topk(acc, 4)[0], 2), "expected a tile, got the values of another topk (row[4])"),
    "topk of a softmax of topk": (lambda acc: topk(softmax(topk(acc, 4)[0]), 2), "ask it for the smaller k"),
    "softmax of a row": (lambda acc: softmax(row_sum(acc)), "expected a tile (or the values of topk), got a row"),
    "pairs of topk": (lambda acc: pairs(topk(acc, 4)[0]), "expected a value with a column for each output feature"),
    "pairs of a row": (lambda acc: pairs(row_sum(acc)), "expected a value with a column for each output feature"),
    "halves of pairs": (lambda acc: halves(pairs(acc)[0]), "halves: expected a value of N columns, got a tile/2"),
    "a sum beside halves": (lambda acc: halves(acc)[0] * row_sum(acc), "row_sum of a value of N columns isn't"),
    "pairs beside halves": (lambda acc: halves(acc)[0] * pairs(acc)[1], "odd of a value of N columns isn't possible"),
    "the accumulator beside halves": (lambda acc: (acc, *halves(acc)), "a value of N columns can't be returned beside"),
    "a Tile beside halves": (with_a_tile, "operand t: expected a HalfTile beside halves, got a Tile"),
    "quantized row": (lambda acc: quantize(row_sum(acc), "fp8_e4m3", 32), "expected a tile, got a row"),
    "k": (lambda acc: topk(acc, 33), "expected a constant k from 1 to 32, got 33"),
    "cast": (lambda acc: cast(acc, "int8"), "expected one of 'bf16', 'fp16', 'fp32', 'fp8_e4m3', got 'int8'"),
    "group": (lambda acc: quantize(acc, "fp8_e4m3", 64), 'got ("fp8_e4m3", group=64)'),
    "tensor": (lambda acc: quantize(acc, "fp8_e4m3", "tensor"), "divide by a Scalar"),
    "gelu": (lambda acc: gelu(acc, "fast"), "expected approximate='none' or 'tanh', got 'fast'"),
    "slope": (lambda acc: leaky_relu(acc, acc), "expected a constant number as slope"),
    "mean of the standard library": (lambda acc: statistics.mean([acc]), "has no attribute 'is_finite'"),
    "median of the standard library": (lambda acc: statistics.median([acc, acc]), BRANCH),
    "random of the standard library": (lambda acc: random.choice(acc), INDEX),
    "sum of the standard library": (lambda acc: math.fsum([acc]), NUMBER),
    "an error in the standard library": (lambda acc: fractions.Fraction(acc), "TypeError while tracing"),
    "layer of torch": (lambda acc: torch.nn.GELU()(acc), "only envoi.epilogue's functions"),
    "layer of torch with weights": (lambda acc: torch.nn.Linear(3, 3)(acc), "make it a parameter"),
    "mean of numpy": (lambda acc: np.mean([acc]), "only envoi.epilogue's functions"),
    "a number above float32": (lambda acc: acc * 1e39, "expected a number that float32 can hold, got 1e+39"),
    "an int above float64": (lambda acc: acc + 10**400, "expected a number that float32 can hold, got 1000"),
    "names that aren't text": (lambda acc: {0: acc}, "expected text as the names of outputs, got [0]"),
    "an empty name": (lambda acc: {"": acc}, "expected text as the names of outputs, got ['']"),
    "an error inside": (lambda acc: acc + undefined_name, "NameError while tracing"),  # noqa: F821
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_line_and_the_reason(name):
    function, reason = REFUSED[name]
    with pytest.raises(EpilogueError) as caught:
        epilogue(function)
    said, _, line = str(caught.value).partition("\n")
    where_, _, text = said.partition(": ")
    assert re.fullmatch(re.escape(__file__) + r":\d+", where_), caught.value
    assert reason in text
    assert line.strip() == LINES[int(where_.rpartition(":")[2]) - 1].strip()


def hint_for(attribute: str) -> str:
    with pytest.raises(EpilogueError) as caught:
        epilogue(lambda acc: getattr(acc, attribute))
    return str(caught.value).splitlines()[0].partition(f"has no attribute {attribute!r}; ")[2]


def test_hints_name_functions_of_the_language_alone():
    own = inspect.getmembers(vocabulary, lambda x: getattr(x, "__module__", "") == vocabulary.__name__)
    functions = {name for name, thing in own if inspect.isfunction(thing) and name[0] != "_"}
    for name in functions:
        assert re.search(rf"\b{name}\(x", hint_for(name)), name
    for name in {*TABLE, "torch", "Any", "refuse"} - functions:
        named = set(re.findall(r"(\w+)\(", hint_for(name)))
        assert named <= functions | {"abs"}, name


IN_PLACE = ("add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "pow", "and", "or", "xor", "lshift", "rshift")


@pytest.mark.parametrize("name", IN_PLACE)
def test_nothing_is_changed_in_place(name):
    change = getattr(operator, f"i{name}")
    with pytest.raises(EpilogueError, match="a value can't be changed in place; write x = x . y") as caught:
        epilogue(lambda acc: change(acc, 2))
    assert "epilogue(lambda acc: change(acc, 2))" in str(caught.value)

    def statement(acc):
        acc += 1
        return acc

    with pytest.raises(EpilogueError, match=f":{statement.__code__.co_firstlineno + 1}: a value can't be changed"):
        epilogue(statement)


def test_refusals_of_what_is_no_function():
    line = test_refusals_of_what_is_no_function.__code__.co_firstlineno + 3
    with pytest.raises(EpilogueError, match=f":{line}: epilogue: expected a Python function, got Identity"):
        epilogue(torch.nn.Identity())


def test_refusals_of_signatures():
    def no_annotation(acc, bias):
        return acc + bias

    def unknown(acc, bias: torch.Tensor):
        return acc + bias

    def many(acc, *rest: Row):
        return acc

    def keyword(acc, *, r: Row):
        return acc + r

    def default(acc, r: Row = 1.0):
        return acc + r

    def unused(acc, r: Row):
        return acc * 2

    def nothing():
        return 1

    def annotated(acc: Tile):
        return acc

    def taken(acc, weights: Col):
        return acc * weights

    def huge(acc, alpha: Scalar = 10**400):
        return acc * alpha

    for function, reason in {
        taken: "parameter weights: envoi.gemm and envoi.grouped_gemm take one of that name; rename it",
        huge: "parameter alpha: expected a default that float32 can hold",
        no_annotation: "parameter bias: expected an annotation of Scalar, Row, Col, Tile, HalfCol, HalfTile, got none",
        unknown: "parameter bias: expected an annotation of",
        many: "parameter rest: expected a plain parameter, got variadic positional",
        keyword: "parameter r: expected a plain parameter, got keyword-only",
        default: "parameter r: only a Scalar can have a default",
        unused: "operand r takes no part in what is returned",
        nothing: "takes the accumulator as its first parameter",
        annotated: "the first is the accumulator, without annotation",
    }.items():
        with pytest.raises(EpilogueError, match=re.escape(reason)) as caught:
            epilogue(function)
        assert str(caught.value).startswith(f"{__file__}:{function.__code__.co_firstlineno}: ")


def test_what_is_called_later_is_refused_unawaited(recwarn):
    async def late(acc):
        return acc

    def steps(acc):
        yield acc

    async def late_steps(acc):
        yield acc

    for function, kind in {late: "one that is async", steps: "a generator", late_steps: "one that is async"}.items():
        with pytest.raises(EpilogueError, match=f"epilogue: expected a plain function, got {kind}") as caught:
            epilogue(function)
        assert str(caught.value).startswith(f"{__file__}:")
    gc.collect()
    assert not list(recwarn)


Vector = Col


class Lattice:
    """Class with names like the language's, but not part of it."""

    Col = Row = int


def test_annotations_may_be_text():
    Mine = Row

    def late(
        acc,
        quoted: "Col",
        twice: "'Col'",
        alias: "Vector",
        dotted: "language.HalfTile",
        local: "Mine",
        own: "Scalar" = 1.0,
    ):
        even, _ = pairs(acc * local + quoted * twice + alias)
        return even * dotted * own

    kinds = [operand.kind for operand in epilogue(late).ir.operands]
    assert kinds == ["Col", "Col", "Col", "HalfTile", "Row", "Scalar"]


def test_annotations_for_type_checkers_alone():
    def function(acc, bias: "Col"):
        return acc + bias

    elsewhere = types.FunctionType(function.__code__, {}, "function")  # a module that never imports Col
    elsewhere.__annotations__ = function.__annotations__
    exec("def decorate(epilogue, function): return epilogue(function)", names := {})
    assert names["decorate"](epilogue, elsewhere).ir.operands[0].kind == "Col"


@pytest.mark.parametrize(
    ("annotation", "reason"),
    [
        ("Lattice.Col", "got 'Lattice.Col'"),
        ("elsewhere.Col", "got 'elsewhere.Col' (name 'elsewhere' is not defined)"),
        ("Bias", "got 'Bias' (name 'Bias' is not defined)"), ("Col +", "got 'Col +' (SyntaxError"),
        ("torch.Tensor", "got 'torch.Tensor'"), ("1 / 0", "got '1 / 0' (ZeroDivisionError"),
    ],
)  # fmt: skip
def test_refusals_of_annotations_that_are_text(annotation, reason):
    def function(acc, bias):
        return acc + bias

    function.__annotations__["bias"] = annotation
    with pytest.raises(EpilogueError, match="parameter bias: expected an annotation of Scalar, Row, Col") as caught:
        epilogue(function)
    assert reason in str(caught.value)


def test_operands_may_have_any_name_that_isnt_taken():
    @epilogue
    def odd_names(x, acc: Row, self: Col, function: Scalar):
        return x * acc + self * function

    row, col = torch.randn(M), torch.randn(N)
    assert_same_bits(odd_names(ACC, acc=row, self=col, function=2), ACC * row[:, None] + col * 2)


def test_none_means_the_default():
    @epilogue
    def scaled(acc, alpha: Scalar = 0.5):
        return acc * alpha

    for values in ({}, {"alpha": None}):
        assert_same_bits(scaled(ACC, **values), ACC * 0.5)
        assert_same_bits(evaluate(scaled.ir, ACC, values)[0], ACC * 0.5)


def test_calls_need_their_operands():
    with pytest.raises(ValueError, match="bias: expected a value of this operand .Col., got none"):
        evaluate(scale_bias_relu.ir, ACC, {"alpha": 1.0})
    with pytest.raises(ValueError, match="bias: epilogue scale_bias_relu needs this operand .Col., got none"):
        scale_bias_relu(ACC, alpha=1.0)
    with pytest.raises(ValueError, match="beta: epilogue scale_bias_relu has no such operand; it takes alpha, bias"):
        scale_bias_relu(ACC, alpha=1.0, bias=torch.zeros(N), beta=1.0)
