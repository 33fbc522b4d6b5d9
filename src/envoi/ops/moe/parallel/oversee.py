"""Deadline for collectives that the device waits for: a thread watches their progress.

    oversee        the device counts the points that calls pass, in memory that both see, also when a graph replays them
                   (`rail_kernels.mark_kernel`)
    oversee_queue  a host has queued collectives, and waits at the end of a call: it may not come so far, since a
                   library's allocation or load of a kernel can wait for all that the device has queued

Where there is no progress for the timeout, the ranks that are missing are named, as for a host that waits, and the
collective that they are missing from is ended, so that the device is free again.
"""

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from envoi.ops.moe.parallel.failure import DONE_S, LOOK_S, MOST_S, PeerTimeout, Point, Watch
from envoi.ops.moe.parallel.store import ANSWER_S, Lookout
from envoi.runtime.wake import Wake

INTERVAL_S = 0.02  # at which a thread that oversees looks for progress
FINISH_S = 5.0  # the most that the end of the process waits for the threads
BEGUN, GATHERED, DONE, LOST = range(4)  # entries of the counts; LOST: set by the host, 1 if a rank is missing
STEPS = {GATHERED: "dispatch", DONE: "combine"}  # the step that a call is in until it passes a point
NUMBERS = 256  # of collectives, after which they begin anew: more than are queued at a time
_stops: "weakref.WeakKeyDictionary[threading.Thread, Wake]" = weakref.WeakKeyDictionary()
_adding = threading.Lock()


@dataclass(frozen=True)
class HostMarks:
    """Marks in memory of the host, which is read without the driver: that may wait for the device, and Python with it.

    numbers [NUMBERS] int32 on the device: 0, 1 .., never written. noted [NUMBERS] int32, pinned: the device writes it,
    any thread reads it, nobody resets it. The place of collective n is n % NUMBERS, and holds n // NUMBERS, modulo
    NUMBERS, of the last one that is done there; each has its own, since those of several streams come in any order.
    """

    numbers: torch.Tensor
    noted: torch.Tensor

    @staticmethod
    def on(device: torch.device) -> "HostMarks":
        """Make marks of none yet."""
        pinned = device.type == "cuda"
        noted = torch.full((NUMBERS,), NUMBERS - 1, dtype=torch.int32, device="cpu", pin_memory=pinned)
        return HostMarks(torch.arange(NUMBERS, dtype=torch.int32, device=device), noted)

    def mark(self, number: int) -> None:
        """Queue that the device notes this number."""
        times, place = divmod(number, NUMBERS)
        times %= NUMBERS
        self.noted[place : place + 1].copy_(self.numbers[times : times + 1], non_blocking=True)

    def is_past(self, number: int) -> bool:
        """Tell whether the device has noted this number."""
        times, place = divmod(number, NUMBERS)
        return (int(self.noted[place]) - times) % NUMBERS < NUMBERS // 2


def oversee(owner: object, counts: torch.Tensor, watch: Watch, end: Callable[[], object]) -> None:
    """Watch over calls until `owner` is gone or a rank is missing: then set watch.failure and counts[LOST], call end.

    counts [4] int32: in memory that the host reads without waiting. end: ends collectives that wait for a peer.
    """

    def point() -> Point:
        begun, gathered, done = counts.tolist()[:LOST]
        step = None if begun == done else STEPS[GATHERED if gathered != begun else DONE]
        return Point((begun, gathered, done), step, begun, done)

    def then() -> None:
        counts[LOST] = 1
        end()

    stop = Wake()
    weakref.finalize(owner, stop.set)
    in_background(
        partial(_oversee, lambda: watch, lambda _: point(), Lookout(watch.connection, watch.name, []), then, stop), stop
    )


def oversee_queue(watch: Watch, marks: Any, end: Callable[[], object]) -> None:
    """Watch over collectives that a host has queued, until `watch` is gone or a rank is missing: then let it fail.

    marks: `HostMarks`. end: ends collectives that wait for a peer; has a thread of its own: NCCL takes a second for it.
    """
    watch.marks, watch.end = marks, partial(in_background, end)
    stop = Wake()
    in_background(partial(_oversee, weakref.ref(watch), Watch.point, watch.new_lookout(), None, stop), stop)


def _oversee(
    owner: Callable[[], Watch | None], point_of: Callable[[Watch], Point], lookout: Lookout,
    then: Callable[[], object] | None, stop: Wake,
) -> None:  # fmt: skip
    mark, since, look, has_store = None, time.monotonic(), 0.0, True
    while not stop.wait(INTERVAL_S):
        watch = owner()
        if watch is None or (then is None and watch.failure is not None):
            return
        point, now = point_of(watch), time.monotonic()
        if point.mark != mark:
            mark, since, look = point.mark, point.began or now, now + LOOK_S
        elif point.step is not None or (has_store and watch.may_be_asked(now - since)):
            try:
                if now > look:
                    look = now + LOOK_S
                    lookout.look(ANSWER_S)
            except RuntimeError:  # the store is gone, and with it a rank; an idle one has nobody to answer
                has_store = False
            # An idle rank that has not begun what others wait for is the late one.
            is_over = lookout.alarm is not None and (point.step is not None or point.done >= lookout.alarm)
            late_s = now - since - watch.patience_s
            if point.step is not None:
                is_over |= not has_store or late_s > MOST_S or (late_s > 0 and not lookout.compiles())
            if is_over:
                step, waited_s = (STEPS[DONE], DONE_S) if point.step is None else (point.step, now - since)
                with suppress(PeerTimeout):
                    watch.fail(step, TimeoutError(step), waited_s, number=point.number)
                if then is not None:
                    then()
                return
        del watch  # which ends where nobody else has it


def in_background(target: Callable[[], object], stop: Wake | None = None) -> None:
    """Run a function in a thread that the end of the process waits for, after it has set `stop`."""
    thread = threading.Thread(target=target, name="envoi-progress", daemon=True)
    with _adding:
        _stops[thread] = stop or Wake()
    thread.start()
    _stop_at_exit()


@cache
def _stop_at_exit() -> None:
    atexit.register(_finish)


def _finish() -> None:
    # Collectives that are being ended while the process shuts down would end it by a signal.
    until = time.monotonic() + FINISH_S
    while time.monotonic() < until:
        with _adding:  # a thread that stops may have started another
            stops = {thread: stop for thread, stop in _stops.items() if thread.is_alive()}
        if not stops:
            return
        for stop in stops.values():
            stop.set()
        next(iter(stops)).join(0.02)
