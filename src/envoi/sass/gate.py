"""Rules for the machine code of registered kernels, and bands around their accepted instruction counts.

    registry -> compile -> count -> broken: rules that hold for any count
                                 -> moved:  accepted counts, within a band

`python tools/gate.py` accepts the current counts; `tests/sass/test_gate.py` compares.
"""

import json
import os
import re
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from envoi.runtime import triton_compat
from envoi.sass import hopper_cases, hopper_recipes, mx_cases, registry, w4a16_cases
from envoi.sass.compile import compile_recipe
from envoi.sass.record import Record, of_binary
from envoi.table import align

FORMAT = 1
BAND, SLACK = 0.05, 4  # a count may change by this fraction of itself, or by so many instructions
EXACT = ("tensor core", "TMA load", "TMA store", "tensor memory load", "tensor memory store", "tensor memory copy")
SPILLS = ("local load (spill)", "local store (spill)")
CALLS = "helper call"

ALLOWED_CALLS = {
    r"__cuda_sm10x_tcgen05_guardrail_trap_\w+": (
        "ptxas guards each allocation of tensor memory; the call is behind a branch that no correct kernel takes"
    ),
}


@dataclass(frozen=True)
class Known:
    """Spills that a kernel has today, and their reason."""

    loads: int
    stores: int
    reason: str


# By Triton release and title: `gemm-sm90-gelu-residual sm_90`.
BETWEEN_TILES = "two CTAs of 8 warps an SM leave 128 registers; all of it is between tiles, none in the loop over K"
ONCE_A_TILE = "addresses and sizes, stored and loaded once a tile, none of them in the loop over K"
IN_LOOP = "two CTAs of 8 warps an SM leave 128 registers; 20 of it are in the loop over K, whose time nobody measured"
KNOWN: dict[str, dict[str, Known]] = {
    "3.6.0": {
        "w4a16-few-l1-wide sm_90": Known(10, 10, BETWEEN_TILES),
        "w4a16-few-l2-wide sm_90": Known(1, 1, BETWEEN_TILES),
    },
    "3.8.0": {
        "gemm-sm90-grouped-fp8-block128 sm_90": Known(4, 4, ONCE_A_TILE),
        "gemm-sm90-experts-l1-fp8-block128 sm_90": Known(5, 4, ONCE_A_TILE),
        "gemm-sm90-experts-l2-fp8-block128 sm_90": Known(7, 5, ONCE_A_TILE),
    },
    "3.9.0": {
        "gemm-sm90-split-linear sm_90": Known(23, 3, ONCE_A_TILE),
        "w4a16-few-l1-wide sm_90": Known(32, 31, IN_LOOP),
        "w4a16-few-l2-wide sm_90": Known(2, 2, BETWEEN_TILES),
        "w4a16-many-sent sm_90": Known(6, 5, ONCE_A_TILE),
    },
}

Accepted = dict[str, dict[str, int]]


@dataclass(frozen=True)
class Rule:
    """Required instructions of a kernel: {family: pattern that all of the family match}; no entry, no requirement."""

    needs: dict[str, str]


def targets() -> list[tuple[str, str]]:
    """Return (name, arch) of every registered kernel."""
    return [(entry.name, arch) for entry in registry.KERNELS.values() for arch in entry.arches]


def rule_of(name: str, arch: str) -> Rule:
    """Return the rule of a kernel: the Hopper GEMM's from its case, others by the name's prefix and `arch`."""
    case = next((case for case in hopper_cases.CASES if case.title == name), None)
    if case is not None:
        call, _ = hopper_recipes.planned(hopper_recipes.inputs(case))
        core = {"tensor core": "QGMMA" if case.format.startswith("fp8") else "HGMMA", "TMA load": "UTMALDG"}
        return Rule({**core, "TMA store": "UTMASTG"} if call.code.leaving else core)
    if name.startswith("gemm-sm100"):
        return Rule({
            "tensor core": r"UTC\w*MMA", "TMA load": "UTMALDG", "TMA store": "UTMASTG",
            "tensor memory load": r"\d+x\S+",
        })  # fmt: skip
    if name.startswith(w4a16_cases.FEW):
        return Rule({"tensor core": "QGMMA"})
    if name.startswith(("router-sm90", mx_cases.PREFIX, w4a16_cases.MANY)):
        return Rule({"tensor core": "HGMMA", "TMA load": "UTMALDG"})
    if name.startswith("router"):
        return Rule({"tensor core": "HMMA"})
    if name.startswith("gemm"):
        return Rule({"tensor core": "HGMMA" if arch == "sm_90" else r"UTC\w*MMA"})
    if name == "indexer-scores-sm90":
        return Rule({"tensor core": "QGMMA", "TMA load": "UTMALDG"})
    if name == "indexer-scores":
        return Rule({"tensor core": "QGMMA" if arch == "sm_90" else r"UTC\w*MMA"})
    return Rule({})


def known_of(title: str) -> Known | None:
    """Return the known spills of a kernel under the installed Triton, or None."""
    return KNOWN.get(triton_compat.VERSION, {}).get(title)


def count(name: str, arch: str) -> tuple[Record, str]:
    """Compile and count one kernel; return the record and the disassembly."""
    records, text = of_binary(compile_recipe(registry.find(name).recipe(arch), arch), name)
    return records[0], text


def broken(record: Record, text: str, rule: Rule, known: Known | None = None) -> list[str]:
    """Return the violations that no acceptance excuses: spills, calls, missing or misplaced instructions."""
    if record.families is None:
        return [f"not counted: {record.not_counted}"]
    found = [*_missing(record, rule), *_spilled(record, known)]
    called = re.findall(r"\b(?:CALL|LEPC)\S*\s+([^;]*)", text)
    strange = [call.strip() for call in called if not allowed(call, text)]
    if strange or len(called) != sum(record.families.get(CALLS, {}).values()):
        found.append(f"{CALLS}: {', '.join(dict.fromkeys(strange)) or 'one whose name is not in the disassembly'}")
    return found


def allowed(call: str, text: str) -> bool:
    """Tell whether a call is one of ALLOWED_CALLS, or to a function that only traps, as those do.

    The ptxas of Triton 3.8 and 3.9 gives a second copy of such a guard no name, only a label.
    """
    if any(re.search(name, call) for name in ALLOWED_CALLS):
        return True
    label = re.search(r"\.L_x_\d+", call)
    body = label and re.search(rf"^{re.escape(label.group())}:\n((?:.*\n)*?.*\bRET\b)", text, re.MULTILINE)
    return bool(body) and re.findall(r"\*/ +([A-Z][\w.]*)", body.group(1))[0] == "BPT.TRAP"


def _missing(record: Record, rule: Rule) -> Iterable[str]:
    for family, pattern in rule.needs.items():
        variants = (record.families or {}).get(family, {})
        strange = [name for name in variants if not re.fullmatch(pattern, name.partition(".")[0])]
        if not variants or strange:
            yield f"{family}: expected {pattern}, got {', '.join(strange) or 'none'}"


def _spilled(record: Record, known: Known | None) -> Iterable[str]:
    loads, stores = (sum((record.families or {}).get(family, {}).values()) for family in SPILLS)
    found = f"spills: {loads} loads and {stores} stores"
    if known is None:
        if loads or stores:
            yield f"{found} of local memory, expected none"
    elif loads > known.loads or stores > known.stores:
        yield f"{found}, known are {known.loads} and {known.stores} ({known.reason})"
    elif (loads, stores) != (known.loads, known.stores):
        yield f"{found}, fewer than the known {known.loads} and {known.stores}: lower those"


def counts(record: Record) -> dict[str, int]:
    """Return the accepted part of a record: all instructions, and those of each family."""
    families = {title: sum(variants.values()) for title, variants in (record.families or {}).items()}
    return {"instructions": record.instructions or 0, **families}


def moved(now: dict[str, int], accepted: dict[str, int] | None) -> list[str]:
    """Return the counts that are out of their band around the accepted ones."""
    if accepted is None:
        return ["nobody accepted its counts yet"]
    return [
        f"{label}: {now.get(label, 0)}, accepted {accepted.get(label, 0)}"
        for label in dict.fromkeys([*accepted, *now])
        if abs(now.get(label, 0) - accepted.get(label, 0)) > _band(label, accepted.get(label, 0))
    ]


def _band(label: str, accepted: int) -> float:
    return 0 if label in EXACT else max(SLACK, BAND * accepted)


def read(path: Path) -> Accepted:
    """Return the accepted counts by title. ValueError if another Triton or another version of this file wrote them."""
    content = json.loads(path.read_text())
    if content["format"] != FORMAT:
        raise ValueError(f"{path.name}: its format is {content['format']}, this version reads {FORMAT}")
    if content["triton"] != triton_compat.VERSION:
        raise ValueError(f"{path.name}: counted with Triton {content['triton']}, this is {triton_compat.VERSION}")
    return content["kernels"]


def write(path: Path, accepted: Accepted) -> None:
    """Write one line per kernel, so that a diff shows which changed."""
    lines = ",\n".join(f" {json.dumps(title)}: {json.dumps(accepted[title])}" for title in sorted(accepted))
    head = f'{{"format": {FORMAT}, "triton": "{triton_compat.VERSION}", "kernels": {{\n'
    path.write_text(f"{head}{lines}\n}}}}\n")


def accept(path: Path) -> tuple[str, bool]:
    """Count all kernels and write the counts; return a report of changes and broken rules, and True if all hold."""
    before = _if_readable(path)
    accepted: Accepted = {}
    wrong: list[str] = []
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork")) as pool:
        for title, now, problems in pool.map(_judge, targets()):
            accepted |= {title: now} if now else {}
            wrong += [f"{title}: {problem}" for problem in problems]
    write(path, accepted)
    totals = [
        [title, *(str(side.get(title, {}).get("instructions", "-")) for side in (before, accepted))]
        for title in dict.fromkeys([*accepted, *before])
        if before.get(title) != accepted.get(title)
    ]
    table = align(["instructions", "before", "after"], totals) if totals else f"{len(accepted)} kernels, none moved"
    return "\n".join([table, *wrong]), not wrong


def _if_readable(path: Path) -> Accepted:
    """Read counts of any Triton; none if the file is missing or has merge conflicts."""
    try:
        return json.loads(path.read_text())["kernels"]
    except (FileNotFoundError, ValueError, KeyError):
        return {}


def _judge(target: tuple[str, str]) -> tuple[str, dict[str, int], list[str]]:
    title = " ".join(target)
    try:
        record, text = count(*target)
    except ValueError as error:
        return title, {}, [str(error)]
    return title, counts(record), broken(record, text, rule_of(*target), known_of(title))
