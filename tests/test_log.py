"""Output of ENVOI_LOG, level by level, and none without it."""

import logging
import os

import pytest
import torch

import envoi
from envoi import log
from envoi.env import log_level
from tests.helpers import fresh
from tests.helpers.slow import mostly_slow
from tests.moe.layers import make

LAYER = make(tokens=5)

STEPS = """
import torch, envoi
from tests.moe.layers import make
layer, gate = make(tokens=5), torch.ones(8, 256)
step = lambda tokens: envoi.moe(tokens, envoi.route(tokens, gate, 2), layer.pack())
"""


def run(code: str, level: str, monkeypatch, **environment: str) -> tuple[str, str]:
    """Return stdout and stderr of a process of its own: the variable is read when envoi is imported."""
    for name, value in {"ENVOI_LOG": level, **environment}.items():
        monkeypatch.setenv(name, value)
    done = fresh.run(code)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def lines(text: str) -> list[str]:
    return [line.removeprefix("envoi: ") for line in text.splitlines() if line.startswith("envoi: ")]


@pytest.mark.parametrize("level", mostly_slow(["call", "1"], quick=["call"]))
def test_calls(level, monkeypatch):
    found = lines(run(STEPS + "step(layer.tokens)", level, monkeypatch)[1])
    assert [line.partition("(")[0] for line in found] == [
        "call route", "call moe", "call grouped_gemm", "call grouped_gemm"
    ]  # fmt: skip
    assert found[0].startswith("call route(tokens=bfloat16 [5, 256] on cpu, gate=float32 [8, 256] on cpu, k=2, ")
    assert "topk_ids=int32 [5, 2] on cpu" in found[1] and "format='bf16'" in found[1]
    assert "tensors=[float32 [10] on cpu]" in found[2]


@pytest.mark.parametrize("level", mostly_slow(["2", "3"], quick=["3"]))
def test_configs_of_kernels(level, monkeypatch):
    found = lines(run(STEPS + "step(layer.tokens)", level, monkeypatch, TRITON_INTERPRET="1")[1])
    kernels = [line.partition(",")[0] for line in found if line.startswith("config")]
    products = ["config gemm_kernel"] * 2
    assert kernels == [
        "config router_kernel", "config sort_kernel", "config gather_kernel", *products, "config combine_kernel"
    ]  # fmt: skip
    router = next(line for line in found if "router_kernel" in line)
    assert "grid (1,): num_warps=4 " in router and "BLOCK_M=16" in router and "Spec(num_experts=8, k=2, " in router


@pytest.mark.parametrize("level", ["debug", "4", "CALL"])
def test_other_values_are_refused(level, monkeypatch):
    monkeypatch.setenv("ENVOI_LOG", level)
    with pytest.raises(ValueError, match=f"^ENVOI_LOG: expected call, config, compile, 1, 2, 3 or 0, got '{level}'$"):
        log_level()


def test_nothing_is_in_the_way_when_it_is_off(monkeypatch, capfd):
    assert log.LEVEL == 0 and not os.environ.get("ENVOI_LOG")
    assert not logging.getLogger("envoi").handlers

    monkeypatch.setattr(log, "text", lambda x: pytest.fail("takes time"))
    log.call("gemm", ("a",), (LAYER.tokens,))
    log.launch(None, (1,), (LAYER.tokens,), {})
    log.gemm_by_torch(LAYER.tokens, LAYER.tokens)
    assert envoi.moe(LAYER.tokens, LAYER.routing, LAYER.pack()).dtype == torch.bfloat16
    assert capfd.readouterr() == ("", "")
    for value in ("", "0"):
        monkeypatch.setenv("ENVOI_LOG", value)
        assert log_level() == 0
