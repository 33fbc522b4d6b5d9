"""Pulse of a rank that compiles within a call, told through the store: hosts of its peers wait on beyond timeout_s.

    rank that compiles    at once, then every BEAT_S another number; DONE at first, and IDLE_S after it   `start`
    rank that waits       looks now and then, and again before it gives up: `Peers`

It waits for FRESH_S after the last number: for a rank that compiles and was killed, or has work left.
"""

import math
import threading
import time
import weakref
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from contextlib import suppress
from functools import partial

from torch.distributed.distributed_c10d import PrefixStore, Store

from envoi.ops.moe.parallel.store import Connection
from envoi.runtime.compiling import is_compiling, listen
from envoi.runtime.wake import Wake

BEAT_S = 0.5
IDLE_S = 1.0  # between two kernels of a call
FRESH_S = 3.0  # the compiler may keep Python's lock, and the pulse with it, for a second or two
ANSWER_S = 0.5  # for which the last look waits for the store
MOST_S = 600.0  # the most that a wait is longer for ranks that compile
DONE = "0"
_started: "weakref.WeakSet[Connection]" = weakref.WeakSet()


def start(connection: Connection, rank: int) -> None:
    """Let a thread tell the store while this process compiles, until the connection is gone. rank: this one, global."""
    if connection not in _started:
        _started.add(connection)
        given = weakref.ref(connection), rank, Wake()
        weakref.finalize(connection, given[-1].set)
        listen(given[-1])
        threading.Thread(target=_beat, args=given, name="envoi-pulse", daemon=True).start()


class Peers:
    """Peers whose pulse a rank looks at. ranks: global ones."""

    def __init__(self, connection: Connection, ranks: list[int]):
        """Remember no number yet."""
        self.connection, self.ranks = connection, ranks
        self._numbers: dict[int, str] = {}
        self._last_beat = -math.inf
        self._answer: Future[dict[int, str]] | None = None

    def look(self) -> None:
        """Ask for the numbers, unless the store still owes an answer, and read what it has answered; never wait."""
        if self._answer is not None and self._answer.done():
            self._read({} if self._answer.exception() else self._answer.result())
            self._answer = None
        if self._answer is None:
            self._answer = self.connection.ask(partial(_numbers, ranks=self.ranks))

    def compile(self) -> bool:
        """Return whether a rank compiles, or did a moment ago. Asks once more, and waits for the answer a moment."""
        with suppress(RuntimeError, NotDone):  # of a store that is gone or silent
            self._read(self.connection.ask(partial(_numbers, ranks=self.ranks)).result(ANSWER_S))
        return time.monotonic() < self._last_beat + FRESH_S

    def _read(self, numbers: dict[int, str]) -> None:
        if any(number not in (DONE, self._numbers.get(rank)) for rank, number in numbers.items()):
            self._last_beat = time.monotonic()
        self._numbers |= numbers


def _numbers(store: Store, ranks: list[int]) -> dict[int, str]:
    ours = PrefixStore("envoi/compiling", store)
    return {rank: ours.get(str(rank)).decode() for rank in ranks if ours.check([str(rank)])}


def _tell(store: Store, rank: int, number: str) -> None:
    PrefixStore("envoi/compiling", store).set(str(rank), number)


def _beat(connection: "weakref.ref[Connection]", rank: int, wake: Wake) -> None:
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
        wake.wait(BEAT_S)
