"""Words that roles hand over by mbarriers: one lane arrives, after a barrier, for what all of the role's lanes did.

racecheck doesn't follow mbarriers, so the rules hold the code of kernels whose roles do so to it.
"""

import re

ARRIVAL = re.compile(r"\bmbarrier\.arrive\.")
ACCESS = re.compile(r"\b(?:st|ld)\.(?:volatile\.)?shared\b")
BARRIER = re.compile(r"\bbar(?:rier)?\.(?:warp\.|cta\.)?sync\b")
LABEL = re.compile(r"\$L__BB\w+:")  # of a block; others are for debuggers


def unordered(ptx: str) -> tuple[str, ...]:
    """Return shared accesses that no barrier orders before an arrival that follows them, within straight code."""
    found, pending = [], []
    for line in ptx.splitlines():
        if LABEL.match(line) or BARRIER.search(line):
            pending = []
        elif ACCESS.search(line):
            pending.append(line.strip())
        elif ARRIVAL.search(line):
            found += [f"{access} before {line.strip()}" for access in pending]
    return tuple(found)
