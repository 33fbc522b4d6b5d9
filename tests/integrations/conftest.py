"""Fixtures of the integrations' tests."""

import pytest


@pytest.fixture
def registered():
    """Register Envoi's names with transformers."""
    from envoi.integrations.transformers import register

    register()
