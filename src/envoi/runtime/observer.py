"""Recorder that observes this thread's launches, or list that takes them in their stead, if there is one.

See `envoi.runtime.prepared.recording`, `envoi.runtime.timeline` and `envoi.runtime.rehearsal`.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from envoi.runtime.scoped import scoped


class _Local(threading.local):
    recorder: Any = None
    rehearsed: Any = None
    timeline: Any = None


_local = _Local()


def current() -> Any:
    """Return the recorder that observes this thread, or None."""
    return _local.recorder


def observe(recorder: Any) -> None:
    """Let a recorder observe this thread from now on; None ends it."""
    _local.recorder = recorder


def rehearsed() -> Any:
    """Return the list that takes this thread's launches in their stead, or None."""
    return _local.rehearsed


def timeline() -> Any:
    """Return the `timeline.Recorder` that records this thread's launches, or None."""
    return _local.timeline


def tracing(recorder: Any) -> AbstractContextManager[None]:
    """Let a `timeline.Recorder` record this thread's launches inside the context."""
    return scoped(_local, timeline=recorder)


def take_step(step: Callable[[], object]) -> None:
    """Run a step of a call that is no launch of ours, such as a collective; a prepared call repeats it at its place.

    step: works on memory that belongs to the call's object, and returns nothing. A rehearsed call leaves it out.
    """
    if _local.rehearsed is not None:
        return
    if _local.recorder is None:
        step()
    else:
        _local.recorder.stepped(step)


def rehearsing(launches: list) -> AbstractContextManager[None]:
    """Append this thread's launches to a list inside the context instead of launching."""
    return scoped(_local, rehearsed=launches)
