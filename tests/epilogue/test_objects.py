"""Epilogue objects: their reference, lifetime, pickling, and nesting."""

import copy
import gc
import inspect
import io
import linecache
import multiprocessing as mp
import pickle
import re
import textwrap
import weakref

import pytest
import torch

import envoi
from envoi.epilogues import IR, Col, EpilogueError, HalfCol, Row, Scalar, Tile, api, cast, epilogue, pairs, relu, topk
from envoi.epilogues.library import linear, swiglu
from envoi.epilogues.lower import lower
from tests.epilogue import pickled
from tests.helpers.accuracy import assert_same_bits

M, N, K = 5, 16, 8
SOURCE = torch.Generator().manual_seed(0)
ACC = torch.randn(M, N, generator=SOURCE)
A, B = torch.randn(M, K, generator=SOURCE), torch.randn(N, K, generator=SOURCE)


@epilogue
def kinds(acc, r: Row, c: Col, h: HalfCol, t: Tile, s: Scalar):
    even, odd = pairs((acc + r) * c + t * s)
    return even + odd * h


def operands(**changes):
    given = {"r": torch.ones(M), "c": torch.ones(N), "h": torch.ones(N // 2), "t": torch.ones(M, N), "s": 2.0}
    return {**given, **changes}


WRONG = {
    "a Row as a column": ({"r": torch.ones(M, 1)}, "r: expected .*, got float32 [5, 1]"),
    "a Row and a Col swapped": ({"r": torch.ones(N), "c": torch.ones(M)}, "r: expected .* [5], got float32 [16]"),
    "a Row that is a number": ({"r": 1.0}, "r: expected .* [5], got float 1.0"),
    "a Col of rows": ({"c": torch.ones(M, N)}, "c: expected .* [16], got float32 [5, 16]"),
    "a HalfCol that is whole": ({"h": torch.ones(N)}, "h: expected .* [8], got float32 [16]"),
    "a list": ({"t": [[1.0]]}, "t: expected .* [5, 16], got list"),
    "whole numbers": ({"t": torch.ones(M, N, dtype=torch.int64)}, "t: expected .* [5, 16], got int64 [5, 16]"),
    "float64": ({"c": torch.ones(N).double()}, "c: expected .* [16], got float64 [16]"),
    "a Scalar of two": ({"s": torch.ones(2)}, "s: expected one element, got [2]"),
    "a Scalar that is text": ({"s": "2"}, "s: expected a number or a tensor of one, got str"),
    "a Scalar above float32": ({"s": 1e39}, "s: expected a number that float32 can hold, got 1e+39"),
    "one that is missing": ({"s": None}, "s: epilogue kinds needs this operand (Scalar), got none"),
    "one too many": ({"u": 1.0}, "u: epilogue kinds has no such operand; it takes r, c, h, t, s"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_the_reference_refuses_what_gemm_does(name):
    changes, message = WRONG[name]
    said = []
    for call in (lambda given: kinds(ACC, **given), lambda given: envoi.gemm(A, B, kinds, **given)):
        with pytest.raises(ValueError) as caught:
            call(operands(**changes))
        said.append(str(caught.value))
    assert said[0] == said[1]
    start, _, end = message.partition(".*")
    assert (said[0].startswith(start) and said[0].endswith(end)) if end else said[0] == message


def test_the_reference_refuses_accumulators():
    for acc, came in (
        (ACC[0], "float32 [16]"), (ACC[None], "float32 [1, 5, 16]"), (ACC.numpy(), "ndarray"),
        (ACC.int(), "int32 [5, 16]"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="acc: expected .* \\[M, N\\], got ") as caught:
            kinds(acc, **operands())
        assert str(caught.value).endswith(came)
    with pytest.raises(
        ValueError, match=r"N: expected a multiple of 2 \(epilogue swiglu splits columns into pairs\), got 15"
    ):
        swiglu(ACC[:, :15])
    with pytest.raises(ValueError, match="N: expected at least k = 20 columns for topk, got 16"):
        epilogue(lambda acc: topk(acc, 20))(ACC)
    with pytest.raises(
        ValueError, match=r"epilogue linear: expected operands by name \(c, alpha, beta\), got 1 without"
    ):
        linear(ACC, ACC)


def test_constants_are_those_of_the_decoration():
    factor = 3.0
    ending = epilogue(lambda acc: acc * factor)
    factor = 100.0
    assert_same_bits(ending(ACC), ACC * 3)
    assert_same_bits(ending(A @ B.T), envoi.gemm(A, B, ending))
    assert_same_bits(epilogue(lambda acc: ending(acc) + factor)(ACC), ACC * 3 + 100)


def test_the_reference_compiles_as_one_graph():
    def both(x, s):
        return swiglu(linear(x, c=x, alpha=s, beta=1.0))

    compiled = torch.compile(both, fullgraph=True, backend="eager")
    assert_same_bits(compiled(ACC, 2.0), both(ACC, 2.0))


# Nesting


def test_an_epilogue_inside_another_is_a_part_of_it():
    @epilogue
    def shifted(acc, bias: Col, scale: Scalar = 0.5):
        return {"shifted": acc * scale + bias, "low": cast(acc, "bf16")}

    @epilogue
    def outer(acc, bias: Col, residual: Tile, h: HalfCol):
        inside = shifted(acc + residual, bias=bias)
        again = shifted(pairs(inside["shifted"])[0], bias=h, scale=2.0)
        return swiglu(relu(inside["shifted"])), again["shifted"], inside["low"]

    given = {"bias": torch.randn(N), "residual": torch.randn(M, N), "h": torch.randn(N // 2)}
    x = (ACC + given["residual"]) * 0.5 + given["bias"]
    activated, again, low = outer(ACC, **given)
    gate, up = x.relu()[:, 0::2], x.relu()[:, 1::2]
    assert_same_bits(activated, gate / (1 + (-gate).exp()) * up)
    assert_same_bits(again, x[:, 0::2] * 2 + given["h"])
    assert_same_bits(low, (ACC + given["residual"]).bfloat16())
    assert [x.shape for x in envoi.gemm(A, B, outer, **given)] == [x.shape for x in (activated, again, low)]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda acc: linear(acc, acc, 1.0, 1.0), "expected operands by name (c, alpha, beta), got 3 without"),
        (lambda acc: linear(acc, c=acc), "alpha: epilogue linear needs this operand (Scalar), got none"),
        (lambda acc: linear(acc, c=acc, alpha=acc, beta=1.0),
         "alpha: epilogue linear expects a scalar (Scalar), got a tile"),
        (lambda acc: linear(acc, c=ACC, alpha=1.0, beta=1.0), "make it a parameter"),
        (lambda acc: linear(pairs(acc)[0], c=acc, alpha=1.0, beta=1.0),
         "c: epilogue linear expects a tile/2 (Tile), got a tile"),
        (lambda acc: swiglu(envoi.epilogues.row_sum(acc)),
         "epilogue swiglu: expected a tile as its accumulator, got a row"),
    ],
)  # fmt: skip
def test_misfits_inside_name_the_line(body, reason):
    with pytest.raises(EpilogueError) as caught:
        epilogue(body)
    assert reason in str(caught.value)
    assert str(caught.value).startswith(f"{__file__}:{body.__code__.co_firstlineno}: ")


# Lifetime


def test_an_epilogue_is_one_already():
    assert epilogue(linear) is linear


def test_epilogues_die_with_what_they_close_over():
    gc.collect()
    before = len(api._alive), len(api._in_graphs), _generated()
    held = []
    for i in range(3000):
        big = torch.ones(4)
        ending = _over(big, i)
        assert envoi.gemm(A, B, ending).shape == (M, N)
        held.append(weakref.ref(big))
        del big, ending
    gc.collect()
    assert sum(x() is not None for x in held) == 0
    assert (len(api._alive), len(api._in_graphs), _generated()) == before


def _over(tensor, i):
    def ending(acc):
        return acc * (i + 0.25) if tensor.numel() else acc

    return epilogue(ending)


def _generated() -> int:
    return sum(name.startswith("<epilogue ") for name in linecache.cache)


def test_equal_epilogues_share_what_is_made_of_them():
    first, second = _over(torch.ones(4), 1000), _over(torch.ones(4), 1000)
    assert first is not second
    assert first.ir is second.ir
    del first
    gc.collect()
    assert_same_bits(envoi.gemm(A, B, second), second(A @ B.T))


def test_a_graph_keeps_what_it_was_traced_with():
    class Layer(torch.nn.Module):
        def forward(self, x):
            return envoi.gemm(x, B, held[0])

    held = [_over(torch.ones(4), 2000)]
    want, key = held[0](A @ B.T), held[0].ir.key
    program = torch.export.export(Layer(), (A,)).module()
    held.clear()
    gc.collect()
    assert_same_bits(program(A), want)
    assert api.with_key(key).name == "ending"


# Copies


def test_an_unknown_key_is_explained():
    with pytest.raises(
        ValueError, match="no epilogue of this process has the key 0123; import the module that makes it"
    ):
        torch.ops.envoi.gemm(A, None, [], B, None, [], "0123", torch.float32, [], [], "")


def test_copies_are_the_same():
    assert copy.copy(linear) is copy.deepcopy(linear) is linear
    local = _over(torch.ones(4), 1)
    assert copy.deepcopy({"x": local})["x"] is local


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickled_by_name(protocol):
    assert pickle.loads(pickle.dumps(pickled.decorated, protocol)) is pickled.decorated
    assert pickle.loads(pickle.dumps(swiglu, protocol)) is swiglu
    again = pickle.loads(pickle.dumps(pickled.made, protocol))
    assert again.ir is pickled.made.ir


def test_other_processes_have_them_too():
    bias = torch.randn(16)
    with mp.get_context("spawn").Pool(1) as pool:
        for layer in (pickled.Layer(pickled.decorated), pickled.Layer(pickled.made)):
            assert_same_bits(pool.apply(pickled.run, (layer, A, bias)), layer(A, bias))
            file = io.BytesIO()
            torch.save(layer, file)
            file.seek(0)
            assert_same_bits(torch.load(file, weights_only=False)(A, bias), layer(A, bias))


def test_a_changed_function_is_noticed(monkeypatch):
    data = pickle.dumps(pickled.made)
    monkeypatch.setattr(pickled.plain, "__code__", (lambda acc, bias: acc * bias).__code__)
    with pytest.raises(pickle.UnpicklingError, match="epilogue plain: expected what it computed when it was pickled"):
        pickle.loads(data)


@pytest.mark.parametrize("ending", [_over(torch.ones(4), 1), epilogue(lambda acc: acc)], ids=["closure", "lambda"])
def test_what_has_no_name_is_not_pickled(ending):
    with pytest.raises(pickle.PicklingError) as caught:
        pickle.dumps(ending)
    assert f"epilogue {ending.__qualname__}: expected it, or its function, as {__name__}." in str(caught.value)
    assert "define it at the top of a module" in str(caught.value)


def test_docstrings_show_what_is_made_of_an_epilogue():
    of_ir, of_code = (str(inspect.getmodule(x).__doc__) for x in (IR, lower))
    assert str(swiglu.ir) in of_ir
    shown = re.findall(r"(?:^ {4}.*\n)+", of_code, re.MULTILINE)[0]
    assert textwrap.dedent(shown) in lower(swiglu.ir, torch.bfloat16, "gluon", False, True, frozenset()).source


@pytest.mark.parametrize(
    ("divisor", "text"),
    [(30.0, "v0 * 0.03333333333333333"), (-4.0, "v0 * -0.25"), (1e-35, "v0 / v1"), (1e35, "v0 / v1")],
)
def test_a_constant_that_is_divided_by_is_multiplied_with_its_reciprocal(divisor, text):
    code = lower(epilogue(lambda acc: acc / divisor).ir, torch.float32, "gluon", False, False, frozenset())
    assert f"v2 = {text}\n" in code.source
    operand = lower(epilogue(_divided).ir, torch.float32, "gluon", False, False, frozenset())
    assert "v2 = v0 / v1\n" in operand.source


def _divided(acc, by: Scalar):
    return acc / by
