"""Tests of cache-directory files: spoilt ones are skipped with a warning that names them, writers lose nothing."""

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from envoi import cache_file

SPOILT = {"empty": "", "cut off": '{"a": {"x"', "a list": "[]", "null": "null", "no text": b"\xff\xfe\x00"}


def number(value) -> int:
    if not isinstance(value, int):
        raise ValueError(f"expected an int, got {value!r}")
    return value


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize("text", SPOILT.values(), ids=SPOILT)
def test_a_spoilt_file_is_left_out_with_one_warning_that_names_it(tmp_path, text):
    path = write(tmp_path / "x.json", text)
    with pytest.warns(UserWarning) as caught:
        assert cache_file.entries(path, number) == {}
        assert cache_file.entries(path, number) == {}
    assert len(caught) == 1
    assert str(caught[0].message).startswith(f"{path}: ")
    assert "going on without it" in str(caught[0].message)


def test_one_bad_entry_takes_no_other_with_it(tmp_path):
    path = write(tmp_path / "x.json", '{"a": 1, "b": "two", "c": 3}')
    with pytest.warns(UserWarning, match=r"x\.json: 'b': expected an int, got 'two'; going on without 1 of 3 entries"):
        assert cache_file.entries(path, number) == {"a": 1, "c": 3}


def test_entries_are_added_replaced_and_kept_whatever_they_are(tmp_path):
    path = tmp_path / "deep" / "x.json"
    cache_file.add(path, {"a": 1, "b": "of another version"})
    cache_file.add(path, {"a": 2, "c": 3})
    assert json.loads(path.read_text()) == {"a": 2, "b": "of another version", "c": 3}
    assert sorted(file.name for file in path.parent.iterdir()) == ["x.json", "x.json.lock"]


@pytest.mark.parametrize("text", SPOILT.values(), ids=SPOILT)
def test_adding_to_a_spoilt_file_puts_it_aside(tmp_path, text):
    path = write(tmp_path / "x.json", text)
    with pytest.warns(UserWarning, match=r"moved to .*x\.json\.spoilt"):
        cache_file.add(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    assert (tmp_path / "x.json.spoilt").read_bytes() == (text if isinstance(text, bytes) else text.encode())


def add_many(path: Path, writer: int) -> None:
    for step in range(40):
        cache_file.add(path, {f"{writer} {step}": step})


def test_writers_at_once_lose_nothing(tmp_path):
    path = tmp_path / "x.json"
    with ProcessPoolExecutor(3, multiprocessing.get_context("fork")) as pool:
        list(pool.map(add_many, [path] * 3, range(3)))
    assert set(json.loads(path.read_text())) == {f"{writer} {step}" for writer in range(3) for step in range(40)}
