"""PTX text without the parts that depend on the location of its source."""

import hashlib
import re

# Order matters: a section is removed with its braces before single lines, a comment before empty lines.
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
    """Return the PTX without comments, line information and debug sections."""
    for pattern in STRIPPED:
        ptx = pattern.sub("", ptx)
    return ptx


def sha256(ptx: str) -> str:
    """Return a hash of the code: independent of the source's location, different when an instruction changes."""
    return hashlib.sha256(without_lines(ptx).encode()).hexdigest()
