"""The router in plain Triton, in Triton's CPU interpreter."""

from pathlib import Path

import pytest

from tests.helpers.interpreter import run_file

FILES = sorted((Path(__file__).parent / "interpreted").glob("test_*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_in_the_interpreter(path):
    run_file(path)
