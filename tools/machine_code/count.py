"""Instruction counts of a kernel by family: tensor-core instructions, data movement by memory, waits, spills.

Counts are static: an instruction in a loop counts once.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from tools.machine_code.compile import Binary
from tools.machine_code.disassemble import Listing, disassemble

# Patterns of instructions' names, without modifiers.
FAMILIES = {
    "tensor core": r"[HQIBDOF]G?MMA|UTC\w*MMA\w*",
    "TMA load": r"UTMALDG|UTMAPF",
    "TMA store": r"UTMASTG|UTMAREDG",
    "bulk copy": r"UBLK\w+",
    "tensor memory load": r"LDTM",
    "tensor memory store": r"STTM",
    "tensor memory copy": r"UTCCP",
    "local load (spill)": r"LDL",
    "local store (spill)": r"STL",
    "helper call": r"LEPC|CALL",
    "barrier": r"BAR|SYNCS|UTCBAR|UCGABAR_\w+|WARPSYNC",
    "wait": r"DEPBAR|WARPGROUP|LDGDEPBAR",
    "fence": r"MEMBAR|FENCE|ERRBAR|CCTL",
    "register budget": r"USETMAXREG",
    "global load": r"LDG?",
    "global store": r"STG?",
    "global atomic": r"ATOMG?|REDG?",
    "copy global to shared": r"LDGSTS",
    "shared load": r"LDSM?",
    "shared store": r"STSM?",
    "shared atomic": r"ATOMS",
    "shuffle": r"SHFL",
    "byte permute": r"U?PRMT",
    "convert": r"[FI]2[FI]P?",
    "float arithmetic": r"F(ADD|MUL|FMA|MNMX|SEL|SETP)\d?",
    "special function": r"MUFU",
}

WAIT = "WARPGROUP.DEPBAR"  # for products in flight

Families = dict[str, dict[str, int]]


@dataclass(frozen=True)
class Record:
    """Counts of one kernel on one architecture. families: {family: {opcode: count}}."""

    kernel: str
    arch: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    num_warps: int
    instructions: int
    families: Families
    ptx_sha256: str
    forgotten: tuple[str, ...] = ()  # barriers that are set up and never used
    unordered: tuple[str, ...] = ()  # accesses of shared memory that no barrier orders before an arrival
    serialized: str = ""  # how often ptxas waits for products in flight, if oftener than the PTX

    @property
    def title(self) -> str:
        """Kernel and architecture: `gemm sm_90`."""
        return f"{self.kernel} {self.arch}"

    def total(self, family: str) -> int:
        """Return the count of a family."""
        return sum(self.families.get(family, {}).values())


def record_of(binary: Binary, kernel: str = "", listing: Listing | None = None) -> tuple[Record, str]:
    """Return the record of a binary under the name `kernel`, and the disassembly of all its functions."""
    listing = listing or disassemble(binary.cubin, binary.arch)
    if binary.name not in listing.functions:
        raise ValueError(f"{binary.name}: the disassembly shows no code of it")
    opcodes = listing.functions[binary.name]
    record = Record(
        kernel or binary.name, binary.arch, binary.registers, binary.stack_bytes, binary.shared_bytes,
        binary.num_warps, len(opcodes), count(opcodes), binary.ptx_sha256, binary.forgotten, binary.unordered,
        serialized(opcodes, binary.ptx),
    )  # fmt: skip
    return record, listing.text


def count(opcodes: Iterable[str]) -> Families:
    """Return {family: {opcode: count}}, most frequent first; families that don't occur have no entry."""
    counters = {family: Counter[str]() for family in FAMILIES}
    for opcode in opcodes:
        family = family_of(opcode)
        if family is not None:
            counters[family][opcode] += 1
    return {family: dict(counter.most_common()) for family, counter in counters.items() if counter}


def serialized(opcodes: Sequence[str], ptx: str) -> str:
    """Return "" unless ptxas waits for Hopper's asynchronous products more than twice as often as the PTX, a product.

    It does where registers are too few, or where it can't tell what reads the sums; the only word of it is a warning
    that Triton doesn't show (C7510 to C7514).
    """
    products, waits = sum("GMMA" in name for name in opcodes), sum(name.startswith(WAIT) for name in opcodes)
    asked, written = ptx.count("wgmma.mma_async"), ptx.count("wgmma.wait_group")
    if waits * asked <= 2 * written * products:
        return ""
    return f"{waits} waits for {products} products, the PTX has {written} for {asked}"


@cache  # a kernel has thousands of instructions, of a hundred opcodes
def family_of(opcode: str) -> str | None:
    """Return the family that counts this opcode, if any."""
    name = opcode.partition(".")[0]
    return next((family for family, pattern in FAMILIES.items() if re.fullmatch(pattern, name)), None)
