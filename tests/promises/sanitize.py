"""compute-sanitizer's tools over every kernel, in parallel processes, and which kernels no tool has watched.

    python -m tests.promises sanitize --jobs 12

Programs (`tests.promises.sanitized`) launch each kernel family on few rows and on many, in every format, and every
config of the Hopper GEMM. Each tool has to find an error that is planted for it, else it watches nothing.
Kernels that another process or a replayed graph launches aren't watched: prepared calls are off here, and no call is
made between ranks in several processes. Torch's kernels aren't either: they cost most of the time. `COMPUTE_SANITIZER`
names the program if it isn't in PATH.
"""

import argparse
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import torch

from tests.promises.evidence import Run
from tests.promises.hazards import races_in, word_places
from tools.machine_code.role_table import RoleTable

TOOLS = ("memcheck", "synccheck", "racecheck")
ERRORS = 97  # exit status of the sanitizer if there were errors
TIMEOUT_S = 240
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) errors?")
MOST_PRINTED = {"racecheck": 1000}  # errors that a tool prints; what racecheck doesn't print can't be told apart
NOT_WATCHED = "kns=_ZN"  # kernels of C++, whose names are mangled: torch's
NOTE = re.compile(r"(?:Warning|Internal|Error|Program hit|Invalid|Divergent|Barrier)[^\n]*")
NOTED = re.compile(rf"=+ +({NOTE.pattern})")
RACE = "Error: Race reported"
PLANTED = "the error planted for it"
OF_ROLES = "reports of accesses to Triton's own table of roles"
OF_WORDS = "reports of words that mbarriers hand over"
NOTHING_SAID = {"right": False, "launched": [], "role_tables": {}}  # by a program that was ended


@dataclass(frozen=True)
class Watched:
    """Program under a tool: the tool's errors, None if it said nothing; what it noted; the kernels launched, by name.

    right: the program's results were. of_roles, of_words, warnings: races in Triton's table of roles and in words that
    mbarriers hand over, and racecheck's warnings, which aren't among the errors.
    """

    program: str
    tool: str
    errors: int | None
    notes: tuple[str, ...]
    kernels: dict[str, set[str]] = field(default_factory=dict)
    right: bool = False
    of_roles: int = 0
    of_words: int = 0
    warnings: int = 0
    seconds: float = 0.0

    @property
    def line(self) -> str:
        """Return what is wrong, or the kernels that were watched."""
        text = f"{sum(map(len, self.kernels.values()))} kernels of {', '.join(sorted(self.kernels))}"
        return self.problem or "; ".join([text, *counted_apart(self)])

    @property
    def is_silent(self) -> bool:
        """Return True if the tool noted nothing until the program was ended, but for races that can't be told apart."""
        return not any(NOTE.match(note) and not note.startswith(RACE) for note in self.notes)

    @property
    def problem(self) -> str:
        """Return what is wrong, "" if nothing is."""
        if self.errors is None:
            return f"{self.program}: {self.tool} ended without a summary; {'; '.join(self.notes) or 'nothing noted'}"
        if self.errors:
            return f"{self.program}: {self.errors} errors of {self.tool}: {'; '.join(self.notes[:2])}"
        internal = [note for note in self.notes if note.startswith("Internal")]
        if internal:
            return f"{self.program}: {self.tool}: {internal[0]}"
        if not self.right:
            return f"{self.program}: wrong results under {self.tool}; {'; '.join(self.notes[-1:])}"
        return "" if self.kernels else f"{self.program}: no kernel for {self.tool} to watch"


def sanitizer() -> str:
    """Return the path of compute-sanitizer. Raises FileNotFoundError."""
    found = os.environ.get("COMPUTE_SANITIZER") or shutil.which("compute-sanitizer")
    if not found:
        for folder in ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer"):
            found = found or shutil.which("compute-sanitizer", path=folder)
    if not found:
        raise FileNotFoundError("compute-sanitizer: expected it in PATH, in /usr/local/cuda or in COMPUTE_SANITIZER")
    return found


def command_of(path: str, tool: str, program: str, log: Path, said: Path) -> tuple[str, ...]:
    """Return the command that runs a program under a tool."""
    options = "--tool", tool, "--error-exitcode", str(ERRORS), "--log-file", str(log)
    options += "--print-limit", str(MOST_PRINTED.get(tool, 5)), "--kernel-name-exclude", NOT_WATCHED
    tables = ()
    if tool == "racecheck":  # each process would take all CPUs to analyse what its kernels noted
        options += "--racecheck-num-workers", "1"
        tables = ("--role-tables",)
    return path, *options, sys.executable, "-m", "tests.promises.sanitized", *tables, program, str(said)


def errors_in(log: str) -> int | None:
    """Return the errors that a tool's log counts, None if it has no summary."""
    found = [int(count) for count in SUMMARY.findall(log)]
    return sum(found) if found else None


def watch(path: str, tool: str, program: str, limit_s: float = TIMEOUT_S, gpu: str = "") -> Watched:
    """Run a program under a tool, for at most limit_s. gpu: as CUDA_VISIBLE_DEVICES names it, "" for any."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log, said = Path(folder) / "log", Path(folder) / "said.json"
        # With torch's cache, tensors are parts of larger allocations, past whose ends a read is no error.
        env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "ENVOI_PREPARED": "0"}
        env |= {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
        with open(Path(folder) / "output", "w") as output:
            in_time = _ends(command_of(path, tool, program, log, said), env, output, limit_s)
        text = log.read_text(errors="replace") if log.exists() else ""
        printed = (Path(folder) / "output").read_text(errors="replace").strip().splitlines()
        result = json.loads(said.read_text()) if said.exists() else NOTHING_SAID
    notes = [*dict.fromkeys(NOTED.findall(text)), *([] if in_time else [f"it took more than {limit_s:.0f} s"])]
    if not result["right"]:
        notes += printed[-1:]
    kernels: dict[str, set[str]] = {}
    for key in result["launched"]:
        name, sha256 = key.split(" ")
        kernels.setdefault(name, set()).add(sha256)
    errors, of_roles, of_words, warnings = None if tool == "racecheck" else errors_in(text), 0, 0, 0
    tables = {name: [RoleTable(*map(frozenset, x)) for x in found] for name, found in result["role_tables"].items()}
    races = races_in(text, tables, word_places())
    if races is not None:
        errors, of_roles, of_words, warnings = races.others, races.of_roles, races.of_words, races.warnings
        notes = [*races.shown, *(note for note in notes if not note.startswith(RACE))]
    spent = time.monotonic() - start
    right = result["right"]
    return Watched(program, tool, errors, tuple(notes), kernels, right, of_roles, of_words, warnings, spent)


def _ends(command: tuple[str, ...], env: dict[str, str], output: IO[str], limit_s: float) -> bool:
    """Run a command; end it and what it started after limit_s. Return whether it ended by itself."""
    process = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return False
    return True


def registered() -> set[str]:
    """Return module and name of all kernels that are launched on Hopper, as the registry has them."""
    from tools.kernel_cases import kernel_cases

    kernels = [case.launch().kernel.fn for case in kernel_cases().values() if "sm_90" in case.arches]
    return {f"{fn.__module__}.{fn.__name__}" for fn in kernels}


def gpus() -> list[str]:
    """Return the GPUs that programs share, as CUDA_VISIBLE_DEVICES names each."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(number) for number in range(max(1, torch.cuda.device_count()))]


def run(options: argparse.Namespace) -> Iterator[Run]:
    """Yield a run for each tool's planted error and for each program that it watches."""
    from tests.promises.sanitized import programs

    path = sanitizer()
    wanted = [name for name in programs() if not options.only or any(part in name for part in options.only)]
    if not wanted:
        raise ValueError(f"--only: expected a part of a program's name, got {', '.join(options.only)}")
    for tool in options.tools:
        start = time.monotonic()
        end = start + options.limit_s / len(options.tools)
        planted = watch(path, tool, f"planted {tool}", max(1.0, min(TIMEOUT_S, end - start)))
        said = "" if planted.errors else f"{tool} didn't find the error planted for it: {'; '.join(planted.notes)}"
        yield Run(f"sanitizers/{tool}/{PLANTED}", 1, int(bool(said)), time.monotonic() - start, said)
        found: dict[str, Watched] = {}
        if planted.errors:
            with ThreadPoolExecutor(options.jobs) as pool:
                watching = {
                    pool.submit(watch_by, end, path, tool, name, gpu): name
                    for name, gpu in zip(wanted, itertools.cycle(gpus()))
                }
                for future in as_completed(watching):  # what has ended is recorded at once
                    name, result = watching[future], future.result()
                    if result is not None:
                        found[name] = result
                        wrong = int(bool(result.problem))
                        yield Run(f"sanitizers/{tool}/{name}", 1, wrong, result.seconds, result.line)
        left = [name for name in wanted if name not in found]
        missing = sorted(registered().difference(*(result.kernels for result in found.values())))
        print(f"{tool}: not run for want of time: {', '.join(left) or 'nothing'}")
        print(f"{tool}: kernels that weren't watched: {', '.join(missing) or 'none of those registered'}", flush=True)
        options.incomplete |= bool(left)


def watch_by(end: float, path: str, tool: str, program: str, gpu: str) -> Watched | None:
    """Watch a program on a GPU; None, which is printed, if `end` came first."""
    start = time.monotonic()
    if start >= end:
        return None
    found = watch(path, tool, program, min(TIMEOUT_S, end - start), gpu)
    if found.errors is None and found.seconds < TIMEOUT_S and time.monotonic() >= end and found.is_silent:
        print(f"{tool}: {program}: ended by the limit after {found.seconds:.0f} s", flush=True)
        return None
    kernels = sum(map(len, found.kernels.values()))
    print(f"{tool}: {program}: {kernels} kernels, {found.seconds:.0f} s, {found.problem or 'right'}", flush=True)
    return found


def counted_apart(found: Watched) -> list[str]:
    """Return in words what isn't among the errors, each kind of which there is some."""
    counts = (found.of_roles, OF_ROLES), (found.of_words, OF_WORDS), (found.warnings, "warnings")
    return [f"{count} {what}" for count, what in counts if count]
