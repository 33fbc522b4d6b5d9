"""Processes that compile, or run, in parallel, started by a process that needn't be safe to fork.

    this process  -> one fresh interpreter, which imports Triton and touches no GPU -> forks of it, which may use one

The imports take seconds: `start_ahead` begins them while a program still does something else, and until they are done
this process may do some of the work itself (`Compilers.help`).

Not `multiprocessing`'s own ways: a fork of a process with threads or a GPU may hang, and "spawn" runs the main program
again wherever its author didn't expect that.
"""

import atexit
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, suppress
from functools import cache, partial
from itertools import count
from multiprocessing import get_context
from queue import SimpleQueue
from typing import IO, Any, NamedTuple, TypeVar, cast

from envoi import env
from envoi.runtime import triton_compat
from envoi.runtime.devices import Target

T = TypeVar("T")
R = TypeVar("R")
DIED = "the worker process died"
ENDED = "jobs: the process that starts the others has ended; with 1 this process does the work itself"
READY = -1  # in the place of a request's number: the process that starts the others is ready for work
IDLE_S = 300.0  # that a process started ahead is kept
SWITCH_S = 1e-4  # after which a thread gives up Python's lock to one that reads files; the default is 5 ms
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


class Begun(NamedTuple):
    """Threads that do what this process needs before its first kernel; None: there were no more threads.

    files: hashes of the compiler's files, which compiling needs. driver: Triton's, which loading needs.
    """

    files: threading.Thread | None
    driver: threading.Thread | None


@cache
def start_here(arch: str) -> Begun:
    """Start what this process has to do before it compiles or loads its first kernel; return the threads that do it.

    They mostly read files, or wait for a compiler of C.
    """
    started: list[threading.Thread | None] = []
    for function in (partial(_hash_files, arch), triton_compat.load_driver):
        try:
            thread = threading.Thread(target=function, daemon=True)
            thread.start()
            started.append(thread)
        except RuntimeError:  # no more threads: it is done when it is needed
            started.append(None)
    return Begun(*started)


def _hash_files(arch: str) -> None:
    """Compute the hashes of the compiler's files, while another thread runs Python.

    The largest is read in hundreds of pieces, and for each this thread takes Python's lock (the GIL) twice. By default
    the other thread keeps the lock for 5 ms each time, so that few pieces would be read until it has nothing to do.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_S))
    mine = sys.getswitchinterval()
    try:
        triton_compat.warm_up(arch)
    finally:
        if sys.getswitchinterval() == mine:  # else somebody has set his own meanwhile
            sys.setswitchinterval(before)


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
    _kill(process)
    process.communicate()


def _kill(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class Work(NamedTuple):
    """Item of a request that waits for the processes.

    here: what to do with it if this process is faster. urgent: this process does it before what isn't.
    """

    request: int
    number: int
    function: Callable[[Any], Any]
    item: Any
    here: Callable[[Any], Any]
    urgent: bool


class Compilers:
    """Processes that apply functions to items: `with Compilers(target, 8) as compilers: compilers.map(f, items)`.

    num_jobs: at most, None = one for each CPU; with 1 this process does the work itself.
    ahead: start them with the context, which takes seconds, not when there is work.
    """

    def __init__(self, target: Target, num_jobs: int | None = None, ahead: bool = True) -> None:
        self.target, self.num_jobs, self.ahead = target, num_jobs or num_cpus(), ahead
        self._server: subprocess.Popen | None = None
        self._requests, self._pid = count(), os.getpid()
        self._threads: list[threading.Thread] = []
        self._writing = threading.Lock()
        # Under the condition: answers that nobody has taken yet, by request; work that waits; how much of it this
        # process does now; whether the process that starts the others was asked to, is ready for work, and has ended.
        self._changed = threading.Condition()
        self._answers: dict[int, deque] = defaultdict(deque)
        self._waiting: list[Work] = []
        self._num_here = 0
        self._is_asked = self._is_ready = self._has_ended = False

    def __enter__(self) -> "Compilers":
        arch = self.target.arch
        if self.num_jobs > 1:
            with suppress(RuntimeError):  # that will be an error where it is needed
                server = _started_ahead(arch) or (_started(arch) if self.ahead else None)
                if server is not None:
                    self._take(server)
        return self

    def __exit__(self, *error: object) -> None:
        """End the processes at once. What this process does meanwhile is waited for, a compilation at most."""
        if os.getpid() != self._pid:
            return  # a fork, which has neither the threads nor a right to end its parent's processes
        with self._changed:
            self._waiting.clear()
        if self._server is not None:
            _kill(self._server)
        try:
            for thread in self._threads:
                thread.join()
        finally:
            if self._server is not None:
                _end(self._server)

    def _take(self, server: subprocess.Popen) -> None:
        self._server = server
        try:
            self._start(partial(self._read, cast(IO[bytes], server.stdout)))
        except BaseException as error:  # an interrupt too: there is no context yet that would end it
            self._server = None
            _end(server)
            if isinstance(error, RuntimeError):
                raise RuntimeError(f"jobs: no thread can be started, {error}; with 1 none is needed") from error
            raise

    def _start(self, function: Callable[[], object]) -> None:
        thread = threading.Thread(target=function, daemon=True)
        thread.start()
        self._threads.append(thread)

    @property
    def have_started(self) -> bool:
        """Return True if there are processes, or the one that will start them."""
        return self._server is not None

    def before(self, function: Callable[[], object]) -> None:
        """Run a picklable function in the process that starts the others, if that has started, and let it start them.

        They have its imports. Errors are left out: whoever works will have them again.
        """
        if self._server is not None:
            with suppress(Exception):
                self._send(READY, function, None)
                self._is_asked = True

    def help(self) -> None:
        """Do work that waits for the processes, what is urgent first, and the last of it, until they have started."""
        while self._work_here():
            pass

    def help_beside(self, around: AbstractContextManager) -> None:
        """Have a thread do what `help` does, within a context."""

        def help_within() -> None:
            with around:
                self.help()

        with suppress(RuntimeError):  # no more threads
            self._start(help_within)

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[T, R | None]]:
        """Yield (item, function(item)) as results come; None if the item's process died. The function is picklable.

        Raises RuntimeError if the processes can't be started, or the function's own error.
        """
        yield from self.begin(function, items)

    def begin(
        self, function: Callable[[T], R], items: Sequence[T], here: Callable[[T], R] | None = None, urgent: bool = False
    ) -> Iterator[tuple[T, R | None]]:
        """Let the processes begin, also while they do other work, and return what `map` yields.

        here: what this process may do instead until they have started, in `help` or while it waits for a result.
        urgent: it does this before what isn't.
        With one job nothing is done until a result is asked for. Raises RuntimeError if no process can be started.
        """
        if self.num_jobs == 1 or not items:
            return ((item, function(item)) for item in items)
        if self._server is None:
            self._take(_started(self.target.arch))
        request = next(self._requests)
        waits = here is not None and self._wait(
            [Work(request, i, function, item, here, urgent) for i, item in enumerate(items)]
        )
        if not waits:
            self._send(request, function, [*enumerate(items)])
        return self._results(request, items)

    def _wait(self, work: list[Work]) -> bool:
        """Let work wait until the processes have started, unless they have."""
        if not self._is_asked:
            self.before(int)
        with self._changed:
            if self._is_ready:
                return False
            self._waiting += work
            self._changed.notify_all()
        return True

    def _results(self, request: int, items: Sequence[T]) -> Iterator[tuple[T, Any]]:
        for _ in items:
            number, result, error = self._receive(request)
            if error is not None:
                raise error
            yield items[number], result

    def _send(self, request: int, function: Callable, items: Sequence[tuple[int, Any]] | None) -> None:
        """Send a request. items: numbered; None for a function of none, after which work may come."""
        numbers, values = (None, None) if items is None else ([n for n, _ in items], [value for _, value in items])
        # First: a part of a message would be read as one. And twice: what can't be read is to be an error of its own.
        data = pickle.dumps((request, self.num_jobs, numbers, pickle.dumps((function, values))))
        pipe = cast(IO[bytes], cast(subprocess.Popen, self._server).stdin)
        try:
            with self._writing:
                pipe.write(data)
                pipe.flush()
        except (BrokenPipeError, ValueError) as error:  # ended, or closed here
            raise RuntimeError(ENDED) from error

    def _receive(self, request: int) -> tuple[int, Any, Exception | None]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._answers[request] or self._waiting or self._is_over())
                if self._answers[request]:
                    return self._answers[request].popleft()
                if not self._waiting:
                    raise RuntimeError(ENDED)
            self._work_here()

    def _is_over(self) -> bool:
        """Return True if no more answers will come."""
        return self._has_ended and not self._waiting and not self._num_here

    def _work_here(self) -> bool:
        """Do a piece of the work that waits; return False if there is none."""
        with self._changed:
            if not self._waiting:
                return False
            work = self._waiting.pop(max(range(len(self._waiting)), key=lambda i: (self._waiting[i].urgent, i)))
            self._num_here += 1
        result: Any = None
        error: Exception | None = None
        try:
            result = work.here(work.item)
        except Exception as raised:
            error = raised
        except BaseException as raised:  # an interrupt
            error = RuntimeError(f"work of this process was ended by {raised!r}")
            raise
        finally:
            with self._changed:
                self._num_here -= 1
                self._answer(work.request, work.number, result, error)
        return True

    def _read(self, pipe: IO[bytes]) -> None:
        """Take the answers of the processes, and send them the work that waits as soon as they have started."""
        with suppress(Exception):  # the end, also in the middle of an answer
            while True:
                request, number, data = pickle.load(pipe)
                if request == READY:
                    self._begin_sending()
                    continue
                try:
                    result, error = pickle.loads(data)
                except Exception as unread:
                    result, error = None, unread
                self._answer(request, number, result, error)
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _begin_sending(self) -> None:
        with self._changed:
            self._is_ready = True
            waiting, self._waiting = self._waiting, []
        for work in waiting:
            try:
                self._send(work.request, work.function, [(work.number, work.item)])
            except Exception as error:  # pickle's, or that the processes have ended
                self._answer(work.request, work.number, None, error)

    def _answer(self, request: int, number: int, result: Any, error: Exception | None) -> None:
        with self._changed:
            self._answers[request].append((number, result, error))
            self._changed.notify_all()


def serve(arch: str) -> None:
    """Take the requests of a `Compilers` from standard input, and answer each item when it is done, until it ends."""
    answers = _Answers(os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)  # what else is printed mustn't be among the answers
    threading.Thread(target=answers.write, daemon=True).start()
    triton_compat.warm_up(arch)
    pool: ProcessPoolExecutor | None = None
    while True:
        try:
            request, num_jobs, numbers, data = pickle.load(sys.stdin.buffer)
        except (EOFError, pickle.UnpicklingError):  # who asked has ended, and the workers may have work for minutes
            os.killpg(os.getpid(), signal.SIGKILL)
        try:
            function, items = pickle.loads(data)
        except Exception as error:
            function, items = partial(_raise, error), numbers or ()
        if numbers is None:
            with suppress(Exception):
                function()
                pool = pool or answers.pool(num_jobs)
                pool.submit(int)  # forks the workers now, so that work needn't wait for it
            answers.ready()
            continue
        for number, item in zip(numbers, items, strict=True):
            # The same processes for all requests, until one dies: they remember what they found out.
            pool = pool or answers.pool(num_jobs)
            try:
                future = pool.submit(function, item)
            except BrokenProcessPool:
                pool = answers.pool(num_jobs)
                future = pool.submit(function, item)
            future.add_done_callback(partial(answers.send, request, number))


def _raise(error: Exception, *_: Any) -> None:
    raise error


def _begin_work(answers: int) -> None:
    """Close a worker's ends of the server's pipes: they'd outlive it otherwise, and who asked would wait for ever."""
    os.close(answers)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


class _Answers:
    """Stream of answers, (request, number of the item, (result, error) by pickle); two None if its process died.

    They are written by a thread: whoever asked may read none for a while, and the workers are to go on meanwhile.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self._done: SimpleQueue[tuple[int, int, Future]] = SimpleQueue()

    def pool(self, num_jobs: int) -> ProcessPoolExecutor:
        """Return new workers."""
        gc.freeze()  # no fork looks for garbage among the imports, which would also copy their memory
        return ProcessPoolExecutor(num_jobs, get_context("fork"), _begin_work, (self.file.fileno(),))

    def send(self, request: int, number: int, future: Future) -> None:
        """Have the answer for an item written that is done."""
        self._done.put((request, number, future))

    def ready(self) -> None:
        """Have it written that work may come."""
        done: Future = Future()
        done.set_result(None)
        self.send(READY, 0, done)

    def write(self) -> None:
        """Write what `send` is given, for ever."""
        while True:
            request, number, future = self._done.get()
            result, error = None, future.exception()
            if error is None:
                result = future.result()
            elif isinstance(error, BrokenProcessPool):
                error = None
            try:
                data = pickle.dumps((result, error))
            except Exception as unwritable:
                text = f"an answer that can't be sent: {error or type(result)}: {unwritable}"
                data = pickle.dumps((None, RuntimeError(text)))
            try:
                self.file.write(pickle.dumps((request, number, data)))
                self.file.flush()
            except BrokenPipeError:  # who asked has ended
                os.killpg(os.getpid(), signal.SIGKILL)
