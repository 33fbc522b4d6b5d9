"""Processes that compile: they end with the context, whatever ends it, and no error waits for them."""

import importlib
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from envoi.runtime import compilers
from envoi.runtime.compilers import ENDED, Compilers
from envoi.runtime.devices import Target

TARGET = Target("sm_90", 132)


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


def test_one_is_started_ahead_for_who_comes_first():
    compilers._ahead["sm_90"] = ahead = compilers._spawn("sm_90")
    with Compilers(TARGET, 2, ahead=False) as first:
        first.before(partial(math.sqrt, -1.0))  # its error is nobody's
        first.before(partial(importlib.import_module, "this"))
        assert start(first) == ahead.pid
        assert list(first.map(has_imported, ["this"])) == [("this", True)]
        with Compilers(TARGET, 2, ahead=False) as second:
            assert second._server is None
            assert list(second.map(has_imported, ["this"])) == [("this", False)]
    assert_ends(ahead.pid)


def has_imported(name: str) -> bool:
    return name in sys.modules


@pytest.mark.parametrize("num_jobs", [1, 2])
def test_one_that_was_started_ahead_and_died_or_has_no_work_is_not_taken(num_jobs):
    compilers._ahead["sm_90"] = ahead = compilers._spawn("sm_90")
    if num_jobs > 1:
        os.kill(ahead.pid, signal.SIGKILL)
        ahead.wait()
    with Compilers(TARGET, num_jobs) as found:
        assert sorted(found.map(math.sqrt, [4.0, 9.0])) == [(4.0, 2.0), (9.0, 3.0)]
        assert found._server is not ahead
    assert ahead.poll() is not None


@pytest.mark.timeout(60)
def test_one_that_was_started_ahead_ends_with_the_process():
    program = (
        "from envoi.runtime import compilers\n"
        "compilers.start_ahead('sm_90'); compilers.start_ahead('sm_90')\n"
        "(ahead,) = compilers._ahead.values(); print(ahead.pid, flush=True)"
    )
    found = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert found.returncode == 0
    assert_ends(int(found.stdout))
