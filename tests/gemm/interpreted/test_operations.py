"""Operations of the language, in a tile that holds whole rows, in several tiles, and after groups."""

import functools
from inspect import signature
from itertools import product

import pytest
import torch

from envoi import epilogues as language
from envoi.epilogues import Col, Row, Scalar, Tile, epilogue, pairs, topk, where
from envoi.epilogues.operations import OPERATIONS
from tests.gemm.interpreted.sides import assert_close, assert_equal, expected, run, whole
from tests.helpers.inputs import normal
from tests.helpers.slow import mostly_slow

# With whole numbers these have the reference's bits.
EXACT = {
    "round_bf16": lambda x, t: language.round_bf16(x * 0.37) + language.round_bf16(t),
    "add": lambda x, c: x + c,
    "sub": lambda x, r: r - x,
    "mul": lambda x, t, s: x * t * s,
    "div": lambda x: x / 8.0,
    "neg": lambda x, r, c, s: (-x, -c * s, -r),
    "abs": lambda x: abs(x),
    "minimum": lambda x, r: language.minimum(x, r),
    "maximum": lambda x: language.maximum(3.0, x),
    "clip": lambda x, r: language.clip(x, -2.0, r),
    "relu": lambda x: language.relu(x),
    "leaky_relu": lambda x: language.leaky_relu(x, 0.25),
    "pow": lambda x: (x**2, x**3, x**0, x**5),
    "lt le": lambda x, r, c, t: (where(x < c, x, r), where(x <= 0.0, 1.0, t)),
    "gt ge": lambda x, r, t: (where(x > r, x, 0.5), where(t >= x, 1.0, 2.0)),
    "eq ne": lambda x, r, c, s: (where(x == r, x, -1.0), where(x != c, x, s)),
    "and or not": lambda x, r, c: where((x < 2.0) & ~(x < -2.0) | (c == 1.0), x, r),
    "even odd": lambda x, r, c: (pairs(x), pairs(c)[0] * pairs(x)[1], pairs(pairs(x)[0])[1] * r),
    "row_sum": lambda x, r: (language.row_sum(x), language.row_sum(pairs(x)[1]) + r),
    "row_max": lambda x, r, c, s: (language.row_max(x * c), language.row_max(pairs(x)[0]) * s + r),
    "row_absmax": lambda x, c: language.row_absmax(x + c),
    "row in tile": lambda x, c: x + language.row_max(x) * c,
    "col": lambda x, r: (language.col_sum(x * r), language.col_max(x), language.col_absmax(pairs(x)[0] + r)),
    "total": lambda x, c, t: (language.total_sum(x), language.total_max(x * c), language.total_absmax(t)),
    "total of rows": lambda x, r: (language.total_max(r), language.total_sum(language.row_max(x))),
    "total of topk": lambda x: language.total_absmax(topk(x, 3)[0]),
    "topk": lambda x: topk(x, 3),
    "topk of half": lambda x: (topk(pairs(x)[1], 4), topk(pairs(x)[1], 2)),
    "after topk": lambda x, r, s: (topk(x, 2)[0] * r + s, language.row_sum(topk(x, 4)[0]), topk(x, 1)[1]),
    "topk beside rows": lambda x, r: (
        where(topk(x, 3)[0] > r, topk(x, 3)[0], r), topk(x, 3)[0] - language.row_max(x),
        language.row_absmax(topk(pairs(x)[0], 2)[0]) + r,
    ),
    "cast": lambda x, s: tuple(language.cast(x * s, d) for d in ("bf16", "fp16", "fp32", "fp8_e4m3")),
    "cast of others": lambda x, r: (language.cast(r, "bf16"), language.cast(language.row_max(x), "fp16")),
    "the same twice": lambda x, r, t, s: (x, x, r, r, s, t),
}  # fmt: skip

# These are as accurate as torch's.
CLOSE = {
    "exp": lambda x: language.exp(x * 0.25),
    "exp2": lambda x, t: language.exp2(x + t),
    "log": lambda x: language.log(abs(x) + 0.1),
    "log2": lambda x: language.log2(abs(x) + 0.1),
    "sqrt": lambda x: language.sqrt(abs(x)),
    "rsqrt": lambda x: language.rsqrt(abs(x) + 0.1),
    "tanh": lambda x: language.tanh(x * 0.3),
    "sigmoid": lambda x: language.sigmoid(x),
    "silu": lambda x: language.silu(x),
    "gelu": lambda x: (language.gelu(x), language.gelu(x, "tanh")),
    "hardswish": lambda x: language.hardswish(x),
    "softplus": lambda x: language.softplus(x),
    "div": lambda x, t: x / (abs(t) + 1.0),
    "pow": lambda x: ((abs(x) + 1.0) ** -3, x**7),
    "row_sum": lambda x, r, t: (language.row_sum(x * x) * r, language.row_sum(abs(t))),
    "col_sum": lambda x: (language.col_sum(x * x), language.total_sum(abs(x))),
    "softmax": lambda x, r: (language.softmax(x * 0.1), language.softmax(pairs(x)[0] * 0.2 + r)),
    "softmax of topk": lambda x: language.softmax(topk(x, 4)[0] * 0.1),
    "rows of a softmax": lambda x, r: (
        language.row_sum(language.softmax(x * 0.1) * r), topk(language.softmax(x * 0.1), 3)[0],
        language.row_max(language.softmax(topk(x, 4)[0] * 0.1)),
    ),
    "normed": lambda x, c: x * language.rsqrt(language.row_sum(x * x) * (1 / 130) + 1e-6) * c,
}  # fmt: skip

KINDS = {"r": Row, "c": Col, "t": Tile, "s": Scalar}


def ending(body):
    """Return an epilogue of a function whose operands' names determine their kinds."""

    @functools.wraps(body)
    def over(*args, **named):
        return flattened(body(*args, **named))

    body.__annotations__ = over.__annotations__ = {name: KINDS[name] for name in list(signature(body).parameters)[1:]}
    return epilogue(over)


def flattened(values):
    if not isinstance(values, tuple):
        return values
    return tuple(part for v in values for part in (v if isinstance(v, tuple) else (v,)))


def values(f, make, m: int, n: int, experts: int | None = None) -> dict:
    c = make(n, seed=3) if experts is None else make(experts, n, seed=3)
    every = {"r": make(m, seed=2), "c": c.bfloat16(), "t": make(m, n, seed=4).half(), "s": 0.5}
    return {operand.name: every[operand.name] for operand in f.ir.operands}


def test_all_operations_are_here():
    known = {node.op for body in (*EXACT.values(), *CLOSE.values()) for node in ending(body).ir.nodes}
    assert set(OPERATIONS) - known == {"quantize", "round_mxfp8", "left", "right"}  # in test_epilogues, test_halves


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize(("m", "n"), mostly_slow([(17, 132), (0, 8), (1, 8), (70, 520)], quick=[(0, 8), (70, 520)]))
def test_exact(name, m, n):
    a, b = whole(m, 40).bfloat16(), whole(n, 40, seed=1).bfloat16()
    f = ending(EXACT[name])
    operands = values(f, whole, m, n)
    assert_equal(run(a, b, f, **operands), expected(a, b, f, **operands))


@pytest.mark.parametrize("name", CLOSE)
@pytest.mark.parametrize(("m", "n"), mostly_slow([(17, 132), (66, 520)], quick=[(66, 520)]))
def test_close(name, m, n):
    a, b = normal(m, 64), normal(n, 64, seed=1)
    f = ending(CLOSE[name])
    operands = values(f, normal, m, n)
    want = expected(a, b, f, wide=True, **operands)
    assert_close(run(a, b, f, out_dtype=torch.float32, **operands), expected(a, b, f, **operands), want)
    a, b = a.bfloat16(), b.bfloat16()
    want = expected(a, b, f, wide=True, **operands)
    assert_close(run(a, b, f, **operands), expected(a, b, f, **operands), want)


# Each kind of operand, of output and of reduction: what an operation does is as in one product.
IN_GROUPS = "add", "mul", "even odd", "row_sum", "row in tile", "col", "total of rows", "after topk", "cast of others"
RETURNING_NO_COLUMN = [name for name in EXACT if name != "neg"]


@pytest.mark.parametrize(
    ("name", "n"), mostly_slow(product(RETURNING_NO_COLUMN, [24, 520]), quick=[*product(IN_GROUPS, [520])])
)
def test_exact_in_groups(name, n):
    offsets = [0, 5, 5, 12, 13]
    a, b = whole(17, 24), whole(4, n, 24, seed=1)
    f = ending(EXACT[name])
    operands = values(f, whole, 17, n, 4)
    assert_equal(run(a, b, f, offsets, **operands), expected(a, b, f, offsets, **operands))


@pytest.mark.parametrize("name", [name for name in EXACT if name not in ("pow", "cast")])
@pytest.mark.parametrize("n", mostly_slow([132, 520], quick=[520]))
def test_nan_and_infinity(name, n):
    a, b = whole(20, 24), whole(n, 24, seed=1)
    a[2, 3], a[7, 5], a[8, 5], a[19] = torch.nan, torch.inf, -torch.inf, 0.0
    b[5, 3] = 0.0
    f = ending(EXACT[name])
    operands = values(f, whole, 20, n)
    if "t" in operands:
        operands["t"][3, 4] = torch.nan
    if "r" in operands:
        operands["r"][4] = torch.inf
    assert_equal(run(a, b, f, **operands), expected(a, b, f, **operands))
