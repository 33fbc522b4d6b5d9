"""Fixtures of the interpreter's tests, as in tests/gemm/interpreted; and the interpreter's exp for the reference."""

import numpy as np
import pytest
import torch

from tests.gemm.interpreted.conftest import outputs_start_as_nan

__all__ = ["outputs_start_as_nan", "the_interpreters_functions"]

_exp, _log1p = torch.Tensor.exp, torch.Tensor.log1p


@pytest.fixture(autouse=True)
def the_interpreters_functions(monkeypatch):
    """Give the reference the interpreter's exponential and logarithm, so that equal logits have equal scores."""

    def exp(x):
        return torch.from_numpy(np.exp(x.numpy())) if x.dtype == torch.float32 else _exp(x)

    def log1p(x):
        if x.dtype != torch.float32:
            return _log1p(x)
        small = x * (1.0 - x * (0.5 - x * 0.33333333))
        return torch.where(x < 1e-3, small, torch.from_numpy(np.log((1.0 + x).numpy())))

    monkeypatch.setattr(torch.Tensor, "exp", exp)
    monkeypatch.setattr(torch.Tensor, "log1p", log1p)
