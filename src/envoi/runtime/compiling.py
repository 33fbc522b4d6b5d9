"""Compilation of kernels, or their first load, as it goes on in this process: what peers that wait for it ask for."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_begun: list[float] = []  # when each thread that compiles began


@contextmanager
def compiling() -> Iterator[None]:
    """Say that this thread compiles, or may, within the context."""
    now = time.monotonic()
    with _lock:
        _begun.append(now)
    try:
        yield
    finally:
        with _lock:
            _begun.remove(now)


def compiling_for() -> float:
    """Return for how many seconds some thread has been compiling, 0 if none is."""
    with _lock:
        return time.monotonic() - min(_begun) if _begun else 0.0
