"""Processes that compile: they end with the context, whatever ends it, and no error waits for them."""

import importlib
import math
import os
import pickle
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

import pytest
import torch

from envoi.runtime import compilers
from envoi.runtime.compilers import ENDED, Compilers
from envoi.runtime.devices import Target

TARGET = Target("sm_90", 132)
MANY = torch.arange(1 << 17), torch.full((1 << 17,), 2)


def members(group: int) -> list[str]:
    """Return the processes of a group that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
            found += [stat.parent.name] if int(pgrp) == group and state != "Z" else []
    return found


def assert_ends(group: int) -> None:
    end = time.monotonic() + 10
    while members(group) and time.monotonic() < end:
        time.sleep(0.1)
    assert not members(group)


def start(found: Compilers) -> int:
    """Let both processes work; return their group."""
    assert sorted(found.map(math.sqrt, [4.0, 9.0])) == [(4.0, 2.0), (9.0, 3.0)]
    server = found._server
    assert server is not None and len(members(server.pid)) == 3
    return server.pid


def test_they_end_with_the_context():
    with Compilers(TARGET, 2) as found:
        group = start(found)
    assert_ends(group)


@pytest.mark.timeout(60)
def test_an_error_in_the_context_comes_out_at_once():
    with pytest.raises(KeyError), Compilers(TARGET, 2) as found:
        group = start(found)
        raise KeyError
    assert_ends(group)


@pytest.mark.timeout(60)
def test_a_function_s_error_comes_out():
    with pytest.raises(ValueError), Compilers(TARGET, 2) as found:
        group = start(found)
        list(found.map(math.sqrt, [-1.0]))
    assert_ends(group)


@pytest.mark.timeout(60)
def test_the_end_of_the_process_that_starts_them_is_an_error():
    with pytest.raises(RuntimeError, match=ENDED.split(";")[0]), Compilers(TARGET, 2) as found:
        group = start(found)
        os.kill(group, signal.SIGKILL)
        list(found.map(time.sleep, [0.1, 0.1]))
    assert_ends(group)


@pytest.mark.timeout(60)
def test_they_end_after_the_process_that_asked_is_killed():
    program = (
        "import math, os, signal; from tests.runtime.test_compilers import *\n"
        "with Compilers(TARGET, 2) as found:\n"
        "    print(start(found), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    found = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert found.returncode == -signal.SIGKILL
    assert_ends(int(found.stdout))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("last", ["b''", "pickle.dumps((5, 2, [0], bytes(100_000)))[:70_000]"], ids=["whole", "cut"])
def test_they_end_quietly_whatever_they_do_if_nobody_is_left_to_take_answers(last):
    """Also if who asked was killed within a message, of which a pipe holds 64 KiB."""
    program = (
        "import os, pickle, signal, time; from tests.runtime.test_compilers import *\n"
        "with Compilers(TARGET, 2) as found:\n"
        "    group = start(found); found.begin(time.sleep, [600.0, 600.0])\n"
        f"    found._server.stdin.write({last}); found._server.stdin.flush()\n"
        "    print(group, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)  # until stderr is closed
    assert found.returncode == -signal.SIGKILL
    assert_ends(int(found.stdout))
    assert not found.stderr


@pytest.fixture
def ahead(monkeypatch):
    """Return the process that is started ahead."""
    server = compilers.Server(compilers._started("sm_90"), compilers._start_of("sm_90"))
    monkeypatch.setattr(compilers, "_ahead", {"sm_90": server})
    yield server.process
    compilers._end_ahead("sm_90")


def test_one_is_started_ahead_for_who_comes_first(ahead):
    with Compilers(TARGET, 2, ahead=False) as first:
        first.before(partial(math.sqrt, -1.0))  # its error is nobody's
        first.before(lambda: None)  # nor is this one, of pickle
        first.before(partial(importlib.import_module, "this"))
        assert start(first) == ahead.pid
        assert list(first.map(has_imported, ["this"])) == [("this", True)]
        with Compilers(TARGET, 2, ahead=False) as second:
            assert second._server is None
            assert list(second.map(has_imported, ["this"])) == [("this", False)]
    assert_ends(ahead.pid)


def has_imported(name: str) -> bool:
    return name in sys.modules


def test_what_this_process_needs_is_started_once(monkeypatch):
    done = []
    monkeypatch.setattr(compilers.triton_compat, "warm_up", done.append)
    monkeypatch.setattr(compilers.triton_compat, "load_driver", lambda: done.append("driver"))
    compilers.start_here.cache_clear()
    try:
        threads = compilers.start_here("sm_90")
        assert compilers.start_here("sm_90") is threads
        threads.files.join()
        assert "sm_90" in done
        threads.driver.join()
        assert sorted(done) == ["driver", "sm_90"]
    finally:
        compilers.start_here.cache_clear()


@pytest.mark.parametrize(("before", "within", "own"), [(0.005, 1e-4, None), (5e-5, 5e-5, None), (0.005, 1e-4, 0.002)])
def test_files_are_hashed_beside_busy_threads(monkeypatch, before, within, own):
    """Python's threads take turns sooner meanwhile, and then as before, unless a program has set something itself."""
    seen, usual = [], sys.getswitchinterval()

    def look(arch: str) -> None:
        seen.append(sys.getswitchinterval())
        if own is not None:
            sys.setswitchinterval(own)

    monkeypatch.setattr(compilers.triton_compat, "warm_up", look)
    monkeypatch.setattr(compilers.triton_compat, "load_driver", lambda: None)
    compilers.start_here.cache_clear()
    try:
        sys.setswitchinterval(before)
        compilers.start_here("sm_90").files.join()
        assert seen == pytest.approx([within], abs=2e-6)
        assert sys.getswitchinterval() == pytest.approx(own or before, abs=2e-6)
    finally:
        sys.setswitchinterval(usual)
        compilers.start_here.cache_clear()


def test_one_that_has_died_is_not_taken(ahead):
    os.kill(ahead.pid, signal.SIGKILL)
    ahead.wait()
    with Compilers(TARGET, 2) as found:
        assert start(found) != ahead.pid


def test_one_with_another_environment_is_not_taken(ahead, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with Compilers(TARGET, 2) as found:
        assert list(found.map(os.getenv, ["TRITON_CACHE_DIR"])) == [("TRITON_CACHE_DIR", str(tmp_path))]
    assert ahead.poll() is not None


def test_who_does_the_work_itself_takes_none(ahead):
    with Compilers(TARGET, 1) as found:
        assert list(found.map(math.sqrt, [4.0])) == [(4.0, 2.0)]
    assert ahead.poll() is None


def program(text: str) -> str:
    """Run a program that starts one ahead; return what it prints."""
    text = f"import os, sys, time\nfrom envoi.runtime import compilers\n{text}"
    found = subprocess.run([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    assert found.returncode == 0
    return found.stdout


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "end", ["", "os.environ['ENVOI_X'] = 'x'; compilers._started_ahead('sm_90')", "time.sleep(0.5)"]
)  # fmt: skip
def test_one_that_was_started_ahead_is_ended(end):
    """At once with the process, by who doesn't want it, and if nobody comes; by itself it would first import torch."""
    pid = program(
        f"compilers.IDLE_S = {0.1 if 'sleep' in end else 60}\n"
        f"compilers.start_ahead('sm_90'); one = compilers._ahead['sm_90']; compilers.start_ahead('sm_90')\n"
        f"assert compilers._ahead['sm_90'] is one; print(one.process.pid, flush=True)\n{end}\n"
        f"assert bool(compilers._ahead) == (not {bool(end)})"
    )
    assert not members(int(pid))


@pytest.mark.timeout(60)
def test_a_fork_leaves_it_to_its_parent():
    """A fork that ends as a program does; it holds no pipe either, by whose end the process knows of its parent's."""
    program(
        "compilers.start_ahead('sm_90'); one = compilers._ahead['sm_90'].process\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    assert not compilers._ahead and one.stdin.closed and one.stdout.closed; sys.exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7 and one.poll() is None\n"
        "assert compilers._started_ahead('sm_90') is one; compilers._end(one)"
    )


@pytest.mark.timeout(120)
def test_forks_need_no_threads_that_were_started_before_them(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with Compilers(TARGET, 2) as found:
        found.before(partial(torch.repeat_interleave, *MANY))  # with all threads
        assert [len(x) for _, x in found.map(partial(torch.repeat_interleave, MANY[0]), [MANY[1]])] == [1 << 18]


def minus_sqrt(x: float) -> float:
    return -math.sqrt(x)


@pytest.mark.timeout(60)
def test_this_process_works_until_they_have_started():
    """It has done the work before they have imported anything; what comes after is theirs."""
    with Compilers(TARGET, 2, ahead=False) as found:
        assert sorted(found.begin(math.sqrt, [4.0, 9.0], minus_sqrt)) == [(4.0, -2.0), (9.0, -3.0)]
        assert list(found.map(math.sqrt, [1.0])) == [(1.0, 1.0)]  # waits until they have
        assert sorted(found.begin(math.sqrt, [4.0, 9.0], minus_sqrt)) == [(4.0, 2.0), (9.0, 3.0)]


@pytest.mark.timeout(60)
def test_what_waits_is_theirs_as_soon_as_they_have_started(tmp_path):
    path = tmp_path / "file"

    def slowly(x):
        wait_for(path)
        return minus_sqrt(x)

    with Compilers(TARGET, 2) as found:
        answers = found.begin(math.sqrt, [4.0, 9.0, 16.0], slowly)
        found.help_beside(nullcontext())  # takes the last
        while found._waiting:  # else this thread would work too
            time.sleep(0.01)
        assert sorted([next(answers), next(answers)]) == [(4.0, 2.0), (9.0, 3.0)]
        path.touch()
        assert list(answers) == [(16.0, -4.0)]


@pytest.mark.timeout(60)
def test_what_waits_and_cannot_be_sent_is_an_error_of_its_own():
    with Compilers(TARGET, 2) as found:
        answers = found.begin(lambda x: x, [4.0], minus_sqrt)
        others = found.begin(math.sqrt, [4.0], minus_sqrt)
        while found._waiting:
            time.sleep(0.01)
        with pytest.raises((AttributeError, pickle.PicklingError)):
            list(answers)
        assert list(others) == [(4.0, 2.0)]


class Deadly:
    """Item that is sent once they have started, and more than a pipe holds; with it ends who would read it."""

    def __init__(self, found: Compilers) -> None:
        self.found = found

    def __reduce__(self) -> tuple:
        assert self.found._server is not None
        os.kill(self.found._server.pid, signal.SIGKILL)
        self.found._server.wait()
        return bytes, (bytes(1 << 20),)


@pytest.mark.timeout(60)
def test_the_end_of_that_process_while_work_is_sent_is_an_error():
    """Though the others still live."""
    with Compilers(TARGET, 2) as found:
        answers = found.begin(len, [Deadly(found)], len)
        while found._waiting:
            time.sleep(0.01)
        with pytest.raises(RuntimeError, match=ENDED.split(";")[0]):
            list(answers)


class Unreadable:
    """Answer that only the processes can read."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __reduce__(self) -> tuple:
        return refuse, (self.pid,)


def refuse(pid: int) -> Unreadable:
    if os.getpid() == pid:
        raise ValueError("no answer for this process")
    return Unreadable(pid)


@pytest.mark.timeout(60)
def test_an_answer_or_a_function_that_cannot_be_read_is_an_error_of_its_own(monkeypatch):
    with Compilers(TARGET, 2) as found:
        with pytest.raises(ValueError, match="no answer for this process"):
            list(found.map(Unreadable, [os.getpid()]))
        monkeypatch.setattr(sys.modules[__name__], "only_here", minus_sqrt, raising=False)
        monkeypatch.setattr(minus_sqrt, "__qualname__", "only_here")
        found.before(partial(minus_sqrt, 1.0))
        with pytest.raises(AttributeError, match="only_here"):
            list(found.map(minus_sqrt, [4.0]))
        assert list(found.map(math.sqrt, [4.0])) == [(4.0, 2.0)]


@pytest.mark.timeout(60)
def test_work_here_that_is_interrupted_is_an_error_for_who_waits():
    def interrupt(_):
        raise KeyboardInterrupt

    with Compilers(TARGET, 2) as found:
        answers = found.begin(math.sqrt, [4.0], interrupt)
        with pytest.raises(KeyboardInterrupt):
            found.help()
        with pytest.raises(RuntimeError, match="work of this process was ended by KeyboardInterrupt"):
            list(answers)


@pytest.mark.timeout(60)
def test_a_fork_that_leaves_the_context_ends_nothing():
    with Compilers(TARGET, 2) as found:
        group = start(found)
        pid = os.fork()
        if pid == 0:
            found.__exit__()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert start(found) == group


@pytest.mark.timeout(60)
def test_this_process_does_what_is_urgent_first_and_the_last_of_it():
    done = []
    with Compilers(TARGET, 2) as found:
        for items, urgent in (([1.0, 2.0], False), ([3.0, 4.0], True), ([5.0], False)):
            found.begin(math.sqrt, items, done.append, urgent)
        found.help()
        assert done == [4.0, 3.0, 5.0, 2.0, 1.0] and not found._is_ready


@pytest.mark.timeout(60)
def test_this_process_does_all_that_waits_if_they_end_before():
    with Compilers(TARGET, 2) as found:
        assert found._server is not None
        answers = found.begin(math.sqrt, [4.0, 9.0], minus_sqrt)
        os.kill(found._server.pid, signal.SIGKILL)
        assert sorted(answers) == [(4.0, -2.0), (9.0, -3.0)]
        with pytest.raises(RuntimeError, match=ENDED.split(";")[0]):
            list(found.map(math.sqrt, [4.0]))


@pytest.mark.timeout(60)
def test_an_error_of_this_process_s_work_comes_out():
    with pytest.raises(ValueError), Compilers(TARGET, 2) as found:
        list(found.begin(math.sqrt, [4.0, -1.0], minus_sqrt))


def wait_for(path: Path) -> str:
    while not path.exists():
        time.sleep(0.01)
    return path.read_text()


@pytest.mark.timeout(60)
def test_work_begins_and_ends_beside_other_work(tmp_path):
    """The second request is answered before the first, whose answers are kept apart; the third while none waits."""
    path = tmp_path / "file"
    with Compilers(TARGET, 2) as found:
        slow = found.begin(wait_for, [path])
        assert list(found.map(math.sqrt, [4.0])) == [(4.0, 2.0)]
        third = found.begin(math.sqrt, [9.0, 16.0])
        (tmp_path / "part").write_text("done")
        (tmp_path / "part").rename(path)
        assert sorted(third) == [(9.0, 3.0), (16.0, 4.0)]
        assert list(slow) == [(path, "done")]
        assert not any(found._answers.values())


@pytest.mark.timeout(60)
def test_answers_that_nobody_takes_keep_no_one_from_work(tmp_path):
    """More of them than a pipe holds."""
    path = tmp_path / "file"
    with Compilers(TARGET, 2) as found:
        many = found.begin(bytes, [1000] * 300)
        found.begin(Path.touch, [path])
        wait_for(path)
        assert [answer for _, answer in many] == [bytes(1000)] * 300


def test_threads_that_cannot_be_started_are_done_without(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with Compilers(TARGET, 2) as found, monkeypatch.context() as refused:
        assert list(found.map(math.sqrt, [4.0])) == [(4.0, 2.0)]
        refused.setattr(compilers.threading.Thread, "start", refuse)
        found.help_beside(nullcontext())
        with Compilers(TARGET, 2) as other, pytest.raises(RuntimeError, match="jobs: no thread can be started"):
            list(other.map(math.sqrt, [4.0]))
    monkeypatch.setattr(compilers.threading.Thread, "start", refuse)
    compilers.start_here.cache_clear()
    try:
        assert compilers.start_here("sm_90") == (None, None)
    finally:
        compilers.start_here.cache_clear()


@pytest.mark.timeout(60)
def test_a_worker_that_dies_is_replaced():
    with Compilers(TARGET, 2) as found:
        assert list(found.map(os._exit, [3])) == [(3, None)]
        assert list(found.map(math.sqrt, [4.0])) == [(4.0, 2.0)]
        slow, fatal = found.begin(time.sleep, [30.0]), found.begin(os._exit, [3])
        assert [*fatal, *slow] == [(3, None), (30.0, None)], "one death ends what the others do"
        assert list(found.map(math.sqrt, [4.0])) == [(4.0, 2.0)]


def test_one_job_does_its_work_when_it_is_asked_for():
    done = []
    with Compilers(TARGET, 1) as found:
        results = found.begin(done.append, ["one", "other"])
        assert not done
        assert next(results) == ("one", None) and done == ["one"]
        assert list(results) == [("other", None)] and done == ["one", "other"]


@pytest.mark.parametrize("ahead", [False, True])
def test_where_no_process_can_be_started_work_is_refused(monkeypatch, ahead):
    def refuse(*_, **__):
        raise OSError("no room")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with Compilers(TARGET, 2, ahead) as found:
        found.before(partial(math.sqrt, 4.0))
        with pytest.raises(RuntimeError, match="no process can be started, no room"):
            list(found.map(math.sqrt, [4.0]))
