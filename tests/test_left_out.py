"""Counts of deselected tests and their reasons, in pytest-xdist's workers too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CONFTEST = """
from tests.conftest import *

torch.cuda.device_count = lambda: 1
torch.cuda.get_device_capability = lambda: (9, 0)
"""
TESTS = """
import pytest

def test_anywhere(): ...

@pytest.mark.gpu
def test_on_a_gpu(): ...

@pytest.mark.gpu(2)
def test_on_two(): ...

@pytest.mark.gpu(arch="sm_90")
def test_on_a_hopper(): ...

@pytest.mark.gpu(arch="sm_100")
def test_on_a_blackwell(): ...

@pytest.mark.slow
def test_like_another(): ...

@pytest.mark.gpu(2)
def test_not_chosen(): ...
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "interpreted").mkdir()
    for name, text in {
        "conftest.py": CONFTEST,
        "pytest.ini": "[pytest]\nmarkers = gpu\n    slow\n",
        "test_some.py": TESTS,
        "interpreted/test_more.py": "def test_one(): ...\n\ndef test_two(): ...\n",
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run(folder, interpret, *options):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": interpret, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not not_chosen", *options]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True).stdout.splitlines()


def test_what_a_worker_leaves_out_is_said(folder):
    said = run(folder, "0", "-n", "1")
    assert [line for line in said if line.startswith("needs")] == [
        "needs TRITON_INTERPRET=1: 2 deselected", "needs 2 GPUs: 1 deselected", "needs a GPU of sm_100: 1 deselected",
        "needs --slow: 1 deselected",
    ]  # fmt: skip
    assert any(line.startswith("3 passed") for line in said)


@pytest.mark.slow
def test_the_interpreter_takes_its_own_and_nothing_else(folder):
    said = run(folder, "1", "-vv")
    assert "TRITON_INTERPRET=1: only the tests in folders called `interpreted`" in said
    assert [line.split(" ")[0] for line in said if " PASSED" in line] == [
        f"interpreted/test_more.py::{name}" for name in ("test_one", "test_two")
    ]
