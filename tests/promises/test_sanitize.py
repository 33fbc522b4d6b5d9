"""Runs of compute-sanitizer by a program that stands for it: summaries, kernels, planted errors, what isn't watched."""

import argparse
import json
import stat
import time

import pytest

from tests.helpers.processes import ends
from tests.promises import sanitize
from tests.promises import test_hazards as races
from tests.promises.sanitize import PLANTED, errors_in, watch

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
    usual = {"tools": ["memcheck"], "only": [], "jobs": 2, "limit_s": 60.0, "device": "cpu"}
    return argparse.Namespace(**(usual | {"incomplete": False} | changes))


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


def test_a_program_is_ended_with_all_that_it_started(fake, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("SLEEPER", str(tmp_path / "sleeper"))
    monkeypatch.setattr("tests.promises.sanitized.programs", lambda: dict.fromkeys(("good", "slow")))
    begun, given = time.monotonic(), options(limit_s=3.0)
    planted, good = sanitize.run(given)
    assert time.monotonic() - begun < 20
    assert (planted.wrong, good.wrong, good.promise) == (0, 0, "sanitizers/memcheck/good") and given.incomplete
    assert "not run for want of time: slow" in capsys.readouterr().out
    assert ends(int((tmp_path / "sleeper").read_text()))


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


def test_only_envois_kernels_are_watched(tmp_path):
    command = sanitize.command_of("compute-sanitizer", "racecheck", "good", tmp_path / "log", tmp_path / "said")
    assert command[command.index("--kernel-name-exclude") + 1] == "kns=_ZN"
    assert command[command.index("--racecheck-num-workers") + 1] == "1"
    assert command[-3:] == ("--role-tables", "good", str(tmp_path / "said"))
    assert "--role-tables" not in sanitize.command_of("", "memcheck", "good", tmp_path / "log", tmp_path / "said")


def test_a_program_without_a_kernel_is_a_problem(fake, monkeypatch):
    monkeypatch.setenv("LAUNCHED", "[]")
    assert watch(fake, "memcheck", "good").problem == "good: no kernel for memcheck to watch"
