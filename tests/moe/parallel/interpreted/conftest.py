"""Fixtures of the interpreter's tests: unwritten memory is NaN, as in tests/gemm/interpreted; small sizes; one rank."""

import pytest

from tests.gemm.interpreted.conftest import outputs_start_as_nan
from tests.helpers.fake_driver import InterpretingDriver, install

__all__ = ["few_programs", "outputs_start_as_nan"]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Four programs rank the slots of a piece, instead of 64: the interpreter takes its time for each."""
    import triton.language as tl

    from envoi.ops.moe.parallel import dispatch_kernels, nvlink

    ranked = nvlink.PIECE // 4
    monkeypatch.setattr(nvlink, "RANKED", ranked)
    monkeypatch.setattr(dispatch_kernels, "RANKED", tl.constexpr(ranked))


@pytest.fixture
def fake(monkeypatch, lone_rank) -> InterpretingDriver:
    """Replace the driver, as in tests/runtime/interpreted, in a process that is the only rank of its group."""
    made = InterpretingDriver()
    install(monkeypatch, made)
    return made
