"""Deadline for calls that only the device follows: a thread watches their progress, in memory that both see.

The device counts the points that calls pass (`gathered_kernels.mark_kernel`), also when a graph replays them. Where a
count doesn't rise for the timeout, the ranks that are missing are named, as for a host that waits, and the collective
that they are missing from is ended, so that the device is free again.
"""

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from functools import cache

import torch

from envoi.moe.parallel.timeout import PeerTimeout, Watch

INTERVAL_S = 0.02
FINISH_S = 5.0  # the most that the end of the process waits for the threads
BEGUN, GATHERED, DONE, LOST = range(4)  # entries of the counts; LOST: set by the host, 1 if a rank is missing
_stop_events: weakref.WeakKeyDictionary[threading.Thread, threading.Event] = weakref.WeakKeyDictionary()
STEPS = {GATHERED: "dispatch", DONE: "combine"}  # the step that a call is in until it passes a point


def oversee(owner: object, counts: torch.Tensor, watch: Watch, end: Callable[[], object]) -> None:
    """Watch over calls until `owner` is gone or a rank is missing: then set watch.failure and counts[LOST], call end.

    counts [4] int32: in memory that the host reads without waiting. end: ends collectives that wait for a peer.
    """
    stop = threading.Event()
    weakref.finalize(owner, stop.set)
    thread = threading.Thread(target=_oversee, args=(counts, watch, end, stop), name="envoi-progress", daemon=True)
    thread.start()
    _stop_events[thread] = stop
    _stop_at_exit()


@cache
def _stop_at_exit() -> None:
    atexit.register(_finish)


def _finish() -> None:
    # Collectives that are being ended while the process shuts down would end it by a signal.
    threads, until = list(_stop_events), time.monotonic() + FINISH_S
    for thread in threads:
        _stop_events[thread].set()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


def _oversee(counts: torch.Tensor, watch: Watch, end: Callable[[], object], stop: threading.Event) -> None:
    seen, since, look = [0, 0, 0], time.monotonic(), 0.0
    while not stop.wait(INTERVAL_S):
        now, points = time.monotonic(), counts.tolist()[:LOST]
        if points != seen or points[BEGUN] == points[DONE]:
            seen, since = points, now
            look = now + watch.look_s
            continue
        try:
            alarmed = watch.alarmed(ask=now > look)
        except RuntimeError:  # the store is gone, and with it a rank
            alarmed = True
        look = now + watch.look_s if now > look else look
        if alarmed or now > since + watch.patience_s:
            step = STEPS[GATHERED if points[GATHERED] != points[BEGUN] else DONE]
            try:
                watch.fail(step, TimeoutError(step), now - since)
            except PeerTimeout:
                counts[LOST] = 1
                end()
            return
