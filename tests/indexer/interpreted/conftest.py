"""Fixtures of the interpreter's tests, as in tests/gemm/interpreted; and sizes for the interpreter."""

import pytest

from tests.gemm.interpreted.conftest import outputs_start_as_nan

__all__ = ["few_programs", "outputs_start_as_nan"]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Set sizes for few programs and few iterations of loops: the interpreter is slow in each."""
    import triton.language as tl

    from envoi.ops.indexer import fast, kernel_rank

    for name, size in (("MINE", 256), ("OTHERS", 256), ("CHUNK", 2048)):
        monkeypatch.setattr(kernel_rank, name, tl.constexpr(size))
    monkeypatch.setattr(fast, "BLOCKS", (2048,))
