"""Wheel on its own: its contents, and calls from it, outside the repository."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.helpers import fresh

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


ALONE = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, envoi
from envoi import cli
print(envoi.__file__)
layer = "--hidden 256 --inter 128 --experts 8 --topk 2 --tokens 64"
for line in ("info", f"plan {layer}", "tune --list --shape 512x512x512"):
    assert cli.main(line.split()) == 0, line
x, gate = torch.randn(5, 64), torch.randn(4, 64)
experts = envoi.experts.pack(torch.randn(4, 64, 64), torch.randn(4, 64, 32), "bf16")
print(envoi.moe(x.bfloat16(), envoi.route(x, gate, 2), experts).shape)
"""


def test_the_wheel_answers_alone(wheel, tmp_path, monkeypatch):
    package, elsewhere = tmp_path / "package", tmp_path / "elsewhere"
    zipfile.ZipFile(wheel).extractall(package)
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    done = fresh.run(ALONE, str(package))
    assert done.returncode == 0, done.stderr
    first, *others, last = done.stdout.splitlines()
    assert (first, last) == (f"{package}/envoi/__init__.py", "torch.Size([5, 64])")
    assert any("all operators: torch reference" in line for line in others)
