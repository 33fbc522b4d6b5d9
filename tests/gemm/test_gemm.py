"""`envoi.gemm` and `envoi.grouped_gemm`: accuracy, epilogues, groups, operators, refusals."""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from envoi.epilogues import (
    Col,
    HalfCol,
    HalfTile,
    Row,
    Scalar,
    Tile,
    cast,
    col_absmax,
    col_max,
    col_sum,
    epilogue,
    pairs,
    quantize,
    relu,
    row_max,
    row_sum,
    softmax,
    topk,
    total_absmax,
    total_max,
    total_sum,
)  # fmt: skip
from envoi.epilogues.library import scale_bias_relu, store, swiglu, swiglu_fp8
from envoi.ops.gemm import gemm, grouped_gemm
from envoi.ops.gemm.api import split
from envoi.ops.gemm.reference import accumulate
from envoi.quant import quantize as cast_to
from envoi.types import QuantTensor
from tests.helpers.accuracy import assert_at_most_twice, assert_same_bits
from tests.helpers.inputs import normal
from tools.oracles.gemm import oracle

PAIRINGS = [
    ("fp8_row", "fp8_row"), ("fp8_tensor", "fp8_tensor"), ("fp8_1x128", "fp8_128x128"), ("mxfp8", "mxfp8"),
    ("mxfp8", "mxfp4"), ("nvfp4", "nvfp4"), ("fp8_1x128", "fp8_row"), ("fp8_row", "mxfp8"),
]  # fmt: skip
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@epilogue
def everything(acc, alpha: Scalar, bias: Col, w: Row, residual: Tile):
    h = alpha * acc + bias + residual
    values, ids = topk(h, 3)
    return {
        "h": h, "low": cast(relu(h), "fp8_e4m3"), "best": softmax(values), "ids": ids, "row": row_max(h),
        "column": col_sum(h), "all": total_sum(h), "q": quantize(h * w, "fp8_e4m3", group=32),
    }  # fmt: skip


def operands(m: int, n: int, experts: int | None = None) -> dict:
    bias = normal(n, seed=3) if experts is None else normal(experts, n, seed=3)
    return {"alpha": 0.5, "bias": bias.bfloat16(), "w": normal(m, seed=4), "residual": normal(m, n, seed=5).half()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(17, 24, 16), (33, 40, 72), (128, 64, 1024)])
def test_products_are_as_good_as_torchs(dtype, shape):
    m, n, k = shape
    a, b = normal(m, k).to(dtype), normal(n, k, seed=1).to(dtype)
    got = gemm(a, b)
    assert got.dtype == dtype
    assert_at_most_twice(got, a @ b.T, oracle(a, b))
    assert_at_most_twice(gemm(a, b, out_dtype=torch.float32), (a.float() @ b.float().T), oracle(a, b))


@pytest.mark.parametrize(("for_a", "for_b"), [(None, None), *PAIRINGS])
def test_a_rows_bits_do_not_depend_on_its_batch(for_a, for_b):
    if for_a == "fp8_tensor":
        return  # its scale depends on the whole batch
    a, b = normal(50, 256), normal(72, 256, seed=1)
    b = b.bfloat16() if for_b is None else cast_to(b, for_b)

    def part(rows):
        return a[:rows].bfloat16() if for_a is None else cast_to(a[:rows], for_a)

    whole = accumulate(part(50), b)
    for rows in (1, 2, 5, 15, 16, 17, 33):
        assert_same_bits(accumulate(part(rows), b), whole[:rows])


def test_epilogues_are_their_own_reference():
    a, b = normal(33, 64).bfloat16(), normal(96, 64, seed=1).bfloat16()
    got, want = gemm(a, b, everything, **operands(33, 96)), everything(accumulate(a, b), **operands(33, 96))
    assert list(got) == list(want)
    for name, value in want.items():
        if isinstance(value, QuantTensor):
            assert_same_bits(got[name].values.view(torch.uint8), value.values.view(torch.uint8))
            assert_same_bits(got[name].sf.view(torch.uint8), value.sf.view(torch.uint8))
            assert got[name].group == value.group
        else:
            assert_same_bits(got[name], value.bfloat16() if name == "h" else value)


def test_scalars_may_be_tensors():
    a, b = normal(4, 16), normal(8, 16, seed=1)
    for alpha in (0.25, torch.tensor(0.25), torch.tensor([0.25], dtype=torch.bfloat16)):
        assert_same_bits(gemm(a, b, scale_bias_relu, alpha=alpha, bias=torch.zeros(8)), (gemm(a, b) * 0.25).relu())


def test_no_rows():
    a, b = normal(0, 64).bfloat16(), normal(96, 64).bfloat16()
    got = gemm(a, b, everything, **operands(0, 96))
    assert got["h"].shape == (0, 96)
    assert got["q"].values.shape == (0, 96)
    assert got["column"].tolist() == [0.0] * 96


@epilogue
def give_back(acc, alpha: Scalar, r: Row, c: Col, t: Tile, h: HalfCol, ht: HalfTile):
    even, odd = pairs(t)
    return (acc, acc, pairs(acc)[0], t, even, odd, t, r, r, c, h, h, ht, alpha, row_max(acc), row_max(acc),
            cast(acc, "fp32"), cast(t, "fp32"), cast(r, "fp32"))  # fmt: skip


@pytest.mark.parametrize(("m", "n"), [(4, 8), (1, 2)])
def test_outputs_are_new_tensors(m, n):
    a, b = normal(m, 16), normal(n, 16)
    values = {"alpha": torch.tensor(2.0), "r": normal(m), "c": normal(n), "t": normal(m, n), "h": normal(n)[: n // 2],
              "ht": normal(m, n)[:, n // 2 :]}  # fmt: skip
    outputs = gemm(a, b, give_back, **values)
    places = [x.untyped_storage().data_ptr() for x in (*outputs, a, b, *values.values())]
    assert len(set(places)) == len(places)
    before = [x.clone() for x in (*outputs, *values.values())]
    for position, output in enumerate(outputs):
        output.zero_()
        for left, kept in zip((*outputs[position + 1 :], *values.values()), before[position + 1 :], strict=True):
            assert_same_bits(left, kept)


@epilogue
def of_all_kinds(acc, alpha: Scalar, r: Row, c: Col, t: Tile, h: HalfCol, ht: HalfTile):
    even, odd = pairs(acc * alpha + c)
    values, ids = topk(acc * c, 2)
    return (acc, even * h, odd + ht, t, r, alpha, cast(r, "bf16"), cast(row_sum(acc), "fp16"), cast(alpha, "fp32"),
            cast(even, "fp8_e4m3"), values, ids, cast(values, "bf16"), softmax(acc), row_max(even), col_sum(acc),
            col_max(odd), col_absmax(t), total_sum(r), total_max(acc + c), total_absmax(odd),
            quantize(acc, "fp8_e4m3", group="row"), quantize(even, "fp8_e4m3", group=32),
            quantize(acc, "fp4_e2m1", group=16))  # fmt: skip


@epilogue
def of_columns(acc, c: Col, h: HalfCol):
    return acc, c, h, -c, cast(h, "bf16"), c * 2.0


def kinds(m: int, n: int, experts: int | None = None) -> dict:
    lead = () if experts is None else (experts,)
    return {"alpha": 0.5, "r": normal(m), "c": normal(*lead, n), "t": normal(m, n).bfloat16(),
            "h": normal(*lead, n // 2), "ht": normal(m, n // 2)}  # fmt: skip


def assert_kernel_and_fake_agree(function, arguments: dict) -> None:
    """Assert that the shapes and dtypes that torch.compile is told are those of the results."""

    def flat(outputs):
        tensors = [(x.values, x.sf) if isinstance(x, QuantTensor) else (x,) for x in outputs]
        return [(list(x.shape), x.dtype) for group in tensors for x in group]

    with FakeTensorMode() as mode:
        fakes = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        told = flat(function(**fakes))
    assert flat(function(**arguments)) == told


@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("m", [0, 1, 5])
def test_shapes_are_those_of_the_fake_kernel(m, out_dtype):
    a, b, columns = normal(m, 16).bfloat16(), normal(64, 16).bfloat16(), kinds(m, 64)
    assert_kernel_and_fake_agree(gemm, {"a": a, "b": b, "epilogue": of_all_kinds, "out_dtype": out_dtype} | columns)
    columns = {"c": columns["c"], "h": columns["h"]}
    assert_kernel_and_fake_agree(gemm, {"a": a, "b": b, "epilogue": of_columns, "out_dtype": out_dtype} | columns)


@pytest.mark.parametrize("m", [0, 1, 5])
@pytest.mark.parametrize("experts", [0, 1, 3])
def test_shapes_of_groups_are_those_of_the_fake_kernel(experts, m):
    rows, weights = normal(m, 16).bfloat16(), normal(experts, 64, 16).bfloat16()
    offsets = torch.arange(experts + 1, dtype=torch.int32).clamp(max=m)
    shared = {"rows": rows, "weights": weights, "offsets": offsets}
    assert_kernel_and_fake_agree(grouped_gemm, shared | {"epilogue": of_all_kinds} | kinds(m, 64, experts))


@pytest.mark.parametrize("k", [0, 1])
def test_a_product_of_little_or_nothing(k):
    a, b = torch.ones(3, k), torch.ones(5, k)
    assert_same_bits(gemm(a, b), torch.full((3, 5), float(k)))
    offsets = torch.tensor([0, 1, 3], dtype=torch.int32)
    assert_same_bits(grouped_gemm(a, torch.ones(2, 5, k), offsets), torch.full((3, 5), float(k)))


GROUPS = {
    "even": [0, 8, 16, 24, 32], "empty experts": [0, 0, 30, 30, 32], "one takes all": [0, 0, 32, 32, 32],
    "no rows": [0, 0, 0, 0, 0], "rows behind the last": [0, 5, 9, 9, 20],
}  # fmt: skip


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize(("for_a", "for_b"), [(None, None), ("fp8_row", "fp8_row"), ("fp8_1x128", "fp8_128x128"),
                                              ("mxfp8", "mxfp4")])  # fmt: skip
def test_groups_are_products_of_their_own(name, for_a, for_b):
    bounds = GROUPS[name]
    rows = 0 if name == "no rows" else 32
    a, b = normal(rows, 128), normal(4, 64, 128, seed=1)
    a, b = (a.bfloat16(), b.bfloat16()) if for_a is None else (cast_to(a, for_a), cast_to(b, for_b))
    shared = operands(rows, 64, 4)
    got = grouped_gemm(a, b, torch.tensor(bounds, dtype=torch.int32), everything, **shared)
    assert got["column"].shape == (4, 64)
    for expert in range(4):
        first, last = bounds[expert], bounds[expert + 1]
        mine = a[first:last] if for_a is None else QuantTensor(a.values[first:last], a.sf[first:last], a.group)
        theirs = b[expert] if for_a is None else QuantTensor(b.values[expert], b.sf[expert], b.group)
        own = {k: v[first:last] if k in ("w", "residual") else v for k, v in shared.items()}
        own["bias"] = shared["bias"][expert]
        want = gemm(mine, theirs, everything, **own)
        for key in ("h", "best", "ids", "row"):
            assert_same_bits(got[key][first:last], want[key])
        assert_same_bits(got["q"].sf.view(torch.uint8)[first:last], want["q"].sf.view(torch.uint8))
        assert_same_bits(got["column"][expert], want["column"])


def flat(a, b, ending, values, *more):
    numbers = {name: value for name, value in values.items() if isinstance(value, float)}
    tensors = {name: value for name, value in values.items() if name not in numbers}
    names = ",".join([*tensors, *numbers])
    key = ending.ir.key
    return (*split(a), *split(b), *more, key, torch.bfloat16, list(tensors.values()), list(numbers.values()), names)


def test_operators_are_well_formed():
    a, b = normal(5, 128).bfloat16(), normal(32, 128).bfloat16()
    for ending, values in ((store, {}), (swiglu, {}), (everything, operands(5, 32))):
        torch.library.opcheck(torch.ops.envoi.gemm.default, flat(a, b, ending, values), test_utils=OPCHECKS)
    weights, offsets = normal(2, 32, 128).bfloat16(), torch.tensor([0, 1, 5], dtype=torch.int32)
    arguments = flat(a, weights, everything, operands(5, 32, 2), offsets)
    torch.library.opcheck(torch.ops.envoi.grouped_gemm.default, arguments, test_utils=OPCHECKS)
    # torch's own check of the schema can't compare float8 arguments.
    quantised = flat(cast_to(normal(5, 128), "mxfp8"), cast_to(normal(32, 128), "mxfp4"), store, {})
    torch.library.opcheck(torch.ops.envoi.gemm.default, quantised, test_utils=OPCHECKS[1:])


def test_compiles_as_one_graph():
    a, b, bias = normal(6, 128).bfloat16(), normal(256, 128).bfloat16(), normal(256)
    weights, offsets = normal(3, 64, 128).bfloat16(), torch.tensor([0, 1, 1, 6], dtype=torch.int32)

    def step(a, b, bias):
        h = gemm(a, b, scale_bias_relu, alpha=0.5, bias=bias)
        q = gemm(h, h, swiglu_fp8) if h.shape[0] == 256 else gemm(a, b, swiglu_fp8)
        return h + 1, q.values, q.sf, grouped_gemm(a, weights, offsets)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(a, b, bias), step(a, b, bias), strict=True):
        assert_same_bits(got.float(), want.float())


A, B = normal(6, 256).bfloat16(), normal(64, 256).bfloat16()
Q, W = cast_to(A, "fp8_row"), cast_to(B, "fp8_row")
BIAS = torch.zeros(64)


@epilogue
def half_residual(acc, residual: HalfTile):
    return pairs(acc)[0] + residual


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("a: expected bfloat16 or float16 or float32 .M, K., got float64", {"a": A.double()}),
        ("a: expected .* got list", {"a": [1.0]}),
        ("a: expected .M, K|a: expected bfloat16 .* .M, K., got bfloat16 .256.", {"a": A[0]}),
        ("b: expected .* .N, 256., got bfloat16 .64, 200.", {"b": B[:, :200]}),
        ("b: expected a tensor on cpu .*, got one on meta", {"b": B.to("meta")}),
        ("b: expected bfloat16 like a, got float32", {"b": B.float()}),
        ("b: expected a QuantTensor like a, got bfloat16", {"a": Q}),
        ("a, b: expected bf16 beside mxfp8, mxfp4 or nvfp4, .*, got bfloat16 beside float8_e4m3fn with float32",
         {"b": W}),
        ("a, b: expected float32 scales over the same extent of K",
         {"a": cast_to(A, "fp8_1x128"), "b": QuantTensor(W.values, torch.ones(64, 4), (1, 64))}),
        ("a.sf: expected float32 or .* .6, 1., got float32 .5, 1.",
         {"a": QuantTensor(Q.values, Q.sf[:5], Q.group), "b": W}),
        ("b.values: expected .* .N, 256., got float8_e4m3fn .64, 128.", {"a": Q, "b": cast_to(B[:, :128], "fp8_row")}),
        ("a.sf: expected float32 or float8_e8m0fnu or float8_e4m3fn .6, 1., got float64 .6, 1.",
         {"a": QuantTensor(Q.values, Q.sf.double(), Q.group), "b": W}),
        ("a.group: expected at least 1 row and 1 column, got .1, 0.",
         {"a": QuantTensor(Q.values, Q.sf, (1, 0)), "b": W}),
        ("a.shape.-1.: expected a multiple of 96 .96 columns share a scale factor., got 256",
         {"a": QuantTensor(Q.values, torch.ones(6, 3), (1, 96)), "b": W}),
        ("a: expected a QuantTensor without a scale for the whole tensor",
         {"a": QuantTensor(Q.values, Q.sf, Q.group, torch.ones(())), "b": W}),
        ("epilogue: expected a function decorated with @envoi.epilogue, got function", {"epilogue": lambda acc: acc}),
        ("out_dtype: expected torch.bfloat16, float16 or float32, got torch.int8", {"out_dtype": torch.int8}),
        ("bias: epilogue scale_bias_relu needs this operand", {"epilogue": scale_bias_relu, "alpha": 1.0}),
        ("gamma: epilogue scale_bias_relu has no such operand",
         {"epilogue": scale_bias_relu, "alpha": 1.0, "bias": BIAS, "gamma": 1.0}),
        ("bias: expected .* .64., got float32 .63.", {"epilogue": scale_bias_relu, "alpha": 1.0, "bias": BIAS[:63]}),
        ("bias: expected .* .64., got int64 .64.", {"epilogue": scale_bias_relu, "alpha": 1.0, "bias": BIAS.long()}),
        ("bias: expected .*, got float 1.0", {"epilogue": scale_bias_relu, "alpha": 1.0, "bias": 1.0}),
        ("alpha: expected a number or .*, got str", {"epilogue": scale_bias_relu, "alpha": "1", "bias": BIAS}),
        ("alpha: expected a number that float32 can hold, got 1e.39",
         {"epilogue": scale_bias_relu, "alpha": 1e39, "bias": BIAS}),
        ("alpha: expected a number that float32 can hold, got 1000",
         {"epilogue": scale_bias_relu, "alpha": 10**400, "bias": BIAS}),
        ("alpha: expected one element, got .64.", {"epilogue": scale_bias_relu, "alpha": BIAS, "bias": BIAS}),
        ("residual: expected .* .6, 32., got float32 .6, 64.", {"epilogue": half_residual, "residual": normal(6, 64)}),
        ("N: expected a multiple of 2 .epilogue swiglu .*, got 63", {"b": B[:63], "epilogue": swiglu}),
        ("N: expected a multiple of 128 .output columns, fp8_1x128 groups., got 32", {"epilogue": swiglu_fp8}),
        ("N: expected at least k = 3 columns for topk, got 2",
         {"b": B[:2], "epilogue": epilogue(lambda acc: topk(acc, 3))}),
    ],
)  # fmt: skip
def test_refusals(message, arguments):
    with pytest.raises(ValueError, match=message):
        gemm(**({"a": A, "b": B} | arguments))


@epilogue
def twice_the_column(acc, c: Col):
    return acc, c * 2


OFFSETS = torch.tensor([0, 2, 6], dtype=torch.int32)
WEIGHTS = normal(2, 64, 256).bfloat16()


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("weights: expected .* .E, N, 256., got bfloat16 .64, 256.", {"weights": B}),
        ("offsets: expected int32 .3., got int64 .3.", {"offsets": OFFSETS.long()}),
        ("offsets: expected int32 .3., got int32 .4.", {"offsets": torch.zeros(4, dtype=torch.int32)}),
        ("offsets: expected ascending values from 0 to at most 6 rows, got .0, 4, 2.",
         {"offsets": torch.tensor([0, 4, 2]).int()}),
        ("offsets: expected ascending values .* got .1, 2, 6.", {"offsets": torch.tensor([1, 2, 6]).int()}),
        ("offsets: expected ascending values .* got .0, 2, 7.", {"offsets": torch.tensor([0, 2, 7]).int()}),
        ("rows: expected a scale factor for each row, got one for 6 rows",
         {"rows": cast_to(A, "fp8_tensor"), "weights": cast_to(WEIGHTS, "fp8_tensor")}),
        ("bias: expected .* .2, 64., got float32 .64.", {"epilogue": scale_bias_relu, "alpha": 1.0, "bias": BIAS}),
        ("weights: expected bfloat16 like rows, got float32", {"weights": WEIGHTS.float()}),
        ("weights: expected a QuantTensor like rows, got bfloat16", {"rows": Q}),
        ("rows, weights: expected bf16 beside mxfp8, mxfp4 or nvfp4, .*, got bfloat16 beside float8_e4m3fn",
         {"weights": cast_to(WEIGHTS, "fp8_row")}),
        ("epilogue: twice_the_column returns a value that is the same for all rows of an expert .col f32 = mul",
         {"epilogue": twice_the_column, "c": torch.zeros(2, 64)}),
    ],
)  # fmt: skip
def test_refusals_of_groups(message, changes):
    with pytest.raises(ValueError, match=message):
        grouped_gemm(**({"rows": A, "weights": WEIGHTS, "offsets": OFFSETS} | changes))


@pytest.mark.parametrize("schemes", [(None, None), ("fp8_row", "fp8_row"), ("fp8_1x128", "fp8_128x128")])
def test_a_prepared_call_is_keyed_by_the_tensors_that_there_are(schemes):
    a, b = (x if s is None else cast_to(x, s) for x, s in zip((normal(4, 128), normal(128, 128)), schemes, strict=True))
    operands = {"alpha": 0.5, "bias": normal(128)}
    constants, tensors = gemm.listed(a, b, scale_bias_relu, **operands)
    assert len(tensors) == (3 if schemes[0] is None else 5) and all(isinstance(x, torch.Tensor) for x in tensors)
    # What isn't a tensor, and which operand is one, is in the key.
    swapped = gemm.listed(a, b, scale_bias_relu, alpha=operands["bias"], bias=0.5)
    assert swapped[0] != constants and [id(x) for x in swapped[1]] == [id(x) for x in tensors]


@pytest.mark.parametrize("field", ["scale", "zeros"])
def test_no_prepared_call_has_a_scale_of_the_whole_tensor_or_zero_points(field):
    x = cast_to(normal(128, 128), "fp8_row")
    with pytest.raises(ValueError, match="zero points"):
        gemm.listed(x, dataclasses.replace(x, **{field: torch.ones(1)}))
