"""Epilogue language: tracing, printing, evaluation, refusals."""

import fractions
import inspect
import math
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
    exp2,
    gelu,
    halves,
    leaky_relu,
    maximum,
    minimum,
    pairs,
    quantize,
    relu,
    row_absmax,
    row_max,
    row_sum,
    sigmoid,
    silu,
    softmax,
    softplus,
    topk,
    total_absmax,
    total_max,
    total_sum,
    where,
)  # fmt: skip
from envoi.epilogues.library import (
    scale_bias_relu,
    swiglu_fp8,
)  # fmt: skip
from envoi.epilogues.operations import OPERATIONS as TABLE
from envoi.epilogues.trace import TAKEN
from envoi.quant import quantize as cast_to
from envoi.types import QuantTensor
from tests.helpers.accuracy import assert_at_most_twice, assert_same_bits

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
    alone = range(0, 4096, 17)
    assert_same_bits(torch.cat([run(x[:, i : i + 1]) for i in alone], 2), whole[..., alone])
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


def test_keys_tell_what_is_computed():
    assert epilogue(lambda x: x * 2).ir.key == epilogue(lambda y: 2.0 and y * 2).ir.key
    assert epilogue(lambda x: x * 2).ir.key != epilogue(lambda x: x * 3).ir.key
    assert epilogue(lambda x: x * 0.0).ir.key != epilogue(lambda x: x * -0.0).ir.key


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
    "torch": (lambda acc: torch.sin(acc), "only the functions of envoi.epilogues"),
    "numpy": (lambda acc: np.exp(acc), "only the functions of envoi.epilogues"),
    "numpy array": (lambda acc: np.ones(3) * acc, "only the functions of envoi.epilogues"),
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
    "function of numpy on a number": (lambda acc: np.power(np.float32(2), acc), "only the functions of envoi.ep"),
    "reduction of numpy": (lambda acc: np.add.reduce(acc), "only the functions of envoi.epilogues"),
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
    "layer of torch": (lambda acc: torch.nn.GELU()(acc), "only the functions of envoi.epilogues"),
    "layer of torch with weights": (lambda acc: torch.nn.Linear(3, 3)(acc), "make it a parameter"),
    "mean of numpy": (lambda acc: np.mean([acc]), "only the functions of envoi.epilogues"),
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

    def also_taken(acc, out: Col):
        return acc * out

    for function, reason in {
        also_taken: "parameter out: envoi.gemm and envoi.grouped_gemm take one of that name; rename it",
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


def test_no_operand_has_the_name_of_an_argument():
    for function in (envoi.gemm, envoi.grouped_gemm):
        parameters = inspect.signature(function).parameters.values()
        names = {x.name for x in parameters if x.kind is not inspect.Parameter.VAR_KEYWORD}
        assert "num_sms" in names and names <= set(TAKEN)


Vector = Col


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


def test_calls_need_their_operands():
    with pytest.raises(ValueError, match="bias: expected a value of this operand .Col., got none"):
        evaluate(scale_bias_relu.ir, ACC, {"alpha": 1.0})
    with pytest.raises(ValueError, match="bias: epilogue scale_bias_relu needs this operand .Col., got none"):
        scale_bias_relu(ACC, alpha=1.0)
    with pytest.raises(ValueError, match="beta: epilogue scale_bias_relu has no such operand; it takes alpha, bias"):
        scale_bias_relu(ACC, alpha=1.0, bias=torch.zeros(N), beta=1.0)
