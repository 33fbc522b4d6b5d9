"""The experts' Triton kernels in Triton's CPU interpreter, chosen when Triton is imported: own processes."""

from pathlib import Path

import pytest

from tests.helpers.interpreter import run_file

FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_in_the_interpreter(name):
    run_file(FOLDER / name)
