"""Pulse of a rank that compiles within a call, told through the store: hosts of its peers wait on beyond timeout_s.

    rank that compiles    every BEAT_S another number; DONE at first, and IDLE_S after it last compiled   `start`
    rank that waits       looks now and then: a rank whose number changed within FRESH_S compiles           `Peers`

A number that doesn't change any more is that of a rank that was killed while it compiled.
"""

import threading
import time
import weakref
from concurrent.futures import Future
from functools import partial

from torch.distributed.distributed_c10d import PrefixStore, Store

from envoi.moe.parallel.store import Connection
from envoi.runtime.compiling import is_compiling

BEAT_S = 0.5
IDLE_S = 1.0  # between two kernels of a call
FRESH_S = 3.0  # the compiler may keep Python's lock, and the pulse with it, for a second or two
MOST_S = 600.0  # the most that a wait is longer for ranks that compile
DONE = "0"
_started: "weakref.WeakSet[Connection]" = weakref.WeakSet()


def start(connection: Connection, rank: int) -> None:
    """Let a thread tell the store while this process compiles, until the connection is gone. rank: this one, global."""
    if connection not in _started:
        _started.add(connection)
        given = weakref.ref(connection), rank, threading.Event()
        weakref.finalize(connection, given[-1].set)
        threading.Thread(target=_beat, args=given, name="envoi-pulse", daemon=True).start()


class Peers:
    """Peers whose pulse a rank looks at. ranks: global ones."""

    def __init__(self, connection: Connection, ranks: list[int]):
        """Remember no number yet."""
        self.connection, self.ranks = connection, ranks
        self._seen: dict[int, tuple[str, float]] = {}  # a rank's number, and since when it is this one
        self._answer: Future[dict[int, str]] | None = None

    def look(self) -> None:
        """Ask for the numbers, unless the store still owes an answer, and read what it has answered; never wait."""
        if self._answer is not None and self._answer.done():
            numbers = {} if self._answer.exception() else self._answer.result()
            for rank, number in numbers.items():
                if self._seen.get(rank, ("", 0.0))[0] != number:
                    self._seen[rank] = number, time.monotonic()
            self._answer = None
        if self._answer is None:
            self._answer = self.connection.ask(partial(_numbers, ranks=self.ranks))

    def compile(self) -> bool:
        """Return whether a rank compiles, by what `look` has read."""
        now = time.monotonic()
        return any(number != DONE and now - since < FRESH_S for number, since in self._seen.values())


def _numbers(store: Store, ranks: list[int]) -> dict[int, str]:
    ours = PrefixStore("envoi/compiling", store)
    return {rank: ours.get(str(rank)).decode() for rank in ranks if ours.check([str(rank)])}


def _tell(store: Store, rank: int, number: str) -> None:
    PrefixStore("envoi/compiling", store).set(str(rank), number)


def _beat(connection: "weakref.ref[Connection]", rank: int, stop: threading.Event) -> None:
    beats, told, busy_until = 0, "", 0.0
    while True:
        now, owner = time.monotonic(), connection()
        if owner is None:
            return
        if is_compiling():
            busy_until = now + IDLE_S
        beats += now < busy_until
        number = str(beats) if now < busy_until else DONE
        if number != told:
            owner.ask(partial(_tell, rank=rank, number=number))
            told = number
        del owner
        if stop.wait(BEAT_S):
            return
