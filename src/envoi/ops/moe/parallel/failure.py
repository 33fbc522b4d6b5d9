"""Lost and late ranks: each wait for a peer is bounded, and ends on every rank with an error that names who is missing.

    join, connect, wait, wait_for_first, queue and finish     bounded waits of a `Watch`
    fail                                                      alarm for all, roll call through the store, PeerTimeout

Where no host waits, a thread does: see `oversee`.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait as wait_for_futures
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from envoi.ops.moe.parallel.store import (
    Compiler,
    Connection,
    Lookout,
    Request,
    StoreSilentError,
    in_thread,
    run_bounded,
)

T = TypeVar("T")

_SPIN_S = 3e-4  # for how long a wait looks without a pause: most collectives of counts are over by then
LOOK_S = 0.2  # interval at which a waiting rank looks at what others say
_ROLL_CALL_S = 2.0  # the most that the roll call takes; it is a part of the timeout
_GRACE_S = 1.0  # for the rest of the opening, where the last rank joins at the last moment
CONNECT_S = 30.0  # the least that a library has to connect ranks, which takes seconds on busy or many hosts
MOST_S = 600.0  # the most that a wait is longer for ranks that compile
NOBODY = 1 << 62  # number that no rank has reached, for a wait that idle ranks have no part in
DONE_S = math.inf  # seconds of waiting that a rank states which is done with what others wait for
_JOIN_S = 0.01  # interval at which a rank that opens checks whether all have joined


class PeerTimeout(RuntimeError):  # noqa: N818
    """Error of a step in which a rank did not take part in time.

    ranks: the ranks that did not answer the roll call, or that answered and were late, or that can't be connected, for
    want of memory for instance; where no connection leads to the store that the roll is called through, the ranks on
    the store's host. Empty if all answered and none was later than the others, and if that can't be told: the message
    says which.
    step: the step that timed out.
    """

    def __init__(
        self, ranks: list[int], step: str, timeout_s: float, answered: bool = False, rank: int | None = None,
        store: str = "", cause: str = "",
    ):  # fmt: skip
        """Make the message. answered: these did answer. rank: the one that raises. store: "", or "gone", "silent".

        cause: the error that the exchange itself ended with, of these ranks or, if there are none, of this one; or "".
        """
        self.ranks, self.step = ranks, step
        names = ", ".join(f"{late} (this one)" if late == rank else str(late) for late in ranks)
        within = f"within {timeout_s:g} s"
        if store == "gone":
            who = f"a rank that can't be named (the store is gone) is lost or did not answer {within}"
        elif store == "silent" and not ranks:
            who = f"a rank that can't be named (the store did not answer) is lost or did not answer {within}"
        elif store == "silent":
            who = f"rank {names} did not answer {within}: no connection to the store's host, which is theirs"
        elif ranks and cause:
            who = f"rank {names} failed: {cause}"
        elif rank in ranks:
            who = f"rank {names} was late: the others gave up {within}"
        elif not ranks and cause:
            who = f"all ranks are there, but the exchange failed: {cause}"
        elif not ranks:
            who = f"all ranks are there, but the exchange was not done {within}"
        elif answered:
            who = f"rank {names} was late: it is there, but came only after the others gave up"
        else:
            who = f"rank {names} is lost or did not answer {within}"
        what_now = "this ExpertParallel can't be used any more: restart the ranks and make a new one"
        if store == "silent":
            what_now = "this ExpertParallel can't be used any more: make a new one once the network is back"
        super().__init__(f"{step}: {who}; {what_now}")
        self._made_of = ranks, step, timeout_s, answered, rank, store, cause

    def __reduce__(self) -> tuple:
        """Pickle by what it was made of: processes that start others send their errors back."""
        return type(self), self._made_of


class _AlarmError(Exception):
    """Signal within `Watch`: another rank reported a failure, or time is up."""


class Queued(NamedTuple):
    """Collective that later work on the device waits for. number: of all so far. began: when it was queued."""

    work: dist.Work
    step: str
    number: int
    began: float


class Point(NamedTuple):
    """How far the calls of a rank have come.

    mark: changes with every progress. step: what is waited for, None if the rank is idle. number: of calls, or of
    collectives, which ranks have done that are past it. done: those that this rank has done. began: when the wait did,
    None = when the mark has changed.
    """

    mark: object
    step: str | None
    number: int
    done: int
    began: float | None = None


class Watch:
    """Waits for collectives of one group with a deadline, and for a failed one the ranks that are missing."""

    def __init__(self, connection: Connection, name: str, ranks: list[int], rank: int, timeout_s: float):
        """Start the opening of the group: until `opened`, the sum of all waits is bounded by timeout_s.

        The wait of `wait_for_first` doesn't count.

        connection: to a store that all `ranks` (global ranks) share, in which no one else uses names that begin with
        `name`; rank: this one, also global.
        """
        self.connection, self.name, self.ranks, self.rank, self.timeout_s = connection, name, ranks, rank, timeout_s
        self.roll_call_s = min(_ROLL_CALL_S, timeout_s / 2)
        self.failure: PeerTimeout | None = None
        self.deadline: float | None = time.monotonic() + timeout_s - self.roll_call_s
        self.ranks_by_store: list[int] = []
        self.end: Callable[[], object] = lambda: None  # begins to end collectives that wait for a lost peer
        self.broken: Callable[[], str] = lambda: ""  # says why collectives failed, though they count as complete
        self.marks: Any = None  # of what is queued
        self.lookout = Lookout(connection, name, [])
        self.count = 0  # of collectives that were queued
        self._failing = threading.Lock()
        self._queued: list[Queued] = []

    @property
    def patience_s(self) -> float:
        """Seconds to wait before the roll is called, which takes the rest of timeout_s."""
        return self.timeout_s - self.roll_call_s

    def may_be_asked(self, idle_s: float) -> bool:
        """Tell whether peers may be calling the roll now for a call that this rank has done, idle for so long since.

        They began to wait at about the time at which it was done, and patience is the same everywhere. At other times
        an idle rank leaves the store alone, which may be gone with the process that has it.
        """
        return self.patience_s - self.roll_call_s < idle_s < self.timeout_s + LOOK_S

    @property
    def left_s(self) -> float:
        """Seconds that are left to open the group, at least a moment."""
        return max(_GRACE_S, (self.deadline or 0.0) - time.monotonic())

    def join(self, step: str) -> float:
        """Return when all ranks have called this: the seconds that are left to connect them. Raises PeerTimeout."""
        came, end = [f"came/{rank}" for rank in self.ranks], self.deadline or self._end(time.monotonic())
        with self._guard(step):
            self._ask_by(end, lambda store: store.set(f"came/{self.rank}", "1"))
            # The alarm first: ranks that gave up have joined too.
            self._look(end)
            while not self._ask_by(end, lambda store: store.check(came)):
                self._look(end)
                time.sleep(_JOIN_S)
        self.deadline = max(end, time.monotonic() + _GRACE_S)
        return self.deadline - time.monotonic()

    def connect(self, step: str, make: Callable[[Store], T], within_s: float) -> T:
        """Make a process group with a store, within a deadline of its own and within_s. Raises PeerTimeout."""
        with self._guard(step):
            shared = self.ask(lambda store: store, within_s)
            return run_bounded(lambda: make(shared), within_s + _GRACE_S)

    def opened(self, by_store: list[int]) -> None:
        """End the opening: from now on each wait has a timeout_s of its own.

        by_store: for each rank of the group, 1 if it runs on the host of the store.
        """
        self.ranks_by_store = [rank for rank, here in zip(self.ranks, by_store, strict=True) if here]
        self.deadline = None

    def wait_for_compilers(self) -> None:
        """Let waits for collectives last longer than timeout_s while a rank compiles, on this rank and its peers."""
        if self.connection.compiler is None:
            self.connection.compiler = Compiler(self.connection, self.rank)
        self.lookout = self.new_lookout()

    def new_lookout(self) -> Lookout:
        """Return the lookout of one more thread, on all ranks but this one."""
        return Lookout(self.connection, self.name, [rank for rank in self.ranks if rank != self.rank])

    def ask(self, request: Request[T], within_s: float) -> T:
        """Make a request to the part of the store that is ours. Raises StoreSilentError, RuntimeError: it is gone."""
        return self.connection.answer(self._ours(request), within_s)

    def wait(self, start: Callable[[], dist.Work], step: str) -> None:
        """Start a collective and return when it is complete. Raises PeerTimeout, and after a failure always at once."""
        with self._guard(step) as began:
            work = start()
            self._poll(work.is_completed, self.deadline or self._end(began))
            work.wait()

    def wait_for_first(self, start: Callable[[], object], step: str) -> None:
        """Start a group's first collective in a thread and wait until it is begun. Raises PeerTimeout.

        start: a function that may return late, or never: another rank's alarm or the end of the patience ends the wait.
        A rank on which it raises is named on all ranks, with its error. While the group is being opened this wait has a
        timeout_s of its own, or CONNECT_S if that is more: a library that connects many ranks may take longer than all
        else.
        """
        within_s = max(self.timeout_s, CONNECT_S)
        with self._guard(step, within_s=within_s) as began:
            first = in_thread(start)
            while not first.done():
                self._look(began + within_s - self.roll_call_s)
                wait_for_futures([first], LOOK_S)
        try:
            first.result()
        except Exception as error:  # whatever it is, the peers have to hear of it
            self.fail(step, error, time.monotonic() - began, says_why=True)
        if self.deadline is not None:
            self.deadline += time.monotonic() - began

    def queue(self, start: Callable[[], dist.Work], step: str) -> None:
        """Start a collective that later work on the device waits for, and the host in `finish`. Raises PeerTimeout."""
        # Those of a call that ended with another error are still here.
        self._queued = [queued for queued in self._queued if not self._is_complete(queued)]
        number = self.count
        try:
            with self._guard(step, number=number + 1) as began:
                self.count += 1
                work = start()
                self._queued.append(Queued(work, step, number, began))
                work.wait()  # of NCCL: makes the current stream wait
                if self.marks is not None:
                    self.marks.mark(number)
        except RuntimeError:
            raise
        except BaseException:  # interrupted: what has no mark would never be past
            self._queued = [queued for queued in self._queued if queued.number != number]
            raise

    def pending(self) -> Queued | None:
        """Return the first collective that was queued and that the device isn't past. For any thread, with `marks`."""
        return next((queued for queued in tuple(self._queued) if not self._is_complete(queued)), None)

    def point(self) -> Point:
        """Return how far the queued collectives have come. For any thread, with `marks`."""
        queued, count = self.pending(), self.count
        if queued is None:
            return Point((count, None), None, NOBODY, count)
        return Point((count, queued.number), queued.step, queued.number + 1, count, queued.began)

    def finish(self) -> None:
        """Return when all collectives that were queued are complete. Raises PeerTimeout."""
        began = time.monotonic()
        for queued in self._queued:
            try:
                with self._guard(queued.step, number=queued.number + 1, began=began):
                    self._poll(partial(self._is_complete, queued), self._end(began))
                    if why := self.broken():
                        raise RuntimeError(why)
            except PeerTimeout:
                self._queued = []
                raise
        self._queued = []
        with self._failing:  # a thread that watches may be about to find, and have ended the collectives already
            failure = self.failure
        if failure is not None:
            raise failure

    def fail(
        self, step: str, cause: Exception, waited_s: float, says_why: bool = False, within_s: float | None = None,
        number: int = NOBODY,
    ) -> NoReturn:  # fmt: skip
        """Raise the alarm for all ranks, call the roll, raise PeerTimeout, the same in all threads.

        waited_s: this rank's wait in this step, or DONE_S. says_why: tell the others why this rank failed, if it did by
        itself: it is the one to be named. within_s: the step's own timeout, None = timeout_s. number: of calls, or of
        collectives that hosts queued, which ranks have done that are past what this one waits for.
        """
        with self._failing:
            if self.failure is None:
                with suppress(RuntimeError):
                    self.end()
                ranks, answered, store, why = self._explain(cause, waited_s, says_why, number)
                within_s = within_s or self.timeout_s
                failure = PeerTimeout(ranks, step, within_s, answered, self.rank, store, why)
                failure.__cause__ = cause
                self.failure = failure
        raise self.failure

    def _explain(
        self, cause: Exception, waited_s: float, says_why: bool, number: int
    ) -> tuple[list[int], bool, str, str]:
        """Return `ranks`, `answered`, `store` and `cause` of the PeerTimeout."""
        missing, answered, store, why = [], False, "", line_of(cause)
        try:
            waited, reasons = self._call_roll(waited_s, why if says_why else "", number)
            missing = [rank for rank in self.ranks if rank not in waited]
            answered = not missing
            if answered:
                # All answered. A late rank has itself waited for less than half as long as the one that waited longest.
                longest = max((seconds for seconds in waited.values() if seconds != DONE_S), default=0.0)
                missing = [rank for rank in self.ranks if waited[rank] < longest / 2]
            short = [rank for rank, reason in reasons.items() if "out of memory" in reason]
            if answered and reasons:
                missing = sorted(short or reasons)  # whoever lacks memory has made the others' exchange fail
                why = reasons[missing[0]]
            elif missing:
                why = ""
        except StoreSilentError:
            store, missing = "silent", self.ranks_by_store if self.rank not in self.ranks_by_store else []
        except RuntimeError:
            store = "gone"
        return missing, answered, store, why

    def first_to_say(self, missing: list[int]) -> list[int]:
        """Return the ranks that the first rank to give up was missing: later ones have missed the first one too."""
        mine = ",".join(map(str, missing))
        try:
            said = self.ask(lambda store: store.compare_set("missing", "", mine), self.roll_call_s)
        except RuntimeError:
            return missing
        return [int(rank) for rank in said.decode().split(",")]

    @contextmanager
    def _guard(
        self, step: str, number: int = NOBODY, within_s: float | None = None, began: float | None = None
    ) -> Iterator[float]:
        """Let this group fail if what is within the context does; the context is the time at which it began.

        began: this time, if the wait began before the context. Other arguments as for `fail`. Raises an earlier failure
        at once.
        """
        if self.failure is not None:
            raise self.failure
        began = time.monotonic() if began is None else began
        try:
            yield began
        except (RuntimeError, _AlarmError) as error:
            self.fail(step, error, time.monotonic() - began, within_s=within_s, number=number)

    def _ours(self, request: Request[T]) -> Request[T]:
        return lambda store: request(PrefixStore(self.name, store))

    def _end(self, start: float) -> float:
        return start + self.patience_s

    def _is_complete(self, queued: Queued) -> bool:
        return queued.work.is_completed() if self.marks is None else self.marks.is_past(queued.number)

    def _poll(self, is_complete: Callable[[], bool], end: float) -> None:
        began = time.monotonic()
        look, pause, limit = began + LOOK_S, 2e-5, end + MOST_S
        while not is_complete():
            if self.failure is not None:
                raise self.failure
            now = time.monotonic()
            if now > look:
                self.lookout.look()
                look = now + LOOK_S
            if self.lookout.alarm is not None or (now > end and not (now < limit and self.lookout.compiles())):
                raise _AlarmError
            if now < began + _SPIN_S:
                time.sleep(0)  # other threads' turn; a timer would take 50 us more than it is asked for
                continue
            time.sleep(pause)
            pause = min(pause * 1.5, 2e-3)

    def _look(self, end: float) -> None:
        if time.monotonic() > end or self._ask_by(end, lambda store: store.check(["alarm"])):
            raise _AlarmError

    def _ask_by(self, end: float, request: Request[T]) -> T:
        """Ask; the store has until `end` for its answer, but at least a moment: at the end it isn't silent yet."""
        return self.ask(request, max(LOOK_S, end - time.monotonic()))

    def _call_roll(self, waited_s: float, reason: str, number: int) -> tuple[dict[int, float], dict[int, str]]:
        """Return the seconds that each rank which answers has waited, and the reasons of those that failed.

        Every rank that waits answers: it sees the alarm within LOOK_S. So do ranks that are past what this one waits
        for, where a thread looks and the patience of this one has ended. Raises StoreSilentError; RuntimeError if the
        store is gone.
        """
        end = time.monotonic() + self.roll_call_s - LOOK_S
        said: dict[int, str] = {}

        def answers(store: Store) -> dict[int, str]:
            missing = [rank for rank in self.ranks if rank not in said and store.check([f"here/{rank}"])]
            return {rank: store.get(f"here/{rank}").decode() for rank in missing}

        self._ask_by(end, lambda store: store.compare_set("alarm", "", str(number)))  # the first one's stays
        self._ask_by(end, lambda store: store.set(f"here/{self.rank}", f"{waited_s:.3f} {reason}"))
        while len(said) < len(self.ranks) and time.monotonic() < end:
            said |= self._ask_by(end, answers)
            time.sleep(0.02)
        # Stay a moment after the last answer: this process may host the store that others still read.
        time.sleep(LOOK_S)
        parts = {rank: text.partition(" ") for rank, text in said.items()}
        waited = {rank: float(seconds) for rank, (seconds, _, _) in parts.items()}
        return waited, {rank: why for rank, (_, _, why) in parts.items() if why}


def line_of(error: Exception) -> str:
    """Return the line of an error's text that says most, that on memory or the first; "" for the end of a wait."""
    if isinstance(error, _AlarmError | TimeoutError):
        return ""
    lines = str(error).splitlines() or [type(error).__name__]
    return next((line for line in lines if "out of memory" in line), lines[0])
