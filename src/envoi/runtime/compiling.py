"""State of this process that its peers want to know: whether it compiles a kernel, or loads one for the first time."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Listener(Protocol):
    """Object that is told, in the thread that compiles."""

    def set(self) -> None:
        """Hear that a thread has begun or ended to compile."""
        ...


_lock = threading.Lock()
_num_compiling = 0  # threads
_listeners: "weakref.WeakSet[Listener]" = weakref.WeakSet()


def listen(listener: Listener) -> None:
    """Have this set when a thread begins or ends to compile, as long as it lives: for those who tell others."""
    with _lock:
        _listeners.add(listener)


@contextmanager
def compiling() -> Iterator[None]:
    """Say that this thread compiles within the context. Nothing in it may wait for another rank, as launches can."""
    _add(1)
    try:
        yield
    finally:
        _add(-1)


def is_compiling() -> bool:
    """Tell whether some thread compiles."""
    return _num_compiling > 0


def _add(number: int) -> None:
    global _num_compiling
    with _lock:
        waiting = list(_listeners)
        _num_compiling += number
    for listener in waiting:
        listener.set()
