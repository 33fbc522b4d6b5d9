"""`python -m tools.engines` without a network: wheels that have what is recorded, and layers that stand for theirs."""

import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.integrations.stand_ins import RECORD
from tools.engines import __main__ as command
from tools.engines.facts import RELEASES


@pytest.mark.parametrize("failing", [None, "sglang", "vllm"])
def test_layers_run_in_the_classes_of_each_release(monkeypatch, capsys, failing):
    ran = []

    def downloaded(engine, release, folder):
        wheel = Path(folder) / f"{engine}-{release}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as file:
            file.writestr(f"{engine}/__init__.py", "")
            file.writestr(f"{engine}/_C.abi3.so", "")
        return wheel

    def run(arguments, env=None, check=False):
        if env is not None:
            assert env["CUDA_VISIBLE_DEVICES"] == ""
            folder = Path(env["PYTHONPATH"].split(":")[0])
            (engine,) = (path.name for path in folder.iterdir())
            assert [path.name for path in (folder / engine).iterdir()] == ["__init__.py"]
            ran.append((engine, arguments[-1]))
        return SimpleNamespace(returncode=int(env is not None and ran[-1][0] == failing))

    def facts_of(engine, wheel):
        return (release := wheel.name.split("-")[1]), RECORD[f"{engine} {release}"]

    monkeypatch.setattr(command, "downloaded", downloaded)
    monkeypatch.setattr(command, "facts_of", facts_of)
    monkeypatch.setattr(command, "unnamed", lambda engine, wheel: [])
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("sys.argv", ["engines"])
    assert command.main() == (failing is not None)
    wanted = [(engine, release) for engine, releases in RELEASES.items() for release in releases]
    assert ran == [(engine, f"tools.engines.{engine}_layers") for engine, _ in wanted]
    lines = capsys.readouterr().out.splitlines()
    for (engine, release), line in zip(wanted, lines, strict=True):
        assert line.startswith(f"{engine} {release}: ")
        assert ("its layers don't run as they should" in line) == (engine == failing)
