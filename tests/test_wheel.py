"""Wheel on its own: its contents, and calls from it, outside the repository."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_WHEEL_BYTES = 2_000_000
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Build from a copy, since setuptools writes beside its sources. Without a network: `dev` installs setuptools."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    leave_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "src", ignore=leave_out)
    done = subprocess.run((sys.executable, "-c", BUILD, "."), cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


def test_the_wheel_holds_the_package_and_what_it_reads(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    package = {name for name in names if ".dist-info/" not in name}
    listed = subprocess.run(("git", "ls-files", "src"), cwd=ROOT, capture_output=True, text=True, check=True).stdout
    sources = {name.removeprefix("src/") for name in listed.split() if (ROOT / name).is_file()}
    assert sources == package
    assert wheel.stat().st_size < MAX_WHEEL_BYTES


def test_the_wheel_answers_alone(wheel, tmp_path):
    package, elsewhere = tmp_path / "package", tmp_path / "elsewhere"
    zipfile.ZipFile(wheel).extractall(package)
    elsewhere.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(package)}

    def python(*arguments: str) -> str:
        command = (sys.executable, *arguments)
        done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    found = python("-c", "from importlib.util import find_spec; print(find_spec('envoi').origin)")
    assert found == f"{package}/envoi/__init__.py\n"
    assert "all operators: torch reference" in python("-m", "envoi.cli", "info")
    layer = ("--hidden", "256", "--inter", "128", "--experts", "8", "--topk", "2", "--tokens", "64")
    assert "us" in python("-m", "envoi.cli", "plan", *layer)
    assert python("-m", "envoi.cli", "tune", "--list", "--shape", "512x512x512")
    code = """
import torch, envoi
x, gate = torch.randn(5, 64), torch.randn(4, 64)
experts = envoi.experts.pack(torch.randn(4, 64, 64), torch.randn(4, 64, 32), "bf16")
print(envoi.moe(x.bfloat16(), envoi.route(x, gate, 2), experts).shape)
"""
    assert python("-c", code) == "torch.Size([5, 64])\n"
