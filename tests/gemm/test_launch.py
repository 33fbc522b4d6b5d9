"""Launches by a short key: found again by constants, device and options; by Triton where a tensor isn't aligned."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from envoi.gemm import launch as module
from envoi.gemm.launch import launch


@triton.jit(do_not_specialize=["n"])
def kernel(x, n, SIZE: tl.constexpr, FLAG: tl.constexpr):
    """Never compiled here."""


class Compiled:
    def __init__(self, calls):
        self.calls = calls

    def __getitem__(self, grid):
        return lambda *arguments: self.calls.append(("found", grid, arguments[1:]))


@pytest.fixture
def calls(monkeypatch):
    calls = []

    def run(self, *arguments, grid, warmup, **options):
        calls.append(("triton", grid, arguments[1:]))
        return Compiled(calls)

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(module, "_compiled", {})
    return calls


def test_the_same_constants_are_found_again(calls):
    x = torch.zeros(8)
    launch(kernel, (3,), (x, 5, 64, True), {"num_warps": 4})
    launch(kernel, (4, 2), (torch.zeros(8), 7, 64, True), {"num_warps": 4})
    assert calls == [("triton", (3,), (5, 64, True)), ("found", (4, 2, 1), (7, 64, True))]


@pytest.mark.parametrize(("constants", "warps"), [((64, False), 4), ((128, True), 4), ((64, True), 8)])
def test_others_are_compiled(calls, constants, warps):
    x = torch.zeros(8)
    launch(kernel, (1,), (x, 5, 64, True), {"num_warps": 4})
    launch(kernel, (1,), (x, 5, *constants), {"num_warps": warps})
    assert [kind for kind, *_ in calls] == ["triton", "triton"]


def test_tensors_off_16_bytes_are_left_to_triton(calls):
    x = torch.zeros(8)
    for start in (0, 1, 1, 0):
        launch(kernel, (1,), (x[start:], 5, 64, True), {})
    assert [kind for kind, *_ in calls] == ["triton", "triton", "triton", "found"]
