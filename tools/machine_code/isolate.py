"""Call of a function in a child process, so that a compiler abort doesn't end the caller."""

import faulthandler
import os
import pickle
import resource
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn


@dataclass(frozen=True)
class Outcome:
    """Result of the call: `value` if `ended` is "returned", else `reason`; `said` is its printed output."""

    ended: str  # "returned", "raised" or "died"
    value: Any
    reason: str
    said: str


def call(function: Callable[[], Any], explain: Callable[[BaseException], str] = str) -> Outcome:
    """Call `function` in a fork of this process and return its picklable result.

    A fork, because a jitted function can't be sent to a fresh interpreter. The child only compiles: it starts no thread
    and touches no device.
    """
    with tempfile.TemporaryFile() as streams:
        source, sink = os.pipe()
        pid = _fork()
        if pid == 0:
            os.close(source)
            _child(function, explain, sink, streams.fileno())
        os.close(sink)
        with os.fdopen(source, "rb") as pipe:
            answer = pipe.read()
        _, status = os.waitpid(pid, 0)
        streams.seek(0)
        said = streams.read().decode(errors="replace")
    if not answer or status:
        return Outcome("died", None, f"the process ended with status {os.waitstatus_to_exitcode(status)}", said)
    ended, content = pickle.loads(answer)
    return Outcome(ended, content, "", said) if ended == "returned" else Outcome(ended, None, content, said)


def _fork() -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python 3.12 warns of forks beside threads: a lock held by a thread stays held. Compiling takes no such lock.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _child(function: Callable[[], Any], explain: Callable[[BaseException], str], sink: int, streams: int) -> NoReturn:
    """Run the child: its streams are written to a file, its answer to the pipe; no exit handler of the parent runs."""
    try:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(streams, 1)
        os.dup2(streams, 2)
        try:
            answer = ("returned", function())
        except BaseException as error:
            answer = ("raised", explain(error))
        with os.fdopen(sink, "wb") as pipe:
            pipe.write(pickle.dumps(answer))
        os._exit(0)
    except BaseException:
        os._exit(1)
