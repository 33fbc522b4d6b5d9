"""Inputs as callers have them: int64 ids, tokens [B, S, H], fp16 tokens, tokens in an autocast. Eager and compiled."""

from dataclasses import replace

import pytest
import torch

import envoi
from envoi.epilogues import Col
from envoi.quant import FORMATS, quantize
from envoi.types import Routing
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.slow import mostly_slow
from tests.moe.layers import make

LAYER = make(tokens=6)
TOKENS, R = LAYER.tokens, LAYER.routing
WIDE = TOKENS.float() * 1.001
GATE = torch.randn(8, 256, generator=torch.Generator().manual_seed(1))
BF16 = LAYER.pack()


def bf16_moe(tokens: torch.Tensor) -> torch.Tensor:
    return envoi.moe(tokens.bfloat16(), R, BF16)


def batched(x: torch.Tensor) -> torch.Tensor:
    """Reshape [6, ..] -> [2, 3, ..]."""
    return x.unflatten(0, (2, 3))


@pytest.fixture(params=["eager", "compiled"])
def run(request):
    """Return a caller of a function, eager or as one graph."""
    if request.param == "eager":
        return lambda function, *arguments: function(*arguments)
    torch.compiler.reset()
    return lambda function, *arguments: torch.compile(function, fullgraph=True, backend="aot_eager")(*arguments)


@pytest.mark.parametrize("format", mostly_slow(FORMATS, quick=["bf16", "mxfp4"]))
def test_ids_of_torchs_topk(format, run):
    packed = LAYER.pack(format)
    weights, ids = torch.randn(6, 8, generator=torch.Generator().manual_seed(2)).softmax(1).topk(3)
    assert ids.dtype == torch.int64
    want = envoi.moe(TOKENS, Routing(weights, ids.int(), 8), packed)
    assert_same_bits(run(lambda t, w, i: envoi.moe(t, Routing(w, i, 8), packed), TOKENS, weights, ids), want)


@pytest.mark.parametrize("id", [2**32 + 1, -(2**32) + 1, 2**31, 8, -2])
def test_a_wide_id_does_not_become_another(id):
    ids = R.topk_ids.long().index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(id))
    with pytest.raises(ValueError, match="ids from 0 to 7, or -1 for a masked slot, got .* at token 1, slot 2"):
        envoi.moe(TOKENS, replace(R, topk_ids=ids), BF16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_are_widened(dtype, run):
    weights = R.topk_weights.to(dtype)
    want = envoi.moe(TOKENS, replace(R, topk_weights=weights.float()), BF16)
    assert_same_bits(run(lambda w: envoi.moe(TOKENS, Routing(w, R.topk_ids, 8), BF16), weights), want)


@pytest.mark.parametrize("slots", ["[M, k]", "[B, S, k]", "one of each"])
def test_tokens_of_a_batch(slots, run):
    weights, ids = R.topk_weights, R.topk_ids
    weights = weights if slots == "[M, k]" else batched(weights)
    ids = batched(ids) if slots == "[B, S, k]" else ids
    got = run(lambda t, w, i: envoi.moe(t, Routing(w, i, 8), BF16), batched(TOKENS), weights, ids)
    assert_same_bits(got, batched(bf16_moe(TOKENS)))


def test_batches_of_nothing():
    none = Routing(R.topk_weights[:0], R.topk_ids[:0], 8)
    for shape in ((0, 3, 256), (2, 0, 256)):
        assert envoi.moe(torch.zeros(shape).bfloat16(), none, BF16).shape == shape
        assert envoi.route(torch.zeros(shape), GATE, 2).topk_ids.shape == (0, 2)


@pytest.mark.parametrize("format", mostly_slow(FORMATS, quick=["bf16", "mxfp4"]))
def test_fp16_tokens(format, run):
    packed = LAYER.pack(format)
    want = envoi.moe(WIDE.half().bfloat16(), R, packed).half()
    assert_same_bits(run(lambda t: envoi.moe(t, R, packed), WIDE.half()), want)
    assert_same_bits(run(lambda t: envoi.moe(t, R, packed), batched(WIDE.half())), batched(want))


def test_fp16_has_room_for_what_bf16_can_not_name():
    """Test fp16: inputs keep their range and lose bits; an output above 65504 is infinite."""
    tokens = torch.full((1, 256), 65504.0).half()
    one = Routing(torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32), 8)
    got, wide = envoi.moe(tokens, one, BF16), envoi.moe(tokens.bfloat16(), one, BF16)
    assert bool(wide.isfinite().all()) and bool((wide.abs() > 65504).any())
    assert torch.equal(got.isinf(), wide.abs() >= 65520)


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tokens_in_an_autocast(dtype, cast, run):
    tokens = WIDE.to(dtype)

    def step(t):
        with torch.autocast("cpu", cast):
            return envoi.moe(t, R, BF16)

    assert_same_bits(run(step, tokens), bf16_moe(tokens).to(cast))


def test_other_tokens_stay_refused():
    with pytest.raises(ValueError, match=r"tokens: expected bfloat16 or float16 \[num_tokens, 256\], got float32"):
        envoi.moe(WIDE, R, BF16)
    for other in (WIDE.double(), TOKENS.int()):
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="tokens: expected bfloat16"):
            envoi.moe(other, R, BF16)
    with torch.autocast("cpu", torch.bfloat16, enabled=False), pytest.raises(ValueError, match="got float32"):
        envoi.moe(WIDE, R, BF16)


def test_other_shapes_stay_refused():
    slots = Routing(batched(R.topk_weights), batched(R.topk_ids), 8)
    turned = Routing(R.topk_weights.view(3, 2, 3), R.topk_ids.view(3, 2, 3), 8)
    for tokens, routing in (
        (TOKENS, slots), (batched(TOKENS), turned), (batched(TOKENS)[None], R), (batched(TOKENS)[:1], R),
        (TOKENS[0], R),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"(tokens|topk_ids): expected .*, got (bfloat16|int32) \["):
            envoi.moe(tokens, routing, BF16)
    with pytest.raises(ValueError, match=r"a: expected .* \[M, K\], got bfloat16 \[2, 3, 256\]"):
        envoi.gemm(batched(TOKENS), GATE.bfloat16())
    with pytest.raises(ValueError, match=r"tokens: expected .* \[num_tokens, hidden\], got bfloat16 \[1, 2, 3, 256\]"):
        envoi.route(batched(TOKENS)[None], GATE, 2)


@pytest.mark.parametrize("ids", [None, "[M]", "[B, S]"])
def test_batches_are_routed_row_by_row(ids, run):
    names = torch.tensor([3, 1, 4, 1, 5, 9])
    table = torch.rand(10, 8, generator=torch.Generator().manual_seed(3)).argsort(1)[:, :2]

    def step(tokens, names):
        extra = {} if ids is None else {"token_ids": names, "hash_table": table}
        found = envoi.route(tokens, GATE, 2, **extra, return_logits=True, return_dense=True, return_counts=True)
        return (
            found.topk_weights, found.topk_ids, found.logits, found.dense, found.num_tokens_per_expert,
            found.expert_offsets,
        )  # fmt: skip

    want = step(TOKENS, names)
    got = run(step, batched(TOKENS), batched(names) if ids == "[B, S]" else names)
    assert got[0].shape == (6, 2)
    for mine, theirs in zip(got, want, strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_logits_are_not_rounded_in_an_autocast(dtype, run):
    tokens = WIDE.to(dtype)

    def step(t):
        with torch.autocast("cpu", torch.bfloat16):
            return envoi.route(t, GATE, 2, return_logits=True).logits

    assert_same_bits(run(step, tokens), envoi.route(tokens, GATE, 2, return_logits=True).logits)


@envoi.epilogue
def shifted(acc, c: Col):
    return acc + c


@pytest.mark.parametrize("cast", mostly_slow([torch.bfloat16, torch.float16], quick=[torch.bfloat16]))
def test_a_gemm_in_an_autocast_is_cast_like_torchs(cast, run):
    c = torch.linspace(-1, 1, 8)
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32)
    stack = torch.stack((GATE, GATE * 2))

    def step(a, b, stack):
        with torch.autocast("cpu", cast):
            alone, torchs = envoi.gemm(a, b, shifted, c=c), torch.mm(a, b.T)
            return alone, envoi.gemm(a, b, out_dtype=torch.float32), envoi.grouped_gemm(a, stack, offsets), torchs

    a, b, many = WIDE.to(cast), GATE.to(cast), stack.to(cast)
    want = (
        envoi.gemm(a, b, shifted, c=c),
        envoi.gemm(a, b, out_dtype=torch.float32),
        envoi.grouped_gemm(a, many, offsets),
    )
    for first, second in ((WIDE, GATE), (TOKENS, GATE), (WIDE, GATE.bfloat16())):
        *got, torchs = run(step, first, second, stack)
        assert got[0].dtype == torchs.dtype == cast
        if first is WIDE and second is GATE:
            for mine, theirs in zip(got, want, strict=True):
                assert_same_bits(mine, theirs)


def test_nothing_inside_an_operator_is_cast():
    """Test that autocast casts nothing: the torch path of `envoi.moe` calls `grouped_gemm` on bf16."""
    want = bf16_moe(TOKENS)
    with torch.autocast("cpu", torch.float16):
        assert_same_bits(envoi.moe(TOKENS, R, BF16), want.half())
        a, b = quantize(WIDE, "mxfp8"), quantize(GATE, "mxfp8")
        assert_same_bits(envoi.gemm(a, b), envoi.gemm(a, b))
