"""What serving engines share: refusals, kernels that are known before weights are, packing without a second copy."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import envoi
from envoi.integrations import engines
from envoi.integrations.engines import Layer
from envoi.ops.moe.op import constants_of
from envoi.ops.moe.warm_up import LayerCall, without_tensors
from envoi.runtime.devices import Target
from envoi.runtime.planned_kernels import find
from envoi.types import QuantTensor
from tests.helpers.accuracy import assert_same_bits
from tests.moe.stored import e4m3, float_factors, meaning, pairs, power_bytes

E, H, I = 4, 256, 128  # noqa: E741
SERVED = ["bf16", "fp8_block128", "fp8_row", "mxfp8", "mxfp4", "nvfp4"]


def stored(format: str, rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a weight as an engine has it after loading, and its factors."""
    if format == "bf16":
        return torch.randn(E, rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16(), None
    if format == "fp8_block128":
        return e4m3(E, rows, columns, seed=seed), float_factors(E, rows // 128, columns // 128)
    if format == "fp8_row":
        return e4m3(E, rows, columns, seed=seed), float_factors(E, rows, 1)
    if format == "mxfp8":
        return e4m3(E, rows, columns, seed=seed), power_bytes(E, rows, columns // 32)
    if format == "mxfp4":
        return pairs(E, rows, columns // 2, seed=seed), power_bytes(E, rows, columns // 32)
    return pairs(E, rows, columns // 2, seed=seed), power_bytes(E, rows, columns // 16, low=40, high=60).view(
        torch.float8_e4m3fn
    )


def tensors(format: str, seed: int = 0, bias: bool = False) -> dict[str, torch.Tensor]:
    gate_up, gate_up_sf = stored(format, 2 * I, H, seed)
    down, down_sf = stored(format, H, I, seed + 1)
    found = {"gate_up": gate_up, "down": down, "gate_up_sf": gate_up_sf, "down_sf": down_sf}
    if format == "nvfp4":
        found |= {"gate_up_scale": torch.rand(E), "down_scale": torch.rand(E)}
    if bias:
        found |= {"gate_up_bias": torch.randn(E, 2 * I).bfloat16(), "down_bias": torch.randn(E, H).bfloat16()}
    return {name: x for name, x in found.items() if x is not None}


@pytest.mark.parametrize("format", SERVED)
@pytest.mark.parametrize("layout", ["concat", "interleaved"])
def test_kernels_are_known_before_weights(packs_for_hopper, format, layout):
    bias = layout == "interleaved"
    if format == "fp8_block128" and bias:
        layout = "concat"  # no checkpoint has blocks of gate and up rows in turn
    layer = Layer(format, H, I, E, 2, "swiglu_oai" if bias else "swiglu", layout, bias)
    foreseen = engines.on_meta(layer, Target("sm_90"))
    packed = engines.pack_layer(layer, **tensors(format, bias=bias))
    assert constants_of(foreseen) == constants_of(packed)
    sites = [
        set(find([LayerCall(without_tensors(x), 2)], Target("sm_90"), (1, 8, 40, 600))) for x in (foreseen, packed)
    ]
    assert sites[0] == sites[1] and len(sites[0]) > 3


def dense(format: str, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `tensors` mean, in float64."""
    if format == "bf16":
        return given["gate_up"].double(), given["down"].double()
    group = {"fp8_block128": (128, 128), "fp8_row": (1, 1 << 30), "nvfp4": (1, 16)}.get(format, (1, 32))
    found = []
    for name in ("gate_up", "down"):
        factors = given[f"{name}_sf"]
        factors = factors.double() if factors.dtype != torch.uint8 else factors
        wide = meaning(given[name], factors, group)
        found.append(wide * given[f"{name}_scale"].double()[:, None, None] if f"{name}_scale" in given else wide)
    return found[0], found[1]


def expected(format: str, given: dict[str, torch.Tensor], x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return what a layer of `tensors` gives for tokens with weights of 0.5, in float64."""
    gate_up, down = dense(format, given)
    want = torch.zeros(x.shape, dtype=torch.float64)
    for token, slots in enumerate(ids.tolist()):
        for e in slots:
            if e >= 0:
                gate, up = (gate_up[e] @ x[token].double()).chunk(2)
                want[token] += 0.5 * (down[e] @ (torch.nn.functional.silu(gate) * up))
    return want


@pytest.mark.parametrize("format", SERVED)
def test_no_weight_is_held_twice(packs_for_hopper, format):
    given = tensors(format)
    want = dense(format, {name: x.clone() for name, x in given.items()})
    packed = engines.pack_layer(Layer(format, H, I, E, 2), **given)
    for name in ("gate_up", "down"):
        weight = getattr(packed, name)
        values = weight.values if isinstance(weight, QuantTensor) else weight
        assert values.data_ptr() == given[name].data_ptr(), name
        if isinstance(weight, QuantTensor) and format in ("mxfp4", "nvfp4"):  # those of mxfp8 are padded
            assert weight.sf.data_ptr() == given[f"{name}_sf"].data_ptr(), name
    unpacked = envoi.experts.unpack(packed, dtype=torch.float64)[:2]
    for x, meant in zip(unpacked, want, strict=True):
        torch.testing.assert_close(x, meant, rtol=1e-7, atol=0)


def test_layers_that_follow_their_weights():
    layer = Layer("fp8_block128", H, I, E, 2)
    given = tensors("fp8_block128")
    packed = engines.pack_layer(layer, **given)
    fresh = tensors("fp8_block128", seed=7)
    for name, x in given.items():
        x.copy_(fresh[name])
    for x, y in zip(envoi.experts.unpack(packed)[:2], dense("fp8_block128", fresh), strict=True):
        assert_same_bits(x, y.float())
    assert layer.is_viewed and not replace(layer, bias=True).is_viewed and not Layer("fp8_row", H, I, E, 2).is_viewed


def test_reasons_name_what_is_wrong(monkeypatch):
    assert engines.why_not(Layer("bf16", H, I, E, 2)) == "there is no GPU"
    monkeypatch.setattr(engines, "_why_not_here", lambda: "")
    assert engines.why_not(Layer("bf16", H, I, E, 2)) == ""
    assert "intermediate: expected" in engines.why_not(Layer("fp8_block128", H, 96, E, 2))
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert "the GPU is sm_100" in engines.why_not(Layer("bf16", H, I, E, 2))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for release, runs in (("3.6.0", True), ("3.8.0", True), ("3.9.1", False), ("3.60.0", False)):
        monkeypatch.setattr(engines, "_triton", lambda release=release: release)
        why = engines.why_not(Layer("bf16", H, I, E, 2))
        assert why == "" if runs else f"Triton is {release}, and" in why


def test_kernels_are_built_once_and_a_failure_is_a_reason(monkeypatch):
    counts = []

    def build(layer, device, max_tokens):
        counts.append(max_tokens)
        if layer.hidden != H:
            raise RuntimeError("warm_up: no such\ninstruction")

    monkeypatch.setattr(engines, "_build", build)
    monkeypatch.setattr(engines, "_built", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    good, bad = Layer("bf16", H, I, E, 2), Layer("bf16", 2 * H, I, E, 2)
    assert engines.why_unbuilt(good, 8) == engines.why_unbuilt(good, 8) == "" and counts == [8]
    assert engines.why_unbuilt(bad, 8) == "its kernels can't be built: RuntimeError: warm_up: no such instruction"
    assert engines.why_unbuilt(bad, 8) and counts == [8, 8]


def test_calls_that_are_batch_invariant_have_kernels_of_their_own(packs_for_hopper):
    layer = Layer("mxfp4", H, I, E, 2)
    wanted = replace(layer, batch_invariant=True)
    sites = [
        {
            site.name
            for site in find([engines._call(x, engines.on_meta(x, Target("sm_90")))], Target("sm_90"), (1, 8)).values()
        }
        for x in (layer, wanted)
    ]
    assert any("few" in name for name in sites[0] - sites[1]), sites


def test_a_router_is_checked_and_built_once(monkeypatch):
    counts = []
    options: dict[str, Any] = {
        "gate": torch.zeros(8, 64, dtype=torch.bfloat16),
        "k": 2,
        "rule": envoi.router.Rule(),
        "expert_bias": None,
    }
    assert engines.why_not_routed(options, 8) == "there is no GPU"
    assert "k: expected" in engines.why_not_routed(options | {"k": 9}, 8)
    monkeypatch.setattr(engines, "_why_not_here", lambda: "")
    monkeypatch.setattr(engines, "_built", {})
    monkeypatch.setattr(engines, "_compile", lambda calls, device, max_tokens: counts.append(max_tokens))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    again = options | {"gate": torch.ones(8, 64, dtype=torch.bfloat16)}
    assert [engines.why_not_routed(x, 8) for x in (options, again, options | {"k": 3})] == [""] * 3 and counts == [8, 8]
