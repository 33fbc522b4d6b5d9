"""Processes that compile: they end with the context, whatever ends it, and no error waits for them."""

import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

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


def start(compilers: Compilers) -> int:
    """Let both processes work; return their group."""
    assert sorted(compilers.map(math.sqrt, [4.0, 9.0])) == [(4.0, 2.0), (9.0, 3.0)]
    server = compilers._server
    assert server is not None and len(members(server.pid)) == 3
    return server.pid


def test_they_end_with_the_context():
    with Compilers(TARGET, 2) as compilers:
        group = start(compilers)
    assert_ends(group)


@pytest.mark.timeout(60)
def test_an_error_in_the_context_comes_out_at_once():
    with pytest.raises(KeyError), Compilers(TARGET, 2) as compilers:
        group = start(compilers)
        raise KeyError
    assert_ends(group)


@pytest.mark.timeout(60)
def test_a_function_s_error_comes_out():
    with pytest.raises(ValueError), Compilers(TARGET, 2) as compilers:
        group = start(compilers)
        list(compilers.map(math.sqrt, [-1.0]))
    assert_ends(group)


@pytest.mark.timeout(60)
def test_the_end_of_the_process_that_starts_them_is_an_error():
    with pytest.raises(RuntimeError, match=ENDED.split(";")[0]), Compilers(TARGET, 2) as compilers:
        group = start(compilers)
        os.kill(group, signal.SIGKILL)
        list(compilers.map(time.sleep, [0.1, 0.1]))
    assert_ends(group)


@pytest.mark.timeout(60)
def test_they_end_after_the_process_that_asked_is_killed():
    program = (
        "import math, os, signal; from tests.runtime.test_compilers import *\n"
        "with Compilers(TARGET, 2) as compilers:\n"
        "    print(start(compilers), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    found = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert found.returncode == -signal.SIGKILL
    assert_ends(int(found.stdout))
