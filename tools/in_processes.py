"""Tasks in parallel processes within a time limit: for programs that need many kernels compiled, or crashes apart."""

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

MOST_WAIT_S = 60.0  # at a time: a system call takes no greater number than some weeks
PRELOADED = ("torch", "torch.distributed", "envoi", "triton")


@dataclass(frozen=True)
class Done:
    """Task that ended: its result, or an error's text."""

    task: Any
    result: Any = None
    error: str = ""


def in_processes(fn: Callable[[Any], Any], tasks: Sequence[Any], jobs: int, limit_s: float) -> Iterator[Done]:
    """Call fn(task) for all tasks in `jobs` processes; yield each as it ends. After limit_s those that run are ended.

    fn must be importable. A task whose process dies has an error, and another process takes the rest. Tasks that the
    time didn't allow aren't yielded. Processes are forked off a server that has imported torch and no CUDA; what they
    start is ended with them. Raises RuntimeError if a process dies before it begins a task.
    """
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    end, places = time.monotonic() + limit_s, iter(range(len(tasks)))
    workers: dict[Any, Any] = {}  # by the connection to each
    working: dict[Any, int] = {}

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
            workers.pop(connection).join()
        else:
            working[connection] = place
            connection.send(tasks[place])

    for _ in range(max(1, min(jobs, len(tasks)))):
        start()
    try:
        while workers:
            left = end - time.monotonic()
            if left <= 0:
                return
            connections: Any = wait(list(workers), min(left, MOST_WAIT_S))
            for connection in connections:
                try:
                    said = connection.recv()
                except EOFError:
                    worker = workers.pop(connection)
                    worker.join()
                    died = f"the process died with exit code {worker.exitcode}"
                    if connection not in working:  # another one would too
                        raise RuntimeError(f"{died} before it began a task") from None
                    yield Done(tasks[working.pop(connection)], error=died)
                    start()
                    continue
                if connection in working:
                    yield Done(tasks[working.pop(connection)], *said)
                give(connection)
    finally:
        for worker in workers.values():
            _end(worker)


def _end(worker: Any) -> None:
    """Kill a process and those that it has started."""
    try:
        os.killpg(worker.pid, signal.SIGKILL)
    except ProcessLookupError:  # it hasn't a group of its own yet, and has started none
        worker.kill()
    worker.join()


def _work(fn: Callable[[Any], Any], connection: Any) -> None:
    import torch

    os.setpgid(0, 0)
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
