"""Fixture of all tests in Triton's interpreter: uninitialised memory is NaN."""

import pytest

from tests.helpers import interpreter


@pytest.fixture(autouse=True)
def outputs_start_as_nan(monkeypatch):
    interpreter.poison_new_tensors(monkeypatch)
