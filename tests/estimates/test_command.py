"""`envoi estimate`: table, picture, JSON, and errors in a line."""

import json
import shlex
from pathlib import Path

import pytest

from envoi import cli

README = Path(__file__).resolve().parents[2] / "README.md"
ARGUMENTS = "--hidden 4096 --inter 2048 --experts 256 --topk 6 --tokens 2048 --gpus 8 --format fp8_block128"


def run(capsys, more: str = "", arguments: str = ARGUMENTS) -> str:
    assert cli.main(["plan", *shlex.split(f"{arguments} {more}")]) == 0
    return capsys.readouterr().out


def test_the_table_and_the_picture(capsys):
    text = run(capsys)
    assert " ".join(text.split()).startswith(
        "hidden 4096, intermediate 2048, 256 experts, top-6, fp8_block128; 2048 tokens on each of 8 x H200 (sm_90) step"
    )
    names = [line.split()[0] for line in text.splitlines() if line]
    steps = ["router", "dispatch", "L1", "L2", "combine"]
    assert [name for name in names if name in steps] == 3 * steps  # times, work, picture
    assert "█" in text
    assert "▒" in text


@pytest.mark.parametrize("format", ["bf16", "fp8_block128", "mxfp4"])
@pytest.mark.parametrize(
    "arguments",
    [
        ARGUMENTS,
        "--hidden 131072 --inter 131072 --experts 1 --topk 1 --tokens 30000",
        "--hidden 8192 --inter 1048576 --experts 8 --topk 1 --tokens 5000 --gpus 8",
        "--hidden 128 --inter 128 --experts 1 --topk 1 --tokens 80000000",
        "--hidden 128 --inter 128 --experts 65536 --topk 32 --tokens 30000 --gpus 8 --arch sm_100",
    ],
)
def test_it_fits_80_columns(arguments, format, capsys):
    lines = run(capsys, f"--format {format}", arguments).splitlines()
    assert len(lines) > 20
    assert max(map(len, lines)) <= 80


def test_the_readme_shows_this_command():
    line = next(line for line in README.read_text().splitlines() if line.startswith("    envoi estimate "))
    assert line.split("envoi estimate ")[1] == ARGUMENTS


def test_one_gpu_has_no_wire(capsys):
    assert "1 x B200" in run(capsys, "--gpus 1 --arch sm_100")
    found = json.loads(run(capsys, "--gpus 1 --arch sm_100 --json"))
    assert {step["nvlink_bytes"] for step in found["steps"]} == {0}


def test_bars_lie_end_to_end(capsys):
    bars = run(capsys).splitlines()
    first = next(at for at, line in enumerate(bars) if line.startswith("router") and "█" in line)
    end = 10
    for line in bars[first : first + 5]:
        bar = line[: line.rindex(" ")]
        assert abs(len(bar) - len(bar[10:].lstrip()) - end) <= 1
        end = len(bar)


def test_json_has_everything(capsys):
    found = json.loads(run(capsys, "--json --max-tokens 4096"))
    assert found["layer"]["hidden"] == 4096
    assert found["machine"]["name"] == "H200"
    assert found["max_tokens"] == 4096
    assert [step["name"] for step in found["steps"]] == ["router", "dispatch", "L1", "L2", "combine"]
    assert found["steps"][1]["bound_by"] == "NVLink"
    assert found["staged_us"] == pytest.approx(sum(step["time_us"] for step in found["steps"]))
    assert found["pool_rows"] == 8 * 4096 * 6


def test_a_picture_in_a_file(capsys, tmp_path):
    run(capsys, f"--png {tmp_path}/plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (f"{ARGUMENTS} --gpus 3", "envoi: --gpus: expected 1, 2, 4 or 8"),
        (f"{ARGUMENTS} --arch sm_80", "envoi: --arch: expected one of"),
        (f"{ARGUMENTS} --format fp7", "envoi: --format: expected one of"),
        (f"{ARGUMENTS} --max-tokens 1", "envoi: --max-tokens: expected an int from"),
        (f"{ARGUMENTS} --topk 100", "envoi: --topk: expected an int from 1 to"),
        (f"{ARGUMENTS} --tokens 0", "envoi: --tokens: expected an int from 1 to"),
        (f"{ARGUMENTS} --experts 7 --gpus 2", "envoi: --experts: expected"),
        (f"{ARGUMENTS} --inter 7", "envoi: --inter: expected a multiple of"),
        (f"{ARGUMENTS} --tokens 100000000", "more GPUs, or fewer max_tokens"),
    ],
)
def test_refusals_are_one_line(arguments, words, capsys):
    assert cli.main(["plan", *shlex.split(arguments)]) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert stderr.startswith("envoi: ")
    assert words in stderr
    assert stderr.count("\n") == 1
