"""Devices: what a capture under way refuses; values of a thread that hold in a context, nested, and after an error."""

import threading

import pytest
import torch

from envoi.runtime.devices import expect_no_capture, scoped


def test_a_capture_is_refused_with_a_reason(monkeypatch):
    expect_no_capture("offsets", torch.device("cpu"), "since it waits")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    expect_no_capture("offsets", torch.device("cpu"), "since it waits")
    with pytest.raises(RuntimeError, match="offsets: expected no CUDA graph to be captured, since it waits"):
        expect_no_capture("offsets", torch.device("cuda"), "since it waits")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    expect_no_capture("offsets", torch.device("cuda"), "since it waits")


class Local(threading.local):
    a: int = 1
    b: str = "x"


def test_values_hold_inside_and_are_as_before_outside():
    local = Local()
    with scoped(local, a=2, b="y"):
        with scoped(local, a=3):
            assert (local.a, local.b) == (3, "y")
        assert local.a == 2
    with pytest.raises(KeyError), scoped(local, a=4):
        raise KeyError
    assert (local.a, local.b) == (1, "x")


def test_other_threads_see_nothing_of_it():
    local, seen = Local(), []
    with scoped(local, a=2):
        thread = threading.Thread(target=lambda: seen.append(local.a))
        thread.start()
        thread.join()
    assert seen == [1]
