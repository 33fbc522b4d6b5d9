"""Processes that compile, or run, in parallel, started by a process that needn't be safe to fork.

    this process  -> one fresh interpreter, which imports Triton and touches no GPU -> forks of it, which may use one

The imports take seconds: `start_ahead` begins them while a program still does something else.

Not `multiprocessing`'s own ways: a fork of a process with threads or a GPU may hang, and "spawn" runs the main program
again wherever its author didn't expect that.
"""

import atexit
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import cache
from multiprocessing import get_context
from typing import IO, Any, NamedTuple, TypeVar, cast

from envoi import env
from envoi.runtime import triton_compat
from envoi.runtime.devices import Target

T = TypeVar("T")
R = TypeVar("R")
DIED = "the worker process died"
ENDED = "jobs: the process that starts the others has ended; with 1 this process does the work itself"
IDLE_S = 300.0  # that a process started ahead is kept
_START = "import sys; sys.path[:] = {path!r}; from envoi.runtime.compilers import serve; serve({arch!r})"


class Server(NamedTuple):
    """Process that starts the others, and what it was started with: its program, and `env.seen_by_compilers`."""

    process: subprocess.Popen
    start: tuple[tuple[str, ...], dict[str, str]]


_ahead: dict[str, Server] = {}  # by arch, for whoever comes first


def num_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def start_ahead(arch: str) -> None:
    """Start a process for the next `Compilers` of this architecture, once in the life of this process.

    It ends with this process, or after IDLE_S if none has taken it.
    """
    with suppress(RuntimeError):  # that will be an error where it is needed
        _ahead[arch] = Server(_started(arch), _start_of(arch))
        os.register_at_fork(after_in_child=_leave_to_parent)
        atexit.register(_end_ahead, arch)
        idle = threading.Timer(IDLE_S, _end_ahead, (arch,))
        idle.daemon = True
        idle.start()


def _leave_to_parent() -> None:
    """Forget the parent's processes, in a fork of it, and let go of their pipes: they end with the parent."""
    for server in _ahead.values():
        for pipe in (server.process.stdin, server.process.stdout):
            cast(IO[bytes], pipe).close()
    _ahead.clear()


def _end_ahead(arch: str) -> None:
    server = _ahead.pop(arch, None)  # who takes it, by this too, has it for itself
    if server is not None:
        _end(server.process)


def _started_ahead(arch: str) -> subprocess.Popen | None:
    """Take the process that was started ahead; end it if it has died, or if one would be started otherwise by now."""
    server = _ahead.pop(arch, None)
    if server is None:
        return None
    if server.process.poll() is None and server.start == _start_of(arch):
        return server.process
    _end(server.process)
    return None


def _start_of(arch: str) -> tuple[tuple[str, ...], dict[str, str]]:
    return _command_of(arch), env.seen_by_compilers()


def _command_of(arch: str) -> tuple[str, ...]:
    return sys.executable, "-c", _START.format(path=sys.path, arch=arch)


def _started(arch: str) -> subprocess.Popen:
    """Start a process that runs `serve`. Raises RuntimeError if it can't be."""
    try:  # in a group of its own, so that its workers can be ended without its help
        return subprocess.Popen(
            _command_of(arch), env=env.for_compilers(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise RuntimeError(f"jobs: no process can be started, {error}; with 1 this one does the work itself") from error


def _end(process: subprocess.Popen) -> None:
    """End a process and its workers at once; by themselves they take half a second, or as long as their work."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


class Compilers:
    """Processes that apply functions to items: `with Compilers(target, 8) as compilers: compilers.map(f, items)`.

    num_jobs: at most, None = one for each CPU; with 1 this process does the work itself.
    ahead: start them with the context, which takes seconds, not when there is work.
    """

    def __init__(self, target: Target, num_jobs: int | None = None, ahead: bool = True) -> None:
        self.target, self.num_jobs, self.ahead = target, num_jobs or num_cpus(), ahead
        self._server: subprocess.Popen | None = None

    def __enter__(self) -> "Compilers":
        arch = self.target.arch
        if self.num_jobs > 1:
            with suppress(RuntimeError):  # that will be an error where it is needed
                self._server = _started_ahead(arch) or (_started(arch) if self.ahead else None)
        return self

    def __exit__(self, *error: object) -> None:
        if self._server is not None:
            _end(self._server)

    def before(self, function: Callable[[], object]) -> None:
        """Run a picklable function in the process that starts the others, if it has started: they have its imports.

        Errors are left out: whoever works will have them again.
        """
        if self._server is not None:
            with suppress(Exception):
                self._send((self.num_jobs, function, None))

    def map(
        self, function: Callable[[T], R], items: Sequence[T], meanwhile: Callable[[], object] | None = None
    ) -> Iterator[tuple[T, R | None]]:
        """Yield (item, function(item)) as results come; None if the item's process died. The function is picklable.

        meanwhile: what this process does before it looks for results, unless it does the work itself.
        Raises RuntimeError if the processes can't be started, or the function's own error.
        """
        if self.num_jobs == 1:
            yield from ((item, function(item)) for item in items)
            return
        if not items:
            return
        if self._server is None:
            self._server = _started(self.target.arch)
        self._send((self.num_jobs, function, list(items)))
        if meanwhile is not None:
            meanwhile()
        for _ in items:
            number, result, error = self._receive()
            if error is not None:
                raise error
            yield items[number], result

    def _send(self, message: Any) -> None:
        data = pickle.dumps(message)  # first: a part of a message would be read as one
        try:
            self._server.stdin.write(data)  # pyright: ignore[reportOptionalMemberAccess]
            self._server.stdin.flush()  # pyright: ignore[reportOptionalMemberAccess]
        except BrokenPipeError as error:
            raise RuntimeError(ENDED) from error

    def _receive(self) -> Any:
        try:
            return pickle.load(self._server.stdout)  # pyright: ignore[reportOptionalMemberAccess, reportArgumentType]
        except EOFError as error:
            raise RuntimeError(ENDED) from error


def serve(arch: str) -> None:
    """Answer the requests of a `Compilers` on standard input, until it ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what else is printed mustn't be among the answers
    triton_compat.warm_up(arch)
    pool: ProcessPoolExecutor | None = None
    while True:
        try:
            num_jobs, function, items = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        if items is None:
            with suppress(Exception):
                function()
            continue
        # The same processes for all requests: they remember what they found out.
        # They close the answers, which otherwise wouldn't end with this process.
        pool = pool or ProcessPoolExecutor(num_jobs, get_context("fork"), os.close, (answers.fileno(),))
        for answer in _answers(pool, function, items):
            try:
                pickle.dump(answer, answers)
                answers.flush()
            except BrokenPipeError:  # who asked was killed, and can't end the workers, which may have work for minutes
                os.killpg(os.getpid(), signal.SIGKILL)
            pool = None if answer[1:] == (None, None) else pool


def _answers(pool: ProcessPoolExecutor, function: Callable, items: list) -> Iterator[tuple[int, Any, Exception | None]]:
    """Yield (number of the item, result, error) as they come; without either if its process died."""
    futures = {pool.submit(function, item): number for number, item in enumerate(items)}
    for future in as_completed(futures):
        try:
            yield futures[future], future.result(), None
        except BrokenProcessPool:
            yield futures[future], None, None
        except Exception as error:
            yield futures[future], None, error
