"""Bounded waits: a peer that is lost or late ends every wait on every rank with an error that names it."""

import time
from collections.abc import Callable
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

_LOOK_S = 0.2  # interval at which a waiting rank checks for another's alarm
_ROLL_CALL_S = 2.0  # the most that the roll call takes; it is a part of the timeout
_GRACE_S = 1.0  # for the rest of the opening, where the last rank joins at the last moment
_JOIN_S = 0.01  # interval at which a rank that opens checks whether all have joined


class PeerTimeout(RuntimeError):  # noqa: N818
    """Error of a step in which a rank did not take part in time.

    ranks: the ranks that did not answer the roll call, or that answered and were late. Empty if all answered and none
    was later than the others, and if that can't be told (the store is gone with its rank): the message says which.
    step: the step that timed out.
    """

    def __init__(
        self, ranks: list[int] | None, step: str, timeout_s: float, answered: bool = False, rank: int | None = None
    ):
        """Make the message. ranks: None if the store is gone. answered: these did answer. rank: the one that raises."""
        self.ranks, self.step = ranks or [], step
        names = ", ".join(f"{late} (this one)" if late == rank else str(late) for late in self.ranks)
        if ranks is None:
            who = f"a rank that can't be named (the store is gone) is lost or did not answer within {timeout_s:g} s"
        elif rank in ranks:
            who = f"rank {names} was late: the others gave up within {timeout_s:g} s"
        elif not ranks:
            who = f"all ranks are there, but the exchange was not done within {timeout_s:g} s"
        elif answered:
            who = f"rank {names} was late: it is there, but came only after the others gave up"
        else:
            who = f"rank {names} is lost or did not answer within {timeout_s:g} s"
        what_now = "this ExpertParallel can't be used any more: restart the ranks and make a new one"
        super().__init__(f"{step}: {who}; {what_now}")


class _AlarmError(Exception):
    """Signal within `Watch`: another rank reported a failure, or time is up."""


class Watch:
    """Waits for collectives of one group with a deadline, and for a failed one the ranks that are missing."""

    def __init__(self, store: Store, ranks: list[int], rank: int, timeout_s: float):
        """Start the opening of the group: until `opened`, the sum of all waits is bounded by timeout_s.

        store: shared by all `ranks` (global ranks) and used by no one else; rank: this one, also global.
        """
        self.store, self.ranks, self.rank, self.timeout_s = store, ranks, rank, timeout_s
        self.roll_call_s = min(_ROLL_CALL_S, timeout_s / 2)
        self.failure: PeerTimeout | None = None
        self.deadline: float | None = time.monotonic() + timeout_s - self.roll_call_s

    def join(self, step: str) -> float:
        """Return when all ranks have called this: the seconds that are left to connect them. Raises PeerTimeout."""
        came, start = [f"came/{rank}" for rank in self.ranks], time.monotonic()
        end = self.deadline or self._end(start)
        try:
            self.store.set(f"came/{self.rank}", "1")
            # The alarm first: ranks that gave up have joined too.
            self._look(end)
            while not self.store.check(came):
                self._look(end)
                time.sleep(_JOIN_S)
        except (RuntimeError, _AlarmError) as error:
            self.fail(step, error, time.monotonic() - start)
        self.deadline = max(end, time.monotonic() + _GRACE_S)
        return self.deadline - time.monotonic()

    def opened(self) -> None:
        """End the opening: from now on each wait has a timeout_s of its own."""
        self.deadline = None

    def wait(self, start: Callable[[], dist.Work], step: str) -> None:
        """Start a collective and return when it is complete. Raises PeerTimeout, and after a failure always at once."""
        if self.failure is not None:
            raise self.failure
        began = time.monotonic()
        try:
            work = start()
            self._poll(work, self.deadline or self._end(began))
            work.wait()
        except (RuntimeError, _AlarmError) as error:
            self.fail(step, error, time.monotonic() - began)

    def fail(self, step: str, cause: Exception, waited_s: float) -> NoReturn:
        """Raise the alarm for all ranks, call the roll, raise PeerTimeout. waited_s: this rank's wait in this step."""
        waited = self._call_roll(waited_s)
        missing = None if waited is None else [rank for rank in self.ranks if rank not in waited]
        answered = missing == []
        if waited is not None and answered:
            # All answered. A late rank has itself waited for less than half as long as the rank that waited longest.
            missing = [rank for rank in self.ranks if waited[rank] < max(waited.values()) / 2]
        self.failure = PeerTimeout(missing, step, self.timeout_s, answered, self.rank)
        raise self.failure from cause

    def first_to_say(self, missing: list[int]) -> list[int]:
        """Return the ranks that the first rank to give up was missing: later ones have missed the first one too."""
        try:
            said = self.store.compare_set("missing", "", ",".join(map(str, missing)))
        except RuntimeError:
            return missing
        return [int(rank) for rank in said.decode().split(",")]

    def _end(self, start: float) -> float:
        return start + self.timeout_s - self.roll_call_s

    def _poll(self, work: dist.Work, end: float) -> None:
        look, pause = time.monotonic() + _LOOK_S, 2e-5
        while not work.is_completed():
            now = time.monotonic()
            if now > end or (now > look and self._alarmed()):
                raise _AlarmError
            look = max(look, now + _LOOK_S) if now > look else look
            time.sleep(pause)
            pause = min(pause * 1.5, 2e-3)

    def _look(self, end: float) -> None:
        if time.monotonic() > end or self._alarmed():
            raise _AlarmError

    def _alarmed(self) -> bool:
        return self.store.check(["alarm"])

    def _call_roll(self, waited_s: float) -> dict[int, float] | None:
        """Return the seconds that each rank which answers has waited; None if the store is gone.

        Every rank that is alive answers: waiting ranks see the alarm within _LOOK_S.
        """
        end = time.monotonic() + self.roll_call_s - _LOOK_S
        try:
            self.store.set("alarm", "1")
            self.store.set(f"here/{self.rank}", f"{waited_s:.3f}")
            missing = self.ranks
            while missing and time.monotonic() < end:
                missing = [rank for rank in missing if not self.store.check([f"here/{rank}"])]
                time.sleep(0.02)
            waited = {rank: float(self.store.get(f"here/{rank}")) for rank in self.ranks if rank not in missing}
            # Stay a moment after the last answer: this process may host the store that others still read.
            time.sleep(_LOOK_S)
            return waited
        except RuntimeError:
            return None
