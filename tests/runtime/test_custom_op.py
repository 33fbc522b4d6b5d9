"""Calls pass through the dispatcher exactly if something observes them."""

from typing import ClassVar

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import envoi
from envoi.runtime import custom_op


class Seen(TorchDispatchMode):
    """Recorder of called operators."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Watching(torch.Tensor):
    """Tensor that records the calls on it."""

    names: ClassVar[list[str]] = []

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.names.append(func.name())
        return args[0].new_empty(0) if func.name() != "envoi::gemm" else [torch.zeros(3, 4)]


@pytest.fixture
def matrices():
    return torch.ones(3, 8), torch.ones(4, 8)


def test_nobody_looks_so_nobody_is_asked(matrices, monkeypatch):
    asked = []
    monkeypatch.setattr(custom_op, "watched", lambda: asked.append(1) or False)
    monkeypatch.setattr(torch._ops.OpOverload, "__call__", lambda *_: pytest.fail("through the dispatcher"))
    out = envoi.gemm(*matrices)
    monkeypatch.undo()
    assert asked and torch.equal(out, torch.full((3, 4), 8.0))


def test_a_mode_sees_the_operator(matrices):
    with Seen() as seen:
        out = envoi.gemm(*matrices)
    assert "envoi::gemm" in seen.names and torch.equal(out, torch.full((3, 4), 8.0))


class SeenBefore(TorchFunctionMode):
    """Recorder of functions called with tensors."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_function_mode_sees_the_operator_and_nothing_inside(matrices):
    with SeenBefore() as seen:
        envoi.gemm(*matrices)
    assert "envoi.gemm.default" in seen.names and not any("matmul" in name for name in seen.names)


def multiply(a, b):
    return envoi.gemm(a, b)


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_a_traced_graph_holds_the_operator(matrices, pre_dispatch):
    graph = make_fx(multiply, pre_dispatch=pre_dispatch)(*matrices)
    assert "torch.ops.envoi.gemm.default" in graph.code and "matmul" not in graph.code


def test_fake_tensors_stay_fake(matrices):
    mode = FakeTensorMode()
    a, b = (mode.from_tensor(x) for x in matrices)
    assert isinstance(envoi.gemm(a, b), FakeTensor)  # outside the mode, too
    with mode:
        assert isinstance(envoi.gemm(a, b), FakeTensor)


def test_a_tensor_of_another_class_is_asked(matrices):
    a, b = matrices
    Watching.names.clear()
    envoi.gemm(a.as_subclass(Watching), b)
    assert "envoi::gemm" in Watching.names
