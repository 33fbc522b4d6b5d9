"""Record of a GPU run of the tests, in `tests/gpu_evidence.json`: the kernels launched and the results of their tests.

    make test-gpu -> recorder -> GpuRecord -> gpu_evidence.json -> no_green_run (in CI, without a GPU)

A kernel is known by the hash of its PTX without line information, which is the same on any machine with that Triton.
"""

import datetime
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.machine_code import ptx

if TYPE_CHECKING:  # it imports Triton, and pytest's plugin this
    from tools.machine_code.compile import Binary

FILE = Path(__file__).resolve().parents[1] / "gpu_evidence.json"
FORMAT = 2
COMMAND = "`make test-gpu` on an H200 writes tests/gpu_evidence.json anew"
# Kernels whose function got another name since the record was made, and the name they have in it: a function's name is
# part of its PTX.
RENAMED: dict[str, str] = {}


@dataclass(frozen=True)
class Launched:
    """Kernel function's name, and how many of the tests that launched it passed and failed."""

    kernel: str
    passed: int
    failed: int

    @property
    def green(self) -> bool:
        """True if all tests passed."""
        return self.passed > 0 and not self.failed


@dataclass(frozen=True)
class Run:
    """Totals of one run. arch: `sm_90`. passed, failed: all its tests."""

    gpu: str
    arch: str
    torch: str
    triton: str
    ptxas: str
    commit: str
    passed: int
    failed: int
    date: str = field(default_factory=lambda: datetime.date.today().isoformat())


@dataclass(frozen=True)
class GpuRecord:
    """Runs by one compiler, the newest last, and the kernels by PTX hash, their tests of all runs added up.

    A run of the tests of changed code is added to the earlier runs (`--record-more`): unchanged kernels keep their
    hashes. A test that failed in any of them counts.
    """

    runs: tuple[Run, ...]
    kernels: dict[str, Launched] = field(default_factory=dict)

    @property
    def last(self) -> Run:
        """The newest run."""
        return self.runs[-1]


def together(old: GpuRecord, new: GpuRecord) -> GpuRecord:
    """Return both records merged. ValueError if they were compiled by different compilers."""
    said = other_compiler(old, new.last.triton, new.last.ptxas)
    if said or old.last.arch != new.last.arch:
        raise ValueError(said or f"the record is of {old.last.arch}, the run on {new.last.arch}: make a record anew")
    parts = [
        {key: (kernel.kernel, kernel.passed, kernel.failed) for key, kernel in record.kernels.items()}
        for record in (old, new)
    ]
    return GpuRecord(old.runs + new.runs, merged(parts))


def merged(parts: Iterable[Mapping[str, tuple[str, int, int]]]) -> dict[str, Launched]:
    """Return the counts of several test processes, added up: {hash: (kernel, passed, failed)}."""
    whole: dict[str, Launched] = {}
    for part in parts:
        for sha256, (kernel, passed, failed) in part.items():
            before = whole.get(sha256, Launched(kernel, 0, 0))
            whole[sha256] = Launched(kernel, before.passed + passed, before.failed + failed)
    return whole


def write(path: Path, record: GpuRecord) -> None:
    """Write one line per kernel, sorted, so that a diff shows the new ones."""
    head = {"format": FORMAT, "runs": [asdict(run) for run in record.runs]}
    kernels = sorted(record.kernels.items())
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(asdict(kernel))}" for key, kernel in kernels)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "kernels": {{\n{lines}\n }}\n}}\n')


def read(path: Path = FILE) -> GpuRecord:
    """Read a record. ValueError for a file of another kind, FileNotFoundError with the command that makes it."""
    if not path.exists():
        raise FileNotFoundError(f"{path.name}: there is none; {COMMAND}")
    content: dict[str, Any] = json.loads(path.read_text())
    found = content.pop("format", None)
    if found != FORMAT:
        raise ValueError(f"{path.name}: its format is {found}, this version reads {FORMAT}; {COMMAND}")
    kernels = {key: Launched(**value) for key, value in content.pop("kernels").items()}
    return GpuRecord(tuple(Run(**run) for run in content["runs"]), kernels)


def recorded_sha256(binary: "Binary") -> str:
    """Return the hash of a kernel's PTX under the name that the kernel has in the record."""
    return ptx.sha256(binary.ptx.replace(binary.name, RENAMED.get(binary.name, binary.name)))


def no_green_run(record: GpuRecord, title: str, sha256: str) -> str:
    """Return why a kernel lacks a green run, in words; "" if it ran and its tests passed."""
    found = record.kernels.get(sha256)
    commits = ", ".join(run.commit for run in record.runs)
    run = f"the runs up to {record.last.date} on {record.last.gpu} (commits {commits}; Triton {record.last.triton})"
    if found is None:
        return f"{title}: its machine code differs from all that {run} launched (PTX {sha256[:12]}); {COMMAND}"
    if not found.green:
        return f"{title}: of the tests that launched it in {run}, {found.passed} passed and {found.failed} failed"
    return ""


def other_compiler(record: GpuRecord, triton: str, ptxas: str) -> str:
    """Return why the hashes of a record can't be compared with those of this machine; "" if they can."""
    last = record.last
    if (last.triton, last.ptxas) == (triton, ptxas):
        return ""
    there, here = f"Triton {last.triton} with ptxas {last.ptxas}", f"Triton {triton} with ptxas {ptxas}"
    return f"the GPU run of {last.date} compiled by {there}, here it is {here}: install the former, or {COMMAND}"
