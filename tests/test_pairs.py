"""Agreement of Makefile, CI, README and pyproject.toml on one list of torch and Triton pairs."""

import re

import pytest

from tests.helpers.tools import ROOT, pairs, tool


def minor(version):
    return tuple(int(part) for part in version.split(".")[:2])


def range_in_pyproject(package):
    found = re.search(rf'"{package}>=([\d.]+),<([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert found, f"pyproject.toml gives no range of {package}"
    return minor(found.group(1)), minor(found.group(2))


@pytest.mark.parametrize("package", ["torch", "triton", "transformers"])
def test_ranges_are_those_of_the_pairs(package):
    releases = [minor(getattr(pair, package)) for pair in pairs.pairs()]
    newest = max(releases)
    assert range_in_pyproject(package) == (min(releases), (newest[0], newest[1] + 1))


def test_pythons_begin_where_pyproject_says():
    found = re.search(r'^requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert found
    assert minor(found.group(1)) == min(minor(python) for pair in pairs.pairs() for python in pair.pythons)


def test_readme_has_the_matrix():
    text = (ROOT / "README.md").read_text()
    assert pairs.with_matrix(text) == text, "python tools/pairs.py matrix README.md"


def test_the_measured_pair_is_the_default_and_both_ends_are_tested():
    known = pairs.pairs()
    assert len({pair.name for pair in known}) == len(known)
    assert pairs.default() == known[0]
    assert pairs.default().gpu
    assert {known[0].name, known[-1].name} <= {pair.name for pair in known if pair.cpu_suite}
    assert pairs.other_tritons(known[0].name) == list(dict.fromkeys(pair.triton for pair in known))[1:]


def test_the_oldest_transformers_is_that_of_pyproject():
    assert minor(pairs.answer("oldest-transformers", "")) == range_in_pyproject("transformers")[0]


def test_a_python_without_wheels_is_told_what_to_do():
    oldest, newest = pairs.pairs()[0], pairs.pairs()[-1]
    assert pairs.refusal(oldest, oldest.pythons[0]) == ""
    message = pairs.refusal(newest, oldest.pythons[0])
    assert f"Python {oldest.pythons[0]} isn't supported with torch {newest.torch}" in message
    assert ", ".join(newest.pythons) in message
    assert f"make PAIR={pairs.pairs()[-2].name}" in message
    assert "PAIR" not in pairs.refusal(oldest, "3.7")


def test_a_pair_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"PAIR: expected one of 2\.11, .*, got '1\.0'"):
        pairs.find("1.0")


def test_a_constraints_file_must_say_all(tmp_path):
    path = tmp_path / "torch-1.0.txt"
    path.write_text("torch==1.0.0\ntriton==1.0.0\n")
    with pytest.raises(ValueError, match="expected pins of torch, triton and transformers"):
        pairs.read(path)


def test_pip_is_asked_for_all_that_envoi_requires(monkeypatch):
    resolve = tool("resolve")
    lines = ["torch>=2", "pytest>=9; extra == 'dev'", "envoi[demo]; extra == 'dev'"]
    monkeypatch.setattr(resolve.importlib.metadata, "requires", lambda name: lines)
    assert resolve.required() == ["torch>=2", "pytest>=9"]


def test_pip_is_asked_without_this_machines_settings(monkeypatch):
    resolve = tool("resolve")
    seen = {}
    monkeypatch.setenv("PIP_FIND_LINKS", "wheels")
    monkeypatch.setenv("PIP_INDEX_URL", "elsewhere")
    monkeypatch.setattr(resolve.subprocess, "run", lambda command, **options: seen.update(options, command=command))
    resolve.pip("python", "install")
    assert "--isolated" in seen["command"]
    settings = {name: value for name, value in seen["env"].items() if name.startswith("PIP_")}
    assert settings == {"PIP_CONFIG_FILE": resolve.os.devnull}


def test_each_python_of_each_pair_is_checked(monkeypatch):
    resolve = tool("resolve")
    titles = [title for title, _ in resolve.checks("python")]
    for pair in pairs.pairs():
        assert sum(title.startswith(f"torch {pair.torch}, ") for title in titles) == len(pair.pythons)
    assert len(set(titles)) == len(titles)


COMMON = pairs.FOLDER / "common.txt"


def test_pins_are_those_of_the_python_that_is_asked_about():
    resolve = tool("resolve")
    oldest, newest = pairs.pairs()[0].pythons[0], pairs.pairs()[-1].pythons[-1]
    assert resolve.pins_of(COMMON, oldest) != resolve.pins_of(COMMON, newest)
    for version in (oldest, newest):
        names = [pin.partition("==")[0] for pin in resolve.pins_of(COMMON, version)]
        assert "numpy" in names and len(names) == len(set(names))
