"""Child processes: a function whose abort doesn't end the caller, and NVIDIA's tools on a cubin."""

import faulthandler
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
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
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as streams:
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Python 3.12 warns of forks beside threads: a lock that a thread holds stays held. Compiling takes none.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _child(function, explain, answer.fileno(), streams.fileno())
        _, status = os.waitpid(pid, 0)
        answer.seek(0)
        streams.seek(0)
        content, said = answer.read(), streams.read().decode(errors="replace")
    if not content or status:
        return Outcome("died", None, f"the process ended with status {os.waitstatus_to_exitcode(status)}", said)
    ended, result = pickle.loads(content)
    return Outcome(ended, result, "", said) if ended == "returned" else Outcome(ended, None, result, said)


def _child(function: Callable[[], Any], explain: Callable[[BaseException], str], sink: int, streams: int) -> NoReturn:
    """Run the child: its streams and its answer are written to files; no exit handler of the parent runs."""
    try:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(streams, 1)
        os.dup2(streams, 2)
        try:
            answer = ("returned", function())
        except BaseException as error:
            answer = ("raised", explain(error))
        os.write(sink, pickle.dumps(answer))
        os._exit(0)
    except BaseException:
        os._exit(1)


def run_on(tool: Path, flags: tuple[str, ...], cubin: bytes) -> subprocess.CompletedProcess[str]:
    """Run a tool on the bytes of a cubin. Raises ValueError if it can't be run."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return run([str(tool), *flags, file.name])


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command; return its output, whatever its status. Raises ValueError if it can't be run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ValueError(f"{command[0]} can't be run: {error.strerror}") from error
