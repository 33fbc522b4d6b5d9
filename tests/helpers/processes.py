"""Processes that a test expects to end."""

import time
from pathlib import Path


def ends(pid: int, within_s: float = 10.0) -> bool:
    """Return whether a process ends in time; one that nobody has waited for yet has ended."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        if stat.rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False
