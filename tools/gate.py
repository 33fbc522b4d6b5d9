"""`python -m tools.gate`: accept the current kernels' instruction counts; `tests/machine_code/test_gate.py` compares them."""

import sys
from pathlib import Path

from tools.machine_code import gate

ACCEPTED = Path(__file__).resolve().parents[1] / "tests" / "machine_code" / "gate.json"

if __name__ == "__main__":
    words, right = gate.accept(ACCEPTED)
    print(words)
    sys.exit(not right)
