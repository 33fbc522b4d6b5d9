"""Records as a table on the terminal."""

from collections.abc import Iterable, Sequence

from envoi.table import align
from tools.machine_code.count import FAMILIES
from tools.machine_code.record import Record, Refusal

UNKNOWN = "?"


def table(records: Sequence[Record]) -> str:
    """Return one column per record; a line for each family, then for each of its variants; "?" if unknown."""
    rows = [[label, *(figures[label] for figures in map(summary, records))] for label in summary(records[0])]
    for label, counts in lines(records):
        rows.append([label, *(UNKNOWN if number is None else str(number) for number in counts)])
    return align(["", *(record.title for record in records)], rows)


def summary(record: Record) -> dict[str, str]:
    """Return a record's resources as text."""
    static = f"{record.static_shared_bytes} + launch's"
    return {
        "warps": _known(record.num_warps),
        "registers per thread": str(record.registers),
        "shared bytes": static if record.shared_bytes is None else str(record.shared_bytes),
        "stack bytes per thread": str(record.stack_bytes),
        "instructions": _known(record.instructions),
    }


def lines(records: Sequence[Record]) -> Iterable[tuple[str, list[int | None]]]:
    """Return (label, a number for each record) of every family and variant that one of the records has."""
    for family in FAMILIES:
        per_record = [None if r.families is None else r.families.get(family.title, {}) for r in records]
        variants = list(dict.fromkeys(variant for counts in per_record for variant in counts or ()))
        if variants:
            yield family.title, [None if counts is None else sum(counts.values()) for counts in per_record]
        for variant in variants:
            yield f"  {variant}", [None if counts is None else counts.get(variant, 0) for counts in per_record]


def notes(records: Iterable[Record], refusals: Iterable[Refusal]) -> list[str]:
    """Return the reasons for missing numbers."""
    uncounted = [f"{record.title}: not counted: {record.not_counted}" for record in records if record.not_counted]
    return uncounted + [f"{refusal.kernel} {refusal.arch}: {refusal.reason}" for refusal in refusals]


def _known(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)
