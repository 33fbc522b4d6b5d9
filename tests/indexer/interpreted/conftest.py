"""Tests in here need TRITON_INTERPRET=1 before anything is imported; tests/indexer/test_interpreted.py runs them so."""

import pytest

from envoi import env
from tests.gemm.interpreted.conftest import outputs_start_as_nan, pytest_configure  # noqa: F401

collect_ignore_glob = [] if env.interpreting() else ["test_*.py"]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter takes its time for each, and for each turn of a loop."""
    import triton.language as tl

    from envoi.indexer import fast, kernel_rank

    for name, size in (("MINE", 256), ("OTHERS", 256), ("CHUNK", 2048)):
        monkeypatch.setattr(kernel_rank, name, tl.constexpr(size))
    monkeypatch.setattr(fast, "BLOCKS", (2048,))
