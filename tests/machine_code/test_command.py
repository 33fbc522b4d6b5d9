"""Command line of the machine-code tools: counts, files, refusals."""

import pytest

from tests.machine_code import kernels
from tools.kernel_cases import KernelCase
from tools.machine_code import __main__ as command
from tools.machine_code import gate


def one(name, launch, arches=("sm_90",)):
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


def test_kernels_are_checked_under_any_triton(small, monkeypatch, capsys):
    assert run("check", capsys=capsys)[:2] == (0, f"Triton {command.triton_compat.VERSION}: 1 kernels compiled\n")
    status, _, err = run("check", "1.0", capsys=capsys)
    assert (status, err) == (2, f"machine_code: expected Triton 1.0, got {command.triton_compat.VERSION}\n")
    monkeypatch.setattr(gate, "needs_of", lambda name, arch: {"tensor core": "HGMMA"})
    status, out, _ = run("check", capsys=capsys)
    assert status == 1
    assert "crowded-512 sm_90: tensor core: expected HGMMA, got none" in out
