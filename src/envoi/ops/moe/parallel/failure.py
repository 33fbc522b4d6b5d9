"""Lost and late ranks: each wait for a peer is bounded, and ends on every rank with an error that names who is missing.

join, connect, wait, wait_for_first     bounded waits of a `Watch`
queue, wait_for_device, oversee         what the device is to do: a thread waits for it, also where no host does
fail                                    alarm for all, roll call through the store, PeerTimeout
"""

import atexit
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait as wait_for_futures
from contextlib import contextmanager, suppress
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from envoi.ops.moe.parallel import store as stores
from envoi.ops.moe.parallel.store import Connection, Lookout, Request, StoreSilentError

T = TypeVar("T")

_SPIN_S = 3e-4  # for how long a wait looks without a pause: most collectives of counts are over by then
LOOK_S = 0.2  # interval at which a waiting rank looks at what others say
_ROLL_CALL_S = 2.0  # the most that the roll call takes; it is a part of the timeout
_GRACE_S = 1.0  # for the rest of the opening, where the last rank joins at the last moment
CONNECT_S = 30.0  # the least that a library has to connect ranks, which takes seconds on busy or many hosts
MOST_S = 600.0  # the most that a wait is longer for ranks that compile
NOBODY = 1 << 62  # number of calls that no rank has made, for a wait that idle ranks have no part in
DONE_S = math.inf  # seconds of waiting that a rank states which is done with what others wait for
_JOIN_S = 0.01  # interval at which a rank that opens checks whether all have joined
_INTERVAL_S = 0.02  # at which a thread that oversees looks for progress
_FINISH_S = 5.0  # the most that the end of the process waits for threads
BEGUN, GATHERED, DONE, LOST = range(4)  # entries of the counts; LOST: set by the host, 1 if a rank is missing
_STEPS = {GATHERED: "dispatch", DONE: "combine"}  # the step that a call is in until it passes a point

_ending = threading.Event()  # set at the end of the process
_threads: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()
_adding = threading.Lock()


class PeerTimeout(RuntimeError):  # noqa: N818
    """Error of a step in which a rank did not take part in time.

    ranks: those that did not answer the roll call, or answered and were late, or can't be connected, for want of memory
    for instance; those on the store's host where no connection leads there. Empty if all answered and none was later
    than the others, and if that can't be told: the message says which. step: the step that timed out.
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
        if store and not ranks:
            why = "is gone" if store == "gone" else "did not answer"
            who = f"a rank that can't be named (the store {why}) is lost or did not answer {within}"
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
        once = "make a new one once the network is back"
        what_now = once if store == "silent" else "restart the ranks and make a new one"
        super().__init__(f"{step}: {who}; this ExpertParallel can't be used any more: {what_now}")
        self._made_of = ranks, step, timeout_s, answered, rank, store, cause

    def __reduce__(self) -> tuple:
        """Pickle by what it was made of: processes that start others send their errors back."""
        return type(self), self._made_of


class _AlarmError(Exception):
    """Signal within `Watch`: another rank reported a failure, or time is up."""


class Watch:
    """Waits for a group's collectives with a deadline, and names the ranks that are missing from a failed one."""

    def __init__(self, connection: Connection, name: str, ranks: list[int], rank: int, timeout_s: float):
        """Start the opening of the group: until `opened`, all waits but `wait_for_first` take timeout_s in all.

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
        self.compilers: list[int] = []  # ranks for which waits last longer while they compile
        self.lookout = Lookout(connection, name, [])
        self._failing = threading.Lock()

    @property
    def patience_s(self) -> float:
        """Seconds to wait before the roll is called, which takes the rest of timeout_s."""
        return self.timeout_s - self.roll_call_s

    def may_be_asked(self, idle_s: float) -> bool:
        """Tell whether peers may be calling the roll for a call that this rank has done, idle for so long since.

        They began to wait when it was done. At other times an idle rank asks no store, which may be gone by right.
        """
        return self.patience_s - self.roll_call_s < idle_s < self.timeout_s + LOOK_S

    @property
    def left_s(self) -> float:
        """Seconds that are left to open the group, at least a moment."""
        return max(_GRACE_S, (self.deadline or 0.0) - time.monotonic())

    def join(self, step: str) -> float:
        """Return when all ranks have called this: the seconds that are left to connect them. Raises PeerTimeout."""
        came, end = [f"came/{rank}" for rank in self.ranks], self.deadline or 0.0
        with self._guard(step):
            self._ask_by(end, lambda store: store.set(f"came/{self.rank}", "1"))
            # The alarm first: ranks that gave up have joined too.
            self._look(end)
            while not self._ask_by(end, lambda store: store.check(came)):
                self._look(end)
                time.sleep(_JOIN_S)
        self.deadline = max(end, time.monotonic() + _GRACE_S)
        return self.left_s

    def connect(self, step: str, make: Callable[[Store], T], within_s: float) -> T:
        """Make a process group with a store, within a deadline of its own and within_s. Raises PeerTimeout."""
        with self._guard(step):
            shared = self.ask(lambda store: store, within_s)
            return stores.run_bounded(lambda: make(shared), within_s + _GRACE_S)

    def opened(self, by_store: Sequence[bool]) -> None:
        """End the opening: from now on each wait has a timeout_s of its own. by_store: who is on the store's host."""
        self.ranks_by_store = [rank for rank, here in zip(self.ranks, by_store, strict=True) if here]
        self.deadline = None

    def wait_for_compilers(self) -> None:
        """Let waits for collectives last longer than timeout_s while a rank compiles, on this rank and its peers."""
        if self.connection.compiler is None:
            self.connection.compiler = stores.Compiler(self.connection, self.rank)
        self.compilers = [rank for rank in self.ranks if rank != self.rank]
        self.lookout = Lookout(self.connection, self.name, self.compilers)

    def ask(self, request: Request[T], within_s: float) -> T:
        """Make a request to the part of the store that is ours. Raises StoreSilentError, RuntimeError: it is gone."""
        return self.connection.answer(lambda store: request(PrefixStore(self.name, store)), within_s)

    def wait(self, start: Callable[[], dist.Work], step: str) -> None:
        """Start a collective and return when it is complete. Raises PeerTimeout, and after a failure always at once."""
        with self._guard(step) as began:
            work = start()
            self._poll(work.is_completed, self.deadline or began + self.patience_s)
            if why := self.broken():
                raise RuntimeError(why)
            work.wait()

    def queue(self, start: Callable[[], dist.Work], step: str) -> None:
        """Start a collective that later work on the device waits for, and the host in `wait_for_device`."""
        with self._guard(step):
            start().wait()

    def wait_for_device(self, counts: torch.Tensor, step: str) -> None:
        """Return when the device has done all that counts[BEGUN] says; `oversee` watches it. Raises PeerTimeout."""
        begun = int(counts[BEGUN])
        with self._guard(step, number=begun):
            self._poll(lambda: int(counts[DONE]) == begun, math.inf)
            if why := self.broken():
                raise RuntimeError(why)

    def wait_for_first(self, start: Callable[[], object], step: str) -> None:
        """Start a group's first collective in a thread and wait until it is begun. Raises PeerTimeout.

        start: a function that may return late, or never: another rank's alarm or the end of the patience ends the wait.
        A rank on which it raises is named on all ranks, with its error. The wait has a timeout_s of its own, or
        CONNECT_S if that is more: a library that connects many ranks may take longer than all else.
        """
        within_s = max(self.timeout_s, CONNECT_S)
        with self._guard(step, within_s=within_s) as began:
            first = stores.in_thread(start)
            while not first.done():
                self._look(began + within_s - self.roll_call_s)
                wait_for_futures([first], LOOK_S)
        try:
            first.result()
        except Exception as error:  # whatever it is, the peers have to hear of it
            self.fail(step, error, time.monotonic() - began, says_why=True)
        if self.deadline is not None:
            self.deadline += time.monotonic() - began

    def fail(
        self, step: str, cause: Exception, waited_s: float, says_why: bool = False, within_s: float | None = None,
        number: int = NOBODY,
    ) -> NoReturn:  # fmt: skip
        """Raise the alarm for all ranks, call the roll, raise PeerTimeout, the same in all threads.

        waited_s: this rank's wait in this step, or DONE_S. says_why: tell the others why this rank failed, if it did by
        itself: it is the one to be named. within_s: the step's own timeout, None = timeout_s. number: of calls which
        ranks have done that are past what this one waits for.
        """
        with self._failing:
            if self.failure is None:
                with suppress(RuntimeError):
                    self.end()
                self.failure = self._explain(step, cause, waited_s, says_why, within_s or self.timeout_s, number)
                self.failure.__cause__ = cause
        raise self.failure

    def _explain(
        self, step: str, cause: Exception, waited_s: float, says_why: bool, within_s: float, number: int
    ) -> PeerTimeout:
        missing, answered, store, why = [], False, "", line_of(cause)
        try:
            waited, reasons = self._call_roll(waited_s, why if says_why else "", number)
            missing = [rank for rank in self.ranks if rank not in waited]
            answered = not missing
            if answered and reasons:
                # A rank that lacks memory has made the others' exchange fail.
                short = [rank for rank, reason in reasons.items() if "out of memory" in reason]
                missing = sorted(short or reasons)
                why = reasons[missing[0]]
            elif answered:
                # A late rank has itself waited for less than half as long as the one that waited longest.
                longest = max((seconds for seconds in waited.values() if seconds != DONE_S), default=0.0)
                missing = [rank for rank in self.ranks if waited[rank] < longest / 2]
                why = "" if missing else why
            else:
                why = ""
        except StoreSilentError:
            store, missing = "silent", self.ranks_by_store if self.rank not in self.ranks_by_store else []
        except RuntimeError:
            store = "gone"
        return PeerTimeout(missing, step, within_s, answered, self.rank, store, why)

    def first_to_say(self, missing: list[int]) -> list[int]:
        """Return the ranks that the first rank to give up was missing: later ones have missed the first one too."""
        mine = ",".join(map(str, missing))
        with suppress(RuntimeError):
            said = self.ask(lambda store: store.compare_set("missing", "", mine), self.roll_call_s)
            return [int(rank) for rank in said.decode().split(",")]
        return missing

    @contextmanager
    def _guard(self, step: str, within_s: float | None = None, number: int = NOBODY) -> Iterator[float]:
        """Let this group fail if what is within the context does; the context is the time at which it began.

        Arguments as for `fail`. Raises an earlier failure at once.
        """
        if self.failure is not None:
            raise self.failure
        began = time.monotonic()
        try:
            yield began
        except (RuntimeError, _AlarmError) as error:
            self.fail(step, error, time.monotonic() - began, within_s=within_s, number=number)

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
            else:
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

        Every rank that waits answers, within LOOK_S; also ranks that are past what this one waits for, where a thread
        oversees them and this one's patience has ended. Raises StoreSilentError; RuntimeError if the store is gone.
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


def oversee(owner: object, counts: torch.Tensor, watch: Watch, end: Callable[[], object]) -> None:
    """Watch over calls until `owner` is gone or a rank is missing: then set watch.failure and counts[LOST], call end.

    counts [4] int32: how many calls have passed each point, also from graphs (`rail_kernels.mark_kernel`), or those of
    `counted.Counted`; in memory that the host reads without waiting. end: ends collectives that wait for a
    peer, so that the device is free again.
    """
    gone: list[None] = []
    weakref.finalize(owner, gone.append, None)  # of what takes no lock: it may run in any thread, anywhere

    def watch_over() -> None:
        lookout, has_store = Lookout(watch.connection, watch.name, watch.compilers), True
        mark, since, look = None, time.monotonic(), 0.0
        while not gone and not _ending.wait(_INTERVAL_S):
            begun, gathered, done = found = counts.tolist()[:LOST]
            waits, now = begun != done, time.monotonic()
            if found != mark:
                mark, since, look = found, now, now + LOOK_S
            elif waits or (has_store and watch.may_be_asked(now - since)):
                try:
                    if now > look:
                        look = now + LOOK_S
                        lookout.look(stores.ANSWER_S)
                except RuntimeError:  # the store is gone, and with it a rank; an idle one has no peer to answer
                    has_store = False
                # An idle rank that has not begun what others wait for is the late one.
                is_over, late_s = lookout.alarm is not None, now - since - watch.patience_s
                if waits:
                    is_over |= not has_store or late_s > MOST_S or (late_s > 0 and not lookout.compiles())
                if is_over and (waits or done >= (lookout.alarm or 0)):
                    step = _STEPS[GATHERED if gathered != begun else DONE]
                    with suppress(PeerTimeout):
                        watch.fail(step, TimeoutError(step), now - since if waits else DONE_S, number=done + waits)
                    counts[LOST] = 1
                    end()
                    return

    in_background(watch_over)


def in_background(target: Callable[[], object]) -> None:
    """Run a function in a thread that the end of the process waits for; one that oversees ends then."""
    thread = threading.Thread(target=target, name="envoi-progress", daemon=True)
    with _adding:
        _threads.add(thread)
        thread.start()


@atexit.register
def _finish() -> None:
    # Collectives that are being ended while the process shuts down would end it by a signal.
    _ending.set()
    until = time.monotonic() + _FINISH_S
    while time.monotonic() < until:
        with _adding:  # a thread that ends may have started another
            running = [thread for thread in _threads if thread.is_alive()]
        if not running:
            return
        running[0].join(0.02)
