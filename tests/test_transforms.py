"""`torch.func.vmap`, counted floating-point operations, and graphs of changing sizes."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import envoi
from envoi.epilogues import Col, HalfTile, Row, Scalar, Tile, col_sum, pairs, row_max, topk, total_sum
from envoi.quant import FORMATS, SCHEMES, dequantize, quantize
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.slow import mostly_slow
from tests.moe.layers import make

SOURCE = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=SOURCE)


A, B = normal(3, 5, 32), normal(8, 32)


@envoi.epilogue
def by_row(acc, r: Row, c: Col, t: Tile, h: HalfTile, s: Scalar):
    x = acc * r + c + t
    best, where = topk(x, 2)
    even, odd = pairs(x)
    return {"x": x, "best": best, "where": where, "most": row_max(x), "half": even * odd * s + h}


# Per-row tensors, batched along a dimension or shared; and tensors that all rows share.
OPERANDS = {"r": normal(3, 5), "t": normal(5, 8), "h": normal(5, 4, 3)}
SHARED = {"c": normal(8), "s": normal(1)}
PLACES = {"r": 0, "t": None, "h": 2}


def test_rows_are_batched():
    def call(x, operands):
        return envoi.gemm(x, B, by_row, **operands, **SHARED)

    got = torch.func.vmap(call, in_dims=(0, PLACES))(A, OPERANDS)
    for i in range(3):
        mine = {name: x if PLACES[name] is None else x.select(PLACES[name], i) for name, x in OPERANDS.items()}
        for name, want in call(A[i], mine).items():
            assert_same_bits(got[name][i], want)
    moved = torch.func.vmap(call, in_dims=(1, PLACES), out_dims=1)(A.movedim(0, 1), OPERANDS)
    assert_same_bits(moved["x"].movedim(1, 0), got["x"])


@pytest.mark.parametrize("scheme", ["fp8_row", "fp8_1x128", "mxfp8", "mxfp4"])
def test_rows_with_scale_factors_are_batched(scheme):
    a, b = quantize(normal(3, 5, 256), scheme), quantize(normal(8, 256), scheme)

    def call(values, sf):
        return envoi.gemm(envoi.QuantTensor(values, sf, a.group), b)

    got = torch.func.vmap(call)(a.values, a.sf)
    for i in range(3):
        assert_same_bits(got[i], call(a.values[i], a.sf[i]))


@envoi.epilogue
def with_sums(acc):
    return acc, col_sum(acc)


@envoi.epilogue
def with_total(acc):
    return total_sum(acc)


@envoi.epilogue
def with_column(acc, c: Col):
    return acc + c


LAYER = make(tokens=5, hidden=32, intermediate=32)
REFUSED = {
    "got b batched": lambda x: envoi.gemm(A[0], x),
    "got an a that isn't batched": lambda x: envoi.gemm(A[0], B, lambda_row, r=x[:, 0]),
    "got c batched, which all rows share": lambda x: envoi.gemm(x[:, :32], B, with_column, c=x[0, :8]),
    "got epilogue with_sums, .*col f32": lambda x: envoi.gemm(x, B, with_sums),
    "got epilogue with_total, .*scalar f32": lambda x: envoi.gemm(x, B, with_total),
    "envoi.route can't be batched": lambda x: envoi.route(x, B, 2).topk_ids,
    "envoi.grouped_gemm can't be batched": lambda x: envoi.grouped_gemm(
        x, B[None], torch.tensor([0, 5], dtype=torch.int32)
    ),
    "envoi.moe can't be batched": lambda x: envoi.moe(x.bfloat16(), LAYER.routing, LAYER.pack()),
}


@envoi.epilogue
def lambda_row(acc, r: Row):
    return acc * r


@pytest.mark.parametrize("message", REFUSED)
def test_other_batches_are_refused(message):
    with pytest.raises(ValueError, match=f"^torch.func.vmap: .*{message}"):
        torch.func.vmap(REFUSED[message])(A)


def counted(function, *arguments) -> int:
    with FlopCounterMode(display=False) as counter:
        function(*arguments)
    return counter.get_total_flops()


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_operations_of_a_gemm(scheme):
    a, b = normal(3, 256), normal(8, 256)
    if scheme is not None:
        a, b = quantize(a, scheme), quantize(b, scheme)
    assert counted(envoi.gemm, a, b) == 2 * 3 * 256 * 8


def test_operations_of_the_other_operators():
    rows, offsets = quantize(normal(7, 64), "mxfp4"), torch.tensor([0, 3, 5], dtype=torch.int32)
    weights = quantize(normal(2, 16, 64), "mxfp4")
    assert counted(envoi.grouped_gemm, rows, weights, offsets) == 2 * 7 * 64 * 16
    assert counted(envoi.route, A[0], B, 2) == 2 * 5 * 32 * 8
    layer = make(tokens=5, experts=6, k=3, hidden=64, intermediate=32)
    for format in ("bf16", "fp8_row", "mxfp4"):
        products = 64 * 2 * 32 + 32 * 64  # per slot: hidden -> gate and up -> hidden
        assert counted(envoi.moe, layer.tokens, layer.routing, layer.pack(format)) == 2 * 5 * 3 * products


def compiles(function, *arguments: torch.Tensor) -> None:
    """Compile one graph, sizes unknown, of a function whose closure holds quantised tensors."""
    torch.compiler.reset()
    got = torch.compile(function, fullgraph=True, dynamic=True, backend="eager")(*arguments)
    assert_same_bits(got, function(*arguments))


@pytest.mark.parametrize("scheme", mostly_slow(SCHEMES, quick=["mxfp4"]))
def test_quantised_tensors_of_a_closure_compile(scheme):
    a, b = quantize(normal(3, 128), scheme), quantize(normal(64, 128), scheme)
    compiles(lambda y: envoi.gemm(a, b) + y, normal(3, 64))
    compiles(lambda x: envoi.gemm(quantize(x, scheme), b), normal(3, 128))
    compiles(lambda x: dequantize(quantize(x, scheme)), normal(3, 128))
    if b.sf.dtype == torch.float8_e8m0fnu:
        compiles(lambda x: envoi.gemm(x, b), normal(3, 128).bfloat16())
    if a.group[0] == 1:
        stack, offsets = quantize(normal(2, 64, 128), scheme), torch.tensor([0, 1, 3], dtype=torch.int32)
        compiles(lambda y: envoi.grouped_gemm(a, stack, offsets) + y, normal(3, 64))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_compiler_leaves_quantisation_alone(scheme):
    """It may divide otherwise than torch, and its code for CPUs has no UE8M0."""
    graphs = []
    torch.compiler.reset()
    function = torch.compile(
        lambda x: dequantize(quantize(x.t(), scheme)), fullgraph=True,
        backend=lambda graph, _: graphs.append(graph) or graph,
    )  # fmt: skip
    x = normal(128, 48)
    assert torch.equal(function(x), dequantize(quantize(x.t(), scheme)))
    ops = {node.target for node in graphs[0].graph.nodes if node.op == "call_function"}
    assert {torch.ops.envoi.quantize.default, torch.ops.envoi.dequantize.default} <= ops
    assert len(graphs) == 1
    q = quantize(x.t(), scheme)
    arguments = q.values, q.sf, None, list(q.group), "rows", torch.float32, None
    for op, given in ((torch.ops.envoi.quantize, (x.t(), scheme)), (torch.ops.envoi.dequantize, arguments)):
        torch.library.opcheck(op.default, given, test_utils="test_faketensor")  # the others multiply float8


@pytest.mark.parametrize("format", mostly_slow(FORMATS, quick=["bf16", "mxfp4", "nvfp4"]))
def test_packed_experts_of_a_closure_compile(format):
    layer = make(tokens=5, bias=True)
    packed, gate = layer.pack(format), normal(8, 256).bfloat16()
    compiles(lambda x: envoi.moe(x, envoi.route(x, gate, 2), packed), layer.tokens)
