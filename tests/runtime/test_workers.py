"""Processes that compile: results, errors, and how they end. The caller's main program doesn't run in them."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

import pytest

from envoi.runtime import workers
from envoi.runtime.workers import Workers

ROOT = Path(__file__).resolve().parents[2]


def half(item: int) -> int:
    return item // 2 if item else 1 // item


def exit_at_once(item: int) -> None:
    os._exit(1)


def wait_long(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    time.sleep(600)


def begin(found: Workers, path: str) -> None:
    with suppress(RuntimeError):  # that they have ended
        next(found.map(wait_long, [path]))


def unpicklable(item: int) -> object:
    return lambda: item


def wait_until(condition, seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def has_ended(pid: int) -> bool:
    """Tell whether no process has this id, or only a dead one that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_results_and_errors_and_that_they_end_with_the_context_whatever_they_do(tmp_path):
    path = tmp_path / "pid"
    with Workers("sm_90", 2) as found:
        assert dict(found.map(half, [4, 6, 9])) == {4: 2, 6: 3, 9: 4}
        assert None in dict(found.map(exit_at_once, [1, 2])).values(), "their process died"
        assert dict(found.map(half, [8])) == {8: 4}, "others work on"
        with pytest.raises(AttributeError, match="pickle"):
            list(found.map(unpicklable, [1]))
        with pytest.raises(ZeroDivisionError):
            list(found.map(half, [0]))
        threading.Thread(target=begin, args=(found, str(path)), daemon=True).start()
        assert wait_until(path.exists)
    assert wait_until(lambda: has_ended(int(path.read_text())))


def test_an_item_that_comes_after_a_process_died_has_no_result():
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        pool.submit(exit_at_once, 1).exception()
        assert workers._outcome(workers._submitted(pool, half, 4)) == (None, None)


UNGUARDED = """
import sys
print("main", flush=True)
sys.path[:0] = [{src!r}, {root!r}]
from envoi.runtime.workers import Workers
from tests.runtime.test_workers import half, wait_long
with Workers("sm_90", 1) as found:
    print(sorted(result for _, result in found.map(half, [4, 6])), flush=True)
    next(found.map(wait_long, [{path!r}]))
"""


def test_the_main_program_runs_once_though_nothing_guards_it_and_they_end_when_it_is_killed(tmp_path):
    program, path = tmp_path / "program.py", tmp_path / "pid"
    program.write_text(UNGUARDED.format(src=str(ROOT / "src"), root=str(ROOT), path=str(path)))
    caller = subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True)
    assert wait_until(path.exists)
    caller.kill()
    assert caller.communicate()[0].splitlines() == ["main", "[2, 3]"]
    assert wait_until(lambda: has_ended(int(path.read_text())))


def test_where_no_process_can_be_started_that_is_an_error(monkeypatch):
    monkeypatch.setattr(workers.sys, "executable", "/nowhere/python")
    with pytest.raises(OSError, match="nowhere"):
        Workers("sm_90", 2)
