"""Pulse of a rank that compiles, through a store of one process."""

import time

import pytest
import torch.distributed as dist

from envoi.moe.parallel import pulse
from envoi.moe.parallel.pulse import DONE, Peers
from envoi.moe.parallel.store import Connection
from envoi.runtime.compiling import compiling, compiling_for


@pytest.fixture
def connection():
    return Connection(dist.HashStore())


def tell(connection: Connection, rank: int, number: str) -> None:
    connection.answer(lambda store: pulse._tell(store, rank, number), 5.0)


def test_a_peer_compiles_as_long_as_its_number_changes(connection):
    peers = Peers(connection, [3, 5])
    assert not peers.compile(), "nobody has ever compiled"
    for number, compiles in (("1", True), ("1", False), ("4", True), (DONE, False), ("5", True), ("5", False)):
        tell(connection, 5, number)
        assert peers.compile() == compiles, number
    tell(connection, 4, "9")
    assert not peers.compile(), "it is none of these ranks"


def test_without_a_store_nobody_compiles(connection, monkeypatch):
    def gone(request, within_s):
        raise RuntimeError("the store is gone")

    monkeypatch.setattr(connection, "answer", gone)
    assert not Peers(connection, [0, 1]).compile()


def test_the_store_hears_of_a_rank_that_compiles_and_that_it_is_done(connection, monkeypatch):
    monkeypatch.setattr(pulse, "BEAT_S", 0.02)
    monkeypatch.setattr(pulse, "LEAST_S", 0.01)
    pulse.start(connection, 1)
    pulse.start(connection, 1)  # a second object has the same connection
    peers = Peers(connection, [0, 1])
    assert not peers.compile()
    with compiling():
        until = time.monotonic() + 10
        heard = [peers.compile()]
        while sum(heard) < 3 and time.monotonic() < until:
            time.sleep(0.05)
            heard.append(peers.compile())
        assert sum(heard) == 3
    while peers.compile() and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.1)
    assert not peers.compile() and not peers.compile()


def test_a_process_compiles_while_any_thread_does():
    assert compiling_for() == 0.0
    with compiling():
        time.sleep(0.02)
        with compiling():
            assert compiling_for() >= 0.02
        assert compiling_for() >= 0.02
    assert compiling_for() == 0.0
    with pytest.raises(ValueError, match="kernel"), compiling():
        raise ValueError("kernel")
    assert compiling_for() == 0.0
