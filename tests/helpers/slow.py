"""Parametrisations of which `make test` runs some, and `make test-slow` the others."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_slow(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return the values as parameters, all marked `slow` but those of `quick`. Raises ValueError if there is none."""
    found = list(values)
    if not all(value in found for value in quick):
        raise ValueError(f"quick: expected some of {found}, got {quick}")
    return [value if value in quick else marked(value) for value in found]


def marked(value: Any) -> Any:
    """Return a value, or a tuple of values for several arguments, as a slow parameter."""
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
