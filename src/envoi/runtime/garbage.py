"""Python's garbage collection while kernels are compiled.

Code generation makes many objects, so that Python sooner or later looks for garbage among all objects of the process.
Beside torch these are so many that it takes 0.15 s, a sixth of the code generation of the largest kernel. One such look
at the end stands for those that are left out: it would otherwise fall into one of the next calls, which take less than
a millisecond.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_NEVER = 2**31 - 1  # collections of younger objects before one of all

_lock = threading.RLock()  # what is collected may run code of the program
_num_within = 0  # contexts, of all threads
_threshold = 0  # what it was before the first of them


@contextmanager
def without_full_collections() -> Iterator[None]:
    """Leave out the collections of all objects within the context, in every thread; not those of younger ones.

    If Python would have made some, it makes one at the end.
    """
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
            _collect_what_is_due(youngest, younger, _threshold)


def _collect_what_is_due(youngest: int, younger: int, all_objects: int) -> None:
    """Set the thresholds; let Python collect now what it would at one of the next allocations.

    That is Python's choice: how many objects are new since the last collection of all, on which it depends, isn't
    visible, and where a program has switched collections off there is none.
    """
    if youngest:
        gc.set_threshold(1, younger, all_objects)
        # Python looks at them when an object is allocated, or at a loop's next turn. Not lists: it keeps their memory.
        _ = [set() for _ in range(4)]
    gc.set_threshold(youngest, younger, all_objects)
