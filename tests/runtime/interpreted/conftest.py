"""Fixtures of prepared calls in the interpreter: the switch is on, and the driver runs kernels on what it is handed."""

import pytest

from tests.gemm.interpreted.conftest import outputs_start_as_nan
from tests.helpers.fake_driver import InterpretingDriver, install

__all__ = ["fake", "outputs_start_as_nan"]


@pytest.fixture
def fake(monkeypatch) -> InterpretingDriver:
    """Replace the driver, and the launches of calls that run as always."""
    made = InterpretingDriver()
    install(monkeypatch, made)
    return made
