"""The language: what is traced, what it prints, what it computes, and what it refuses."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import envoi.epilogue as language
from envoi.epilogue import (
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
    hardswish,
    leaky_relu,
    log,
    log2,
    maximum,
    minimum,
    pairs,
    quantize,
    relu,
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
    where,
)  # fmt: skip
from envoi.epilogue.library import (
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
from envoi.quant import quantize as cast_to
from envoi.types import QuantTensor
from tests.helpers.accuracy import assert_same_bits, relative_error

M, N = 7, 64
SOURCE = torch.Generator().manual_seed(0)
ACC = torch.randn(M, N, generator=SOURCE) * 3


def test_the_ir_prints_itself():
    @language
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
    assert language.epilogue is epilogue
    assert str(language(lambda acc: acc + 1).ir) == str(epilogue(lambda acc: acc + 1).ir)


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
    "clip": (lambda x: clip(x, -1.0, 2.0), lambda x: x.clamp(-1, 2)),
    "where": (lambda x: where((x > 1) | (x <= -1), x, 0.0), lambda x: x * ((x > 1) | (x <= -1))),
    "masks": (lambda x: where(~((x < 1) & (x >= -1)) & (x != 5), 1.0, where(x == 0, 3.0, 2.0)),
              lambda x: torch.where((x >= 1) | (x < -1), 1.0, 2.0)),
    "even": (lambda x: pairs(x)[0], lambda x: x[:, ::2]),
    "odd": (lambda x: pairs(x)[1], lambda x: x[:, 1::2]),
    "pairs of pairs": (lambda x: pairs(pairs(x)[1])[0], lambda x: x[:, 1::4]),
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
        assert_same_bits(evaluate(ending.ir, acc, {})[0], got)
        assert got.dtype == acc.dtype
        assert relative_error(got, formula(acc.double())) < (1e-5 if acc.dtype == torch.float32 else 1e-12)


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
    want = cast_to(torch.nn.functional.silu(acc), scheme)
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


def test_what_needs_whole_rows_is_known():
    assert epilogue(lambda x: softmax(x)).ir.needs_whole_rows
    assert epilogue(lambda x: x / row_max(x)).ir.needs_whole_rows
    assert epilogue(lambda x: quantize(x, "fp8_e4m3", "row")).ir.needs_whole_rows
    assert not swiglu_fp8.ir.needs_whole_rows


def test_library():
    gate, up = ACC[:, 0::2], ACC[:, 1::2]
    h = torch.nn.functional.silu(gate) * up
    bias, tile, half = torch.randn(N), torch.randn(M, N), torch.randn(M, N // 2)
    assert_same_bits(swiglu(ACC), h)
    assert_same_bits(swiglu_residual(ACC, residual=half), h + half)
    assert_same_bits(scale_bias_relu(ACC, alpha=0.5, bias=bias), (ACC * 0.5 + bias).relu())
    assert_same_bits(linear(ACC, c=tile, alpha=2.0, beta=0.5), ACC * 2 + tile * 0.5)
    assert_same_bits(gelu_residual(ACC, bias=bias, residual=tile), torch.nn.functional.gelu(ACC + bias) + tile)
    assert_same_bits(absmax(ACC)[1], ACC.abs().amax(1))
    weight = torch.rand(M)
    assert_same_bits(expert_l1("swiglu", None, False, None)(ACC, weight=weight), (h * weight[:, None]).bfloat16())
    assert_same_bits(expert_l2(True)(ACC, weight=weight, bias=bias), ACC + weight[:, None] * bias)
    assert expert_l1("swiglu", None, False, None) is expert_l1("swiglu", None, False, None)


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
    "method": (lambda acc: acc.relu(), "has no attribute 'relu'"),
    "shape": (lambda acc: acc * acc.shape[0], "has no attribute 'shape'"),
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
    "pairs of a row": (lambda acc: pairs(row_sum(acc)), "expected a value with a column for each output feature"),
    "quantized row": (lambda acc: quantize(row_sum(acc), "fp8_e4m3", 32), "expected a tile, got a row"),
    "k": (lambda acc: topk(acc, 33), "expected a constant k from 1 to 32, got 33"),
    "cast": (lambda acc: cast(acc, "int8"), "expected one of 'bf16', 'fp16', 'fp32', 'fp8_e4m3', got 'int8'"),
    "group": (lambda acc: quantize(acc, "fp8_e4m3", 64), 'got ("fp8_e4m3", group=64)'),
    "tensor": (lambda acc: quantize(acc, "fp8_e4m3", "tensor"), "divide by a Scalar"),
    "gelu": (lambda acc: gelu(acc, "fast"), "expected approximate='none' or 'tanh', got 'fast'"),
    "slope": (lambda acc: leaky_relu(acc, acc), "expected a constant number as slope"),
    "an error inside": (lambda acc: acc + undefined_name, "NameError while tracing"),  # noqa: F821
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_line_and_the_reason(name):
    function, reason = REFUSED[name]
    with pytest.raises(EpilogueError) as caught:
        epilogue(function)
    where_, _, text = str(caught.value).partition(": ")
    assert re.fullmatch(re.escape(__file__) + r":\d+", where_), caught.value
    assert reason in text
    if "\n" in text:
        assert LINES[int(where_.rpartition(":")[2]) - 1].strip() in text


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

    for function, reason in {
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


def test_annotations_may_be_text():
    def late(acc, bias: "Col"):
        return acc + bias

    assert epilogue(late).ir.operands[0].kind == "Col"


def test_calls_need_their_operands():
    with pytest.raises(ValueError, match="bias: epilogue scale_bias_relu needs this operand .Col., got none"):
        scale_bias_relu(ACC, alpha=1.0)
    with pytest.raises(ValueError, match="beta: epilogue scale_bias_relu has no such operand; it takes alpha, bias"):
        scale_bias_relu(ACC, alpha=1.0, bias=torch.zeros(N), beta=1.0)
