"""`envoi estimate`: table, picture, JSON, and errors in a line."""

import json
import shlex

import pytest

from envoi import cli

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


def test_the_width_of_an_expert_has_the_name_that_warm_up_has_for_it(capsys):
    assert run(capsys, "--json", ARGUMENTS.replace("--inter", "--intermediate")) == run(capsys, "--json")


def test_json_has_everything(capsys):
    found = json.loads(run(capsys, "--json --max-tokens 4096"))
    assert found["layer"]["hidden"] == 4096
    assert found["machine"]["name"] == "H200"
    assert found["max_tokens"] == 4096
    assert [step["name"] for step in found["steps"]] == ["router", "dispatch", "L1", "L2", "combine"]
    assert found["steps"][1]["bound_by"] == "NVLink"
    assert found["staged_us"] == pytest.approx(sum(step["time_us"] for step in found["steps"]))
    assert found["pool_rows"] == 8 * 4096 * 6


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
