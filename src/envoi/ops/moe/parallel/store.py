"""Requests to the default group's store, made by a thread: every wait for the store is bounded.

A store on another host answers only while the network does: a request over a dead link returns after minutes,
whatever the store's own timeout. So each process has a connection of its own beside the user's, and a thread that makes
the requests one after the other.
"""

import queue
import socket
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

T = TypeVar("T")
Request = Callable[[Store], T]

# One connection for each default store. One that stays silent is replaced at the next call of `connect`.
_connections: "weakref.WeakKeyDictionary[Store, Connection]" = weakref.WeakKeyDictionary()


class StoreSilentError(RuntimeError):
    """Error of a request that the store did not answer in time."""


class Connection:
    """Connection to a store, with the thread that makes its requests."""

    def __init__(self, store: Store):
        """Connect to the server of `store`, in the thread."""
        self.is_silent = False
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
        """Make a request and return its answer. Raises StoreSilentError if that takes longer than within_s.

        Raises RuntimeError if the store is gone.
        """
        try:
            return self.ask(request).result(max(0.0, within_s))
        except NotDone:
            self.is_silent = True
            raise StoreSilentError(f"the store did not answer within {within_s:.1f} s") from None


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
        _fulfil(future, partial(_make_request, request, opened))
        del item, request, future


def _make_request(request: Request[T], opened: "Future[Store]") -> T:
    return request(opened.result())


def _fulfil(future: Future, step: Callable[[], Any]) -> None:
    try:
        result = step()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
