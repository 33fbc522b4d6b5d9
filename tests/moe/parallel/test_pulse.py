"""Pulse of a rank that compiles, through a store of one process."""

import gc
import threading
import time

import pytest
import torch.distributed as dist

from envoi.moe.parallel import pulse
from envoi.moe.parallel.pulse import DONE, Peers
from envoi.moe.parallel.store import Connection
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


def compile_after_a_look(peers: Peers) -> bool:
    peers.look()
    peers.connection.answer(lambda store: None, 5.0)  # requests are answered in turn
    peers.look()
    return peers.compile()


def test_a_peer_compiles_until_its_number_has_stood_still(connection, fast):
    peers = Peers(connection, [3, 5])
    assert not compile_after_a_look(peers), "nobody has ever compiled"
    for number in ("1", "2"):
        tell(connection, 5, number)
        assert compile_after_a_look(peers)
        assert compile_after_a_look(peers), "looking twice at once tells nothing new"
    time.sleep(0.6)
    assert not compile_after_a_look(peers), "it was killed"
    tell(connection, 5, "3")
    assert compile_after_a_look(peers)
    tell(connection, 5, DONE)
    assert not compile_after_a_look(peers)
    tell(connection, 4, "9")
    assert not compile_after_a_look(peers), "it is none of these ranks"


def test_a_look_never_waits_and_a_store_that_is_gone_says_nothing(connection, monkeypatch):
    peers, asked = Peers(connection, [0, 1]), threading.Event()
    monkeypatch.setattr(pulse, "_numbers", lambda store, ranks: asked.wait(10) and {1: "7"})
    peers.look()
    peers.look()
    assert not peers.compile()
    asked.set()
    assert compile_after_a_look(peers)

    def gone(store, ranks):
        raise RuntimeError("the store is gone")

    monkeypatch.setattr(pulse, "_numbers", gone)
    monkeypatch.setattr(pulse, "FRESH_S", 0.0)
    assert not compile_after_a_look(peers) and not compile_after_a_look(peers)


def test_the_store_hears_of_a_rank_that_compiles_and_that_it_is_done(connection, fast):
    pulse.start(connection, 1)
    pulse.start(connection, 1)  # a second object has the same connection
    peers, until = Peers(connection, [0, 1]), time.monotonic() + 10
    assert not compile_after_a_look(peers)
    for kernel in range(4):  # one after the other, with a moment between them
        with compiling():
            begun = time.monotonic()
            while (not compile_after_a_look(peers) or time.monotonic() < begun + 0.6) and time.monotonic() < until:
                time.sleep(0.05)
            assert compile_after_a_look(peers), f"kernel {kernel}"
        time.sleep(0.1)
        assert compile_after_a_look(peers), f"after kernel {kernel}"
    while compile_after_a_look(peers) and time.monotonic() < until:
        time.sleep(0.05)
    assert time.monotonic() < until
    assert peers._seen[1][0] == DONE


def test_a_number_of_an_earlier_process_is_none_of_ours(connection, fast):
    tell(connection, 1, "12")
    pulse.start(connection, 1)
    until = time.monotonic() + 10
    peers = Peers(connection, [1])
    while compile_after_a_look(peers) and time.monotonic() < until:
        time.sleep(0.05)
    assert peers._seen[1][0] == DONE


def test_the_thread_ends_with_its_connection(fast):
    before, made = set(threading.enumerate()), Connection(dist.HashStore())
    pulse.start(made, 0)
    (thread,) = (new for new in set(threading.enumerate()) - before if new.name == "envoi-pulse")
    del made
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
