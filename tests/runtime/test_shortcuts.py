"""Private parts of torch and Triton: one variable turns all off, and results are equal either way."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from envoi.ops.gemm import gemm
from envoi.runtime import custom_op, shortcuts
from envoi.runtime.launch import launch
from envoi.runtime.tma import descriptor, unswizzled_descriptor
from tests.helpers import fresh
from tests.runtime.test_launch import calls, kernel, kinds_of_calls  # noqa: F401


@pytest.fixture(params=[True, False], ids=["shortcuts", "safe"])
def enabled(request, monkeypatch):
    monkeypatch.setattr(shortcuts, "ENABLED", request.param)
    return request.param


@pytest.mark.parametrize(("value", "enabled"), [("1", False), ("0", True), ("", True)])
def test_the_variable_decides(value, enabled, monkeypatch):
    monkeypatch.setenv("ENVOI_SAFE_LAUNCH", value)
    done = fresh.run("from envoi.runtime import shortcuts; print(shortcuts.ENABLED)")
    assert done.stdout.strip() == str(enabled), done.stderr


def test_launches_go_through_triton_if_it_is_safe(calls, enabled):  # noqa: F811
    for _ in range(3):
        launch(kernel, (3,), (torch.zeros(8), 5, 64, True), {"num_warps": 4})
    assert kinds_of_calls(calls) == (["triton", "found", "found"] if enabled else ["triton"] * 3)


def test_calls_go_through_the_dispatcher_if_it_is_safe(enabled):
    assert custom_op.watched() is not enabled


@pytest.mark.parametrize("make", [descriptor, unswizzled_descriptor])
def test_descriptors_are_equal(make, monkeypatch):
    x = torch.zeros(64, 128)
    found = []
    for enabled in (True, False):
        monkeypatch.setattr(shortcuts, "ENABLED", enabled)
        found.append(make(x, 64, 32))
    one, other = found
    assert type(one) is type(other) and vars(one).keys() == vars(other).keys()
    assert one.base is other.base is x
    for name in vars(one).keys() - {"base"}:
        assert getattr(one, name) == getattr(other, name), name


def test_triton_checks_each_descriptor_if_it_is_safe(monkeypatch):
    x = torch.zeros(64, 128)
    kind = type(descriptor(x, 64, 32))
    checked = []
    original = kind.__post_init__
    monkeypatch.setattr(kind, "__post_init__", lambda self: checked.append(self) or original(self))
    monkeypatch.setattr(shortcuts, "ENABLED", True)
    descriptor(x, 64, 32)
    assert not checked
    monkeypatch.setattr(shortcuts, "ENABLED", False)
    descriptor(x, 64, 32)
    assert len(checked) == 1


def test_products_have_the_same_bits(monkeypatch):
    a, b = torch.randn(33, 64).bfloat16(), torch.randn(48, 64).bfloat16()
    found = []
    for enabled in (True, False):
        monkeypatch.setattr(shortcuts, "ENABLED", enabled)
        found.append(gemm(a, b))
    assert torch.equal(*found)


def test_modes_see_operators_either_way(enabled):
    class Names(TorchDispatchMode):
        seen = ()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen += (str(function),)
            return function(*args, **(kwargs or {}))

    with Names() as names:
        gemm(torch.randn(4, 16), torch.randn(8, 16))
    assert "envoi.gemm.default" in names.seen
