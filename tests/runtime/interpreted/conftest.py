"""Fixtures of prepared calls in the interpreter: the switch is on, and the driver runs kernels on what it is handed."""

import pytest

from envoi.runtime import launch, shortcuts
from envoi.runtime.prepared import calls, driver
from tests.gemm.interpreted.conftest import outputs_start_as_nan
from tests.helpers.fake_driver import InterpretingDriver

__all__ = ["fake", "outputs_start_as_nan"]


@pytest.fixture
def fake(monkeypatch) -> InterpretingDriver:
    """Replace the driver, and the launches of calls that run as always."""
    made = InterpretingDriver()
    monkeypatch.setattr(shortcuts, "PREPARED", True)
    monkeypatch.setattr(driver, "active", lambda: made)
    monkeypatch.setattr(launch, "_run", made.launch_as_always)
    monkeypatch.setattr(calls, "_calls", calls.Calls())
    return made
