"""compute-sanitizer's tools over every kernel, in parallel processes, and which kernels no tool has watched.

    python -m tools.promises sanitize --jobs 12 --record

Programs (`tools.promises.sanitized`) launch each kernel family on few rows and on many, in every format, and every
config of the Hopper GEMM. Each tool has to find an error that is planted for it, else it watches nothing.
Kernels that another process or a replayed graph launches aren't watched: prepared calls are off here, and no call is
made between ranks in several processes. `COMPUTE_SANITIZER` names the program if it isn't in PATH.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tools.promises.evidence import Run, run_of

TOOLS = ("memcheck", "synccheck", "racecheck")
ERRORS = 97  # exit status of the sanitizer if there were errors
TIMEOUT_S = 240
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+) hazards? displayed)")
NOTED = re.compile(r"=+ +((?:Warning|Internal|Error|Program hit|Invalid|Race reported|Divergent|Barrier)[^\n]*)")


@dataclass(frozen=True)
class Watched:
    """Program under a tool: the tool's errors, None if it said nothing; what it noted; the kernels launched, by name.

    right: the program's results were.
    """

    program: str
    tool: str
    errors: int | None
    notes: tuple[str, ...]
    kernels: dict[str, set[str]] = field(default_factory=dict)
    right: bool = False

    @property
    def problem(self) -> str:
        """Return what is wrong, "" if nothing is."""
        if self.errors is None:
            return f"{self.program}: {self.tool} ended without a summary; {'; '.join(self.notes) or 'nothing noted'}"
        if self.errors:
            return f"{self.program}: {self.errors} errors of {self.tool}: {'; '.join(self.notes[:2])}"
        return "" if self.right else f"{self.program}: wrong results under {self.tool}; {'; '.join(self.notes[-1:])}"


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
    options = "--tool", tool, "--error-exitcode", str(ERRORS), "--log-file", str(log), "--print-limit", "5"
    return path, *options, sys.executable, "-m", "tools.promises.sanitized", program, str(said)


def errors_in(log: str) -> int | None:
    """Return the errors that a tool's log counts, None if it has no summary."""
    found = [int(a or b) for a, b in SUMMARY.findall(log)]
    return sum(found) if found else None


def watch(path: str, tool: str, program: str) -> Watched:
    """Run a program under a tool."""
    with tempfile.TemporaryDirectory() as folder:
        log, said = Path(folder) / "log", Path(folder) / "said.json"
        # With torch's cache, tensors are parts of larger allocations, past whose ends a read is no error.
        env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "ENVOI_PREPARED": "0"}
        with open(Path(folder) / "output", "w") as output:
            try:
                subprocess.run(
                    command_of(path, tool, program, log, said), env=env, stdout=output, stderr=output,
                    timeout=TIMEOUT_S, check=False,
                )  # fmt: skip
                ended = ""
            except subprocess.TimeoutExpired:
                ended = f"it took more than {TIMEOUT_S} s"
        text = log.read_text(errors="replace") if log.exists() else ""
        printed = (Path(folder) / "output").read_text(errors="replace").strip().splitlines()
        result = json.loads(said.read_text()) if said.exists() else {"right": False, "launched": []}
    notes = [*dict.fromkeys(NOTED.findall(text)), *([ended] if ended else [])]
    if not result["right"]:
        notes += printed[-1:]
    kernels: dict[str, set[str]] = {}
    for key in result["launched"]:
        name, sha256 = key.split(" ")
        kernels.setdefault(name, set()).add(sha256)
    return Watched(program, tool, errors_in(text), tuple(notes), kernels, result["right"])


def registered() -> set[str]:
    """Return module and name of all kernels that are launched on Hopper, as the registry has them."""
    from envoi.cases import kernel_cases

    kernels = [case.launch().kernel.fn for case in kernel_cases().values() if "sm_90" in case.arches]
    return {f"{fn.__module__}.{fn.__name__}" for fn in kernels}


def run(options: argparse.Namespace) -> Iterator[Run]:
    """Yield a run for each tool, and print what wasn't watched."""
    from tools.promises.sanitized import programs

    path = sanitizer()
    names = [name for name in programs() if not options.only or any(part in name for part in options.only)]
    everything = registered()
    for tool in options.tools:
        start, kernels, problems = time.monotonic(), {}, []
        end = start + options.limit_s / len(options.tools)
        with ThreadPoolExecutor(options.jobs) as pool:
            done = list(pool.map(partial(watch_by, end, path, tool), [f"planted {tool}", *names]))
        planted, *found = done
        if planted is None or not planted.errors:
            problems.append(f"{tool} didn't find the error planted for it: {planted and planted.notes}")
        left = [name for name, result in zip(names, found, strict=True) if result is None]
        for result in filter(None, found):
            for name, hashes in result.kernels.items():
                kernels.setdefault(name, set()).update(hashes)
            problems += [result.problem] * bool(result.problem)
        for problem in problems:
            print(problem, flush=True)
        missing = sorted(everything - set(kernels))
        print(f"{tool}: not run for want of time: {', '.join(left) or 'nothing'}")
        print(f"{tool}: kernels that weren't watched: {', '.join(missing) or 'none of those registered'}", flush=True)
        watched = sum(map(len, kernels.values()))
        text = f"{watched} kernels of {len(kernels)} names in {len(names) - len(left)} of {len(names)} programs"
        text = "; ".join([text, *([f"not watched: {', '.join(missing)}"] if missing else []), *problems[:1]])
        count = len(names) - len(left) + 1
        yield run_of(
            f"sanitizers/{tool}", count, min(count, len(problems)), time.monotonic() - start, options.device, 1, text
        )


def watch_by(end: float, path: str, tool: str, program: str) -> Watched | None:
    """Watch a program, unless it is too late to begin."""
    return watch(path, tool, program) if time.monotonic() < end else None
