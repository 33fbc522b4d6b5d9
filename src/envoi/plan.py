"""Names of `envoi.estimates` under the package's earlier name, for one version. `envoi.plan` is a function."""

import warnings
from typing import Any

from envoi import estimates

EARLIER = {"plan_moe": "estimate", "Plan": "Estimate", "MoeLayer": "MoeLayer", "Step": "Step"}


def __getattr__(name: str) -> Any:
    """Return a name of `envoi.estimates`, with a warning."""
    if name not in EARLIER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"envoi.plan.{name} is envoi.estimates.{EARLIER[name]} now", DeprecationWarning, stacklevel=2)
    return getattr(estimates, EARLIER[name])
