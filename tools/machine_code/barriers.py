"""Barriers that a kernel sets up and never uses, in Triton's GPU dialect.

The compiler gives their memory to another buffer, and the hardware may write their state there long after.
"""

import re

ALLOCATED = re.compile(r"(%[\w#]+) = ttg\.local_alloc\b.*memdesc<(?:\d+x)+i64\b")  # no other buffer of ours has int64
VIEW = re.compile(r"(%[\w#]+) = ttg\.memdesc_\w+ ")
SET_UP = re.compile(r"= ttg\.local_alloc\b|\b\w+\.init_barrier\b")


def forgotten(ttgir: str) -> tuple[str, ...]:
    """Return the names of mbarriers that are initialised, and not waited for or arrived on in any role."""
    lines = ttgir.splitlines()
    return tuple(name for line in lines for name in ALLOCATED.findall(line) if not _is_used(name, lines))


def _is_used(name: str, lines: list[str]) -> bool:
    for line in lines:
        if not re.search(rf"{re.escape(name)}(?![\w#])", line) or line.lstrip().startswith(f"{name} ="):
            continue
        view = VIEW.search(line)
        if _is_used(view[1], lines) if view else not SET_UP.search(line):
            return True
    return False
