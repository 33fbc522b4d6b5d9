"""Bounded waits: a peer that is lost or late ends every wait on every rank with an error that names it."""

import time
from collections.abc import Callable
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

_LOOK_S = 0.2  # how often a waiting rank looks for another's alarm
_ROLL_CALL_S = 2.0  # how long the roll call takes at most; it is a part of the timeout


class PeerTimeout(RuntimeError):  # noqa: N818
    """A rank did not take part in a step in time.

    ranks: the ranks that did not answer the roll call; empty if that can't be told (the store is gone with its rank).
    step: what was being waited for.
    """

    def __init__(self, ranks: list[int], step: str, timeout_s: float):
        self.ranks, self.step = ranks, step
        who = f"rank {', '.join(map(str, ranks))}" if ranks else "a rank that can't be named (the store is gone)"
        super().__init__(
            f"{step}: {who} is lost or did not answer within {timeout_s:g} s; "
            "this ExpertParallel can't be used any more: restart the ranks and make a new one"
        )


class _AlarmError(Exception):
    """Another rank reported a failure, or time is up."""


class Watch:
    """Waits for collectives of one group with a deadline, and finds out who is missing."""

    def __init__(self, store: Store, ranks: list[int], rank: int, timeout_s: float):
        """store: shared by all `ranks` (global ranks) and used by no one else; rank: this one, also global."""
        self.store, self.ranks, self.rank, self.timeout_s = store, ranks, rank, timeout_s
        self.roll_call_s = min(_ROLL_CALL_S, timeout_s / 2)
        self.failure: PeerTimeout | None = None

    def wait(self, start: Callable[[], dist.Work], step: str) -> None:
        """Start a collective and return when it is complete. Raises PeerTimeout; from then on at once."""
        if self.failure is not None:
            raise self.failure
        try:
            work = start()
            self._poll(work)
            work.wait()
        except (RuntimeError, _AlarmError) as error:
            self.fail(step, error)

    def fail(self, step: str, cause: Exception) -> NoReturn:
        """Raise the alarm for all ranks, call the roll and raise PeerTimeout."""
        self.failure = PeerTimeout(self._missing(), step, self.timeout_s)
        raise self.failure from cause

    def first_to_say(self, missing: list[int]) -> list[int]:
        """The ranks that the first rank to give up was missing: those that gave up later have missed it too."""
        try:
            said = self.store.compare_set("missing", "", ",".join(map(str, missing)))
        except RuntimeError:
            return missing
        return [int(rank) for rank in said.decode().split(",")]

    def _poll(self, work: dist.Work) -> None:
        start = time.monotonic()
        look, pause = start + _LOOK_S, 2e-5
        while not work.is_completed():
            now = time.monotonic()
            if now - start > self.timeout_s - self.roll_call_s or (now > look and self._alarmed()):
                raise _AlarmError
            look = max(look, now + _LOOK_S) if now > look else look
            time.sleep(pause)
            pause = min(pause * 1.5, 2e-3)

    def _alarmed(self) -> bool:
        return self.store.check(["alarm"])

    def _missing(self) -> list[int]:
        """The ranks that don't report in. A rank that is alive does: waiting ranks see the alarm within _LOOK_S."""
        end = time.monotonic() + self.roll_call_s - _LOOK_S
        try:
            self.store.set("alarm", "1")
            self.store.set(f"here/{self.rank}", "1")
            missing = self.ranks
            while missing and time.monotonic() < end:
                missing = [rank for rank in missing if not self.store.check([f"here/{rank}"])]
                time.sleep(0.02)
            # Stay a moment after the last answer: this process may host the store that others still read.
            time.sleep(_LOOK_S)
            return missing
        except RuntimeError:
            return []
