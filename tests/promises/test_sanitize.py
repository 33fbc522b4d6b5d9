"""Runs of compute-sanitizer by a program that stands for it: summaries, kernels, planted errors, what isn't watched."""

import argparse
import json
import os
import re
import stat
import time
from dataclasses import replace

import pytest

from tests.helpers.processes import ends
from tests.promises import evidence, sanitize
from tests.promises import test_hazards as races
from tests.promises.sanitize import PLANTED, Watched, errors_in, registered, watch

FAKE = """#!/bin/sh
# Stands for compute-sanitizer: --tool T .. --log-file F .. python -m module [--role-tables] PROGRAM SAID
tool=$2
log=$6
for last; do before=$program; program=$last; done
case "$before" in
  planted*) echo "========= ERROR SUMMARY: $PLANTED errors" > $log; exit 97 ;;
  *bad*) printf '========= Invalid __global__ read of size 4 bytes\\n========= ERROR SUMMARY: 2 errors\\n' > $log ;;
  *slow*) sleep 60 & echo $! > "$SLEEPER"; wait ;;
  *hung*) echo "========= Invalid __global__ read of size 4 bytes" > $log; sleep 60 & echo $! > "$SLEEPER"; wait ;;
  *sick*) printf '========= Internal Sanitizer Error: x\n========= ERROR SUMMARY: 0 errors\n' > $log ;;
  *roles*) cp "$RACES" $log ;;
  *mute*) echo "========= COMPUTE-SANITIZER" > $log ;;
  *) echo "========= ERROR SUMMARY: 0 errors" > $log ;;
esac
[ "$PYTORCH_NO_CUDA_MEMORY_CACHING$ENVOI_PREPARED" = 10 ] || exit 5
case "$before" in *wrong*) right=false ;; *) right=true ;; esac
echo "{\\"right\\": $right, \\"launched\\": $LAUNCHED, \\"role_tables\\": $TABLES}" > $program
"""
NAME = "envoi.ops.moe.kernels.sort_kernel"


@pytest.fixture
def fake(tmp_path, monkeypatch):
    path = tmp_path / "compute-sanitizer"
    path.write_text(FAKE)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("COMPUTE_SANITIZER", str(path))
    monkeypatch.setenv("PLANTED", "1")
    monkeypatch.setenv("TABLES", json.dumps({"gemm_kernel": [[[240], [12736, 18176]]]}))
    monkeypatch.setenv("LAUNCHED", json.dumps([f"{NAME} abc", f"{NAME} def"]))
    monkeypatch.setattr("tests.promises.sanitized.programs", lambda: dict.fromkeys(("good", "fine")))
    return str(path)


def options(**changes) -> argparse.Namespace:
    usual = {"tools": ["memcheck"], "only": [], "jobs": 2, "limit_s": 60.0, "device": "cpu", "more": False}
    return argparse.Namespace(**(usual | {"record": None, "incomplete": False} | changes))


def test_a_log_without_a_summary_is_not_a_green_one():
    assert errors_in("========= ERROR SUMMARY: 3 errors\n") == 3
    assert errors_in("========= ERROR SUMMARY: 0 errors\n========= ERROR SUMMARY: 1 error\n") == 1
    assert errors_in("========= Internal Sanitizer Error\n") is None


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("good", ""),
        ("bad", "bad: 2 errors of memcheck: Invalid __global__ read of size 4 bytes"),
        ("mute", "mute: memcheck ended without a summary; nothing noted"),
        ("sick", "sick: memcheck: Internal Sanitizer Error: x"),
        ("wrong", "wrong: wrong results under memcheck; "),
    ],
)
def test_what_a_tool_says(fake, program, said):
    found = watch(fake, "memcheck", program)
    assert found.problem == said
    assert found.kernels == {NAME: {"abc", "def"}}


def test_a_tool_that_misses_the_planted_error_watches_nothing(fake, monkeypatch, capsys):
    planted, *programs = sanitize.run(options())
    fine, good = sorted(programs, key=lambda run: run.promise)
    assert (planted.promise, planted.count, planted.wrong, planted.text) == (f"sanitizers/memcheck/{PLANTED}", 1, 0, "")
    assert (good.promise, good.count, good.wrong) == ("sanitizers/memcheck/good", 1, 0)
    assert good.text == fine.text == f"2 kernels of {NAME}"
    assert "not run for want of time: nothing" in capsys.readouterr().out
    monkeypatch.setenv("PLANTED", "0")
    given = options()
    (run,) = sanitize.run(given)
    assert run.wrong == 1 and given.incomplete
    assert "memcheck didn't find the error planted for it" in run.text
    assert "not run for want of time: good, fine" in capsys.readouterr().out


def test_kernels_that_nothing_launched_are_listed(fake, capsys):
    list(sanitize.run(options()))
    missing = registered() - {NAME}
    assert f"kernels that weren't watched: {', '.join(sorted(missing))}" in capsys.readouterr().out
    assert len(missing) > 20


def test_programs_that_the_time_does_not_allow_are_listed(fake, capsys):
    given = options(limit_s=0.0)
    list(sanitize.run(given))
    assert given.incomplete
    assert "not run for want of time: good, fine" in capsys.readouterr().out


def test_a_program_is_ended_with_all_that_it_started(fake, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("SLEEPER", str(tmp_path / "sleeper"))
    monkeypatch.setattr("tests.promises.sanitized.programs", lambda: dict.fromkeys(("good", "slow")))
    begun, given = time.monotonic(), options(limit_s=3.0)
    planted, good = sanitize.run(given)
    assert time.monotonic() - begun < 20
    assert (planted.wrong, good.wrong, good.promise) == (0, 0, "sanitizers/memcheck/good") and given.incomplete
    assert "not run for want of time: slow" in capsys.readouterr().out
    assert ends(int((tmp_path / "sleeper").read_text()))


def test_what_a_tool_said_before_the_limit_is_not_lost(fake, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("SLEEPER", str(tmp_path / "sleeper"))
    monkeypatch.setattr("tests.promises.sanitized.programs", lambda: dict.fromkeys(("good", "hung")))
    _, good, hung = sanitize.run(options(limit_s=3.0))  # as they end
    assert (good.wrong, hung.wrong) == (0, 1)
    assert hung.text.startswith("hung: memcheck ended without a summary; Invalid __global__ read of size 4 bytes")
    assert "hung: memcheck ended without a summary; Invalid __global__ read of size 4 bytes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("log", "problem", "counts"),
    [
        (races.OF_ROLES + races.WARNING + races.summary(1, 1), "", (1, 1)),
        (races.summary(0), "", (0, 0)),
        (
            races.OF_ROLES + races.OF_A_BUFFER + races.summary(2),
            "roles: 1 errors of racecheck: write of gemm_kernel+0x5000 in tile.py:9 and read of gemm_kernel+0xf0",
            (1, 0),
        ),
        (races.OF_ROLES, "roles: racecheck ended without a summary; Error: Race reported between", (0, 0)),
    ],
)
def test_races_in_the_table_of_roles_are_counted_apart(fake, monkeypatch, tmp_path, log, problem, counts):
    (tmp_path / "races").write_text(log)
    monkeypatch.setenv("RACES", str(tmp_path / "races"))
    found = watch(fake, "racecheck", "roles")
    assert (found.of_roles, found.warnings) == counts
    assert found.problem.startswith(problem) and bool(found.problem) == bool(problem)


def test_a_program_that_takes_too_long_by_itself_is_wrong(fake, monkeypatch, tmp_path):
    monkeypatch.setenv("SLEEPER", str(tmp_path / "sleeper"))
    assert watch(fake, "memcheck", "slow", 1.0).problem == (
        "slow: memcheck ended without a summary; it took more than 1 s"
    )


def test_what_each_program_came_to_is_said_at_once(fake, monkeypatch, capsys):
    monkeypatch.setattr("tests.promises.sanitized.programs", lambda: dict.fromkeys(("good", "bad")))
    list(sanitize.run(options()))
    said = capsys.readouterr().out
    assert re.search(r"memcheck: good: 2 kernels, \d+ s, right", said)
    assert re.search(r"memcheck: bad: 2 kernels, \d+ s, bad: 2 errors of memcheck", said)


def test_only_envois_kernels_are_watched(tmp_path):
    command = sanitize.command_of("compute-sanitizer", "racecheck", "good", tmp_path / "log", tmp_path / "said")
    assert command[command.index("--kernel-name-exclude") + 1] == "kns=_ZN"
    assert command[command.index("--racecheck-num-workers") + 1] == "1"
    assert command[-3:] == ("--role-tables", "good", str(tmp_path / "said"))
    assert "--role-tables" not in sanitize.command_of("", "memcheck", "good", tmp_path / "log", tmp_path / "said")


def test_without_the_sanitizer_there_is_no_run(monkeypatch):
    monkeypatch.delenv("COMPUTE_SANITIZER", raising=False)
    monkeypatch.setattr(sanitize.shutil, "which", lambda *_, **__: None)
    with pytest.raises(FileNotFoundError, match="compute-sanitizer: expected it in PATH"):
        list(sanitize.run(options()))


def test_programs_are_of_every_operator():
    os.environ.pop("COMPUTE_SANITIZER", None)
    from tests.promises.sanitized import programs
    from tests.promises.subjects import MAKERS

    names = programs()
    for name in MAKERS:
        by_torch = "gemm fp32" in name or name.startswith("quantise")
        assert any(name.startswith(program) for program in names) is not by_torch, name


def test_a_program_without_a_kernel_is_a_problem(fake, monkeypatch):
    monkeypatch.setenv("LAUNCHED", "[]")
    assert watch(fake, "memcheck", "good").problem == "good: no kernel for memcheck to watch"


def test_a_name_that_no_program_has_is_refused(fake):
    with pytest.raises(ValueError, match="--only: expected a part of a program's name, got gem bf16"):
        list(sanitize.run(options(only=["gem bf16"])))


def test_only_some_programs(fake):
    planted, fine = sanitize.run(options(only=["fine"]))
    assert (planted.promise, fine.promise) == (f"sanitizers/memcheck/{PLANTED}", "sanitizers/memcheck/fine")


def test_kernels_of_earlier_runs_count_as_watched(fake, tmp_path, monkeypatch, capsys):
    record = tmp_path / "sanitize.jsonl"
    evidence.append(record, list(sanitize.run(options(only=["fine"]))))
    other = "envoi.ops.moe.kernels.combine_kernel"
    monkeypatch.setenv("LAUNCHED", json.dumps([f"{other} abc"]))
    capsys.readouterr()
    list(sanitize.run(options(more=True, record=str(record))))
    missing = registered() - {NAME, other}
    assert f"kernels that weren't watched: {', '.join(sorted(missing))}\n" in capsys.readouterr().out


def test_more_are_those_without_a_right_run(fake, tmp_path):
    record = tmp_path / "sanitize.jsonl"
    given = options(more=True, record=str(record))
    evidence.append(record, list(sanitize.run(options(only=["fine"]))))
    _, good = sanitize.run(given)
    assert good.promise == "sanitizers/memcheck/good"
    evidence.append(record, [replace(good, wrong=1)])
    assert [run.promise for run in sanitize.run(given)][1:] == ["sanitizers/memcheck/good"]
    evidence.append(record, [good])
    assert len(list(sanitize.run(given))) == 1 and not given.incomplete, "the planted error alone"


def test_programs_take_turns_with_the_gpus(fake, monkeypatch):
    seen = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setattr("tests.promises.sanitized.programs", lambda: dict.fromkeys("abc"))
    monkeypatch.setattr(sanitize, "watch_by", lambda end, path, tool, program, gpu: seen.append((program, gpu)))
    list(sanitize.run(options(jobs=1)))
    assert seen == [("a", "3"), ("b", "5"), ("c", "3")]
    monkeypatch.undo()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert sanitize.gpus()[0] == "0"


def test_lines_add_up():
    one = Watched(
        "a", "racecheck", 0, (), {NAME: {"x", "y"}, "envoi.b": {"z"}}, True, of_roles=4, of_words=2, warnings=1
    )
    other = Watched("b", "racecheck", 0, (), {NAME: {"x"}}, True)
    wrong = Watched("c", "racecheck", 2, ("Error: 5 kernels of note",), {NAME: {"x"}}, True)
    assert one.line == f"3 kernels of envoi.b, {NAME}; 4 {sanitize.OF_ROLES}; 2 {sanitize.OF_WORDS}; 1 warnings"
    found = sanitize.totals(x.line for x in (one, other, wrong))
    assert found == sanitize.Totals(4, frozenset([NAME, "envoi.b"]), 4, 2, 1)
