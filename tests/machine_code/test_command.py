"""Command: counts, files, comparisons, and refusals."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tools.machine_code import diff, record, registry, report
from tools.machine_code.__main__ import main
from tools.machine_code.compile import Recipe, compile_kernel

from tests.machine_code import kernels

ROOT = Path(__file__).resolve().parents[2]
SIGNATURE = {"x": "*fp32:16", "out": "*fp32:16"}


@pytest.fixture(scope="module")
def built():
    """Compile one kernel at two sizes."""
    return [compile_kernel(kernels.crowded, SIGNATURE, {"BLOCK": size}, "sm_90") for size in (512, 2048)]


@pytest.fixture
def small(monkeypatch):
    """Reduce the registry to one kernel that compiles quickly."""
    recipe = Recipe(kernels.crowded, SIGNATURE, {"BLOCK": 512})
    entry = registry.Entry("crowded-512", ("sm_90", "sm_100"), "a kernel", lambda arch: recipe)
    monkeypatch.setattr(registry, "KERNELS", {"crowded-512": entry})


def run(*arguments, capsys):
    status = main([*map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_command_as_a_program(tmp_path):
    here, there = tmp_path / "counts.json", tmp_path / "code.sass"
    command = ("-m", "tools.machine_code", "tmem-load", "--arch", "sm_100", "--json", here, "--dump", there)
    done = subprocess.run((sys.executable, *command), capture_output=True, text=True, cwd=ROOT)
    said, _, _ = done.stderr.partition("nanobind: leaked")  # Triton 3.9 may end with a report on itself
    assert (done.returncode, said) == (0, "")
    assert "tmem-load sm_100" in done.stdout
    assert "  32x32b.x32" in done.stdout
    (kernel,) = json.loads(here.read_text())["kernels"]
    assert kernel["families"]["tensor memory load"] == {"32x32b.x32": 8}
    assert there.read_text().count("LDTM.x32") == 8
    assert there.read_text().startswith("// tmem-load sm_100\n")


def test_the_tool_lists_and_refuses_in_one_line():
    listed = subprocess.run((sys.executable, "-m", "tools.machine_code", "--list"), capture_output=True, text=True, cwd=ROOT)
    assert [line.split()[0] for line in listed.stdout.splitlines()] == list(registry.KERNELS)
    refused = subprocess.run((sys.executable, "-m", "tools.machine_code", "tmem-lode"), capture_output=True, text=True, cwd=ROOT)
    assert refused.returncode == 2
    names = ", ".join(registry.KERNELS)
    assert refused.stderr == f"machine_code: KERNEL: expected a .cubin file or one of {names}, got 'tmem-lode'\n"


def test_an_architecture_that_is_not_decoded_has_no_zeros(small, tmp_path, monkeypatch, capsys):
    blind = tmp_path / "nvdisasm"
    blind.write_text('#!/bin/sh\ntest "$1" = --version || { echo "nvdisasm fatal : Cannot decode" >&2; exit 1; }\n')
    blind.chmod(0o755)
    monkeypatch.setenv("NVDISASM", str(blind))
    status, out, _ = run("crowded-512", "--arch", "sm_100", "--json", tmp_path / "x.json", capsys=capsys)
    assert status == 1
    rows = [line.split() for line in out.splitlines()]
    assert ["instructions", "?"] in rows
    assert not any(row[-1] == "0" for row in rows if row[0] != "stack")
    assert "crowded-512 sm_100: not counted: nothing here disassembles sm_100" in out
    (kept,) = record.read(tmp_path / "x.json")
    assert kept.families is kept.instructions is None
    assert kept.registers > 0
    assert "?" in diff.compare([kept], [kept])


def test_kernels_and_architectures(small, capsys):
    status, out, _ = run("crowded-512", capsys=capsys)
    assert status == 0
    assert out.splitlines()[0].split() == ["crowded-512", "sm_90", "crowded-512", "sm_100"]
    assert run("crowded-512", "--arch", "sm_103", capsys=capsys)[:2] == (
        1, "crowded-512 sm_103: it is written for sm_90, sm_100\n",
    )  # fmt: skip


def test_a_refusal_of_the_compiler_is_a_line(small, monkeypatch, capsys):
    broken = Recipe(kernels.crowded, SIGNATURE, {"BLOCK": 100})
    monkeypatch.setitem(registry.KERNELS, "odd", registry.Entry("odd", ("sm_90",), "", lambda arch: broken))
    status, out, err = run("odd", capsys=capsys)
    assert (status, err) == (1, "")
    assert out.startswith("odd sm_90: the compiler refuses it: ")
    assert "power of 2" in out


def test_a_cubin_from_a_file(built, tmp_path, capsys):
    path = tmp_path / "crowded.cubin"
    path.write_bytes(built[0].cubin)
    status, out, _ = run(path, capsys=capsys)
    assert status == 0
    assert "crowded sm_90" in out
    assert f"{built[0].registers}" in out
    assert "+ launch's" in out


def test_a_comparison(built, tmp_path, capsys):
    small, large = (record.of_binary(binary)[0][0] for binary in built)
    rows = {row[0]: row[1:] for row in diff.rows(small, large)}
    assert rows["  128 bit"] == ["1", "4", "+3"]
    assert rows["warps"] == ["4", "4", "="]
    assert rows["registers per thread"][2] == f"{large.registers - small.registers:+d}"
    assert rows["PTX"][2] == "differs"
    assert {row[0]: row for row in diff.rows(small, small)}["PTX"][3] == "="

    as_json, as_cubin = tmp_path / "before.json", tmp_path / "after.cubin"
    as_json.write_text(record.to_json([small], [], {}))
    as_cubin.write_bytes(built[1].cubin)
    status, out, _ = run("--diff", as_json, as_cubin, capsys=capsys)
    assert status == 0
    lines = [line.split() for line in out.splitlines()]
    assert ["128", "bit", "1", "4", "+3"] in lines
    assert lines[0] == ["crowded", "sm_90"]


def test_what_stands_on_one_side_only(built):
    small = record.of_binary(built[0])[0][0]
    other, third = (dataclasses.replace(small, kernel=name) for name in ("other", "third"))
    text = diff.compare([small, other], [small, third])
    assert text.startswith("crowded sm_90\n")
    assert text.endswith("only before: other sm_90\nonly after: third sm_90")
    renamed = diff.compare([small], [third])
    assert renamed.startswith("crowded sm_90 -> third sm_90\n")


def test_json_brings_all_back(built, tmp_path):
    kept = record.of_binary(built[0], "name")[0]
    path = tmp_path / "counts.json"
    path.write_text(record.to_json(kept, [record.Refusal("a", "sm_90", "why")], {"triton": "3"}))
    assert record.read(path) == kept
    assert report.table(kept).splitlines()[0].strip() == "name sm_90"


def test_a_sweep(monkeypatch, tmp_path, capsys):
    from tools.machine_code import tmem_sweep

    few = [tmem_sweep.Case("32x32b", 32), tmem_sweep.Case("16x64b", 1)]
    monkeypatch.setattr(tmem_sweep, "cases", lambda: iter(few))
    status, out, err = run("--sweep", "tmem-load", "--json", tmp_path / "rows.json", capsys=capsys)
    assert (status, err) == (0, "")
    assert "8 32x32b.x32" in out
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]["sm_100"]
    assert rows[0]["record"]["families"]["tensor memory load"] == {"32x32b.x32": 8}
    assert "unsupported" in rows[1]["reason"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "sass: expected one of KERNEL, --list, --diff, --sweep, got none"),
        (["--list", "tmem-load"], "got KERNEL and --list"),
        (["nothing"], "KERNEL: expected a .cubin file or one of tmem-load"),
        (["tmem-load", "--arch", "sm_89"], "arch: expected one of sm_90, sm_100, sm_103, got 'sm_89'"),
        (["none.cubin"], "KERNEL: none.cubin: there is no such file"),
        (["--sweep", "tmem-load", "--dump", "x"], "--dump: expected KERNEL beside it, got --sweep"),
        (["--diff", "none.json", "none.json"], "No such file"),
        ([__file__], "expected a cubin (an ELF file for NVIDIA GPUs), got"),
        ([sys.executable], "got an ELF file for another machine"),
        (["--diff", __file__, __file__], "expected a cubin, or JSON that tools.machine_code wrote"),
    ],
)
def test_refusals(arguments, words, capsys):
    status, out, err = run(*arguments, capsys=capsys)
    assert (status, out) == (2, "")
    assert err.startswith("machine_code: ")
    assert err.count("\n") == 1
    assert words in err


def test_a_damaged_cubin_and_old_json(built, tmp_path, capsys):
    cut = tmp_path / "cut.cubin"
    cut.write_bytes(built[0].cubin[:1000])
    status, _, err = run(cut, capsys=capsys)
    assert status == 2
    assert "cuobjdump" in err
    old = tmp_path / "old.json"
    old.write_text('{"format": 0, "kernels": []}')
    assert "its format is 0, this version reads 1" in run("--diff", old, old, capsys=capsys)[2]


def test_a_name_stands_once_in_the_registry():
    with pytest.raises(ValueError, match="'tmem-load' stands twice"):
        registry.kernel("tmem-load", ("sm_90",))(lambda arch: None)
    assert all(entry.about and entry.arches for entry in registry.KERNELS.values())
