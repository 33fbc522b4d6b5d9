"""Choices between kernels that tests and measurements force."""

from envoi.runtime import prepared

_choices: list["Choice"] = []


class Choice:
    """Choice of a kernel. forced: True or False if it was forced, None if it is made as always."""

    def __init__(self) -> None:
        """Make one that isn't forced."""
        self.forced: bool | None = None
        _choices.append(self)

    def force(self, wanted: bool | None) -> None:
        """Force it, or with None no longer. Prepared calls, which hold what was chosen, are forgotten."""
        self.forced = wanted
        prepared.clear()


def any_forced() -> bool:
    """Tell whether a choice isn't made as always."""
    return any(choice.forced is not None for choice in _choices)
