"""What serving engines load of the package by name, and what it says where there is no such engine."""

import importlib
import re
from pathlib import Path

import pytest

from tests.helpers import fresh

POINTS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}


@pytest.mark.parametrize("engine", POINTS)
def test_the_package_names_the_function(engine):
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    group = re.escape(POINTS[engine])
    (found,) = re.findall(rf'\[project\.entry-points\."{group}"\].*\nenvoi = "(.*):(.*)"', text)
    integration = importlib.import_module(f"envoi.integrations.{engine}")
    assert getattr(importlib.import_module(found[0]), found[1]) is integration.register


def test_without_the_engine_a_line_says_so(monkeypatch):
    for engine in POINTS:
        monkeypatch.setenv(f"ENVOI_{engine.upper()}", "1")
    found = fresh.run(
        "import logging, sys\n"
        "from envoi.integrations import sglang, vllm\n"
        "logging.basicConfig(stream=sys.stdout)\n"
        "vllm.register()\n"
        "sglang.register()"
    )
    for engine in POINTS:
        line = f"Envoi runs no MoE layers: ModuleNotFoundError: {engine} isn't installed\n"
        assert found.stdout.count(line) == 1, found
