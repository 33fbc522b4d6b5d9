"""Opcodes of several cubins in one run of the disassembler, which takes longer to start than to read a kernel."""

import re
import struct
from collections.abc import Sequence

from tools.machine_code import isolate
from tools.machine_code.disassemble import BYTES_OF_AN_INSTRUCTION, Listing, disassemble, disassemblers, parse

CODE = ".text."
ADDRESS = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/")
NAMED = re.compile(r"CALL|LEPC|BPT")  # their text names a function or a label, which code alone doesn't have


def disassemble_together(cubins: Sequence[bytes], arch: str) -> list[Listing]:
    """Disassemble each, as `disassemble` does; the text of kernels without calls has neither labels nor names."""
    functions = [functions_of(cubin) for cubin in cubins]
    codes = [next(iter(found.values())) if len(found) == 1 else b"" for found in functions]
    lines = _lines(b"".join(codes), arch)
    listings, first = [], 0
    for cubin, found, code in zip(cubins, functions, codes, strict=True):
        mine = lines[first : first + len(code) // BYTES_OF_AN_INSTRUCTION]
        first += len(mine)
        listings.append((_listing(next(iter(found)), mine) if mine else None) or disassemble(cubin, arch))
    return listings


def functions_of(cubin: bytes) -> dict[str, bytes]:
    """Return the code of each function in a cubin, which is an ELF file."""
    (headers,) = struct.unpack_from("<Q", cubin, 40)
    size, count, index_of_names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, headers + i * size) for i in range(count)]
    names = sections[index_of_names][4]
    found = {}
    for name, _, _, _, offset, num_bytes in sections:
        title = cubin[names + name : cubin.index(b"\0", names + name)].decode()
        if title.startswith(CODE):
            found[title.removeprefix(CODE)] = cubin[offset : offset + num_bytes]
    return found


def _lines(code: bytes, arch: str) -> list[str]:
    """Return the disassembler's line for each instruction; none if the first tool can't."""
    done = isolate.run_on(disassemblers()[0], ("-b", f"{arch.replace('sm_', 'SM')}a"), code)
    lines = [line for line in done.stdout.splitlines() if ADDRESS.match(line)]
    return lines if len(lines) * BYTES_OF_AN_INSTRUCTION == len(code) else []


def _listing(name: str, lines: list[str]) -> Listing | None:
    """Return a kernel's listing with addresses of its own; None if it calls something."""
    numbered = [ADDRESS.sub(f"/*{i * BYTES_OF_AN_INSTRUCTION:04x}*/", line) for i, line in enumerate(lines)]
    text = "\n".join([f"\t.section\t{CODE}{name},", *numbered, ""])
    functions = parse(text)
    return None if any(NAMED.match(opcode) for opcode in functions[name]) else Listing(text, functions)
