"""PTX text without what depends on where its source stands."""

import hashlib
import re

# In this order: a section goes with its braces before lines are looked at, a comment goes before a line can be empty.
STRIPPED = tuple(
    re.compile(pattern, flags)
    for pattern, flags in (
        (r"/\*.*?\*/", re.DOTALL),
        (r"//.*", 0),
        (r"^\s*\.section\s+\.debug_\w+\s*\{.*?\}", re.DOTALL | re.MULTILINE),
        (r"^\s*\.(loc|file)\s.*", re.MULTILINE),
        (r"^\$L__(tmp|func_begin|func_end)\d+:", re.MULTILINE),  # labels that only debug sections name
        (r"[ \t]+$", re.MULTILINE),
        (r"^\n", re.MULTILINE),
    )
)


def without_lines(ptx: str) -> str:
    """The PTX without comments, line information and debug sections."""
    for pattern in STRIPPED:
        ptx = pattern.sub("", ptx)
    return ptx


def sha256(ptx: str) -> str:
    """A hash of the code: the same wherever the source stands, another one when an instruction changes."""
    return hashlib.sha256(without_lines(ptx).encode()).hexdigest()
