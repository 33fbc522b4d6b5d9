"""Lines of an engine's log about its layers, which come in kinds: each is said once in a process."""

import logging

_said: set[str] = set()


def say(logger: logging.Logger, level: int, text: str) -> None:
    """Log a line unless it has been said."""
    if text not in _said:
        _said.add(text)
        logger.log(level, text)
