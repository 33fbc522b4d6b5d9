"""What the tests of integrations share."""

import pytest


@pytest.fixture
def registered():
    """Envoi's names known to transformers."""
    from envoi.integrations.transformers import register

    register()
