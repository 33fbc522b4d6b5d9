"""Python's garbage collection while kernels are compiled.

Code generation makes many objects, so that Python sooner or later looks for garbage among all objects of the process.
Beside torch these are so many that it takes 0.15 s, a sixth of the code generation of the largest kernel.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_NEVER = 2**31 - 1  # collections of younger objects before one of all

_lock = threading.Lock()
_num_within = 0  # contexts, of all threads
_threshold = 0  # what it was before the first of them


@contextmanager
def without_full_collections() -> Iterator[None]:
    """Leave out the collections of all objects within the context, in every thread; not those of younger ones."""
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _num_within, _threshold
    with _lock:
        youngest, younger, all_objects = gc.get_threshold()
        if _num_within == 0:
            _threshold = all_objects
            gc.set_threshold(youngest, younger, _NEVER)
        _num_within += 1


def _leave() -> None:
    global _num_within
    with _lock:
        _num_within -= 1
        youngest, younger, all_objects = gc.get_threshold()
        if _num_within == 0 and all_objects == _NEVER:  # else somebody has set his own meanwhile
            gc.set_threshold(youngest, younger, _threshold)
