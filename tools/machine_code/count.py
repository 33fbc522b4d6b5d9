"""Instruction counts by family: tensor-core instructions, data movement by memory, waits, spills.

Counts are static: an instruction in a loop counts once.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tools.machine_code.disassemble import Instruction

WIDTH_BITS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}

# Names as in PTX's shapes of tcgen05.ld; no modifier = 32 lanes. One 16x32bx2 load is a pair in machine
# code, one for each half of the warp's threads.
TENSOR_MEMORY_SHAPES = {
    "16dp64bit": "16x64b", "16dp128bit": "16x128b", "16dp256bit": "16x256b",
    "16dp32bit_t0_t15": "16x32bx2[t0-15]", "16dp32bit_t16_t31": "16x32bx2[t16-31]",
}  # fmt: skip

Families = dict[str, dict[str, int]]


@dataclass(frozen=True)
class Family:
    """Instructions whose name, without modifiers, matches a pattern; `variant` returns the line to count one under."""

    title: str
    pattern: re.Pattern[str]
    variant: Callable[[Instruction], str]


def opcode(instruction: Instruction) -> str:
    """Return the full opcode: `HGMMA.64x256x16.F32.BF16`."""
    return instruction.opcode


def name_only(instruction: Instruction) -> str:
    """Return the name without modifiers: `FFMA`."""
    return instruction.name


def width(instruction: Instruction) -> str:
    """Return the width per thread: `128 bit`."""
    bits = next((WIDTH_BITS[part] for part in instruction.modifiers if part in WIDTH_BITS), 32)
    return f"{bits} bit, generic" if instruction.name in ("LD", "ST") else f"{bits} bit"


def shared_width(instruction: Instruction) -> str:
    """Return `128 bit`, or the whole opcode of a matrix load or store."""
    return instruction.opcode if instruction.name.endswith("SM") else width(instruction)


def tensor_memory_shape(instruction: Instruction) -> str:
    """Return the shape and its repeat count: `32x32b.x64`."""
    shapes = [part for part in instruction.modifiers if "dp" in part]
    times = next((part for part in instruction.modifiers if re.fullmatch(r"x\d+", part)), "x1")
    return f"{TENSOR_MEMORY_SHAPES.get(shapes[0], shapes[0]) if shapes else '32x32b'}.{times}"


def with_operand(instruction: Instruction) -> str:
    """Return the opcode and its number: `USETMAXREG.DEALLOC.CTAPOOL 24`."""
    number = instruction.operands[-1] if instruction.operands else ""
    return f"{instruction.opcode} {int(number, 16) if number.startswith('0x') else number}".strip()


FAMILIES = tuple(
    Family(title, re.compile(pattern), variant)
    for title, pattern, variant in (
        ("tensor core", r"[HQIBDOF]G?MMA|UTC\w*MMA\w*", opcode),
        ("TMA load", r"UTMALDG|UTMAPF", opcode),
        ("TMA store", r"UTMASTG|UTMAREDG", opcode),
        ("bulk copy", r"UBLK\w+", opcode),
        ("tensor memory load", r"LDTM", tensor_memory_shape),
        ("tensor memory store", r"STTM", tensor_memory_shape),
        ("tensor memory copy", r"UTCCP", opcode),
        ("local load (spill)", r"LDL", width),
        ("local store (spill)", r"STL", width),
        ("helper call", r"LEPC|CALL", opcode),
        ("barrier", r"BAR|SYNCS|UTCBAR|UCGABAR_\w+|WARPSYNC", opcode),
        ("wait", r"DEPBAR|WARPGROUP|LDGDEPBAR", opcode),
        ("fence", r"MEMBAR|FENCE|ERRBAR|CCTL", opcode),
        ("register budget", r"USETMAXREG", with_operand),
        ("global load", r"LDG?", width),
        ("global store", r"STG?", width),
        ("global atomic", r"ATOMG?|REDG?", opcode),
        ("copy global to shared", r"LDGSTS", width),
        ("shared load", r"LDSM?", shared_width),
        ("shared store", r"STSM?", shared_width),
        ("shared atomic", r"ATOMS", opcode),
        ("shuffle", r"SHFL", opcode),
        ("byte permute", r"U?PRMT", name_only),
        ("convert", r"[FI]2[FI]P?", opcode),
        ("float arithmetic", r"F(ADD|MUL|FMA|MNMX|SEL|SETP)\d?", name_only),
        ("special function", r"MUFU", opcode),
    )
)


def count(instructions: Iterable[Instruction]) -> Families:
    """Return {family: {variant: count}}, most frequent variants first; families that don't occur have no entry."""
    counters: dict[str, Counter[str]] = {}
    for instruction in instructions:
        family = family_of(instruction.name)
        if family is not None:
            counters.setdefault(family.title, Counter())[family.variant(instruction)] += 1
    return {
        family.title: dict(counters[family.title].most_common()) for family in FAMILIES if family.title in counters
    }  # fmt: skip


def family_of(name: str) -> Family | None:
    """Return the family that counts instructions of this name, if any."""
    return next((family for family in FAMILIES if family.pattern.fullmatch(name)), None)
