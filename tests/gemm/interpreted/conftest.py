"""Tests in here need TRITON_INTERPRET=1 before anything is imported; tests/gemm/test_interpreted.py runs them so."""

import pytest

from envoi import env
from tests.helpers import interpreter

collect_ignore_glob = [] if env.interpreting() else ["test_*.py"]
pytest_configure = interpreter.ignore_numpy


@pytest.fixture(autouse=True)
def outputs_start_as_nan(monkeypatch):
    interpreter.poison_new_tensors(monkeypatch)
