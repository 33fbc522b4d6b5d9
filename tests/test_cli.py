"""The `envoi` command: help at once, one-line errors with status 2, info and the demo's contract."""

import io
import json
import subprocess
import sys

import pytest
import torch

import envoi
from bench import __main__ as bench
from envoi import cli, info
from examples.demo import __main__ as demo
from tests.helpers import fresh
from tests.helpers.slow import mostly_slow

HEAVY = ("torch", "triton", "transformers", "matplotlib", "numpy")


PROGRAMS = {"demo": demo.main, "bench": bench.main}  # beside the wheel's, with the same manners


def run(*arguments: str) -> int:
    """Return the exit status, whether returned or raised."""
    try:
        program = PROGRAMS.get(arguments[0]) if arguments else None
        return program(list(arguments[1:])) if program else cli.main(list(arguments))
    except SystemExit as stop:
        return int(stop.code or 0)


def test_help_imports_nothing_heavy():
    # A stand-in for the package's own names: the test concerns the imports of the command itself.
    code = f"""
import sys, types
package = types.ModuleType("envoi", {envoi.__doc__!r})
package.__path__, package.__file__, package.__version__ = {envoi.__path__!r}, {envoi.__file__!r}, "0"
sys.modules["envoi"] = package
from envoi.cli import main
for arguments in ["--help"], ["tune", "--help"], ["info", "--help"], ["plan", "--help"]:
    try:
        main(arguments)
    except SystemExit as stop:
        assert not stop.code
print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True)
    assert done.stdout.count("usage: envoi") == 4
    assert done.stderr.splitlines()[-1] == "[]"


def test_the_package_is_imported_without_a_compiler():
    heavy = ("torch._dynamo", "torch._inductor", "transformers", "matplotlib")
    done = fresh.run(f"import sys, envoi; print([name for name in {heavy} if name in sys.modules])")
    assert (done.stdout, done.stderr) == ("[]\n", "")


PLAN = ["plan", "--hidden", "256", "--inter", "128", "--experts", "8", "--topk", "2", "--tokens", "64"]


LEFT = """
import os, runpy, sys
reading, writing = os.pipe()
os.close(reading)
os.dup2(writing, 1)
sys.stdout.reconfigure(write_through=sys.argv.pop() == "unbuffered")
runpy.run_module("envoi.cli", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("buffering", ["buffered", "unbuffered"])
@pytest.mark.parametrize("arguments", mostly_slow([["--help"], ["info"], [*PLAN, "--json"]], quick=[[*PLAN, "--json"]]))
def test_a_reader_who_leaves_ends_it_without_a_word(arguments, buffering):
    done = fresh.run(LEFT, *arguments, buffering)
    assert (done.returncode, done.stderr) == (cli.READER_GONE, "")


@pytest.mark.parametrize(
    ("picture", "problem"),
    [
        ("{folder}", "expected a file, got the folder {folder}"),
        ("{folder}/plan", "expected a name that ends in .png, .pdf, .svg, got {folder}/plan"),
        ("{folder}/plan.txt", "expected a name that ends in .png, .pdf, .svg, got {folder}/plan.txt"),
        ("{folder}/none/x.png", "expected a file in a folder that exists, got {folder}/none/x.png"),
        ("", "expected a file, got the folder "),
    ],
)
def test_a_picture_that_cant_be_drawn_is_refused_at_the_start(picture, problem, tmp_path, monkeypatch, capsys):
    from examples.demo import model

    monkeypatch.setattr(model, "load", lambda *_: pytest.fail("this is too late"))
    assert run("demo", "--out", picture.format(folder=tmp_path)) == 2
    stdout, stderr = capsys.readouterr()
    assert (stdout, stderr) == ("", f"envoi: --out: {problem.format(folder=tmp_path)}".strip() + "\n")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["demo", "--ranks", "many"],
        ["demo", "--device", "tpu"],
        ["demo", "--rank", "3"],
        ["bench", "gems"],
        ["bench", "--list", "--case", "1x2x3 no such"],
        ["bench", "--repeat", "0"],
        ["bench", "--docs", "/nonexistent/docs/benchmarks"],
        ["bench", "--docs", "/nonexistent"],
        ["bench", "--docs", ""],
        ["bench", "gemm", "--out", "/dev/null/results"],
        ["info", "--yaml"],
        ["plan"],
        ["plan", "--hidden", "wide"],
        [*PLAN, "--tokens", "9" * 24],
        [*PLAN, "--tokens", "9" * 5000],
        [*PLAN, "--max-tokens", "9" * 24],
        [*PLAN, "--hidden", str(2**40)],
        [*PLAN, "--inter", str(2**40)],
        [*PLAN, "--experts", str(2**40)],
        [*PLAN, "--topk", str(2**40)],
        [*PLAN, "--gpus", str(2**40)],
    ],
)
def test_errors_are_one_line_and_status_2(arguments, capsys):
    assert run(*arguments) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert stderr.startswith("envoi: ")
    assert stderr.count("\n") == 1


def test_a_plan_is_printed_where_there_are_no_blocks(monkeypatch):
    printed = io.TextIOWrapper(io.BytesIO(), encoding="latin-1", write_through=True)
    monkeypatch.setattr(sys, "stdout", printed)
    assert run(*PLAN) == 0
    assert b"bound by # compute  = HBM" in printed.buffer.getvalue()


def test_a_missing_package_is_named_and_a_bug_is_not_hidden(monkeypatch, capsys):
    def needs(name):
        def fail(args):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        monkeypatch.setattr(info, "run", fail)

    needs("transformers")
    assert run("info") == 2
    assert "info needs transformers, which isn't installed" in capsys.readouterr().err
    needs("envoi.nothing")
    with pytest.raises(ModuleNotFoundError):
        run("info")


def test_info_as_json_and_as_text(capsys):
    assert run("info", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["envoi"] == envoi.__version__
    assert found["devices"][-1]["kind"] == "cpu"
    assert {entry["operator"] for entry in found["operators"]} == set(info.OPERATORS)
    assert run("info") == 0
    text = capsys.readouterr().out
    assert found["transport"]["name"] in text
    assert max(map(len, text.splitlines())) <= 80


def on(devices):
    operators = [{"operator": name, **info.backend(name, devices)} for name in info.OPERATORS]
    found = {"versions": {"envoi": "0", "torch": None}, "devices": devices, "operators": operators}
    return info.to_text({**found, "transport": {"name": "NCCL", "why": "one GPU here"}})


def test_operators_on_a_gpu_are_a_table_of_80_columns(monkeypatch):
    from envoi.ops.indexer import certificate

    monkeypatch.setattr(certificate, "orders", lambda device, num_heads: None)
    text = on([GPU, CPU])
    assert all(name in text for name in info.OPERATORS)
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("formats that it doesn't take") == 1  # gemm and grouped_gemm share a row


GPU = {"kind": "cuda", "name": "NVIDIA H200", "arch": "sm_90", "num_sms": 132, "memory_gib": 139.8}
CPU = {"kind": "cpu", "name": "X (CPU)", "num_threads": 2}


@pytest.mark.parametrize(
    ("devices", "reach", "backend", "name"),
    [
        ([CPU], False, "torch reference", "gloo"),
        ([GPU, CPU], False, "Hopper kernel", "NCCL"),
        ([GPU, GPU, CPU], False, "Hopper kernel", "NCCL"),
        ([GPU, GPU, CPU], True, "Hopper kernel", "NVLink"),
    ],
)
def test_backends_and_transport_say_why(monkeypatch, devices, reach, backend, name):
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: reach)
    found = info.backend("ExpertParallel.moe", devices)
    assert found["backend"] == backend
    assert found["why"]
    assert info.transport(devices)["name"] == name
