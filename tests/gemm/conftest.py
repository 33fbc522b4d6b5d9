"""Setup shared by the tests of GEMMs."""

from collections.abc import Iterator

import pytest

from envoi.ops.gemm.hopper import candidates
from envoi.runtime import triton_compat


@pytest.fixture
def larger_views(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Choose configs as under the Tritons that they were measured with: others need more memory for narrowed tiles."""
    monkeypatch.setattr(triton_compat, "LARGER_VIEWS", True)
    candidates._fitting.cache_clear()
    yield
    candidates._fitting.cache_clear()
