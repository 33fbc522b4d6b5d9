"""Triton's own table of roles in a kernel's machine code.

`warp_specialize` keeps a byte for each warp beyond the first role's in shared memory: which role it takes. The first
role's warps store all of them, each the same constants; the others load theirs in a loop at the kernel's start and
branch by it. Tools that look for races in shared memory name these accesses in every kernel with roles, since they
don't follow the barrier between them.
"""

import re
from dataclasses import dataclass

from tools.machine_code.disassemble import LINE

_READ = re.compile(r"LDS\.U8 R\d+, \[U?R\d+(?:\+UR\d+)?\+0x([0-9a-f]+)\]")
_WRITE = re.compile(r"STS(?:\.\w+)? \[U?R\d+\+0x([0-9a-f]+)\], ")
_BRANCH = re.compile(r"BRX\b")
NEAR = 24  # instructions from the load of a role to the branch
FIRST = 4  # warps of the first role, at least: the load's constant is so many bytes before the table
MOST = 24  # bytes from there to the table's end, at most


@dataclass(frozen=True)
class RoleTable:
    """Offsets of a kernel's instructions that read and write the table; none in kernels without roles."""

    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()


def role_table(text: str) -> RoleTable:
    """Return where one function, as nvdisasm prints it, accesses the table."""
    found = [(int(line["address"], 16), line["body"]) for line in map(LINE.match, text.splitlines()) if line]
    for place, (at, body) in enumerate(found):
        read = _READ.search(body)
        if read and any(_BRANCH.search(later) for _, later in found[place : place + NEAR]):
            table = range(int(read[1], 16) + FIRST, int(read[1], 16) + MOST)
            writes = ((at, _WRITE.search(body)) for at, body in found)
            stores = frozenset(at for at, write in writes if write and int(write[1], 16) in table)
            return RoleTable(frozenset([at]), stores)
    return RoleTable()
