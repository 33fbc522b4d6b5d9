"""Kernels of a layer tried on random weights, where the release of Triton asks for it."""

import math

import pytest
import torch

import envoi
from envoi.integrations import engines, trial
from envoi.integrations.engines import Layer
from envoi.ops.moe import packing
from envoi.ops.moe.op import constants_of
from envoi.runtime.devices import Target
from envoi.types import Routing
from tests.helpers.accuracy import relative_error
from tests.integrations.test_engines import SERVED, E, H, I
from tools import pairs
from tools.oracles.moe import moe_oracle

CPU = torch.device("cpu")
# Activations, and where rows of gate and up are: those of blocks of factors are never in turn.
KINDS = [("swiglu", "concat", False), ("swiglu_oai", "interleaved", True), ("relu2", "concat", False)]


@pytest.fixture
def untested(monkeypatch):
    """Stand for a Triton that is untested, on what stands for a Hopper GPU that compiles."""
    monkeypatch.setattr(trial, "_triton", lambda: "9.8.7")
    monkeypatch.setattr(packing, "implementation", lambda device: "hopper")
    monkeypatch.setattr(engines, "_compile", lambda calls, device, max_tokens: [])
    monkeypatch.setattr(engines.Target, "of", lambda device: Target("sm_90"))
    monkeypatch.setattr(trial, "run_layer", by_torch)


def why_unbuilt(layer: Layer, max_tokens: int) -> str:
    return engines._remembered((object(),), lambda: engines._build(layer, CPU, max_tokens))


def by_torch(tokens, weights, ids, experts, batch_invariant=False):
    """Run a layer as on a CPU."""
    return envoi.moe(tokens, Routing(weights, ids, experts.num_routed), experts)


def test_releases_that_ran_on_gpus_need_no_trial(monkeypatch):
    for pair in pairs.pairs():
        monkeypatch.setattr(trial, "_triton", lambda pair=pair: pair.triton)
        assert trial.is_needed() == (not pair.gpu), pair.name


@pytest.mark.parametrize("format", SERVED)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[0])
def test_what_torch_computes_is_right(monkeypatch, format, kind):
    activation, layout, bias = kind
    if format == "fp8_block128":
        layout = "concat"
    monkeypatch.setattr(packing, "implementation", lambda device: "hopper")
    monkeypatch.setattr(trial, "run_layer", by_torch)
    layer = Layer(format, H, I, E, 2, activation, layout, bias)
    given = trial.random_tensors(format, activation, H, I, E, bias, CPU)
    packed = engines.pack_layer(layer, **given)
    trial.expect_right(packed, 2, (1, 3, 70))
    source = torch.Generator().manual_seed(3)
    x, weights = torch.randn(5, H, generator=source).bfloat16(), torch.rand(5, 2, generator=source)
    ids = torch.rand(5, E, generator=source).argsort(1)[:, :2].int()
    got = trial.meant(x, weights, ids, packed)
    assert relative_error(got, moe_oracle(x, weights, ids, packed)) < 1e-12
    assert 0.02 < float(got.square().mean().sqrt()) < 20, "numbers so small or large that errors would hide"


def test_wrong_numbers_are_a_reason(untested, monkeypatch):
    layer = Layer("mxfp4", H, I, E, 2)
    assert why_unbuilt(layer, 40) == ""

    def wrong_from(count, value):
        def run(tokens, *rest):
            out = by_torch(tokens, *rest)
            if len(out) >= count:
                out[count - 1, 7 : 7 + H // 8] = value
            return out

        return run

    for value in (0.0, math.nan):
        monkeypatch.setattr(trial, "run_layer", wrong_from(30, value))
        why = why_unbuilt(layer, 40)
        assert "wrong numbers for 32 tokens under Triton 9.8.7, with which they are untested" in why
        assert why_unbuilt(layer, 20) == ""


def test_large_factors_are_tried_where_they_have_kernels_of_their_own(untested, monkeypatch):
    tried = []
    monkeypatch.setattr(engines, "try_out", lambda layer, device, numbers, small: tried.append((layer.format, small)))
    for format in SERVED:
        assert why_unbuilt(Layer(format, H, I, E, 2), 4) == ""
    assert [format for format, small in tried if small] == SERVED
    others = [format for format, small in tried if not small]
    assert "mxfp4" in others and "bf16" not in others
    for format in others:
        layer = Layer(format, H, I, E, 2)
        for small in (True, False):
            packed = engines.pack_layer(layer, **trial.random_tensors(format, "swiglu", H, I, E, False, CPU, small))
            assert constants_of(packed) == constants_of(engines.on_meta(layer, Target("sm_90"), small))


def test_a_trial_keeps_an_engines_default_dtype(untested, monkeypatch):
    seen = []

    def run(tokens, *rest):
        seen.append((torch.get_default_dtype(), torch.is_grad_enabled()))
        return by_torch(tokens, *rest)

    monkeypatch.setattr(trial, "run_layer", run)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert why_unbuilt(Layer("fp8_row", H, I, E, 2), 4) == ""
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert set(seen) == {(torch.float32, False)}


def test_an_untested_triton_routes_nothing(monkeypatch):
    monkeypatch.setattr(engines, "_why_not_here", lambda: "")
    monkeypatch.setattr(trial, "_triton", lambda: "9.8.7")
    options = {"gate": torch.zeros(8, 64, dtype=torch.bfloat16), "k": 2, "rule": envoi.router.Rule()}
    assert "Triton 9.8.7, with which they are untested" in engines.why_not_routed(options, 8)
