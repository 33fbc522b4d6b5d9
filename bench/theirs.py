"""Baselines that another process measured, for libraries that need another torch than Envoi's.

Such a process is started first, on the same GPUs: it draws the same inputs, times them by the same clock, and writes a
line of JSON for each case. `python -m bench --theirs FILE` then measures Envoi and takes the baselines from the file.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.libraries import OF_BASELINE
from bench.shapes import Case
from bench.timing import Timing
from bench.trial import Trial


@dataclass(frozen=True)
class Theirs:
    """Time of a baseline for a case of a suite, in us, as `evidence.Measurement` and `timing.Timing` have them.

    gpus: the devices' UUIDs, by rank. version: of the baseline's library. error: against float64.
    """

    suite: str
    case: str
    baseline: str
    num_gpus: int
    gpus: tuple[str, ...]
    version: str
    torch: str
    error: float
    p50_us: float
    p10_us: float
    p90_us: float
    n: int


def write(path: Path, found: Theirs) -> None:
    """Append a line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(found)) + "\n")


def read(path: Path, gpus: tuple[str, ...]) -> tuple[Theirs, ...]:
    """Read a file. Raises ValueError if it can't be read, or for other GPUs than these: times would not compare."""
    try:
        entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        found = tuple(Theirs(**{**entry, "gpus": tuple(entry["gpus"])}) for entry in entries)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"--theirs: expected lines that another process wrote, got {path}: {error}") from None
    for one in found:
        if one.gpus != gpus:
            raise ValueError(f"--theirs: expected times on {', '.join(gpus)}, got {one.case} on {', '.join(one.gpus)}")
    return found


def beside(trial: Trial, case: Case, num_gpus: int, theirs: Iterable[Theirs]) -> Trial:
    """Return a trial with the baselines of its case that another process measured; they take the place of its own."""
    for one in theirs:
        if (one.suite, one.case, one.num_gpus) == (case.suite, case.name, num_gpus):
            name = one.baseline
            details: dict[str, str | float] = {
                OF_BASELINE[name]: one.version,
                f"{name} ran": f"in another process, with torch {one.torch}",
                f"{name} error": one.error,
            }
            trial = replace(
                trial,
                baselines={**trial.baselines, name: Timing(one.p50_us, one.p10_us, one.p90_us, one.n)},
                missing={other: why for other, why in trial.missing.items() if other != name},
                details={**trial.details, **details},
            )
    return trial
