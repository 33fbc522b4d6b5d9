"""Fixtures of the interpreter's tests: unwritten memory is NaN, as in tests/gemm/interpreted; small sizes."""

import pytest

from tests.gemm.interpreted.conftest import outputs_start_as_nan

__all__ = ["few_programs", "outputs_start_as_nan"]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Four programs rank the slots of a piece, instead of 64: the interpreter takes its time for each."""
    import triton.language as tl

    from envoi.ops.moe.parallel import dispatch_kernels, nvlink

    ranked = nvlink.PIECE // 4
    monkeypatch.setattr(nvlink, "RANKED", ranked)
    monkeypatch.setattr(dispatch_kernels, "RANKED", tl.constexpr(ranked))
