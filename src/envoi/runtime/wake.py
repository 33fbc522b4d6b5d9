"""Signal that wakes a thread."""

import queue


class Wake:
    """Signal for one thread that waits. A weakref's finalizer may set it, in that thread too.

    `threading.Event` would wait for itself there: its `set` needs a lock that `wait` holds.
    """

    def __init__(self) -> None:
        """Make one that isn't set."""
        self._queue: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        """End the current wait, or the next one."""
        self._queue.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Return True as soon as it is set, False after timeout_s. The next wait is for another `set`."""
        try:
            self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return False
        for _ in range(self._queue.qsize()):  # no more: who sets it may never stop
            self._queue.get()
        return True
