"""Agreement of Makefile, CI, README and pyproject.toml on one list of torch and Triton pairs."""

import re

import pytest

from tests.helpers.tools import ROOT, pairs


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


def test_readme_has_the_matrix():
    text = (ROOT / "README.md").read_text()
    assert pairs.with_matrix(text) == text, "python tools/pairs.py matrix README.md"
