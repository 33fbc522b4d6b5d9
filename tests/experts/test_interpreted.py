"""The experts' Triton kernels in Triton's CPU interpreter, chosen when Triton is imported: own processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.mark.parametrize("name", sorted(path.name for path in (HERE / "interpreted").glob("test_*.py")))
def test_in_the_interpreter(name):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "interpreted" / name)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    # Not a worker of the outer run's xdist.
    environment = {key: value for key, value in environment.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
