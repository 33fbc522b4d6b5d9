"""Sweep of one kernel: compile it in many ways and tabulate the counts."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from envoi.table import align
from tools.machine_code.compile import CompilerRefusesError, compile_recipe
from tools.machine_code.record import Record, of_binary
from tools.machine_code.tmem_sweep import ARCHES, Case, recipe


@dataclass(frozen=True)
class Row:
    """Case and its record, or the reason that it didn't compile."""

    case: Case
    record: Record | None
    reason: str


def run(arch: str, chosen: Iterable[Case], progress: Callable[[Case], None] = lambda case: None) -> list[Row]:
    """Compile the cases, disassemble and count."""
    if arch not in ARCHES:
        raise ValueError(f"--arch: expected {' or '.join(ARCHES)} for this sweep ({arch} has no tensor memory)")
    rows = []
    for case in chosen:
        progress(case)
        try:
            binary = compile_recipe(recipe(case), arch)
        except CompilerRefusesError as error:
            rows.append(Row(case, None, error.reason))
            continue
        records, _ = of_binary(binary)
        rows.append(Row(case, records[0], records[0].not_counted))
    return rows


HEADER = (
    "asked for", "tile rows", "warps", "columns", "tensor memory loads", "all instructions", "registers", "stack bytes",
    "spill loads", "spill stores",
)  # fmt: skip


def table(rows: Iterable[Row]) -> str:
    """Return one line per case, then the refusals in the compiler's words."""
    rows = list(rows)
    text = align(HEADER, [_cells(row) for row in rows], left=(0, 4))
    return "\n".join([text, *(f"{_name(row.case)}: {row.reason}" for row in rows if row.reason)])


def _cells(row: Row) -> list[str]:
    case, record = row.case, row.record
    asked = [case.shape, str(case.block_m), str(case.num_warps), str(case.columns)]
    if record is None:
        return [*asked, "refused, see below", *"-----"]
    resources = [str(record.registers), str(record.stack_bytes)]
    if record.families is None:
        return [*asked, "not counted, see below", "?", *resources, "?", "?"]
    loads = ", ".join(f"{number} {name}" for name, number in record.families.get("tensor memory load", {}).items())
    spills = [
        str(sum(record.families.get(f"local {way} (spill)", {}).values())) for way in ("load", "store")
    ]  # fmt: skip
    return [*asked, loads, str(record.instructions), *resources, *spills]


def _name(case: Case) -> str:
    return f"{case.shape}, {case.block_m} rows, {case.num_warps} warps, {case.columns} columns"
