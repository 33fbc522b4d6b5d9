"""Deadline for calls that only the device follows, and for queued collectives: ranks of one process, whose progress the
test sets."""

import gc
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from envoi.ops.moe.parallel import failure as module
from envoi.ops.moe.parallel.collectives import Channel
from envoi.ops.moe.parallel.counted import Counted
from envoi.ops.moe.parallel.failure import LOST, PeerTimeout, Watch, oversee
from envoi.ops.moe.parallel.store import Connection, Lookout
from envoi.runtime.compiling import compiling

TIMEOUT_S = 2.0


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


def rank_of(store: dist.Store, rank: int, num_ranks: int) -> Rank:
    group, counts = list(range(num_ranks)), torch.zeros(4, dtype=torch.int32)
    watch = Watch(Connection(store), "test", group, rank, TIMEOUT_S)
    watch.opened([False] * num_ranks)
    made = Rank(Owner(), counts, watch, threading.Event())
    oversee(made.owner, counts, watch, made.ended.set)
    return made


@pytest.fixture
def ranks():
    store = dist.HashStore()
    made = [rank_of(store, rank, 2) for rank in range(2)]
    yield made
    for rank in made:
        rank.reach(0, 0, 0)


def test_a_rank_that_never_begins_is_named_within_the_timeout(ranks):
    start = time.monotonic()
    ranks[0].reach(5, 4, 4)
    assert ranks[0].ended.wait(TIMEOUT_S + 1)
    assert time.monotonic() - start < TIMEOUT_S + 1
    assert ranks[0].watch.failure.ranks == [1]
    assert "dispatch: rank 1 is lost or did not answer within 2 s" in str(ranks[0].watch.failure)
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


@pytest.mark.slow
def test_a_rank_that_is_done_with_the_call_is_none_that_is_missing():
    """Over two hosts of two ranks, rank 0 needs nothing of rank 1 in combine, but rank 3 does."""
    store = dist.HashStore()
    done, waiting = rank_of(store, 0, 4), [rank_of(store, rank, 4) for rank in (2, 3)]
    for rank in waiting:
        rank.reach(7, 7, 6)
    done.reach(7, 7, 7)
    for rank in (*waiting, done):
        assert rank.ended.wait(TIMEOUT_S + 1)
        assert rank.watch.failure.ranks == [1]
        assert "combine: rank 1 is lost or did not answer" in str(rank.watch.failure)
        assert int(rank.counts[LOST]) == 1


def test_a_rank_that_is_done_is_not_late_either():
    store = dist.HashStore()
    done, waiting = rank_of(store, 0, 3), [rank_of(store, rank, 3) for rank in (1, 2)]
    waiting[0].reach(7, 7, 6)
    done.reach(7, 7, 7)
    time.sleep(0.7 * waiting[0].watch.patience_s)
    waiting[1].reach(7, 7, 6)
    for rank in (*waiting, done):
        assert rank.ended.wait(TIMEOUT_S + 1)
        assert rank.watch.failure.ranks == [2]
        assert "rank 2" in str(rank.watch.failure) and "was late" in str(rank.watch.failure)


def test_an_idle_rank_is_missing_from_what_hosts_wait_for():
    """It may have done all calls, and not come to the compilation of the next one."""
    store = dist.HashStore()
    waiting, late = rank_of(store, 0, 2), rank_of(store, 1, 2)
    for rank in (waiting, late):
        rank.reach(3, 3, 3)
    time.sleep(0.2)
    with pytest.raises(PeerTimeout, match="first call: rank 1 is lost or did not answer"):
        waiting.watch.fail("first call", TimeoutError("first call"), waiting.watch.patience_s)
    time.sleep(0.5)
    assert late.watch.failure is None and not late.ended.is_set()


class SlowStore(dist.Store):
    """Store whose answers take a while."""

    def __init__(self, store: dist.Store):
        super().__init__()
        self.store = store

    def clone(self):
        return self

    def check(self, keys):
        time.sleep(0.3)
        return self.store.check(keys)

    def __getattr__(self, name):
        return getattr(self.store, name)

    def get(self, key):
        time.sleep(0.3)
        return self.store.get(key)

    def set(self, key, value):
        self.store.set(key, value)

    def compare_set(self, key, expected, desired):
        return self.store.compare_set(key, expected, desired)


def test_a_store_that_is_slow_is_asked_on():
    lookout = Lookout(Connection(SlowStore(store := dist.HashStore())), "test", [])
    dist.PrefixStore("test", store).set("alarm", "7")
    end = time.monotonic() + 3.0
    while lookout.alarm is None and time.monotonic() < end:
        lookout.look()
        time.sleep(0.02)
    assert lookout.alarm == 7


def test_an_idle_rank_asks_only_while_peers_may_call_the_roll():
    watch = Watch(Connection(dist.HashStore()), "test", [0, 1], 0, 30.0)
    assert [watch.may_be_asked(idle_s) for idle_s in (1.0, 25.0, 27.0, 30.1, 31.0, 1e6)] == [
        False, False, True, True, False, False,
    ]  # fmt: skip


@pytest.mark.slow
def test_an_idle_rank_does_without_a_store_that_is_gone():
    store = GoneStore()
    watch, counts = Watch(Connection(store), "test", [0, 1], 0, 1.0), torch.zeros(4, dtype=torch.int32)
    owner, ended = Owner(), threading.Event()
    oversee(owner, counts, watch, ended.set)
    assert not ended.wait(3.0) and watch.failure is None
    assert store.asked == 1


@pytest.mark.slow
def test_nobody_watches_over_what_is_gone(ranks):
    ranks[0].owner = None
    gc.collect()
    time.sleep(0.1)
    ranks[0].reach(1, 0, 0)
    assert not ranks[0].ended.wait(TIMEOUT_S)
    assert ranks[0].watch.failure is None


class GoneStore(dist.Store):
    asked = 0

    def clone(self):
        return self

    def check(self, keys):
        self.asked += 1
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


class Group:
    """Group of NCCL whose collectives are ended."""

    def __init__(self):
        self.ended = threading.Event()

    def abort(self) -> None:
        assert not self.ended.is_set()
        self.ended.set()


class Host:
    """Rank whose host queues collectives of counted rows; the device does one at the end of `queued`."""

    def __init__(self, store: dist.Store, rank: int, timeout_s: float = TIMEOUT_S, num_ranks: int = 2):
        self.watch, self.group = Watch(Connection(store), "queued", list(range(num_ranks)), rank, timeout_s), Group()
        self.watch.opened([False] * num_ranks)
        control, data = cast(Any, None), cast(Any, self.group)
        self.exchange = Counted(Channel(control, data, torch.device("cpu"), self.watch))

    def queued(self, number: int):
        return self.exchange.queued(number)

    def do(self, number: int) -> None:
        with self.queued(number):
            pass

    def finish(self) -> None:
        self.watch.wait_for_device(self.exchange.counts, "combine")


def test_a_collective_is_ended_while_its_host_is_held_by_the_device():
    host, begun = Host(dist.HashStore(), 0), time.monotonic()
    with host.queued(0):
        assert host.group.ended.wait(TIMEOUT_S + 1), "the device holds the host until its collective is ended"
        assert time.monotonic() - begun < TIMEOUT_S + 1
        with pytest.raises(PeerTimeout, match="dispatch: rank 1 is lost or did not answer within 2 s") as told:
            host.finish()
    with pytest.raises(PeerTimeout) as again:
        host.watch.queue(lambda: pytest.fail("queued"), "dispatch")
    assert again.value is told.value


def test_a_host_that_waits_has_the_step_and_one_that_computes_waits_for_none():
    """Between its two collectives a host may compile for long; ended calls leave the second out."""
    host = Host(dist.HashStore(), 0, timeout_s=1.0)
    for number in (0, 1, 0, 0, 1, 0):
        host.do(number)
    time.sleep(1.5)
    assert host.watch.failure is None
    host.finish()
    host = Host(dist.HashStore(), 0, timeout_s=1.0)
    host.do(0)
    with host.queued(1), pytest.raises(PeerTimeout, match="combine: rank 1 is lost"):
        host.finish()


def test_a_host_that_is_held_answers_the_roll_call_of_another():
    waiting, held = (Host(store := dist.HashStore(), 0), Host(store, 1))
    with waiting.queued(0), held.queued(0):
        time.sleep(0.5)
        with pytest.raises(PeerTimeout, match="all ranks are there"):
            waiting.watch.fail("dispatch", TimeoutError("dispatch"), 0.5)
        assert held.group.ended.wait(2.0) and waiting.group.ended.wait(2.0)
        with pytest.raises(PeerTimeout, match="all ranks are there"):
            held.finish()


@pytest.mark.parametrize(("done", "named"), [(2, [1]), (1, [0, 1])], ids=["done", "late"])
def test_a_host_that_is_done_answers_the_roll_call_and_a_late_one_does_not(done, named):
    """A rank that has no tokens for the lost one, and gets none from it, may be done before the others."""
    store = dist.HashStore()
    other, waiting = Host(store, 0, num_ranks=3), Host(store, 2, num_ranks=3)
    for number in range(done):
        other.do(number)
    other.finish()
    waiting.do(0)
    with waiting.queued(1), pytest.raises(PeerTimeout) as told:
        waiting.finish()
    assert told.value.ranks == named
    time.sleep(0.5)
    assert (other.watch.failure is not None) == (0 not in named)


def test_a_host_waits_for_peers_that_compile():
    store = dist.HashStore()
    waiting, other = Host(store, 0, timeout_s=1.0), Host(store, 1, timeout_s=1.0)
    with waiting.queued(0), compiling():  # of the process, in which rank 1 says so
        time.sleep(2.0)
        assert waiting.watch.failure is None
    waiting.finish()
    assert other.watch.failure is None


def test_the_thread_that_watches_a_queue_ends_with_it():
    before, host = set(module._threads), Host(dist.HashStore(), 0)
    (thread,) = set(module._threads) - before
    del host
    gc.collect()
    thread.join(2.0)
    assert not thread.is_alive()


@pytest.fixture
def process_that_ends():
    """Let a test end the process, as far as threads know."""
    yield module._finish
    module._ending.clear()


def test_the_end_of_the_process_stops_all_threads(process_that_ends):
    before, owners = set(module._threads), [Owner() for _ in range(3)]
    watch = Watch(Connection(dist.HashStore()), "test", [0], 0, TIMEOUT_S)
    for owner in owners:
        oversee(owner, torch.zeros(4, dtype=torch.int32), watch, lambda: None)
    started = set(module._threads) - before
    assert len(started) == 3
    process_that_ends()
    assert not any(thread.is_alive() for thread in started)
    kept = [weakref.ref(thread) for thread in started]
    del started
    gc.collect()
    assert not any(thread() for thread in kept), "nothing keeps a thread that has ended"


def test_the_end_of_the_process_waits_for_threads_that_others_start(process_that_ends):
    """A thread that oversees begins to end collectives when it is told to stop."""
    done = threading.Event()

    def end() -> None:
        time.sleep(0.3)
        done.set()

    module.in_background(lambda: (module._ending.wait(60.0), time.sleep(0.2), module.in_background(end)))
    process_that_ends()
    assert done.is_set()


def test_an_error_doesnt_wait_for_the_end_of_the_collectives(process_that_ends):
    """NCCL takes a second to end them, for which the end of the process waits."""
    ended, watch = threading.Event(), Watch(Connection(dist.HashStore()), "test", [0, 1], 0, TIMEOUT_S)
    watch.end = lambda: module.in_background(lambda: time.sleep(2.5) or ended.set())
    begun = time.monotonic()
    with pytest.raises(PeerTimeout, match="rank 1 is lost"):
        watch.fail("combine", TimeoutError("combine"), 1.0)
    assert time.monotonic() - begun < 2.5, "the roll call takes up to two seconds"
    assert not ended.is_set()
    process_that_ends()
    assert ended.is_set()
