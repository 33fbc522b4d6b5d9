"""Tasks in parallel processes within a time limit: for programs that need many kernels compiled, or crashes apart."""

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

LEAVING_S = 30.0  # for a process without a task to end
MOST_WAIT_S = 60.0  # at a time: a system call takes no greater number than some weeks
PRELOADED = ("torch", "torch.distributed", "envoi", "triton")


@dataclass(frozen=True)
class Done:
    """Task that ended after so many seconds: its result, or an error's text. cut: the limit ended it."""

    task: Any
    result: Any = None
    error: str = ""
    seconds: float = 0.0
    cut: bool = False


def in_processes(fn: Callable[[Any], Any], tasks: Sequence[Any], jobs: int, limit_s: float) -> Iterator[Done]:
    """Call fn(task) for all tasks in `jobs` processes; yield each as it ends. After limit_s those that run are ended.

    fn must be importable. A task whose process dies has an error, and another process takes the rest. Tasks that
    weren't begun aren't yielded. Processes are forked off a server that has imported torch and no CUDA; what they start
    is ended with them, and they with this one. Raises RuntimeError if a process dies before it begins a task.
    """
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    end, places = time.monotonic() + limit_s, iter(range(len(tasks)))
    workers: dict[Any, Any] = {}  # by the connection to each
    working: dict[Any, tuple[Any, float]] = {}  # the task of each, and when it began

    def done(connection: Any, *said: Any, cut: bool = False) -> Done:
        task, begun = working.pop(connection)
        return Done(task, *said, seconds=time.monotonic() - begun, cut=cut)

    def start() -> None:
        mine, theirs = context.Pipe()
        worker = context.Process(target=_work, args=(fn, theirs))  # not a daemon: a task may start processes itself
        worker.start()
        theirs.close()
        workers[mine] = worker

    def give(connection: Any) -> None:
        """Send the next task, or end the worker where there is none."""
        place = next(places, None) if time.monotonic() < end else None
        if place is None:
            connection.close()
            worker = workers.pop(connection)
            worker.join(LEAVING_S)
            _end(worker)
        else:
            working[connection] = tasks[place], time.monotonic()
            connection.send(tasks[place])

    for _ in range(max(1, min(jobs, len(tasks)))):
        start()
    try:
        while workers:
            left = end - time.monotonic()
            if left <= 0:
                break
            connections: Any = wait(list(workers), min(left, MOST_WAIT_S))
            for connection in connections:
                try:
                    said = connection.recv()
                except EOFError:
                    worker = workers.pop(connection)
                    worker.join()
                    _end(worker)
                    died = f"the process died with exit code {worker.exitcode}"
                    if connection not in working:  # another one would too
                        raise RuntimeError(f"{died} before it began a task") from None
                    yield done(connection, None, died)
                    start()
                    continue
                if connection in working:
                    yield done(connection, *said)
                give(connection)
    finally:
        for worker in workers.values():
            _end(worker)
    for connection in list(working):
        yield done(connection, None, f"ended after the limit of {limit_s:g} s", cut=True)


def _end(worker: Any) -> None:
    """Kill a process and those that it has started, also if it has ended itself."""
    try:
        os.killpg(worker.pid, signal.SIGKILL)
    except ProcessLookupError:  # no one is left, or it hasn't a group of its own yet and has started none
        worker.kill()
    worker.join()


def _end_with_parent() -> None:
    """Wait until the process that started this one has ended; then kill this one and those that it has started."""
    wait([multiprocessing.parent_process().sentinel])  # pyright: ignore[reportOptionalMemberAccess]
    os.killpg(0, signal.SIGKILL)


def _work(fn: Callable[[Any], Any], connection: Any) -> None:
    import torch

    os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    connection.send(())  # ready
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        try:
            connection.send((fn(task), ""))
        except Exception as error:
            traceback.print_exc()
            connection.send((None, f"{type(error).__name__}: {error}"))
