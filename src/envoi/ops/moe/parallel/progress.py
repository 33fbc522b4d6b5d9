"""Deadline for collectives that the device waits for: a thread watches their progress.

Where the host never waits, the device counts the points that calls pass (`gathered_kernels.mark_kernel`), in memory
that both see, also when a graph replays them: `oversee`. Where the host waits at the end of a call, it may not come so
far: a library's allocation or load of a kernel can wait for all that the device has queued: `oversee_queue`.
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

import torch

from envoi.ops.moe.parallel.pulse import MOST_S, Peers
from envoi.ops.moe.parallel.timeout import DONE_S, LOOK_S, Alarm, Marks, PeerTimeout, Queued, Watch
from envoi.runtime.wake import Wake

INTERVAL_S = 0.02
FINISH_S = 5.0  # the most that the end of the process waits for the threads
BEGUN, GATHERED, DONE, LOST = range(4)  # entries of the counts; LOST: set by the host, 1 if a rank is missing
NUMBERS = 256  # of collectives, after which they begin anew: more than are queued at a time
ANSWER_S = 0.05  # for which a thread that looks waits for the store
_stops: weakref.WeakKeyDictionary[threading.Thread, Wake] = weakref.WeakKeyDictionary()
_adding = threading.Lock()
STEPS = {GATHERED: "dispatch", DONE: "combine"}  # the step that a call is in until it passes a point


def oversee(owner: object, counts: torch.Tensor, watch: Watch, end: Callable[[], object]) -> None:
    """Watch over calls until `owner` is gone or a rank is missing: then set watch.failure and counts[LOST], call end.

    counts [4] int32: in memory that the host reads without waiting. end: ends collectives that wait for a peer.
    """
    stop = Wake()
    weakref.finalize(owner, stop.set)
    in_background(partial(_oversee, counts, watch, end, stop), stop)


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


def oversee_queue(watch: Watch, marks: Marks, end: Callable[[], object]) -> None:
    """Watch over collectives that a host has queued, until `watch` is gone or a rank is missing: then let it fail.

    end: ends collectives that wait for a peer. It has a thread of its own: NCCL takes a second for it.
    """
    watch.marks, watch.end = marks, partial(in_background, end)
    given = weakref.ref(watch), Alarm(watch.connection, watch.name), watch.new_peers()
    stop = Wake()
    in_background(partial(_oversee_queue, *given, stop), stop)


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


def _oversee(counts: torch.Tensor, watch: Watch, end: Callable[[], object], stop: Wake) -> None:
    seen, since, look, alarm = [0, 0, 0], time.monotonic(), 0.0, Alarm(watch.connection, watch.name)
    has_store = True
    while not stop.wait(INTERVAL_S):
        now, points = time.monotonic(), counts.tolist()[:LOST]
        if points != seen:
            seen, since, look = points, now, now + LOOK_S
            continue
        is_idle = points[BEGUN] == points[DONE]
        if is_idle and not (has_store and watch.may_be_asked(now - since)):
            continue
        try:
            number = alarm.raised(ask=now > look)
        except RuntimeError:  # the store is gone, and with it a rank; an idle one has nobody to answer
            number, has_store = None if is_idle else 0, False
        look = now + LOOK_S if now > look else look
        # An idle rank that has not begun the call is the late one.
        alarmed = number is not None and (not is_idle or points[DONE] >= number)
        if alarmed or (not is_idle and now > since + watch.patience_s):
            step = STEPS[GATHERED if points[GATHERED] != points[BEGUN] else DONE]
            waited_s = DONE_S if is_idle else now - since
            try:
                watch.fail(step, TimeoutError(step), waited_s, number=points[BEGUN])
            except PeerTimeout:
                counts[LOST] = 1
                end()
            return


def _oversee_queue(owner: "weakref.ref[Watch]", alarm: Alarm, peers: Peers, stop: Wake) -> None:
    count, since, has_store = 0, time.monotonic(), True
    while not stop.wait(LOOK_S):
        watch = owner()
        if watch is None or watch.failure is not None:
            return
        queued, now = watch.pending(), time.monotonic()
        since = since if queued is None and watch.count == count else now
        count = watch.count
        if queued is not None and _has_failed(watch, queued, alarm, peers):
            return
        if queued is None and has_store and watch.may_be_asked(now - since):
            try:
                number = alarm.answer(ANSWER_S)
            except RuntimeError:  # the store is gone: nobody asks
                number, has_store = None, False
            if number is not None and count >= number:
                with suppress(PeerTimeout):
                    watch.fail("combine", TimeoutError("combine"), DONE_S)
                return
        del watch  # which ends where nobody else has it


def _has_failed(watch: Watch, queued: Queued, alarm: Alarm, peers: Peers) -> bool:
    if time.monotonic() < queued.began + LOOK_S:
        return False
    peers.look()
    try:
        over = alarm.answer(ANSWER_S) is not None
    except RuntimeError:  # the store is gone, and with it a rank
        over = True
    waited_s = time.monotonic() - queued.began
    late_s = waited_s - watch.patience_s
    if not over and (late_s < 0 or (late_s < MOST_S and peers.compile())):
        return False
    with suppress(PeerTimeout):
        watch.fail(queued.step, TimeoutError(queued.step), waited_s, number=queued.number + 1)
    return True
