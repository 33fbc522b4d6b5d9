"""Rules for the machine code of all kernels, and bands around their accepted instruction counts.

    tools.kernel_cases -> compile -> count -> broken: rules that hold for any count
                                    -> moved:  accepted counts, within a band

`make gate` compiles all kernels and accepts their counts, with a hash of what each was compiled from.
`tests/machine_code/test_kernels.py` compares; it compiles only kernels whose hash is another than the accepted one.
"""

import json
import os
import re
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

from envoi.epilogues.lower import Lowered
from envoi.runtime import triton_compat
from tools.kernel_cases import HOPPER, KernelCase, kernel_cases
from tools.kernel_cases import gemm_hopper as hopper
from tools.machine_code import source
from tools.machine_code.compile import compile_launch
from tools.machine_code.count import Record, record_of
from tools.machine_code.operands import cast_early, overwritten
from tools.machine_code.together import disassemble_together

FORMAT = 2
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
IN_LOOP = "two CTAs of 8 warps an SM leave 128 registers; 2 of it are in the loop over K, whose time nobody measured"
IN_PRODUCTS = "scale factors in the loop over K: up to 1.9 times as slow as without (64 rows, H200)"
TOLD = "the corner of a tile, addresses, a lookup table; once a tile or once a launch, none in the loop over K"
KNOWN: dict[str, dict[str, Known]] = {
    "3.6.0": {
        "experts-both-gemms sm_90": Known(8, 4, TOLD),
        "experts-both-gemms-sent sm_90": Known(2, 2, TOLD),
        "w4a16-int4-l1-64 sm_90": Known(3, 3, ONCE_A_TILE),
        "w4a16-int4-l2-64 sm_90": Known(1, 1, ONCE_A_TILE),
    },
    "3.8.0": {
        "gemm-sm90-experts-l1-fp8-block128 sm_90": Known(5, 4, ONCE_A_TILE),
        "gemm-sm90-experts-l2-fp8-block128 sm_90": Known(7, 5, ONCE_A_TILE),
        "gemm-sm90-experts-l1-pairs-concat sm_90": Known(1, 1, ONCE_A_TILE),
        "gemm-sm90-experts-l1-pairs-square sm_90": Known(2, 2, "one once a tile, one in the loop over K, not timed"),
        "gemm-triton-nvfp4 sm_90": Known(248, 248, IN_PRODUCTS),
        "gemm-triton-nvfp4 sm_100": Known(286, 280, IN_PRODUCTS),
        "gemm-triton-nvfp4 sm_103": Known(286, 280, IN_PRODUCTS),
        "indexer-set-65536 sm_90": Known(1, 1, "once a row"),
        "w4a16-few-l2-wide-1536 sm_90": Known(5, 5, ONCE_A_TILE),
        "w4a16-few-l2-wide-2048 sm_90": Known(2, 2, ONCE_A_TILE),
        "w4a8-few-l1 sm_90": Known(3, 3, ONCE_A_TILE),
        "w4a8-few-l1-ids sm_90": Known(6, 6, ONCE_A_TILE),
        "w4a8-few-l2 sm_90": Known(2, 2, ONCE_A_TILE),
        "w4a16-many-l1-512-experts sm_90": Known(1, 1, ONCE_A_TILE),
        "w4a8-l1-512-experts sm_90": Known(1, 1, ONCE_A_TILE),
    },
    "3.9.0": {
        "gemm-sm90-split-linear sm_90": Known(23, 3, ONCE_A_TILE),
        "gemm-sm90-experts-l1-concat-fp8-block128 sm_90": Known(21, 4, f"{ONCE_A_TILE}, but for one load"),
        "gemm-sm90-experts-l1-pairs-concat sm_90": Known(7, 1, ONCE_A_TILE),
        "w4a16-few-l1-wide sm_90": Known(14, 14, IN_LOOP),
        "w4a16-few-l2-wide sm_90": Known(1, 1, BETWEEN_TILES),
        "w4a16-few-l1-wide-4096 sm_90": Known(2, 2, BETWEEN_TILES),
        "w4a16-many-sent sm_90": Known(6, 5, ONCE_A_TILE),
    },
}

# Required instructions by the start of a case's name, the first that fits: {family: pattern of all its names}.
BLACKWELL_CORE = r"UTC\w*MMA"
BLOCK_SCALED_CORE = "UTCQMMA"  # of FP8, and of FP4 beside it, under UE8M0 factors
LOADS = {"TMA load": "UTMALDG"}
NEEDS: tuple[tuple[str, dict[str, str]], ...] = (
    (
        "gemm-sm100",
        {"tensor core": BLACKWELL_CORE, **LOADS, "TMA store": "UTMASTG", "tensor memory load": "LDTM"},
    ),
    ("w4a16-few-", {"tensor core": "QGMMA"}),
    ("w4a8-few-", {"tensor core": "QGMMA"}),
    ("w4a8-permute", {}),
    ("experts-both-gemms", {"tensor core": "QGMMA", **LOADS}),
    ("router-sm100", {"tensor core": "UTCHMMA", **LOADS, "tensor memory load": "LDTM"}),
    ("router-sm90-choice", {}),
    ("router-sm90", {"tensor core": "HGMMA", **LOADS}),
    ("gemm-mx-sm90-", {"tensor core": "HGMMA", **LOADS}),
    ("w4a16-many-", {"tensor core": "HGMMA", **LOADS}),
    ("w4a8-", {"tensor core": "QGMMA", **LOADS}),
    ("router", {"tensor core": "HMMA"}),
    ("indexer-scores-sm90", {"tensor core": "QGMMA", **LOADS}),
)

# Kernels whose roles hand over words by mbarriers.
HAND_OVER = ("experts-both-gemms",)


@dataclass(frozen=True)
class Accepted:
    """Accepted machine code of a kernel. source: the hash of what it was compiled from. counts: {family: count}."""

    source: str
    ptx_sha256: str
    stack_bytes: int
    shared_bytes: int
    counts: dict[str, int]


@cache
def cases() -> dict[str, KernelCase]:
    """Return the cases of all kernels by name."""
    return kernel_cases()


@cache
def measured() -> dict[str, KernelCase]:
    """Return the cases of `tuned.json` that aren't among `cases`: compiled for Hopper, not counted."""
    return {case.title: hopper.kernel_case(case) for case in hopper.measured_cases()}


def targets() -> list[tuple[str, str]]:
    """Return (name, arch) of every kernel that is counted."""
    return [(case.name, arch) for case in cases().values() for arch in case.arches]


def source_of(name: str, arch: str) -> str:
    """Return the hash of what a kernel is compiled from and judged by."""
    tools = compile_launch, record_of, disassemble_together, broken
    if name in measured():
        return source.digest(measured()[name].launch(), arch, tools)
    return source.digest(cases()[name].launch(), arch, (*tools, needs_of(name, arch)))


def needs_of(name: str, arch: str) -> dict[str, str]:
    """Return the required instructions of a kernel: {family: pattern that all of the family match}."""
    if name.startswith("gemm-sm90-"):
        arguments = cases()[name].launch().arguments
        core = {"tensor core": "QGMMA" if arguments[0].base.itemsize == 1 else "HGMMA", **LOADS}
        stores = any(isinstance(value, Lowered) and value.tma_outputs for value in arguments)
        return {**core, "TMA store": "UTMASTG"} if stores else core
    if name.startswith("gemm-triton-mxfp4"):
        return {"tensor core": BLOCK_SCALED_CORE}
    if name.startswith("gemm-triton"):
        return {"tensor core": "HGMMA" if arch == "sm_90" else BLACKWELL_CORE}
    if name in ("indexer-scores", "indexer-scores-4-heads"):
        return {"tensor core": "QGMMA" if arch == "sm_90" else BLACKWELL_CORE}
    if name == "indexer-scores-fp4":
        return {"tensor core": "HGMMA" if arch == "sm_90" else BLACKWELL_CORE}
    return next((needs for start, needs in NEEDS if name.startswith(start)), {})


def known_of(title: str) -> Known | None:
    """Return the known spills of a kernel under the installed Triton, or None."""
    return KNOWN.get(triton_compat.VERSION, {}).get(title)


def count(name: str, arch: str) -> tuple[Record, str]:
    """Compile and count one kernel; return the record and the disassembly."""
    return record_of(compile_launch(cases()[name].launch(), arch), name)


def broken(record: Record, text: str, needs: dict[str, str], known: Known | None = None) -> list[str]:
    """Return the violations that no acceptance excuses: spills, calls, unused barriers, missing instructions .."""
    found = [*_missing(record, needs), *spilled(counts(record), known)]
    if record.forgotten:
        found.append(f"barriers set up and never used, whose memory is reused: {', '.join(record.forgotten)}")
    if record.serialized:
        found.append(f"ptxas runs products one after the other: {record.serialized}")
    if record.kernel.startswith(HAND_OVER) and record.unordered:
        found.append(f"no barrier orders shared memory before an arrival: {', '.join(record.unordered)}")
    called = re.findall(r"\b(?:CALL|LEPC)\S*\s+([^;]*)", text)
    strange = [call.strip() for call in called if not allowed(call, text)]
    if strange or len(called) != record.total(CALLS):
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


def _missing(record: Record, needs: dict[str, str]) -> Iterable[str]:
    for family, pattern in needs.items():
        opcodes = record.families.get(family, {})
        strange = [opcode for opcode in opcodes if not re.fullmatch(pattern, opcode.partition(".")[0])]
        if not opcodes or strange:
            yield f"{family}: expected {pattern}, got {', '.join(strange) or 'none'}"


def spilled(now: dict[str, int], known: Known | None) -> Iterable[str]:
    """Yield what is wrong with the spills among a kernel's counts."""
    loads, stores = (now.get(family, 0) for family in SPILLS)
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
    return {"instructions": record.instructions, **{family: record.total(family) for family in record.families}}


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


def read(path: Path) -> dict[str, Accepted]:
    """Return what is accepted, by title. ValueError if another Triton or another version of this file wrote it."""
    content = json.loads(path.read_text())
    if content["format"] != FORMAT:
        raise ValueError(f"{path.name}: its format is {content['format']}, this version reads {FORMAT}")
    if content["triton"] != triton_compat.VERSION:
        raise ValueError(f"{path.name}: counted with Triton {content['triton']}, this is {triton_compat.VERSION}")
    return {title: Accepted(**entry) for title, entry in content["kernels"].items()}


def write(path: Path, accepted: dict[str, Accepted]) -> None:
    """Write one line per kernel, so that a diff shows which changed."""
    lines = ",\n".join(f" {json.dumps(title)}: {json.dumps(asdict(accepted[title]))}" for title in sorted(accepted))
    head = f'{{"format": {FORMAT}, "triton": "{triton_compat.VERSION}", "kernels": {{\n'
    path.write_text(f"{head}{lines}\n}}}}\n")


def accept(path: Path) -> tuple[str, bool]:
    """Compile all kernels and write what is accepted; return a report of broken rules, and True if all hold."""
    accepted, wrong = judge_all([*targets(), *((name, *HOPPER) for name in measured())])
    write(path, accepted)
    return "\n".join([f"{len(accepted)} kernels compiled; `git diff` shows which moved", *wrong]), not wrong


def judge_all(chosen: Iterable[tuple[str, str]]) -> tuple[dict[str, Accepted], list[str]]:
    """Compile and count kernels, in processes; return what they are, and the broken rules in a line each."""
    found: dict[str, Accepted] = {}
    wrong: list[str] = []
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork")) as pool:
        for title, now, problems in pool.map(_judge, chosen):
            found |= {title: now} if now is not None else {}
            wrong += [f"{title}: {problem}" for problem in problems]
    return found, wrong


def _judge(target: tuple[str, str]) -> tuple[str, Accepted | None, list[str]]:
    name, arch = target
    title = " ".join(target)
    try:
        if name in measured():
            made, counted, wrong = compile_launch(measured()[name].launch(), arch), {}, []
        else:
            made, text = count(*target)
            counted, wrong = counts(made), broken(made, text, needs_of(*target), known_of(title))
            wrong += [f"a wgmma in flight reads what is written: {line}" for line in overwritten(text)]
            wrong += [f"a cast from E4M3 comes before its codes: {line}" for line in cast_early(text)]
    except ValueError as error:
        return title, None, [str(error)]
    # Without a hash the tests compile it, and say what is wrong.
    digest = "" if wrong else source_of(*target)
    return title, Accepted(digest, made.ptx_sha256, made.stack_bytes, made.shared_bytes, counted), wrong
