"""Results have the same bits whatever torch's default dtype and default device are."""

from collections.abc import Callable, Iterator

import pytest
import torch

import envoi
from envoi.epilogues import Col, Row, Scalar, col_sum, row_max, silu, softmax, topk, total_sum
from envoi.experts import unpack
from envoi.ops.indexer import indexer_topk
from envoi.quant import FORMATS, SCHEMES, dequantize, quantize
from envoi.quant.pack import with_checked_scales
from tests.helpers.slow import mostly_slow
from tests.moe.layers import make
from tests.test_types import same
from tools.oracles.indexer_workloads import one

OTHERS = (torch.float16, torch.bfloat16, torch.float64)
SOURCE = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    """Return normal numbers large enough for sums of products to exceed float16."""
    return torch.randn(*shape, generator=SOURCE) * 100


A, B, STACK = normal(5, 256), normal(8, 256), normal(2, 8, 256)
ROW, COL = normal(5), normal(8)
OFFSETS = torch.tensor([0, 2, 4], dtype=torch.int32)
LAYERS = {kind: make(tokens=7, **options) for kind, options in {
    "plain": {}, "bias": {"bias": True, "activation": "swiglu_oai"}, "limit": {"limit": 0.5},
}.items()}  # fmt: skip
INDEXED = one((70, 0, 130)).tensors()


@envoi.epilogue
def much(acc, r: Row, c: Col, by: Scalar = 0.3):
    """Return constants, an omitted operand, reductions, a top-k and a softmax."""
    x = silu(acc * 1e-4 + c) * r
    best, where = topk(x, 3)
    return {"x": x, "p": softmax(x * 0.1), "most": row_max(x), "sums": col_sum(x), "all": total_sum(x), "best": best,
            "where": where, "scaled": x * by}  # fmt: skip


def quantised(scheme: str, x: torch.Tensor) -> envoi.QuantTensor:
    return quantize(x, scheme)


CASES: dict[str, Callable[[], object]] = {
    "gemm float32": lambda: envoi.gemm(A, B),
    "gemm bf16": lambda: envoi.gemm(A.bfloat16(), B.bfloat16()),
    "gemm without K": lambda: envoi.gemm(A[:, :0], B[:, :0]),
    "epilogue": lambda: envoi.gemm(A, B, much, r=ROW, c=COL),
    "bf16 beside mxfp4": lambda: envoi.gemm(A.bfloat16(), quantised("mxfp4", B)),
    "grouped": lambda: envoi.grouped_gemm(A, STACK, OFFSETS),
    "grouped blocks": lambda: envoi.grouped_gemm(quantised("fp8_1x128", A), quantised("fp8_128x128", STACK), OFFSETS),
    "route": lambda: envoi.route(A, B, 3, 1e-4, return_logits=True, return_dense=True, return_counts=True),
    "route by groups": lambda: envoi.route(
        A, B, 3, 1e-4, rule=envoi.router.Rule("sigmoid", 4, 2, "top2_sum"), expert_bias=COL * 1e-3, logit_bias=COL
    ),
    "route softplus": lambda: envoi.route(A, B, 3, 1e-4, rule=envoi.router.Rule("sqrt_softplus")),
    "indexer exact": lambda: indexer_topk(*INDEXED, k=512, mode="exact"),
    "indexer fast": lambda: indexer_topk(*INDEXED, k=512, mode="fast", output="positions", order="position"),
    **{f"gemm {s}": lambda s=s: envoi.gemm(quantised(s, A), quantised(s, B)) for s in SCHEMES},
    **{f"gemm fp8_1x128 {s}": lambda s=s: envoi.gemm(quantised("fp8_1x128", A), quantised(s, B)) for s in SCHEMES},
    **{f"quantise {s}": lambda s=s: quantised(s, A) for s in SCHEMES},
    **{f"dequantise {s}": lambda s=s: dequantize(quantised(s, A)) for s in SCHEMES},
    **{f"with_checked_scales {s}": lambda s=s: with_checked_scales(quantised(s, A)) for s in SCHEMES},
    **{f"pack {f}": lambda f=f: LAYERS["bias"].pack(f) for f in FORMATS},
    **{f"unpack {f}": lambda f=f: unpack(LAYERS["bias"].pack(f)) for f in FORMATS},
    **{f"moe {f} {kind}": lambda f=f, layer=layer: envoi.moe(layer.tokens, layer.routing, layer.pack(f))
       for f in FORMATS for kind, layer in LAYERS.items()},
}  # fmt: skip


def leaves(x: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of a result, in order."""
    if isinstance(x, torch.Tensor):
        yield x
    else:
        parts = x.values() if isinstance(x, dict) else x if isinstance(x, (tuple, list)) else vars(x).values()
        for part in parts:
            if not isinstance(part, (str, int, float, bool, type(None))) and part != ():
                yield from leaves(part)


def same_bits(got: object, want: object) -> bool:
    return same([x.contiguous() for x in leaves(got)], [x.contiguous() for x in leaves(want)])


@pytest.fixture(params=mostly_slow(OTHERS, quick=[torch.float64]), ids=str)
def default_dtype(request) -> Iterator[Callable[[], None]]:
    """Return a function that sets another default dtype."""
    yield lambda: torch.set_default_dtype(request.param)
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", CASES)
def test_the_default_dtype_and_device_change_nothing(name, default_dtype):
    want = list(leaves(CASES[name]()))
    assert want and all(bool(x.isfinite().all()) for x in want if x.dtype in (torch.float32, torch.bfloat16))
    with torch.device("meta"):
        assert same_bits(CASES[name](), want)
    default_dtype()
    assert same_bits(CASES[name](), want)
