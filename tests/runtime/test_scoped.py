"""Values that hold in a context: of one thread, nested, and as before after an error."""

import threading

import pytest

from envoi.runtime.devices import scoped


class Local(threading.local):
    a: int = 1
    b: str = "x"


def test_values_hold_inside_and_are_as_before_outside():
    local = Local()
    with scoped(local, a=2, b="y"):
        with scoped(local, a=3):
            assert (local.a, local.b) == (3, "y")
        assert local.a == 2
    with pytest.raises(KeyError), scoped(local, a=4):
        raise KeyError
    assert (local.a, local.b) == (1, "x")


def test_other_threads_see_nothing_of_it():
    local, seen = Local(), []
    with scoped(local, a=2):
        thread = threading.Thread(target=lambda: seen.append(local.a))
        thread.start()
        thread.join()
    assert seen == [1]
