"""Runs that prove a promise: lines of bench/promises/*.jsonl, appended, one for each run of a check."""

import datetime
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench import machine
from tests.helpers.ranks import share_gpus

FUZZ = "fuzz.jsonl"  # records of `tests.fuzz`, of another form
FOLDER = Path(__file__).resolve().parents[2] / "bench" / "promises"


@dataclass(frozen=True)
class Run:
    """Run of a check.

    promise: "same bits/run to run/gemm bf16", "soak", "faults/killed".. count: calls, cases or kernels that were
    checked; wrong: those that weren't right. num_gpus: 0 for CPUs. text: of the first wrong one, or a remark.
    num_ranks: of ranks that share GPUs; else 0.
    """

    promise: str
    machine: str
    num_gpus: int
    commit: str
    date: str
    count: int
    wrong: int
    seconds: float
    text: str = ""
    num_ranks: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.wrong <= self.count:
            raise ValueError(f"wrong: expected 0 to count = {self.count}, got {self.wrong}")


def run_of(
    promise: str, count: int, wrong: int, seconds: float, device: str, num_ranks: int = 1, text: str = ""
) -> Run:  # fmt: skip
    """Describe a run on this machine, now. device: "cuda" or "cpu"."""
    gpus = min(num_ranks, torch.cuda.device_count()) if device == "cuda" else 0
    sharing = num_ranks if share_gpus(num_ranks, device) else 0
    today = datetime.date.today().isoformat()
    name, commit = machine.device_name(device), machine.commit()
    return Run(promise, name, gpus, commit, today, count, wrong, round(seconds, 1), text, sharing)


def append(path: Path, runs: Iterable[Run]) -> None:
    """Append a line for each run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(asdict(run)) + "\n" for run in runs)


def read(folder: Path = FOLDER) -> dict[str, Run]:
    """Return the last run of each promise on a GPU or, if it has none, on CPUs. Raises ValueError for a bad line."""
    return read_files(sorted(path for path in folder.glob("*.jsonl") if path.name != FUZZ))


def read_files(paths: Iterable[Path]) -> dict[str, Run]:
    """Return of these files what `read` returns of a folder's."""
    found: dict[str, Run] = {}
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                run = Run(**json.loads(line))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path.name}, line {number}: expected a run, got {error}") from error
            if run.num_gpus or not (run.promise in found and found[run.promise].num_gpus):
                found[run.promise] = run
    return found
