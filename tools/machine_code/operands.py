"""Registers that an instruction reads too early or too late, by two known faults of an assembler.

That of CUDA 12.9, which Triton 3.8 uses for Hopper, may forget that a wgmma in flight still reads its first operand, if
that is in registers as 4-bit weights are: nothing may write them before a wait for it. And where numbers are cast to
E4M3 and back, it may move the cast back before the other, whose register then holds something else.
"""

import re
from collections.abc import Iterator

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
WGMMA = re.compile(r"[BHIQ]GMMA\.64x(\d+)x")
REGISTERS_OF_A = 4  # of a thread, for every type
PREDICATE = re.compile(r"!?U?P[\dT]")
REGISTER = re.compile(r"R(\d+)")
WIDTH = re.compile(r"\.(64|128)\b")
PAIRS = ("IMAD.WIDE", "CS2R")
TO_E4M3, FROM_E4M3 = "F2FP.SATFINITE.E4M3", "F2FP.F16.E4M3.UNPACK"
CODES = ("F2FP", "LD", "PRMT", "SHF")  # what gives codes of E4M3: a cast, memory, bytes of another register
NOTHING_WRITTEN = re.compile(r"\w*SETP|WARPSYNC|ST[GSL]?\b|BR[AX]|RET")


def overwritten(text: str) -> tuple[str, ...]:
    """Return the instructions of a disassembly, in the order of its text, that write what a wgmma in flight reads."""
    groups: list[list[range]] = [[]]  # the last one isn't closed yet
    found = []
    for address, opcode, operands in INSTRUCTION.findall(text):
        if opcode.startswith("WARPGROUP.DEPBAR"):
            left = int(operands.rpartition("0x")[2], 16)
            del groups[: max(0, len(groups) - 1 - left)]
            continue
        for written in _written(opcode, operands):
            if any(max(written[0], read[0]) <= min(written[-1], read[-1]) for group in groups for read in group):
                found.append(f"{address}: {opcode} {operands.strip()}")
                break
        if WGMMA.match(opcode):
            first = REGISTER.match(operands.split(",")[1].strip())
            if first is not None:
                groups[-1].append(range(int(first[1]), int(first[1]) + REGISTERS_OF_A))
            if "gsb0" in operands:
                groups.append([])
    return tuple(found)


def cast_early(text: str) -> tuple[str, ...]:
    """Return the casts from E4M3 of a disassembly whose register nothing before them in the text fills with codes.

    None of a kernel that doesn't cast to E4M3.
    """
    if TO_E4M3 not in text:
        return ()
    filled: dict[int, str] = {}  # register -> what wrote it last
    found = []
    for address, opcode, operands in INSTRUCTION.findall(text):
        if opcode.startswith(FROM_E4M3):
            read = REGISTER.match(operands.split(",")[1].strip())
            if read is not None and not filled.get(int(read[1]), "").startswith(CODES):
                found.append(f"{address}: {opcode} {operands.strip()}")
        for written in _written(opcode, operands):
            filled.update((register, opcode) for register in written)
    return tuple(found)


def _written(opcode: str, operands: str) -> Iterator[range]:
    if NOTHING_WRITTEN.match(opcode):
        return
    target = next((x.strip() for x in operands.split(",") if not PREDICATE.fullmatch(x.strip())), "")
    first = REGISTER.match(target)
    if first is None:
        return
    wgmma, wide = WGMMA.match(opcode), WIDTH.search(opcode)
    count = int(wgmma[1]) // 2 if wgmma else int(wide[1]) // 32 if wide else 2 if opcode.startswith(PAIRS) else 1
    yield range(int(first[1]), int(first[1]) + count)
