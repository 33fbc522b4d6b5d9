"""Runs of compute-sanitizer by a program that stands for it: summaries, kernels, planted errors, what isn't watched."""

import json
import stat

import pytest

from tests.promises.sanitize import errors_in, watch

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


def test_a_program_without_a_kernel_is_a_problem(fake, monkeypatch):
    monkeypatch.setenv("LAUNCHED", "[]")
    assert watch(fake, "memcheck", "good").problem == "good: no kernel for memcheck to watch"
