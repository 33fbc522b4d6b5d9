"""Record of kernels that ran on a GPU: recording, merging, writing, reading, and refusals."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.helpers import gpu_record, recorder
from tests.helpers.gpu_record import GpuRecord, Launched, Run

ROOT = Path(__file__).resolve().parents[2]
RUN = Run("NVIDIA H200", "sm_90", "2.11.0", "3.6.0", "12.8", "abc", 3, 1, "2026-11-21")
RECORD = GpuRecord(
    (RUN,),
    {"b" * 64: Launched("k", 2, 0), "a" * 64: Launched("k", 1, 1)},
)  # fmt: skip

# A GPU that isn't there, and kernels whose launch only reports their name.
PRETENDED = """
import types
import pytest
import torch
from triton.runtime.jit import JITFunction
from tests.helpers import recorder

torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda: (9, 0)
torch.cuda.get_device_name = lambda: "NVIDIA H200"
kernels = {}

def run(self, name, grid, warmup):
    made = types.SimpleNamespace(asm={"ptx": name}, metadata=types.SimpleNamespace(name=name))
    return kernels.setdefault(name, made)

JITFunction.run = run
pytest_addoption = recorder.add_options
pytest_configure = recorder.configure

@pytest.fixture
def launch():
    function = object.__new__(JITFunction)
    function.fn = types.SimpleNamespace(__module__="envoi.gemm")
    other = object.__new__(JITFunction)
    other.fn = types.SimpleNamespace(__module__="elsewhere")
    def both(name, warmup=False):
        function.run(name, grid=(1,), warmup=warmup)
        other.run("other", grid=(1,), warmup=False)
    return both
"""
CALLED_3_6 = """
from envoi.runtime import triton_compat
from tests.helpers import launches
triton_compat.VERSION, launches.ptxas_version = "3.6.0", lambda: "12.8"

"""
TESTS = """
import pytest

@pytest.fixture
def broken_behind():
    yield
    raise ValueError

def test_green(launch):
    launch("first")
    launch("first")
    launch("second")

def test_red(launch):
    launch("second")
    assert False

def test_red_behind(launch, broken_behind):
    launch("third")

def test_compiled_only(launch):
    launch("fourth", warmup=True)

@pytest.mark.parametrize("i", range(6))
def test_many(launch, i):
    launch("fifth")
"""


@pytest.mark.slow
def test_a_recorded_run_of_two_workers(tmp_path):
    (tmp_path / "conftest.py").write_text(PRETENDED)
    (tmp_path / "test_some.py").write_text(TESTS)
    path = tmp_path / "record.json"
    command = [sys.executable, "-m", "pytest", tmp_path, "-p", "no:cacheprovider", "--rootdir", tmp_path, "-q"]
    command += ["-n", "2", "--record-kernels", path, "--record-commit", "abc"]
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"4 kernels recorded in {path}" in done.stdout
    record = gpu_record.read(path)
    (run,) = record.runs
    assert (run.gpu, run.arch, run.commit) == ("NVIDIA H200", "sm_90", "abc")
    assert (run.passed, run.failed) == (9, 2)  # the test whose teardown failed counts in both
    assert {entry.kernel: (entry.passed, entry.failed) for entry in record.kernels.values()} == {
        "first": (1, 0), "second": (1, 1), "third": (0, 1), "fifth": (6, 0),
    }  # fmt: skip


def test_a_run_of_some_tests_is_added(tmp_path):
    (tmp_path / "conftest.py").write_text(PRETENDED.replace("def run(", CALLED_3_6 + "def run("))
    (tmp_path / "test_some.py").write_text(TESTS)
    path = tmp_path / "record.json"
    gpu_record.write(path, replace(RECORD, runs=(replace(RUN, triton="3.6.0", ptxas="12.8"),)))
    command = [sys.executable, "-m", "pytest", tmp_path, "-p", "no:cacheprovider", "--rootdir", tmp_path, "-q"]
    command += ["-k", "green or red", "--record-kernels", path, "--record-more", "--record-commit", "def"]
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    record = gpu_record.read(path)
    assert [(run.commit, run.passed, run.failed) for run in record.runs] == [("abc", 3, 1), ("def", 2, 2)]
    assert {entry.kernel for entry in record.kernels.values()} == {"k", "first", "second", "third"}


def test_records_together():
    more = GpuRecord((replace(RUN, commit="def"),), {"b" * 64: Launched("k", 1, 1), "c" * 64: Launched("k", 1, 0)})
    both = gpu_record.together(RECORD, more)
    assert both.runs == RECORD.runs + more.runs
    assert both.kernels == {
        "a" * 64: Launched("k", 1, 1), "b" * 64: Launched("k", 3, 1), "c" * 64: Launched("k", 1, 0),
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"compiled by Triton 3\.6\.0 .*, here it is Triton 3\.7\.0"):
        gpu_record.together(RECORD, replace(more, runs=(replace(RUN, triton="3.7.0"),)))
    with pytest.raises(ValueError, match="the record is of sm_90, the run on sm_100"):
        gpu_record.together(RECORD, replace(more, runs=(replace(RUN, arch="sm_100"),)))


def test_no_record_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "record.json"
    config = SimpleNamespace(getoption={"--record-kernels": str(path)}.get)
    with pytest.raises(pytest.UsageError, match="--record-kernels: expected a machine with a GPU, found none"):
        recorder.configure(config)  # pyright: ignore[reportArgumentType]
    assert not path.exists()


def test_a_file_brings_all_back(tmp_path):
    path = tmp_path / "record.json"
    gpu_record.write(path, RECORD)
    assert gpu_record.read(path) == RECORD
    lines = [line for line in path.read_text().splitlines() if '"kernel":' in line]
    assert [line.strip()[1] for line in lines] == ["a", "b"]
    gpu_record.write(path, replace(RECORD, kernels={}))
    assert gpu_record.read(path).kernels == {}


def test_files_that_are_not_read(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.json: there is none; `make test-gpu` on an H200"):
        gpu_record.read(tmp_path / "none.json")
    (tmp_path / "old.json").write_text('{"format": 0}')
    with pytest.raises(ValueError, match="its format is 0, this version reads 2"):
        gpu_record.read(tmp_path / "old.json")


def test_what_a_record_proves():
    assert gpu_record.no_green_run(RECORD, "gemm", "b" * 64) == ""
    red = gpu_record.no_green_run(RECORD, "gemm", "a" * 64)
    assert re.search(r"gemm: of the tests that launched it .* 1 passed and 1 failed", red)
    unknown = gpu_record.no_green_run(RECORD, "gemm", "c" * 64)
    assert "gemm: its machine code differs" in unknown
    assert "(PTX cccccccccccc); `make test-gpu` on an H200" in unknown


def test_another_compiler_proves_nothing():
    assert gpu_record.other_compiler(RECORD, "3.6.0", "12.8") == ""
    said = gpu_record.other_compiler(RECORD, "3.7.0", "12.8")
    assert "compiled by Triton 3.6.0 with ptxas 12.8, here it is Triton 3.7.0 with ptxas 12.8" in said
