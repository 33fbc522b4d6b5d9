"""Tests in here need TRITON_INTERPRET=1 before anything is imported; tests/indexer/test_interpreted.py runs them so."""

import pytest

from envoi import env
from tests.gemm.interpreted.conftest import outputs_start_as_nan, pytest_configure  # noqa: F401

collect_ignore_glob = [] if env.interpreting() else ["test_*.py"]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter takes its time for each."""
    from envoi.indexer import fast

    monkeypatch.setattr(fast, "RANKED", 128)
    monkeypatch.setattr(fast, "BLOCK", 2048)
