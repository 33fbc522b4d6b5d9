"""Pulse of a rank that compiles, through a store of one process."""

import gc
import threading
import time

import pytest
import torch.distributed as dist

from envoi.ops.moe.parallel import pulse
from envoi.ops.moe.parallel.pulse import DONE, Peers
from envoi.ops.moe.parallel.store import Connection
from envoi.runtime.compiling import compiling


@pytest.fixture
def connection():
    return Connection(dist.HashStore())


@pytest.fixture
def fast(monkeypatch):
    for name, seconds in (("BEAT_S", 0.02), ("IDLE_S", 0.2), ("FRESH_S", 0.5)):
        monkeypatch.setattr(pulse, name, seconds)


def tell(connection: Connection, rank: int, number: str) -> None:
    connection.answer(lambda store: pulse._tell(store, rank, number), 5.0)


def test_a_peer_compiles_until_its_number_has_stood_still(connection, fast):
    peers = Peers(connection, [3, 5])
    assert not peers.compile(), "nobody has ever compiled"
    for number in ("1", "2"):
        tell(connection, 5, number)
        assert peers.compile()
        assert peers.compile(), "looking twice at once tells nothing new"
    time.sleep(0.6)
    assert not peers.compile(), "it was killed"
    tell(connection, 5, "3")
    assert peers.compile()
    tell(connection, 5, DONE)
    assert peers.compile(), "it may have work left"
    time.sleep(0.6)
    assert not peers.compile()
    tell(connection, 4, "9")
    assert not peers.compile(), "it is none of these ranks"


def test_a_number_that_was_there_before_the_end_is_none_of_now(connection, fast):
    tell(connection, 5, "7")  # of a rank that was killed long ago
    peers = Peers(connection, [5])
    peers.look()
    connection.answer(lambda store: None, 5.0)  # requests are answered in turn
    peers.look()
    time.sleep(0.6)
    assert not peers.compile()


def test_a_look_never_waits_and_the_last_one_a_moment(connection, monkeypatch):
    peers, asked = Peers(connection, [0, 1]), threading.Event()
    monkeypatch.setattr(pulse, "_numbers", lambda store, ranks: asked.wait(10) and {1: "7"})
    start = time.monotonic()
    peers.look()
    peers.look()
    assert time.monotonic() - start < 0.2
    assert not peers.compile()
    assert pulse.ANSWER_S <= time.monotonic() - start < pulse.ANSWER_S + 0.5
    asked.set()
    assert peers.compile()


def test_a_store_that_is_gone_says_nothing(connection, monkeypatch):
    def gone(store, ranks):
        raise RuntimeError("the store is gone")

    monkeypatch.setattr(pulse, "_numbers", gone)
    peers = Peers(connection, [0, 1])
    peers.look()
    assert not peers.compile()
    peers.look()
    assert not peers.compile()


@pytest.mark.slow
def test_the_store_hears_at_once_of_a_rank_that_compiles_and_that_it_is_done(connection, monkeypatch):
    monkeypatch.setattr(pulse, "IDLE_S", 0.2)
    monkeypatch.setattr(pulse, "FRESH_S", 1.0)
    pulse.start(connection, 1)
    pulse.start(connection, 1)  # a second object has the same connection
    peers, until = Peers(connection, [0, 1]), time.monotonic() + 20
    assert not peers.compile()
    for kernel in range(3):  # one after the other, with a moment between them
        with compiling():
            time.sleep(0.1)  # less than a beat
            assert peers.compile(), f"kernel {kernel}"
            time.sleep(1.2)
            assert peers.compile(), f"kernel {kernel}, later than what was heard first"
        time.sleep(0.05)
    while peers.compile() and time.monotonic() < until:
        time.sleep(0.05)
    assert time.monotonic() < until
    assert peers._numbers[1] == DONE


def test_a_number_of_an_earlier_process_is_none_of_ours(connection, fast):
    tell(connection, 1, "12")
    pulse.start(connection, 1)
    until = time.monotonic() + 10
    peers = Peers(connection, [1])
    while peers.compile() and time.monotonic() < until:
        time.sleep(0.05)
    assert peers._numbers[1] == DONE


def test_the_thread_ends_with_its_connection(fast):
    before, made = set(threading.enumerate()), Connection(dist.HashStore())
    pulse.start(made, 0)
    (thread,) = (new for new in set(threading.enumerate()) - before if new.name == "envoi-pulse")
    del made
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
