"""Tests of Triton kernels in its CPU interpreter, which is chosen when Triton is imported: processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
LIMIT_S = 230

_empty, _new_empty = torch.empty, torch.Tensor.new_empty


def run_file(path: Path) -> None:
    """Run a test file in the interpreter; fails as it does."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    # Not a worker of the outer run's xdist.
    environment = {key: value for key, value in environment.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def poison_new_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody wrote is NaN; where that isn't a float, a huge number."""
    monkeypatch.setattr(torch, "empty", lambda *size, **options: _poisoned(_empty(*size, **options)))
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda x, *size, **options: _poisoned(_new_empty(x, *size, **options))
    )


def _poisoned(x: torch.Tensor) -> torch.Tensor:
    x.untyped_storage().fill_(0xFF if x.is_floating_point() else 0x7F)
    return x


def ignore_numpy(config: pytest.Config) -> None:
    """Its warnings about what kernels are meant to do with NaN and infinity; and one of the interpreter's own."""
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning")
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array:DeprecationWarning")
