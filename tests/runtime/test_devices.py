"""Properties of devices: what a capture under way refuses."""

import pytest
import torch

from envoi.runtime.devices import expect_no_capture


def test_a_capture_is_refused_with_a_reason(monkeypatch):
    expect_no_capture("offsets", torch.device("cpu"), "since it waits")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    expect_no_capture("offsets", torch.device("cpu"), "since it waits")
    with pytest.raises(RuntimeError, match="offsets: expected no CUDA graph to be captured, since it waits"):
        expect_no_capture("offsets", torch.device("cuda"), "since it waits")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    expect_no_capture("offsets", torch.device("cuda"), "since it waits")
