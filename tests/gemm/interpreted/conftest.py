"""Tests in here need TRITON_INTERPRET=1 before anything is imported; tests/gemm/test_interpreted.py runs them so."""

import pytest
import torch

from envoi import env

collect_ignore_glob = [] if env.interpreting() else ["test_*.py"]

_empty = torch.empty


def poisoned(*size, **options):
    """torch.empty, full of NaN; of 0xFF where that isn't a float."""
    x = _empty(*size, **options)
    x.untyped_storage().fill_(0xFF)
    return x


@pytest.fixture(autouse=True)
def outputs_start_as_nan(monkeypatch):
    monkeypatch.setattr(torch, "empty", poisoned)


def pytest_configure(config: pytest.Config) -> None:
    # numpy's, about what the kernels are meant to do with NaN and infinity; and the interpreter's own.
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning")
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array:DeprecationWarning")
