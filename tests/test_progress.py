"""Progress on stderr: a line that is written over on a terminal; elsewhere only what stays."""

import re
import sys

import pytest

from envoi import progress
from envoi.progress import Progress


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
