"""Deadline for calls that only the device follows: ranks of one process, whose counts the test sets."""

import gc
import threading
import time
import weakref
from dataclasses import dataclass
from functools import cache

import pytest
import torch
import torch.distributed as dist

from envoi.moe.parallel import progress
from envoi.moe.parallel.progress import LOST, oversee
from envoi.moe.parallel.store import Connection
from envoi.moe.parallel.timeout import Watch

TIMEOUT_S = 3.0


class Owner:
    pass


@dataclass
class Rank:
    owner: Owner
    counts: torch.Tensor
    watch: Watch
    ended: threading.Event

    def reach(self, begun: int, gathered: int, done: int) -> None:
        self.counts[:LOST] = torch.tensor([begun, gathered, done])


@pytest.fixture
def ranks():
    store = dist.HashStore()
    made = []
    for rank in range(2):
        watch, counts = Watch(Connection(store), "test", [0, 1], rank, TIMEOUT_S), torch.zeros(4, dtype=torch.int32)
        watch.opened([0, 0])
        made.append(Rank(Owner(), counts, watch, threading.Event()))
        oversee(made[rank].owner, counts, watch, made[rank].ended.set)
    yield made
    for rank in made:
        rank.reach(0, 0, 0)


def test_a_rank_that_never_begins_is_named_within_the_timeout(ranks):
    start = time.monotonic()
    ranks[0].reach(5, 4, 4)
    assert ranks[0].ended.wait(TIMEOUT_S + 1)
    assert time.monotonic() - start < TIMEOUT_S + 1
    assert ranks[0].watch.failure.ranks == [1]
    assert "dispatch: rank 1 is lost or did not answer within 3 s" in str(ranks[0].watch.failure)
    assert int(ranks[0].counts[LOST]) == 1
    assert ranks[1].watch.failure is None and not ranks[1].ended.is_set()
    ranks[1].reach(5, 4, 4)  # comes late, and hears of it
    assert ranks[1].ended.wait(TIMEOUT_S)
    assert "rank 1 (this one) was late" in str(ranks[1].watch.failure)


def test_a_collective_without_an_end_is_one_of_all(ranks):
    for rank in ranks:
        rank.reach(1, 1, 0)
    for rank in ranks:
        assert rank.ended.wait(TIMEOUT_S + 1)
        assert rank.watch.failure.ranks == []
        assert "combine: all ranks are there" in str(rank.watch.failure)


def test_calls_that_go_on_are_left_alone(ranks):
    """Calls take longer than the timeout in all, each step of them less."""
    end, call = time.monotonic() + 1.5 * TIMEOUT_S, 0
    while time.monotonic() < end:
        for points in ((1, 0, 0), (1, 1, 0), (1, 1, 1)):
            for rank in ranks:
                rank.reach(*(call + point for point in points))
            time.sleep(0.1)
        call += 1
    time.sleep(TIMEOUT_S / 2)
    assert not any(rank.ended.is_set() or rank.watch.failure for rank in ranks)


def test_nobody_watches_over_what_is_gone(ranks):
    ranks[0].owner = None
    gc.collect()
    time.sleep(0.1)
    ranks[0].reach(1, 0, 0)
    assert not ranks[0].ended.wait(TIMEOUT_S)
    assert ranks[0].watch.failure is None


class GoneStore(dist.Store):
    def clone(self):
        return self

    def check(self, keys):
        raise RuntimeError("connection reset")

    def set(self, key, value):
        raise RuntimeError("connection reset")


def test_a_store_that_is_gone_ends_the_wait():
    watch, counts = Watch(Connection(GoneStore()), "test", [0, 1], 0, 60.0), torch.zeros(4, dtype=torch.int32)
    owner, ended = Owner(), threading.Event()
    oversee(owner, counts, watch, ended.set)
    counts[0] = 1
    assert ended.wait(10)
    assert "the store is gone" in str(watch.failure)


def test_the_end_of_the_process_stops_all_threads_by_one_handler(monkeypatch):
    registered = []
    monkeypatch.setattr(progress.atexit, "register", registered.append)
    monkeypatch.setattr(progress, "_stop_at_exit", cache(progress._stop_at_exit.__wrapped__))
    before = set(progress._stop_events)
    owners = [Owner() for _ in range(3)]
    watch = Watch(Connection(dist.HashStore()), "test", [0], 0, TIMEOUT_S)
    for owner in owners:
        oversee(owner, torch.zeros(4, dtype=torch.int32), watch, lambda: None)
    started = set(progress._stop_events) - before
    assert len(started) == 3 and registered == [progress._finish]
    progress._finish()
    assert not any(thread.is_alive() for thread in started)
    kept = [weakref.ref(thread) for thread in started]
    del started
    gc.collect()
    assert not any(thread() for thread in kept), "nothing keeps a thread that has ended"
