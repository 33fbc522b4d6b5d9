"""Names of `envoi.epilogues` under the package's earlier name, for one version. `envoi.epilogue` is the decorator."""

import warnings
from typing import Any

from envoi import epilogues


def __getattr__(name: str) -> Any:
    """Return a name of `envoi.epilogues`, with a warning."""
    if name not in epilogues.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"envoi.epilogue.{name} is envoi.epilogues.{name} now", DeprecationWarning, stacklevel=2)
    return getattr(epilogues, name)
