"""Recorder that observes this thread's launches, if one does: see `envoi.runtime.prepared.recording`."""

import threading
from typing import Any


class _Local(threading.local):
    recorder: Any = None


_local = _Local()


def current() -> Any:
    """Return the recorder that observes this thread, or None."""
    return _local.recorder


def observe(recorder: Any) -> None:
    """Let a recorder observe this thread from now on; None ends it."""
    _local.recorder = recorder
