"""The rule of tests/gemm/interpreted, and sizes for the interpreter."""

import pytest

from tests.gemm.interpreted.conftest import outputs_start_as_nan

__all__ = ["few_programs", "outputs_start_as_nan"]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter takes its time for each, and for each turn of a loop."""
    import triton.language as tl

    from envoi.indexer import fast, kernel_rank

    for name, size in (("MINE", 256), ("OTHERS", 256), ("CHUNK", 2048)):
        monkeypatch.setattr(kernel_rank, name, tl.constexpr(size))
    monkeypatch.setattr(fast, "BLOCKS", (2048,))
