"""Deadline for calls that only the device follows, and for queued collectives: ranks of one process, whose progress the
test sets."""

import gc
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from functools import cache

import pytest
import torch
import torch.distributed as dist

from envoi.ops.moe.parallel import oversee as module
from envoi.ops.moe.parallel.failure import PeerTimeout, Watch
from envoi.ops.moe.parallel.oversee import LOST, HostMarks, oversee, oversee_queue
from envoi.ops.moe.parallel.store import Compiler, Connection, Lookout
from envoi.runtime.compiling import compiling
from envoi.runtime.wake import Wake
from tests.helpers.slow import mostly_slow

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


def rank_of(store: dist.Store, rank: int, num_ranks: int) -> Rank:
    group, counts = list(range(num_ranks)), torch.zeros(4, dtype=torch.int32)
    watch = Watch(Connection(store), "test", group, rank, TIMEOUT_S)
    watch.opened([0] * num_ranks)
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


def test_the_end_of_the_process_stops_all_threads_by_one_handler(monkeypatch):
    registered = []
    monkeypatch.setattr(module.atexit, "register", registered.append)
    monkeypatch.setattr(module, "_stop_at_exit", cache(module._stop_at_exit.__wrapped__))
    before = set(module._stops)
    owners = [Owner() for _ in range(3)]
    watch = Watch(Connection(dist.HashStore()), "test", [0], 0, TIMEOUT_S)
    for owner in owners:
        oversee(owner, torch.zeros(4, dtype=torch.int32), watch, lambda: None)
    started = set(module._stops) - before
    assert len(started) == 3 and registered == [module._finish]
    module._finish()
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
    """Rank whose host queues collectives; `ended` says how often they were ended. It is its own marks."""

    def __init__(self, store: dist.Store, rank: int, timeout_s: float = TIMEOUT_S, num_ranks: int = 2):
        self.watch, self.ended = Watch(Connection(store), "queued", list(range(num_ranks)), rank, timeout_s), 0
        self.watch.opened([0] * num_ranks)
        self.collectives: list[Collective] = []
        oversee_queue(self.watch, self, self.end)

    @property
    def collective(self) -> Collective:
        return self.collectives[-1]

    def queue(self) -> None:
        self.collectives.append(Collective())
        self.watch.queue(lambda: self.collective, "combine")

    def mark(self, number: int) -> None:
        assert number == len(self.collectives) - 1

    def is_past(self, number: int) -> bool:
        return self.collectives[number].done.is_set()

    def end(self) -> None:
        self.ended += 1
        for collective in self.collectives:
            collective.done.set()


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


@pytest.mark.parametrize(
    ("queued", "named"),
    mostly_slow([(2, [1]), (1, [0, 1]), (0, [0, 1])], [(1, [0, 1])]),
    ids=["done", "late", "before"],
)
def test_a_host_that_is_done_answers_the_roll_call_and_a_late_one_does_not(queued, named):
    """A rank that has no tokens for the lost one, and gets none from it, may be done before the others."""
    store = dist.HashStore()
    other, waiting = Host(store, 0, num_ranks=3), Host(store, 2, num_ranks=3)
    for host, number in ((other, queued), (waiting, 2)):
        for _ in range(number):
            host.queue()
    for collective in other.collectives:
        collective.done.set()
    other.watch.finish()
    waiting.collectives[0].done.set()
    with pytest.raises(PeerTimeout) as told:
        waiting.watch.finish()
    assert told.value.ranks == named
    time.sleep(0.5)
    assert (other.watch.failure is not None) == (0 not in named)
    assert other.watch.failure is None or other.watch.failure.ranks == named


@pytest.mark.slow
def test_who_is_done_is_not_missing_from_a_collective_that_failed_by_itself():
    """NCCL says of such a one that it is complete."""
    store = dist.HashStore()
    done, failed = Host(store, 0, num_ranks=3), Host(store, 2, num_ranks=3)
    for host in (done, failed):
        host.queue()
        host.collective.done.set()
    done.watch.finish()
    time.sleep(done.watch.patience_s)
    failed.watch.broken = lambda: "NCCL reports REMOTE_ERROR"
    with pytest.raises(PeerTimeout) as told:
        failed.watch.finish()
    assert told.value.ranks == [1]


def test_an_error_doesnt_wait_for_the_end_of_the_collectives(hosts):
    ended = threading.Event()
    oversee_queue(hosts[0].watch, hosts[0], lambda: time.sleep(2.0) or ended.set())
    begun = time.monotonic()
    with pytest.raises(PeerTimeout):
        hosts[0].watch.fail("combine", TimeoutError("combine"), 1.0)
    assert time.monotonic() - begun < 2.5, "the roll call takes up to two seconds"
    assert not ended.is_set()
    module._finish()  # as at the end of the process, which waits for the threads
    assert ended.is_set()


@pytest.mark.parametrize("attempt", mostly_slow(range(5), [0]))
def test_it_answers_in_time_where_the_timeout_is_short(attempt):
    store = dist.HashStore()
    waiting, held = (Host(store, rank, timeout_s=1.0) for rank in range(2))
    waiting.queue(), held.queue()
    time.sleep(0.25 + 0.04 * attempt)
    with pytest.raises(PeerTimeout, match="all ranks are there"):
        waiting.watch.fail("combine", TimeoutError("combine"), 0.5)


def test_the_error_says_what_caused_it_in_every_thread(hosts):
    hosts[0].queue()
    cause = RuntimeError("NCCL error")
    with pytest.raises(PeerTimeout) as first:
        hosts[0].watch.fail("combine", cause, 1.0)
    with pytest.raises(PeerTimeout) as second:
        hosts[0].watch.finish()
    assert first.value is second.value and first.value.__cause__ is cause


def test_a_collective_that_failed_by_itself_is_none_that_is_complete(hosts):
    hosts[0].queue()
    hosts[0].collective.done.set()  # as NCCL says of one with an error
    hosts[0].watch.broken = lambda: "NCCL reports REMOTE_ERROR"
    with pytest.raises(PeerTimeout, match="combine: rank 1 is lost") as told:
        hosts[0].watch.finish()
    assert "REMOTE_ERROR" in str(told.value.__cause__)


@pytest.mark.slow
def test_an_interrupted_wait_is_watched_further(hosts, monkeypatch):
    hosts[0].queue()

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(hosts[0].watch, "_poll", interrupted)
        hosts[0].watch.finish()
    assert hosts[0].collective.done.wait(TIMEOUT_S + 1)
    with pytest.raises(PeerTimeout, match="combine: rank 1 is lost"):
        hosts[0].watch.finish()


def test_an_interrupted_start_leaves_nothing_to_wait_for(hosts):
    class Interrupted(Collective):
        def wait(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hosts[0].watch.queue(Interrupted, "combine")
    assert hosts[0].watch.pending() is None
    hosts[0].watch.finish()


def test_what_an_earlier_call_left_is_dropped_when_it_is_complete(hosts):
    watch = hosts[0].watch
    hosts[0].queue()  # and something else raises before `finish`
    hosts[0].queue()
    assert len(watch._queued) == 2
    hosts[0].collectives[0].done.set()
    hosts[0].queue()
    assert [queued.number for queued in watch._queued] == [1, 2] and watch.pending().number == 1
    hosts[0].end()
    watch.finish()
    assert watch.pending() is None and watch.failure is None


def test_a_rank_that_compiles_itself_waits_no_longer_for_a_lost_one(hosts):
    hosts[0].watch.connection.compiler = Compiler(hosts[0].watch.connection, 0)
    begun = time.monotonic()
    hosts[0].queue()
    with compiling():
        assert hosts[0].collective.done.wait(TIMEOUT_S + 2)
    assert time.monotonic() - begun < TIMEOUT_S + 1


@pytest.mark.slow
def test_a_host_that_waits_itself_fails_once(hosts):
    hosts[0].queue()
    begun = time.monotonic()
    with pytest.raises(PeerTimeout, match="rank 1 is lost"):
        hosts[0].watch.finish()
    assert time.monotonic() - begun < TIMEOUT_S + 1
    assert hosts[0].collective.done.wait(1.0)
    time.sleep(0.5)
    assert hosts[0].ended == 1


@pytest.mark.slow
def test_collectives_that_end_or_whose_peers_compile_are_left_alone(hosts):
    hosts[1].watch.connection.compiler = Compiler(hosts[1].watch.connection, 1)
    hosts[0].queue()
    with compiling():  # of the process, in which rank 1 says so
        time.sleep(1.5 * TIMEOUT_S)
    assert hosts[0].watch.failure is None
    hosts[0].collective.done.set()
    hosts[0].watch.finish()
    time.sleep(1.5 * TIMEOUT_S)
    assert hosts[0].watch.failure is None and hosts[0].ended == 0


def test_the_thread_that_watches_a_queue_ends_with_it():
    before = set(module._stops)
    made = Host(dist.HashStore(), 0)
    (thread,) = set(module._stops) - before
    del made
    gc.collect()
    thread.join(2.0)
    assert not thread.is_alive()


def test_marks_are_past_each_by_itself():
    marks = HostMarks.on(torch.device("cpu"))
    for number in range(3 * module.NUMBERS):
        assert not marks.is_past(number)
        if number % 2:  # two streams: the later one is done first
            marks.mark(number)
            assert marks.is_past(number) and not marks.is_past(number - 1)
            marks.mark(number - 1)
        assert all(marks.is_past(before) for before in range(max(0, number - 100), number - 1))
    last = 300 * module.NUMBERS + 7
    marks.noted.fill_((last // module.NUMBERS - 1) % module.NUMBERS)
    assert not marks.is_past(last)
    marks.mark(last)
    assert marks.is_past(last)


def test_the_end_of_the_process_waits_for_threads_that_others_start():
    """A thread that watches begins to end collectives when it is told to stop."""
    done = threading.Event()

    def end() -> None:
        time.sleep(0.3)
        done.set()

    stop = Wake()
    module.in_background(lambda: (stop.wait(60.0), time.sleep(0.2), module.in_background(end)), stop)
    module._finish()
    assert done.is_set()


def test_a_waiting_thread_may_be_woken_by_itself():
    """As a finalizer would that runs anywhere within `wait`: with threading.Event the thread waits for itself."""
    wake, woken = Wake(), threading.Event()

    def waiting() -> None:
        left = iter(range(40))

        def anywhere(*_) -> None:
            if next(left, None) is not None:
                wake.set()

        sys.setprofile(anywhere)
        wake.wait(0.05)
        sys.setprofile(None)
        woken.set()

    threading.Thread(target=waiting, daemon=True).start()
    assert woken.wait(10.0)


def test_a_wake_is_for_one_wait():
    wake = Wake()
    wake.set(), wake.set()
    assert wake.wait(0.0) and not wake.wait(0.01)
    threading.Timer(0.05, wake.set).start()
    assert wake.wait(5.0)
