"""Engines of one model with several backends of experts in one GPU's memory, timed in turns: no two rounds overlap.

All start at once, each a process (`engine_process.py`) with caches of its own, all empty. Then each measures a round,
and in the next round they come in the opposite order, so that neither finds the machine warmer than the other.
"""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

READY_S = 400  # until an engine takes requests
WARM_S = 240  # until each step was made once; kernels may be compiled
ANSWER_S = 120  # until a round is done
LOOK_S = 2.0  # how often an engine that says nothing is looked at
# Settings of caches that would be shared, and their folders in an engine's own home.
CACHES = {
    "HOME": "", "XDG_CACHE_HOME": ".cache", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton",
    "VLLM_CACHE_ROOT": "vllm",
}  # fmt: skip


@dataclass
class Found:
    """What one engine answered. ready: until it took requests; warm: its first calls; rounds: times by step, in us.

    firsts: of each round, whether the engine was the first to run it. why: the reason why it gave no more, or "".
    """

    ready: dict[str, Any] = field(default_factory=dict)
    warm: dict[str, Any] = field(default_factory=dict)
    rounds: list[dict[str, float]] = field(default_factory=list)
    firsts: list[bool] = field(default_factory=list)
    why: str = ""


class Contender:
    """Process that measures when it is asked to: reads words from its input, answers with lines of JSON."""

    def __init__(self, command: Sequence[str], log: Path, home: Path):
        """Start `command --answers FD`; its output goes to log."""
        read, write = os.pipe()
        env = os.environ | {name: str(home / folder) for name, folder in CACHES.items()}
        self.log, self._buffer, self._answers = log, b"", read
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, "--answers", str(write)], env=env, stdin=subprocess.PIPE, stdout=output,
                stderr=subprocess.STDOUT, pass_fds=(write,),
            )  # fmt: skip
        os.close(write)

    def ask(self, word: str) -> None:
        """Ask for the next answer. Raises RuntimeError if the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{word}\n".encode())
            self._process.stdin.flush()
        except OSError:
            raise RuntimeError(self._ended()) from None

    def answer(self, limit_s: float) -> dict[str, Any]:
        """Return the next answer. Raises RuntimeError if the process ends before, or doesn't give it in time."""
        end = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            left_s = end - time.monotonic()
            ready, _, _ = select.select([self._answers], [], [], max(0.0, min(LOOK_S, left_s)))
            data = os.read(self._answers, 1 << 16) if ready else b""
            self._buffer += data
            # A process may end while its own children hold the file open.
            if not data and (ready or self._process.poll() is not None):
                raise RuntimeError(self._ended())
            if not data and left_s <= 0:
                raise RuntimeError(f"no answer within {limit_s} s; the log is {self.log}")
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        os.close(self._answers)

    def _ended(self) -> str:
        status = self._process.wait()
        last = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()][-3:]
        return f"exit status {status}: {' '.join(last)[-200:]}; the log is {self.log}"


def in_turns(
    commands: Mapping[str, Sequence[str]], rounds: int, logs: str, meanwhile: Callable[[], object] = lambda: None
) -> dict[str, Found]:
    """Return what the commands, by name, answered in so many rounds; one that fails has a reason in its place.

    logs: beginning of the names of their logs, in the folder of temporary files. meanwhile: called while they start.
    """
    found = {name: Found() for name in commands}
    running: dict[str, Contender] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            for name, command in commands.items():
                home = Path(folder, name)
                home.mkdir()
                log = Path(tempfile.gettempdir(), f"{logs}_{name}.log")
                running[name] = Contender(command, log, home)
            meanwhile()
            _fill(found, running, "ready", READY_S)
            _fill(found, running, "warm", WARM_S)
            for number in range(rounds):
                order = list(running)[:: 1 if number % 2 == 0 else -1]
                _fill(found, running, "round", ANSWER_S, order)
        finally:
            for contender in running.values():
                contender.close()
    return found


def _fill(
    found: dict[str, Found], running: dict[str, Contender], word: str, limit_s: float, order: Sequence[str] = ()
) -> None:
    """Ask each contender that still runs, one after the other; all start by themselves. One that fails is ended."""
    for place, name in enumerate(order or list(running)):
        try:
            if word != "ready":
                running[name].ask(word)
            answer = running[name].answer(limit_s)
        except RuntimeError as error:
            found[name].why = f"{word}: {error}"
            running.pop(name).close()
            continue
        if word == "round":
            found[name].rounds.append(answer)
            found[name].firsts.append(place == 0)
        else:
            setattr(found[name], word, answer)


def python(module: str, *arguments: str) -> list[str]:
    """Return the command of a module under this Python."""
    return [sys.executable, "-m", module, *arguments]
