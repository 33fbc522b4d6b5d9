"""Private parts of torch and Triton: one variable turns all off, and results are equal either way."""

import pytest
import torch

from envoi.ops.gemm import gemm
from envoi.runtime import custom_op, shortcuts
from envoi.runtime.tma import descriptor, unswizzled_descriptor


@pytest.fixture(params=[True, False], ids=["shortcuts", "safe"])
def enabled(request, monkeypatch):
    monkeypatch.setattr(shortcuts, "ENABLED", request.param)
    return request.param


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
