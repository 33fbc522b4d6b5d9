"""Launches by a short key: found again by constants, device, options and what Triton compiles for; TMA descriptors."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from envoi.runtime import launch as module
from envoi.runtime.compiling import compiling, is_compiling
from envoi.runtime.devices import Target
from envoi.runtime.launch import launch
from envoi.runtime.program import building
from envoi.runtime.tma import descriptor


@triton.jit
def kernel(x, n, SIZE: tl.constexpr, FLAG: tl.constexpr):
    """Kernel that is never compiled here."""


@triton.jit(do_not_specialize=["n"])
def general_kernel(x, n, SIZE: tl.constexpr, FLAG: tl.constexpr):
    """Kernel that is never compiled here, and whose machine code is one for all n."""


class Compiled:
    """Compiled kernel; calls: how each launch came by it, the grid, and the arguments but the first."""

    def __init__(self, calls):
        self.calls, self.is_new = calls, True

    def __getitem__(self, grid):
        assert not is_compiling(), "peers wait as long as this says; a launch may wait for them"
        how, self.is_new = "compiled" if self.is_new else "found", False
        return lambda *arguments: self.calls.append((how, grid, arguments[1:]))

    def _init_handles(self):
        assert is_compiling()


@pytest.fixture
def calls(monkeypatch):
    calls = []

    def run(self, *arguments, grid, warmup, **options):
        if not warmup:
            calls.append(("triton", grid, arguments[1:]))
        assert is_compiling() == warmup
        return Compiled(calls)

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(module, "_compiled", {})
    monkeypatch.setattr(module.shortcuts, "ENABLED", True)
    return calls


def test_a_process_compiles_while_any_thread_does():
    assert not is_compiling()
    with compiling():
        with compiling():
            assert is_compiling()
        assert is_compiling()
    with pytest.raises(ValueError, match="kernel"), compiling():
        raise ValueError("kernel")
    assert not is_compiling()


def test_without_shortcuts_triton_does_all(calls, monkeypatch):
    monkeypatch.setattr(module.shortcuts, "ENABLED", False)
    monkeypatch.setattr(module, "key_of", lambda *_: pytest.fail("of no use"))
    monkeypatch.setattr(Compiled, "_init_handles", lambda self: pytest.fail("private"))
    for _ in range(3):
        launch(kernel, (1,), (torch.zeros(8), 5, 64, True), {})
    assert kinds_of_calls(calls) == ["triton"] * 3


def test_the_same_constants_are_found_again(calls):
    x = torch.zeros(8)
    launch(kernel, (3,), (x, 5, 64, True), {"num_warps": 4})
    launch(kernel, (4, 2), (torch.zeros(8), 7, 64, True), {"num_warps": 4})
    assert calls == [("compiled", (3, 1, 1), (5, 64, True)), ("found", (4, 2, 1), (7, 64, True))]


@pytest.mark.parametrize(("constants", "warps"), [((64, False), 4), ((128, True), 4), ((64, True), 8)])
def test_others_are_compiled(calls, constants, warps):
    x = torch.zeros(8)
    launch(kernel, (1,), (x, 5, 64, True), {"num_warps": 4})
    launch(kernel, (1,), (x, 5, *constants), {"num_warps": warps})
    assert kinds_of_calls(calls) == ["compiled", "compiled"]


def kinds_of_calls(calls):
    return [kind for kind, *_ in calls]


def test_tensors_off_16_bytes_are_others(calls):
    x = torch.zeros(8)
    for start in (0, 1, 1, 0):
        launch(kernel, (1,), (x[start:], 5, 64, True), {})
    assert kinds_of_calls(calls) == ["compiled", "compiled", "found", "found"]


@pytest.mark.parametrize("other", [1, 32, 1 << 31, 5.0, None, torch.zeros(2), (5,), (5, torch.zeros(2))])
def test_what_triton_compiles_for_is_told_apart(calls, other):
    x = torch.zeros(8)
    launch(kernel, (1,), (x, 5, 64, True), {})
    launch(kernel, (1,), (x, other, 64, True), {})
    launch(kernel, (1,), (x, other, 64, True), {})
    launch(kernel, (1,), (x, 7, 64, True), {})
    assert kinds_of_calls(calls) == ["compiled", "compiled", "found", "found"]


@pytest.mark.parametrize("other", [0, 1, 16, -5, (1 << 31) - 1])
def test_integers_for_which_triton_does_not_specialize_are_one(calls, other):
    x = torch.zeros(8)
    launch(general_kernel, (1,), (x, 5, 64, True), {})
    launch(general_kernel, (1,), (x, other, 64, True), {})
    assert kinds_of_calls(calls) == ["compiled", "found"]


@pytest.mark.parametrize("other", [1 << 31, True, 5.0, None, torch.zeros(2), (5,)])
def test_types_are_told_apart_without_specialization_too(calls, other):
    x = torch.zeros(8)
    launch(general_kernel, (1,), (x, 5, 64, True), {})
    launch(general_kernel, (1,), (x, other, 64, True), {})
    launch(general_kernel, (1,), (x, 7, 64, True), {})
    assert kinds_of_calls(calls) == ["compiled", "compiled", "found"]


def test_dtypes_of_tensors_in_tuples_are_told_apart(calls):
    x = torch.zeros(8)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        launch(kernel, (1,), (x, (torch.zeros(8, dtype=dtype), None), 64, True), {})
    assert kinds_of_calls(calls) == ["compiled", "compiled", "found"]


def test_descriptors_are_told_apart_by_dtype_and_box(calls):
    for dtype, columns in ((torch.bfloat16, 64), (torch.bfloat16, 32), (torch.float16, 64), (torch.bfloat16, 64)):
        launch(kernel, (1,), (descriptor(torch.zeros(64, 128, dtype=dtype), 64, columns), 5, 64, True), {})
    assert kinds_of_calls(calls) == ["compiled", "compiled", "compiled", "found"]


def test_a_descriptor_wants_16_bytes():
    with pytest.raises(ValueError, match="expected a matrix on 16 bytes"):
        descriptor(torch.zeros(65, 128).view(-1)[1 : 1 + 64 * 128].view(64, 128), 64, 32)


def test_a_dependent_launch_follows_the_one_that_it_waits_for():
    first, second = (("first", (1,), (2,), {"num_warps": 8}), ("second", (3,), (4,), {"num_warps": 4}))
    with building(Target("sm_90")) as builder:
        module.launch_with_dependent(first, second)
    assert builder.launches == [first, ("second", (3,), (4,), {"num_warps": 4, "launch_pdl": True})]
