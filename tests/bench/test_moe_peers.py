"""Other libraries' MoE layers: what is refused, and that they are measured in the same trial."""

import sys
import types

import pytest
import torch
from torch.nn import functional

from bench.shapes import MoeShape
from bench.suites import cases, measure, moe, moe_peers
from bench.trial import Bench
from envoi.tune.timing import Clock

from .test_suites import CPU, ROOF


def layer_of(format: str, hidden: int = 256, intermediate: int = 128, tokens: int = 9):
    shape = MoeShape(hidden, intermediate, 4, 2, tokens, format)
    return shape, moe.make_layer(shape, CPU)


def install(monkeypatch, **modules) -> None:
    """Install modules with these contents; "__" in a name stands for a dot."""
    for name, contents in modules.items():
        path = name.replace("__", ".")
        parts = path.split(".")
        for depth in range(1, len(parts)):
            parent = ".".join(parts[:depth])
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
        module = types.ModuleType(path)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, path, module)


@pytest.mark.parametrize("format", ["bf16", "fp8_block128", "mxfp4", "mxfp4_mxfp8"])
def test_a_library_that_is_not_installed_is_named(format):
    shape, layer = layer_of(format)
    for name, make in moe_peers.candidates(shape, layer, moe._oracle).items():
        with pytest.raises(ModuleNotFoundError, match=name.partition("_")[0]):
            make()


def fused_experts(x, w1, w2, weights, ids, **options):
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            gate, up = (x[token].double() @ w1[expert].double().T).chunk(2)
            out[token] += weight * ((functional.silu(gate) * up) @ w2[expert].double().T)
    return out.to(x.dtype)


def test_a_wrong_peer_is_not_timed(monkeypatch):
    def wrong(*args, **options):
        return fused_experts(*args, **options).roll(1, dims=0)

    install(monkeypatch, vllm__model_executor__layers__fused_moe__fused_moe={"fused_experts": wrong})
    shape, layer = layer_of("bf16")
    with pytest.raises(RuntimeError, match="its result differs from float64's by 1"):
        moe_peers.candidates(shape, layer, moe._oracle)["vllm_triton"]()


def test_a_peer_is_measured_beside_the_others(monkeypatch):
    install(monkeypatch, vllm={"__version__": "0.20.2"},
            vllm__model_executor__layers__fused_moe__fused_moe={"fused_experts": fused_experts})  # fmt: skip
    monkeypatch.setattr(Bench, "on_gpu", property(lambda bench: True))
    case = next(case for case in cases("moe") if case.on_cpu and case.name.endswith("bf16 tokens=64"))
    trial = measure(case, Bench(Clock(CPU, 1), ROOF))
    assert set(trial.baselines) == {"eager", "torch_grouped", "interleaved", "vllm_triton"}
    assert trial.details == {"vllm": "0.20.2"}
