"""Every test here finds Envoi's names registered."""

import pytest

from envoi.integrations.transformers import register


@pytest.fixture(autouse=True)
def registered():
    register()
