"""`python -m tools.compile_all`: compile every registered kernel for its architectures with the installed Triton.

For the Triton releases that tests/machine_code doesn't run under: no spills, no calls, and the required instructions of each
kernel; counts may differ. `make compile` calls it with each release first on the path. Exit status 1 names the
failures.
"""

import sys
from concurrent.futures import ProcessPoolExecutor

from envoi.runtime import triton_compat
from tools.machine_code import gate

JOBS = 2


def wrong_with(target: tuple[str, str]) -> list[str]:
    """Return the rules that a kernel breaks."""
    name, arch = target
    try:
        record, text = gate.count(name, arch)
    except ValueError as error:
        return [f"{name} {arch}: {error}"]
    wrong = gate.broken(record, text, gate.rule_of(name, arch), gate.known_of(record.title))
    return [f"{record.title}: {reason}" for reason in wrong]


def main(expected: str | None) -> int:
    """Compile all kernels. expected: the release that should be installed."""
    if expected not in (None, triton_compat.VERSION):
        print(f"compile_all: expected Triton {expected}, got {triton_compat.VERSION}", file=sys.stderr)
        return 1
    targets = gate.targets()
    with ProcessPoolExecutor(JOBS) as pool:
        found = [reason for reasons in pool.map(wrong_with, targets) for reason in reasons]
    print(f"Triton {triton_compat.VERSION}: {len(targets)} kernels compiled", *found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else None))
