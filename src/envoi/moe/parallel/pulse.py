"""Pulse of a rank that compiles, told through the store: what peers wait for isn't lost, and they wait on.

    rank that compiles    every BEAT_S another number, 0 when it is done    a thread, `start`
    rank that waits       at the end of its patience: did a number change?  `Peers.compile`

Numbers that don't change any more are those of a rank that was killed while it compiled.
"""

import threading
import weakref
from functools import partial

from torch.distributed.distributed_c10d import PrefixStore, Store

from envoi.moe.parallel.store import Connection
from envoi.runtime.compiling import compiling_for

BEAT_S = 0.5
LEAST_S = 0.3  # a kernel that is in the cache on disk is loaded in less
# Until the next look: the compiler may keep Python's lock, and the pulse with it, for a second or two.
EXTRA_S = 3.0
ANSWER_S = 0.3  # for which a look waits for the store
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
        """Remember no pulse yet."""
        self.connection, self.ranks = connection, ranks
        self._seen: dict[int, str] = {}

    def compile(self) -> bool:
        """Return whether a rank compiles: its number is another than at the last look. False without a store."""
        try:
            now = self.connection.answer(partial(_numbers, ranks=self.ranks), ANSWER_S)
        except RuntimeError:
            return False
        before, self._seen = self._seen, now
        return any(number not in (DONE, before.get(rank)) for rank, number in now.items())


def _numbers(store: Store, ranks: list[int]) -> dict[int, str]:
    ours = PrefixStore("envoi/compiling", store)
    return {rank: ours.get(str(rank)).decode() for rank in ranks if ours.check([str(rank)])}


def _tell(store: Store, rank: int, number: str) -> None:
    PrefixStore("envoi/compiling", store).set(str(rank), number)


def _beat(connection: "weakref.ref[Connection]", rank: int, stop: threading.Event) -> None:
    beats, told = 0, DONE
    while not stop.wait(BEAT_S):
        owner = connection()
        if owner is None:
            return
        busy = compiling_for() > LEAST_S
        beats += busy
        number = str(beats) if busy else DONE
        if number != told:
            owner.ask(partial(_tell, rank=rank, number=number))
            told = number
        del owner
