"""Hazards of shared memory in a log of compute-sanitizer's racecheck.

The tool follows neither mbarriers, by which TMA, wgmma and roles are ordered, nor the barrier between the accesses of
Triton's own table of roles (`tools.machine_code.role_table`), which it names in every kernel with roles. Reports of
these accesses alone, all in one kernel's machine code, are counted apart; so are warnings, and reports of words that
roles hand over by mbarriers alone, stored by `pipeline.put_word` and loaded by `get_word`: that the protocol overwrites
none before it is read, and reads none before it is written, is what `tests/moe/test_one_launch_roles.py` simulates, and
that a barrier stands between a role's accesses and its arrival is in `tests/machine_code/test_arrivals.py`.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.machine_code.role_table import RoleTable

_SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)")
_REPORT = re.compile(r"=+ +(\w+): Race reported between (\w+) access at ([^\n]*)")
_OTHER = re.compile(r"=+ +and (\w+) access at ([^\n]*)")
_PLACE = re.compile(r"(?P<kernel>[\w$]+)(?:\([^)]*\))?\+0x(?P<offset>[0-9a-f]+)(?: in (?P<line>\S+))?")


@dataclass(frozen=True)
class Access:
    """Instruction of a kernel that is part of a race. kind: "Read" or "Write". line: file and line, "" if not known."""

    kind: str
    kernel: str
    offset: int
    line: str

    def __str__(self) -> str:
        return f"{self.kind.lower()} of {self.kernel}+{self.offset:#x}{f' in {self.line}' if self.line else ''}"


@dataclass(frozen=True)
class Races:
    """Errors and warnings of racecheck's log.

    of_roles, of_words: errors that are accesses of the table of roles alone, and of words that mbarriers hand over.
    shown: the other errors, as far as the log prints them.
    """

    errors: int
    warnings: int
    of_roles: int
    of_words: int
    shown: tuple[str, ...]

    @property
    def others(self) -> int:
        """Number of errors elsewhere, also of those that the log doesn't print."""
        return max(self.errors - self.of_roles - self.of_words, len(self.shown))


@dataclass(frozen=True)
class WordPlaces:
    """Lines at which a kernel's roles store and load words that mbarriers hand over, as racecheck names them."""

    kernel: str
    stores: frozenset[str]
    loads: frozenset[str]


def word_places() -> WordPlaces:
    """Return the places of one launch of L1 and L2."""
    from envoi.ops.gemm.hopper.pipeline import get_word, put_word
    from envoi.ops.moe.one_launch.kernel import fused_kernel

    return WordPlaces(fused_kernel.fn.__name__, _lines_with(put_word.fn, ".store("), _lines_with(get_word.fn, ".load("))


def _lines_with(function: Callable, text: str) -> frozenset[str]:
    lines, first = inspect.getsourcelines(function)
    file = Path(inspect.getfile(function)).name
    return frozenset(f"{file}:{first + at}" for at, line in enumerate(lines) if text in line)


def races_in(log: str, role_tables: Mapping[str, Sequence[RoleTable]], words: WordPlaces | None = None) -> Races | None:
    """Return what is in a log, None if it has no summary.

    role_tables: by the kernels' names in machine code; of each kernel of that name. words: None = there are none.
    """
    summaries = _SUMMARY.findall(log)
    if not summaries:
        return None
    reports: list[tuple[str, list[Access | None]]] = []
    for line in log.splitlines():
        first, other = _REPORT.match(line), _OTHER.match(line)
        if first:
            reports.append((first[1], [_access(first[2], first[3])]))
        elif other and reports:
            reports[-1][1].append(_access(other[1], other[2]))
    accesses = [found for severity, found in reports if severity == "Error"]
    of_roles = [_is_of_roles(found, role_tables) for found in accesses]
    of_words = [words is not None and _is_of_words(found, words) for found in accesses]
    errors, warnings = (sum(int(found[place]) for found in summaries) for place in (1, 2))
    shown = [
        " and ".join(str(x or "an access that can't be read") for x in found)
        for found, *is_known in zip(accesses, of_roles, of_words, strict=True)
        if not any(is_known)
    ]
    num_of_roles = min(sum(of_roles), errors)
    return Races(errors, warnings, num_of_roles, min(sum(of_words), errors - num_of_roles), tuple(shown))


def _is_of_roles(found: Sequence[Access | None], role_tables: Mapping[str, Sequence[RoleTable]]) -> bool:
    """Tell whether one kernel's machine code accesses its table of roles at all of these places."""
    names = {x.kernel for x in found if x is not None}
    tables = role_tables.get(names.pop(), ()) if len(names) == 1 and None not in found else ()
    places = [(x.kind, x.offset) for x in found if x is not None]
    return any(
        all(offset in {"Read": table.reads, "Write": table.writes}.get(kind, ()) for kind, offset in places)
        for table in tables
    )


def _is_of_words(found: Sequence[Access | None], words: WordPlaces) -> bool:
    """Tell whether the kernel's roles store and load words at these places, and do nothing else."""
    places = {"Write": words.stores, "Read": words.loads}
    fits = all(x is not None and x.kernel == words.kernel and x.line in places.get(x.kind, ()) for x in found)
    return fits and {x.kind for x in found if x is not None} == set(places)


def _access(kind: str, place: str) -> Access | None:
    found = _PLACE.match(place)
    return found and Access(kind, found["kernel"], int(found["offset"], 16), (found["line"] or "").rpartition("/")[2])
