"""Processes that compile, or run, in parallel, for a process that needn't be safe to fork.

    this process -> a fresh interpreter, which imports Triton and touches no GPU -> forks of it in a ProcessPoolExecutor

The fresh interpreter is what multiprocessing's "forkserver" would be, but for one thing: that one's workers run the
caller's main program again, wherever its author didn't expect it. Nothing of the caller's process is changed.
"""

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import get_context
from typing import IO, Any, TypeVar, cast

from envoi import env

T = TypeVar("T")
R = TypeVar("R")
LOOK_S = 1.0  # between two looks whether the caller still lives
_START = "import sys; sys.path[:] = {path!r}; from envoi.runtime.workers import serve; serve({arch!r}, {num_jobs})"


def num_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """Processes that apply a function to items: `with Workers("sm_90", 8) as workers: workers.map(f, items)`.

    They start with the context, which takes seconds, and are ended with it, whatever they do. For one thread.
    Raises OSError if no process can be started.
    """

    def __init__(self, arch: str, num_jobs: int | None = None) -> None:
        code = _START.format(path=sys.path, arch=arch, num_jobs=num_jobs or num_cpus())
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], env=env.for_compilers(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[T, R | None]]:
        """Yield (item, function(item)) as results come; None if the item's process died. All have to be taken.

        function, items: picklable. Raises the function's own error, the first one, after all else is done; RuntimeError
        if the processes have ended.
        """
        failed: Exception | None = None
        data = pickle.dumps((function, items))  # first: a part of a message would be read as one
        try:
            pipe = cast(IO[bytes], self._process.stdin)
            pipe.write(data)
            pipe.flush()
            for _ in items:
                number, result, error = pickle.load(cast(IO[bytes], self._process.stdout))
                failed = failed or error
                if error is None:
                    yield items[number], result
        except (BrokenPipeError, EOFError, pickle.UnpicklingError) as error:
            raise RuntimeError("the processes that compile have ended") from error
        if failed is not None:
            raise failed


def serve(arch: str, num_jobs: int) -> None:
    """Take requests of `Workers.map` from standard input, and answer each item when it is done, until it ends."""
    from envoi.runtime import triton_compat

    answers, caller = os.fdopen(os.dup(1), "wb"), os.getppid()
    os.dup2(2, 1)  # what else is printed mustn't be among the answers
    triton_compat.hash_files(arch)  # here: no worker needs to then
    try:
        while True:
            function, items = pickle.load(sys.stdin.buffer)
            pool = ProcessPoolExecutor(num_jobs, get_context("fork"), _begin_work, (answers.fileno(),))
            number_of = {_submitted(pool, function, item): number for number, item in enumerate(items)}
            while number_of:
                for done in wait(number_of, LOOK_S, FIRST_COMPLETED).done:
                    answers.write(pickle.dumps((number_of.pop(done), *_outcome(done))))
                    answers.flush()
                if os.getppid() != caller:
                    return
            pool.shutdown()
    finally:  # the caller has ended, and workers may have work for minutes
        os.killpg(os.getpid(), signal.SIGKILL)


def _begin_work(answers: int) -> None:
    """Close a worker's end of the answers' pipe, which would outlive the interpreter otherwise."""
    os.close(answers)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def _submitted(pool: ProcessPoolExecutor, function: Callable[[Any], Any], item: object) -> Future[Any]:
    """Queue an item; return a future that has failed if a process of the pool has died by now."""
    try:
        return pool.submit(function, item)
    except BrokenProcessPool as error:
        lost: Future[Any] = Future()
        lost.set_exception(error)
        return lost


def _outcome(done: Any) -> tuple[Any, Exception | None]:
    """Return a future's result and error; neither if its process died."""
    error = done.exception()
    if isinstance(error, BrokenProcessPool):
        return None, None
    return (None, error) if error else (done.result(), None)
