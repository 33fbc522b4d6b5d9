"""Store of the default group: requests to it, made by a thread so that every wait is bounded, and what ranks say there.

A store on another host answers only while the network does: a request over a dead link returns after minutes, whatever
the store's own timeout. So each process has a connection of its own beside the user's, and a thread that makes the
requests one after the other.
"""

import math
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from concurrent.futures import wait as wait_for_futures
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from envoi.runtime.compiling import is_compiling, listen

T = TypeVar("T")
Request = Callable[[Store], T]

ANSWER_S = 0.05  # for which a thread that oversees waits for the store
COMPILES_S = 60.0  # for which a rank may compile one kernel, after which it counts as lost
IDLE_S = 1.0  # between two kernels that a rank compiles within a call
NO_COMPILER = "0"

# One connection for each default store. One that stays silent is replaced at the next call of `connect`.
_connections: "weakref.WeakKeyDictionary[Store, Connection]" = weakref.WeakKeyDictionary()


class StoreSilentError(RuntimeError):
    """Error of a request that the store did not answer in time."""


class Connection:
    """Connection to a store, with the thread that makes its requests. compiler: tells peers when this rank compiles."""

    def __init__(self, store: Store):
        """Connect to the server of `store`, in the thread."""
        self.is_silent = False
        self.compiler: Compiler | None = None
        self._requests: queue.SimpleQueue = queue.SimpleQueue()
        self._requests.put(store)
        threading.Thread(target=_serve, args=(self._requests,), name="envoi-store", daemon=True).start()
        weakref.finalize(self, self._requests.put, None)

    def ask(self, request: Request[T]) -> "Future[T]":
        """Queue a request, a function of the store; return its future at once."""
        future: Future[T] = Future()
        self._requests.put((request, future))
        return future

    def answer(self, request: Request[T], within_s: float) -> T:
        """Make a request and return its answer. Raises StoreSilentError after within_s, RuntimeError if it is gone."""
        try:
            return self.ask(request).result(max(0.0, within_s))
        except NotDone:
            self.is_silent = True
            raise StoreSilentError(f"the store did not answer within {within_s:.1f} s") from None


class Lookout:
    """What other ranks say in the store, for one thread to ask now and then. ranks: peers that may compile; global.

    alarm: the number that the first rank to fail gave, None if none has failed: see `Watch.fail`.
    """

    def __init__(self, connection: Connection, name: str, ranks: list[int]):
        """Ask nothing yet. name: as of a `Watch`."""
        self.alarm: int | None = None
        self._connection, self._name, self._ranks = connection, name, ranks
        self._asked: Future | None = None
        self._compilers: dict[int, str] = {}
        self._changed = -math.inf  # when it was seen that other ranks compile, or other kernels

    def look(self, within_s: float = 0.0) -> None:
        """Take the store's answer if there is one within a moment, and ask if it owes none. RuntimeError: gone."""
        asked = self._asked = self._asked or self._connection.ask(self._read)
        if within_s:
            wait_for_futures([asked], within_s)
        if asked.done():
            self._asked = None
            self.alarm, compilers = asked.result()
            if compilers != self._compilers:
                self._compilers, self._changed = compilers, time.monotonic()

    def compiles(self) -> bool:
        """Tell whether a peer compiles, or did a moment ago. Asks once more, and waits for the answer a moment."""
        for _ in range(2 if self._ranks else 0):  # the first may be an earlier answer
            with suppress(RuntimeError):
                self.look(10 * ANSWER_S)
        return time.monotonic() - self._changed < (COMPILES_S if self._compilers else IDLE_S)

    def _read(self, store: Store) -> tuple[int | None, dict[int, str]]:
        ours, keys = PrefixStore(self._name, store), {rank: f"envoi/compiling/{rank}" for rank in self._ranks}
        alarm = int(ours.get("alarm")) if ours.check(["alarm"]) else None
        numbers = {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}
        return alarm, {rank: number for rank, number in numbers.items() if number != NO_COMPILER}


class Compiler:
    """Listener of `runtime.compiling`, which tells the store when this rank begins and ends to compile."""

    def __init__(self, connection: Connection, rank: int):
        """Say that this rank compiles nothing, and listen. rank: this one, global."""
        self._connection, self._rank, self._count = weakref.ref(connection), rank, 0
        self.set()
        listen(self)

    def set(self) -> None:
        """Tell what is so now: NO_COMPILER, or another number than before."""
        connection, self._count = self._connection(), self._count + 1
        number = str(self._count) if is_compiling() else NO_COMPILER
        if connection is not None:
            connection.ask(lambda store: store.set(f"envoi/compiling/{self._rank}", number))


def connect() -> Connection:
    """Return this process's connection to the default group's store."""
    store = dist.distributed_c10d._get_default_store()
    connection = _connections.get(store)
    if connection is None or connection.is_silent:
        connection = _connections[store] = Connection(store)
    return connection


def is_on_this_host(store: Store) -> bool:
    """Return True if the store's server listens on an address of this host. A file counts as one on another host."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    server = getattr(store, "host", None)  # only a TCPStore has one
    if server is None:
        return False
    try:
        family, kind, proto, _, address = socket.getaddrinfo(server, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.bind(address)  # only an address of one's own can be bound
    except OSError:
        return False
    return True


def run_bounded(step: Callable[[], T], within_s: float) -> T:
    """Run a step in a thread and return its result. Raises RuntimeError if that takes longer than within_s."""
    try:
        return in_thread(step).result(max(0.0, within_s))
    except NotDone:
        raise RuntimeError(f"not done within {within_s:.1f} s") from None


def in_thread(step: Callable[[], T]) -> "Future[T]":
    """Start a step in a thread of its own, which doesn't keep the process from ending; return its future."""
    future: Future[T] = Future()
    threading.Thread(target=_fulfil, args=(future, step), name="envoi-open", daemon=True).start()
    return future


def _serve(requests: queue.SimpleQueue) -> None:
    """Connect to the store that is first in the queue, then answer requests until there is a None.

    Holds neither the Connection nor that store, so that both, and this thread, end with their last user.
    """
    opened: Future[Store] = Future()
    _fulfil(opened, requests.get().clone)
    while (item := requests.get()) is not None:
        request, future = item
        _fulfil(future, lambda request=request: request(opened.result()))
        del item, request, future


def _fulfil(future: Future, step: Callable[[], Any]) -> None:
    try:
        result = step()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
