"""Progress on stderr: a line that is written over on a terminal; elsewhere only what stays."""

import re
import sys

import pytest

from envoi import progress
from envoi.progress import Progress
from examples.demo.command import _bar


def work(**options) -> None:
    with Progress(2, **options) as bar:
        bar.step("first")
        bar.say("first: 12 us")
        bar.step("second")


def test_a_terminal_has_the_counter_and_is_left_clean(capsys, monkeypatch):
    monkeypatch.setattr(progress, "DELAY_S", -1.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    work()
    said = capsys.readouterr().err
    assert "\r[0/2] first" in said and "\r[1/2] second" in said
    assert re.search(r"\rfirst: 12 us *\n", said)
    assert said.endswith("\r" + " " * 80 + "\r")


def test_a_file_has_only_what_stays(capsys, monkeypatch):
    monkeypatch.setattr(progress, "DELAY_S", -1.0)
    work()
    assert capsys.readouterr().err == "first: 12 us\n"


@pytest.mark.parametrize("on_terminal", [True, False])
def test_short_or_quiet_work_says_nothing(capsys, monkeypatch, on_terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: on_terminal)
    work()
    monkeypatch.setattr(progress, "DELAY_S", -1.0)
    work(quiet=True)
    assert capsys.readouterr().err == ""


def test_a_closed_stderr_stops_no_work(monkeypatch):
    monkeypatch.setattr(progress, "DELAY_S", -1.0)
    monkeypatch.setattr(sys, "stderr", None)
    work(quiet=True)
    bar = Progress(1)
    bar.step("first")


def test_the_demo_has_no_bar_in_a_file(capsys):
    with _bar(10) as bar:
        bar.set_description("loading")
        bar.update(10)
        bar.write("a line")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("a line\n", "")
