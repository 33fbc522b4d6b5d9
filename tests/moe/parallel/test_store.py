"""Requests to a store that stays silent, is gone, or is on another host."""

import gc
import threading
import time

import pytest
import torch.distributed as dist

from envoi.ops.moe.parallel import store as stores
from envoi.ops.moe.parallel.store import Compiler, Connection, Lookout, StoreSilentError, is_on_this_host, run_bounded
from envoi.runtime.compiling import compiling


class Silent(dist.HashStore):
    """Store that answers `check` only once `back` is set, as one over a dead link."""

    back = threading.Event()

    def clone(self):
        return self

    def check(self, keys):
        return self.back.wait(60)


@pytest.fixture
def silent():
    Silent.back.clear()
    yield Silent()
    Silent.back.set()


def test_a_silent_store_is_waited_for_no_longer_than_asked(silent):
    connection, start = Connection(silent), time.monotonic()
    with pytest.raises(StoreSilentError, match=r"the store did not answer within 0\.2 s"):
        connection.answer(lambda store: store.check(["x"]), 0.2)
    # Requests made meanwhile wait for their turn, no longer than they want to either.
    with pytest.raises(StoreSilentError):
        connection.answer(lambda store: store.num_keys(), 0.1)
    assert time.monotonic() - start < 5
    Silent.back.set()
    assert connection.answer(lambda store: store.check(["x"]), 10)


def test_a_silent_connection_is_replaced(silent, monkeypatch):
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: silent)
    first = stores.connect()
    assert stores.connect() is first
    with pytest.raises(StoreSilentError):
        first.answer(lambda store: store.check(["x"]), 0.1)
    second = stores.connect()
    assert second is not first
    assert second.answer(lambda store: store.set("x", "1") or store.get("x"), 10) == b"1"


def test_a_stores_error_is_raised_again():
    connection = Connection(dist.HashStore())

    def gone(store):
        raise RuntimeError("connection reset")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="connection reset"):
            connection.answer(gone, 10)
    assert connection.answer(lambda store: store.check(["x"]), 10) is False


def test_the_thread_ends_with_its_store(monkeypatch):
    before = set(threading.enumerate())
    default = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: default[0])
    connection = stores.connect()
    connection.answer(lambda store: store.check(["x"]), 10)
    (thread,) = set(threading.enumerate()) - before
    default.clear()  # as destroy_process_group does
    del connection
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_where_a_store_is():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert is_on_this_host(dist.PrefixStore("a", dist.PrefixStore("b", server)))
    assert not is_on_this_host(dist.HashStore())


def test_where_a_store_on_another_host_is(monkeypatch):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    elsewhere = [(2, 1, 6, "", ("192.0.2.1", 0))]  # an address that is nobody's
    monkeypatch.setattr(stores.socket, "getaddrinfo", lambda *_, **__: elsewhere)
    assert not is_on_this_host(server)


def test_a_step_is_waited_for_no_longer_than_asked():
    assert run_bounded(lambda: 3, 10) == 3
    with pytest.raises(RuntimeError, match=r"not done within 0\.1 s"):
        run_bounded(lambda: time.sleep(0.5), 0.1)


def test_a_peer_compiles_while_it_says_so_and_a_moment_longer(monkeypatch):
    monkeypatch.setattr(stores, "IDLE_S", 0.3)
    connection = Connection(dist.HashStore())
    told, lookout, other = Compiler(connection, 1), Lookout(connection, "a", [1]), Lookout(connection, "a", [2])
    assert not lookout.compiles(), "nobody has ever compiled"
    with compiling():
        assert lookout.compiles()
        assert not other.compiles(), "it is none of these ranks"
    assert lookout.compiles(), "it may have work left"
    time.sleep(0.4)
    assert not lookout.compiles()
    del told


def test_a_rank_that_was_killed_while_it_compiled_is_waited_for_no_longer_than_a_kernel_takes(monkeypatch):
    monkeypatch.setattr(stores, "COMPILES_S", 0.3)
    connection = Connection(dist.HashStore())
    lookout = Lookout(connection, "a", [1])
    connection.answer(lambda store: store.set("envoi/compiling/1", "7"), 10)
    assert lookout.compiles()
    time.sleep(0.4)
    assert not lookout.compiles()


def test_a_look_never_waits_and_what_a_store_that_is_gone_says_is_nothing(silent):
    lookout, start = Lookout(Connection(silent), "a", [1]), time.monotonic()
    lookout.look()
    assert time.monotonic() - start < 0.2
    assert not lookout.compiles() and lookout.alarm is None
