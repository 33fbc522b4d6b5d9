"""Comparison of two builds: before, after, and the difference."""

from collections.abc import Sequence

from envoi.table import align
from tools.machine_code import report
from tools.machine_code.record import Record, find_twins

HEADER = ("", "before", "after", "delta")


def compare(before: Sequence[Record], after: Sequence[Record]) -> str:
    """Return the text of all comparisons; kernels that only one build has are named at the end."""
    parts, lonely = [], []
    for old, new in find_twins(before, after):
        if old is not None and new is not None:
            parts.append(f"{_title(old, new)}\n{align(HEADER, rows(old, new))}")
        else:
            lonely.append(f"only before: {old.title}" if old else f"only after: {new.title if new else ''}")
    return "\n\n".join([*parts, *filter(None, ["\n".join(lonely)])])


def rows(old: Record, new: Record) -> list[list[str]]:
    """Return [label, before, after, delta] of the resources, of each family and of each variant."""
    numbers: list[tuple[str, list[int | None]]] = [
        ("warps", [old.num_warps, new.num_warps]),
        ("registers per thread", [old.registers, new.registers]),
        ("shared bytes", [old.shared_bytes, new.shared_bytes]),
        ("static shared bytes", [old.static_shared_bytes, new.static_shared_bytes]),
        ("stack bytes per thread", [old.stack_bytes, new.stack_bytes]),
        ("instructions", [old.instructions, new.instructions]),
        *report.lines([old, new]),
    ]
    found = [[label, _text(pair[0]), _text(pair[1]), _delta(*pair)] for label, pair in numbers]
    return [*found, ["PTX", *_hashes(old, new)]]


def _title(old: Record, new: Record) -> str:
    return old.title if old.title == new.title else f"{old.title} -> {new.title}"


def _text(number: int | None) -> str:
    return report.UNKNOWN if number is None else str(number)


def _delta(old: int | None, new: int | None) -> str:
    if old is None or new is None:
        return report.UNKNOWN
    return f"{new - old:+d}" if new != old else "="


def _hashes(old: Record, new: Record) -> tuple[str, str, str]:
    first, second = old.ptx_sha256, new.ptx_sha256
    if first is None or second is None:
        return (first or report.UNKNOWN)[:8], (second or report.UNKNOWN)[:8], report.UNKNOWN
    return first[:8], second[:8], "=" if first == second else "differs"
