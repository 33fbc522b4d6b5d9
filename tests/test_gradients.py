"""Refusals of gradients: no operator has one, and none drops one silently."""

from collections.abc import Callable

import pytest
import torch
from torch.autograd import forward_ad

import envoi
from envoi.epilogues import Col, Scalar
from envoi.ops.moe.parallel import opening
from envoi.quant import quantize
from tests.moe.layers import make
from tools.oracles.indexer_workloads import one

LAYER = make(tokens=5, bias=True)
PAGES = dict(zip(("q", "k_cache", "weights", "seq_lens", "block_table"), one((70, 3)).tensors(), strict=True))


@envoi.epilogue
def shifted(acc, c: Col, s: Scalar):
    return acc * s + c


def gemm(x, b, c, s):
    return envoi.gemm(x, b, shifted, c=c, s=s)


def scaled(x, sf):
    q = quantize(torch.ones(4, 8), "fp8_row")
    return envoi.gemm(envoi.QuantTensor(q.values, sf, q.group), quantize(x.detach(), "fp8_row"))


def grouped_gemm(x, weights):
    return envoi.grouped_gemm(x, weights, torch.tensor([0, 1, 3], dtype=torch.int32))


def route(x, gate, bias):
    return envoi.route(x, gate, 2, logit_bias=bias).topk_weights


def moe(x, weights, gate_up, bias):
    experts = envoi.experts.pack(gate_up, LAYER.down, gate_up_bias=bias, down_bias=LAYER.down_bias)
    return envoi.moe(x, envoi.Routing(weights, LAYER.routing.topk_ids, 8), experts)


def indexer(weights):
    return envoi.indexer_topk(**PAGES | {"weights": weights}, k=512)


X = torch.randn(3, 8)
CALLS: dict[Callable, dict[str, torch.Tensor]] = {
    gemm: {"a": X, "b": torch.ones(4, 8), "c": torch.ones(4), "s": torch.ones(1)},
    scaled: {"": torch.ones(4, 8), "a_sf": torch.ones(4, 1)},
    grouped_gemm: {"rows": X, "weights": torch.ones(2, 4, 8)},
    route: {"tokens": X, "gate": torch.ones(4, 8), "logit_bias": torch.ones(4)},
    moe: {"tokens": LAYER.tokens, "topk_weights": LAYER.routing.topk_weights, "gate_up": LAYER.gate_up,
          "gate_up_bias": LAYER.gate_up_bias},
    indexer: {"weights": PAGES["weights"]},
}  # fmt: skip
TENSORS = [(call, place) for call, given in CALLS.items() for place, name in enumerate(given) if name]


def arguments(call: Callable, place: int, change: Callable) -> tuple[str, list[torch.Tensor]]:
    """Return the name of one tensor, and all tensors of a call with that one changed."""
    given = [x.clone() for x in CALLS[call].values()]
    given[place] = change(given[place])
    return list(CALLS[call])[place].strip(), given


@pytest.mark.parametrize(("call", "place"), TENSORS)
def test_what_requires_grad_is_refused(call, place):
    name, given = arguments(call, place, torch.Tensor.requires_grad_)
    wanted = rf"^{name}: expected a tensor without gradients, got .* that requires grad: .*no_grad.*to train use"
    with pytest.raises(ValueError, match=wanted):
        call(*given)


@pytest.mark.parametrize("format", ["bf16", "fp8_row", "mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("name", ["gate_up", "down", "gate_up_bias", "down_bias"])
def test_packing_refuses_what_requires_grad(name, format):
    given = {
        "gate_up": LAYER.gate_up, "down": LAYER.down, "gate_up_bias": LAYER.gate_up_bias, "down_bias": LAYER.down_bias
    }  # fmt: skip
    given[name] = torch.nn.Parameter(given[name])
    with pytest.raises(ValueError, match=f"^{name}: expected a tensor without gradients, got .* that requires grad"):
        envoi.experts.pack(format=format, **given)
    with torch.no_grad():
        envoi.experts.pack(format=format, **given)


@pytest.mark.parametrize("scheme", ["fp8_row", "fp8_128x128", "mxfp8", "mxfp4", "nvfp4"])
def test_quantising_refuses_what_requires_grad(scheme):
    x = torch.nn.Parameter(torch.randn(4, 128))
    with pytest.raises(ValueError, match="^x: expected a tensor without gradients, got float32 .* that requires grad"):
        quantize(x, scheme)
    quantize(x.detach(), scheme)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("call", "place"), TENSORS)
def test_nothing_is_refused_where_gradients_are_off(call, place, off):
    want = call(*CALLS[call].values())
    with off():
        assert torch.equal(call(*arguments(call, place, torch.nn.Parameter)[1]), want)


@pytest.mark.parametrize(("call", "place"), TENSORS)
def test_a_derivative_is_refused(call, place):
    name, given = arguments(call, place, lambda x: x)

    def total(x):
        return call(*given[:place], x, *given[place + 1 :]).float().sum()

    with pytest.raises(ValueError, match=f"^{name}: expected a tensor without gradients, .*requires grad"):
        torch.func.grad(total)(given[place])
    with pytest.raises(ValueError, match=f"^{name}: expected a tensor without gradients, .*is differentiated"):
        torch.func.jvp(total, (given[place],), (torch.ones_like(given[place]),))


EXPERTS = envoi.experts.pack(LAYER.gate_up, LAYER.down)
OUTS: dict[str, tuple[Callable, str]] = {
    "gemm": (lambda out: envoi.gemm(X, torch.ones(4, 8), out=out), "out"),
    "grouped_gemm": (
        lambda out: envoi.grouped_gemm(X, torch.ones(2, 4, 8), torch.tensor([0, 1, 3], dtype=torch.int32), out=out),
        "out",
    ),
    "route": (lambda out: envoi.route(X, torch.ones(4, 8), 2, out=out), "out, tensor 0"),
    "moe": (lambda out: envoi.moe(LAYER.tokens, LAYER.routing, EXPERTS, out=out), "out"),
    "combine": (lambda out: opening.check_out(out, LAYER.tokens), "out"),
}


@pytest.mark.parametrize("name", OUTS)
def test_an_out_that_requires_grad_is_refused(name):
    call, said = OUTS[name]
    out = LAYER.tokens.clone() if name == "combine" else call(None)
    first = out.topk_weights if isinstance(out, envoi.Routing) else out
    first.requires_grad_()
    with pytest.raises(ValueError, match=f"^{said}: expected a tensor without gradients, got .* that requires grad"):
        call(out)
    with torch.no_grad():
        assert call(out) is None or torch.isfinite(first).all()


def test_a_tangent_is_refused_where_gradients_are_off():
    """Test that tangents are refused: forward derivatives don't need grad mode."""
    with torch.no_grad(), forward_ad.dual_level():
        envoi.gemm(X, X)
        with pytest.raises(ValueError, match="^b: expected a tensor without gradients, .*is differentiated"):
            envoi.gemm(X, forward_ad.make_dual(X, X))


def multiply(x):
    return envoi.gemm(x, X)


COMPILED = {
    "a call": multiply,
    "a gradient": torch.func.grad(lambda x: multiply(x).sum()),
    "a tangent": lambda x: torch.func.jvp(multiply, (x,), (x,)),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_calls_are_refused(name):
    torch.compiler.reset()
    x = X.clone().requires_grad_(name == "a call")
    with pytest.raises(ValueError, match="^a: expected a tensor without gradients"):
        torch.compile(COMPILED[name], backend="aot_eager")(x)


def test_compiled_calls_without_gradients_stay_one_graph():
    torch.compiler.reset()
    weight = torch.nn.Parameter(torch.ones(4, 8))

    def step(x):
        with torch.no_grad():
            return envoi.gemm(x, weight) + envoi.route(x, weight, 2).topk_weights.sum()

    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(X), step(X))
