"""Sharing of self-resetting memory: streams, captures, and the pool for graphs when it is full."""

import weakref

import pytest
import torch

from envoi.runtime import workspace
from envoi.runtime.workspace import FOR_GRAPHS, NONE, Kept
from tests.helpers.spoiled import spoil

CPU = torch.device("cpu")


@pytest.fixture
def on(monkeypatch):
    """Return on(stream, capture), which sets the current stream and capture."""

    def to(stream, capture=NONE):
        monkeypatch.setattr(workspace, "under_way", lambda device: (stream, capture))

    to(1)
    return to


def start(x):
    return x.data_ptr()


def test_a_stream_shares_until_more_is_wanted(on):
    kept = Kept(0)
    first = kept.take(10, CPU)
    assert start(kept.take(first.numel(), CPU)) == start(first)
    more = kept.take(first.numel() + 1, CPU)
    assert more.numel() > first.numel()
    assert start(kept.take(10, CPU)) == start(more)
    on(2)
    assert start(kept.take(10, CPU)) != start(more)


def test_what_has_been_replaced_stays(on):
    kept = Kept(0)
    first = weakref.ref(kept.take(10, CPU))  # a kernel may still use it
    kept.take(workspace.LEAST + 1, CPU)
    assert first() is not None


def test_a_capture_has_its_own_and_shares_it_in_itself(on):
    kept = Kept(workspace.BLANK)
    outside = kept.take(10, CPU)
    on(1, capture=7)
    first = kept.take(100, CPU)
    assert start(kept.take(90, CPU)) == start(first)
    on(2, capture=7)
    beside = kept.take(100, CPU)
    on(1, capture=8)
    later = kept.take(100, CPU)
    assert len({start(x) for x in (outside, first, beside, later)}) == 4
    assert all(bool((x == -1).all()) and start(x) % 16 == 0 for x in (outside, first, beside, later))
    on(1)
    assert start(kept.take(10, CPU)) == start(outside)


def test_launches_have_their_own_when_the_pool_is_used_up(on):
    kept, quarter = Kept(0), FOR_GRAPHS // 4
    kept.take(1, CPU)
    found = []
    for capture in range(1, 6):
        on(1, capture)
        found += [kept.take(quarter, CPU), kept.take(quarter, CPU)]
    places = [start(x) for x in found]
    assert [len(set(places[i : i + 2])) for i in range(0, 10, 2)] == [1, 1, 1, 1, 2]
    assert len(set(places)) == 6
    on(1)
    kept.take(1, CPU)
    on(1, 9)
    assert start(kept.take(quarter, CPU)) == start(kept.take(quarter, CPU)), "no new pool outside of captures"
    assert len(kept.pools[CPU]) == 2


@pytest.fixture
def scratch(monkeypatch):
    monkeypatch.setattr(workspace, "_scratch", {})
    return workspace.scratch(CPU)


def test_calls_of_a_stream_have_one_scratch_memory_after_another(scratch):
    assert workspace.scratch(CPU) is scratch
    first = scratch.take(1, 10)
    scratch.give_back(1, first)
    again = scratch.take(1, first.numel())
    assert start(again) == start(first) and again.numel() == workspace.LEAST_SCRATCH
    scratch.give_back(1, again)
    more = scratch.take(1, first.numel() + 1)
    scratch.give_back(1, more)
    assert [x.numel() for x in scratch.free[1]] == [2 * first.numel()], "the smaller one is free for other uses"
    assert scratch.take(1, 10) is more


def test_calls_at_once_and_other_streams_have_scratch_memory_of_their_own(scratch):
    taken = [(stream, scratch.take(stream, 10)) for stream in (1, 1, 2)]
    assert len({start(x) for _, x in taken}) == 3
    for stream, memory in taken:
        scratch.give_back(stream, memory)
    assert {start(scratch.take(1, 10)) for _ in range(2)} == {start(x) for stream, x in taken if stream == 1}
    memory = scratch.take(2, 10)
    assert start(memory) == start(taken[2][1])
    memory.fill_(5.0)
    spoil(3.0)
    assert (memory == 5.0).all(), "a call has it"
    scratch.give_back(2, memory)
    spoil(7.0)
    assert (scratch.take(2, 10) == 7.0).all()
    workspace.forget_scratch()
    assert not scratch.free


def test_scratch_memory_at_the_end_of_the_process(scratch, monkeypatch):
    def refuse(self, make):
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(workspace.ThreadPoolExecutor, "submit", refuse)
    assert scratch.take(1, 10).numel() == workspace.LEAST_SCRATCH


def test_an_error_of_the_allocation_is_raised_after_one_attempt(scratch, monkeypatch):
    attempts = []

    def refuse(*_, **__):
        attempts.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        scratch.take(1, 10)
    assert len(attempts) == 1
