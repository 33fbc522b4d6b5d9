"""Hazards of shared memory in a log of compute-sanitizer's racecheck.

The tool follows neither mbarriers, by which TMA, wgmma and roles are ordered, nor the barrier between the accesses of
Triton's own table of roles (`tools.machine_code.role_table`), which it names in every kernel with roles. Hazards there
are counted apart.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    """Errors of racecheck's log. of_roles: those that are accesses of the table of roles alone, among `errors`.

    shown: the other reports, as far as the log prints them.
    """

    errors: int
    of_roles: int
    shown: tuple[str, ...]

    @property
    def others(self) -> int:
        """Number of errors elsewhere, also of those that the log doesn't print."""
        return self.errors - self.of_roles


def races_in(log: str, role_tables: Mapping[str, Sequence[int]]) -> Races | None:
    """Return the errors in a log, None if it has no summary. role_tables: offsets of instructions by kernel."""
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
    own = [all(x is not None and x.offset in role_tables.get(x.kernel, ()) for x in found) for found in accesses]
    errors = sum(int(count) for _, count, _ in summaries)
    shown = [
        " and ".join(str(x or "an access that can't be read") for x in found)
        for found, is_own in zip(accesses, own, strict=True)
        if not is_own
    ]
    return Races(errors, min(sum(own), errors), tuple(shown))


def _access(kind: str, place: str) -> Access | None:
    found = _PLACE.match(place)
    return found and Access(kind, found["kernel"], int(found["offset"], 16), (found["line"] or "").rpartition("/")[2])
