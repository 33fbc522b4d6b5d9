"""Command line of the machine-code tools: counts, files, refusals."""

import subprocess
import sys
from pathlib import Path

import pytest

from envoi.runtime.kernel_case import KernelCase
from envoi.runtime.program import Launch
from tests.machine_code import kernels
from tools.machine_code import __main__ as command
from tools.machine_code import gate

ROOT = Path(__file__).resolve().parents[2]


def one(name, launch, arches=("sm_90", "sm_100")):
    return {name: KernelCase(name, "a kernel", arches, lambda: launch)}


@pytest.fixture
def small(monkeypatch):
    """Reduce the list of kernels to one that compiles quickly."""
    monkeypatch.setattr(gate, "measured", dict)
    monkeypatch.setattr(gate, "cases", lambda: one("crowded-512", kernels.crowded_launch(512)))


def run(*arguments, capsys):
    try:
        status = command.main([*map(str, arguments)])
    except SystemExit as stop:
        status = int(stop.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_command_as_a_program(tmp_path):
    there = tmp_path / "code.sass"
    arguments = ("count", "ep-sum", "--arch", "sm_100", "--dump", there)
    done = subprocess.run(
        (sys.executable, "-m", "tools.machine_code", *arguments), capture_output=True, text=True, cwd=ROOT
    )
    said, _, _ = done.stderr.partition("nanobind: leaked")  # Triton 3.9 may end with a report on itself
    assert (done.returncode, said) == (0, "")
    assert done.stdout.startswith("ep-sum sm_100: ")
    assert " 0 stack bytes a thread, " in done.stdout
    assert "\n  float arithmetic: " in done.stdout
    assert there.read_text().startswith("// ep-sum sm_100\n")
    assert "EXIT" in there.read_text()


def test_the_list_names_all_kernels(capsys):
    status, out, _ = run("list", capsys=capsys)
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == list(gate.cases())


def test_kernels_and_architectures(small, capsys):
    status, out, _ = run("count", "crowded-512", capsys=capsys)
    assert status == 0
    titles = [line.partition(":")[0] for line in out.splitlines() if not line.startswith(" ")]
    assert titles == ["crowded-512 sm_90", "crowded-512 sm_100"]
    assert "global load: 1 LDG.E.128" in out


def test_a_refusal_of_the_compiler_is_a_line(monkeypatch, capsys):
    launch = kernels.crowded_launch(512)
    odd = Launch(launch.kernel, (1,), (*launch.arguments[:2], 100), {})
    monkeypatch.setattr(gate, "cases", lambda: one("odd", odd, ("sm_90",)))
    status, out, err = run("count", "odd", capsys=capsys)
    assert (status, err) == (1, "")
    assert out.startswith("crowded: the compiler refuses it for sm_90: ")
    assert "power of 2" in out


def test_kernels_are_checked_under_any_triton(small, monkeypatch, capsys):
    assert run("check", capsys=capsys)[:2] == (0, f"Triton {command.triton_compat.VERSION}: 2 kernels compiled\n")
    status, _, err = run("check", "1.0", capsys=capsys)
    assert (status, err) == (2, f"machine_code: expected Triton 1.0, got {command.triton_compat.VERSION}\n")
    monkeypatch.setattr(gate, "needs_of", lambda name, arch: {"tensor core": "HGMMA"})
    status, out, _ = run("check", capsys=capsys)
    assert status == 1
    assert "crowded-512 sm_90: tensor core: expected HGMMA, got none" in out


def test_accepting_writes_the_file(small, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "ACCEPTED", tmp_path / "gate.json")
    assert run("accept", capsys=capsys)[0] == 0
    assert set(gate.read(tmp_path / "gate.json")) == {"crowded-512 sm_90", "crowded-512 sm_100"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["count"], "the following arguments are required: KERNEL"),
        (["count", "ep-som"], "KERNEL: expected a name of `list`, got ep-som"),
        (["count", "ep-sum", "--arch", "sm_89"], "invalid choice: 'sm_89'"),
        (["count", "indexer-scores-sm90", "--arch", "sm_100"], "--arch: expected one that a kernel is written for"),
    ],
)
def test_refusals(arguments, words, capsys):
    status, out, err = run(*arguments, capsys=capsys)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert words in err


def test_an_architecture_that_is_not_decoded_is_an_error(small, tmp_path, monkeypatch, capsys):
    blind = tmp_path / "nvdisasm"
    blind.write_text('#!/bin/sh\ntest "$1" = --version || { echo "nvdisasm fatal : Cannot decode" >&2; exit 1; }\n')
    blind.chmod(0o755)
    monkeypatch.setenv("NVDISASM", str(blind))
    status, out, err = run("count", "crowded-512", "--arch", "sm_100", capsys=capsys)
    assert (status, out) == (2, "")
    assert "nothing here disassembles sm_100" in err
    accepted, wrong = gate.judge_all(gate.targets())
    assert not accepted
    assert len(wrong) == 2
