"""Garbage collection while kernels are compiled: no look at all objects, and afterwards as it was."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from envoi.moe import warm_up
from envoi.runtime.compilers import Compilers
from envoi.runtime.devices import Target
from envoi.runtime.garbage import without_full_collections

THRESHOLD = 300, 4, 3


@pytest.fixture(autouse=True)
def threshold() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*THRESHOLD)
    yield
    gc.set_threshold(*before)


@pytest.fixture(scope="module")
def compilers() -> Iterator[Compilers]:
    """Return processes of their own, where nothing else has been frozen or made; they take seconds to start."""
    with Compilers(Target("sm_90"), 2) as started:
        yield started


@contextmanager
def noting() -> Iterator[list[int]]:
    """Note the generations that are collected within the context."""
    seen: list[int] = []

    def note(phase: str, info: dict) -> None:
        if phase == "stop":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    try:
        yield seen
    finally:
        gc.callbacks.remove(note)


def cycles(number: int) -> list:
    """Make so many objects in cycles."""
    kept: list = []
    for _ in range(number):
        kept.append([])
        kept[-1].append(kept[-1])
    return kept


def collected(number: int) -> set[int]:
    """Return the generations that were collected while so many objects in cycles were made."""
    gc.collect()  # Python puts a collection of all off until there are a quarter more objects than after the last
    with noting() as seen:
        cycles(number)
    return set(seen)


def generations(_: int) -> list[set[int]]:
    """Return the generations that are collected before, within and after a context."""
    gc.set_threshold(*THRESHOLD)
    gc.freeze()  # of what is imported there is too much
    found = [collected(100_000)]
    with without_full_collections():
        found.append(collected(100_000))
    return [*found, collected(100_000)]


def test_only_young_objects_are_looked_at(compilers):
    ((_, found),) = compilers.map(generations, [0])
    assert found is not None
    before, within, after = found
    assert within == {0, 1} and 2 in before and 2 in after


def full_collections(_: int) -> list[int]:
    """Count them, in turns, in a context with its end and after it: with many objects, with few, and
    with many where collections are off."""
    gc.set_threshold(*THRESHOLD)
    gc.freeze()
    gc.collect()
    found, kept = [], []
    for number, enabled in ((100_000, True), (100, True), (200_000, False)):
        if not enabled:
            gc.disable()
        with noting() as seen, without_full_collections():
            kept.append(cycles(number))
        found.append(seen.count(2))
        with noting() as seen:
            kept.append(cycles(2_000))
        found.append(seen.count(2))
    assert gc.get_threshold() == THRESHOLD and not gc.isenabled()
    gc.enable()
    return found


def test_what_was_left_out_is_made_up_for_at_the_end(compilers):
    """Not in a call after it, only where Python would have collected, and not where a program collects nothing."""
    ((_, found),) = compilers.map(full_collections, [0])
    assert found == [1, 0, 0, 0, 0, 0]


def test_the_last_context_of_all_threads_ends_it():
    inner = without_full_collections()
    with without_full_collections():
        thread = threading.Thread(target=inner.__enter__)
        thread.start()
        thread.join()
    assert gc.get_threshold()[2] > 10**6
    assert not inner.__exit__(ValueError, ValueError("no room"), None)
    assert gc.get_threshold() == THRESHOLD


def test_what_a_program_sets_meanwhile_stays():
    with without_full_collections():
        gc.set_threshold(500, 6, 7)
    assert gc.get_threshold() == (500, 6, 7)


def test_a_warm_up_has_none(monkeypatch):
    target, seen = Target("sm_90"), []
    monkeypatch.setattr(warm_up, "begin_looking", lambda *_, **__: lambda: seen.append(gc.get_threshold()) or {})
    warm_up.compile_calls([lambda number: None], target, 2, 1, progress=False, for_launch=False)
    assert len(seen) == 1 and seen[0][:2] == THRESHOLD[:2] and seen[0][2] > 10**6
    assert gc.get_threshold() == THRESHOLD


def frozen(_: int) -> int:
    return gc.get_freeze_count()


def test_forks_leave_out_their_imports(compilers):
    ((_, number),) = compilers.map(frozen, [0])
    assert number is not None and number > 100_000
