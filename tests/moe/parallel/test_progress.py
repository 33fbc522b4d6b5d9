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
from envoi.moe.parallel.progress import LOST, oversee, oversee_queue
from envoi.moe.parallel.pulse import start as tell_when_compiling
from envoi.moe.parallel.store import Connection
from envoi.moe.parallel.timeout import PeerTimeout, Watch
from envoi.runtime.compiling import compiling

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


class Collective:
    """Collective that is complete once it is ended, as NCCL's are."""

    def __init__(self):
        self.done = threading.Event()

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return self.done.is_set()


class Host:
    """Rank whose host queues a collective; `ended` says how often its collectives were ended."""

    def __init__(self, store: dist.Store, rank: int):
        self.watch, self.collective, self.ended = Watch(Connection(store), "queued", [0, 1], rank, TIMEOUT_S), None, 0
        self.watch.opened([0, 0])
        oversee_queue(self.watch, self.end)

    def queue(self) -> None:
        self.collective = Collective()
        self.watch.queue(lambda: self.collective, "combine")

    def end(self) -> None:
        self.ended += 1
        self.collective.done.set()


@pytest.fixture
def hosts():
    store = dist.HashStore()
    return [Host(store, rank) for rank in range(2)]


def test_a_collective_is_ended_while_its_host_is_held_by_the_device(hosts):
    held, begun = hosts[0], time.monotonic()
    held.queue()
    assert held.collective.done.wait(TIMEOUT_S + 1), "the device holds the host until its collective is ended"
    assert time.monotonic() - begun < TIMEOUT_S + 1
    with pytest.raises(PeerTimeout, match="combine: rank 1 is lost or did not answer within 3 s") as told:
        held.watch.finish()
    assert held.ended == 1 and told.value.ranks == [1]
    with pytest.raises(PeerTimeout) as again:
        held.watch.queue(Collective, "dispatch")
    assert again.value is told.value


def test_a_host_that_is_held_answers_the_roll_call_of_another(hosts):
    waiting, held = hosts
    waiting.queue(), held.queue()
    time.sleep(0.5)
    begun = time.monotonic()
    with pytest.raises(PeerTimeout, match="all ranks are there"):
        waiting.watch.fail("combine", TimeoutError("combine"), 0.5)
    assert held.collective.done.wait(2.0)
    assert time.monotonic() - begun < 2.0
    with pytest.raises(PeerTimeout, match="all ranks are there"):
        held.watch.finish()
    assert waiting.collective.done.wait(1.0)
    assert (waiting.ended, held.ended) == (1, 1)


def test_an_error_doesnt_wait_for_the_end_of_the_collectives(hosts, monkeypatch):
    ended = threading.Event()
    oversee_queue(hosts[0].watch, lambda: time.sleep(2.0) or ended.set())
    begun = time.monotonic()
    with pytest.raises(PeerTimeout):
        hosts[0].watch.fail("combine", TimeoutError("combine"), 1.0)
    assert time.monotonic() - begun < 2.5, "the roll call takes up to two seconds"
    assert not ended.is_set()
    progress._finish()  # as at the end of the process, which waits for the threads
    assert ended.is_set()


def test_a_host_that_waits_itself_fails_once(hosts):
    hosts[0].queue()
    begun = time.monotonic()
    with pytest.raises(PeerTimeout, match="rank 1 is lost"):
        hosts[0].watch.finish()
    assert time.monotonic() - begun < TIMEOUT_S + 1
    assert hosts[0].collective.done.wait(1.0)
    time.sleep(0.5)
    assert hosts[0].ended == 1


def test_collectives_that_end_or_whose_peers_compile_are_left_alone(hosts):
    tell_when_compiling(hosts[1].watch.connection, 1)
    hosts[0].queue()
    with compiling():  # of the process, in which rank 1 says so
        time.sleep(1.5 * TIMEOUT_S)
    assert hosts[0].watch.failure is None
    hosts[0].collective.done.set()
    hosts[0].watch.finish()
    time.sleep(1.5 * TIMEOUT_S)
    assert hosts[0].watch.failure is None and hosts[0].ended == 0


def test_the_thread_that_watches_a_queue_ends_with_it():
    before = set(progress._stop_events)
    made = Host(dist.HashStore(), 0)
    (thread,) = set(progress._stop_events) - before
    del made
    gc.collect()
    thread.join(2.0)
    assert not thread.is_alive()
