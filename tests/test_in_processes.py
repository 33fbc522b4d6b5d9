"""Tasks in parallel processes: results, errors, processes that die, and the time limit."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers import ranks
from tests.helpers.processes import ends
from tools.in_processes import in_processes


@pytest.fixture(scope="module", autouse=True)
def server():
    """Start the server of all tests' ranks, lest one that imports less be it, and wait until it is there."""
    ranks.forking()
    assert [done.result for done in in_processes(square, [2], 1, 120)] == [4]


def square(x: int) -> int:
    if x == 3:
        raise ValueError("three")
    if x == 5:
        os._exit(7)
    return x * x


def nap(x: int) -> int:
    time.sleep(0.4)
    return x


def test_a_task_that_raises_and_one_whose_process_dies_are_told_from_the_others():
    done = {d.task: d for d in in_processes(square, range(12), 2, 60)}
    assert sorted(done) == list(range(12))
    assert done[3].error == "ValueError: three"
    assert done[5].error == "the process died with exit code 7"
    assert all(done[x].result == x * x and not done[x].error for x in done if x not in (3, 5))


def start_a_sleeper(path: str) -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    Path(path).write_text(str(sleeper.pid))
    if path.endswith("crash"):
        os._exit(7)
    sleeper.wait()


def test_nothing_runs_after_the_limit():
    start = time.monotonic()
    done = list(in_processes(nap, range(40), 2, 2))
    assert 1 <= len(done) < 30
    assert sorted(d.task for d in done) == list(range(len(done)))
    assert time.monotonic() - start < 30
    cut = [d for d in done if d.cut]
    assert len(cut) <= 2 and done[len(done) - len(cut) :] == cut
    assert all(d.error == "ended after the limit of 2 s" and d.seconds < 0.6 for d in cut)
    assert all(d.result == d.task and d.seconds >= 0.4 for d in done if not d.cut)


@pytest.mark.parametrize("name", ["cut", "crash"])
def test_what_a_task_has_started_is_ended_with_it(name, tmp_path):
    path = tmp_path / name
    [done] = in_processes(start_a_sleeper, [str(path)], 1, 10)
    assert done.cut == (name == "cut") and done.error
    assert ends(int(path.read_text()))
