"""Common ground of all tests: threads, no measured configs, which tests can run here, a record of kernels that ran."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from envoi import env
from tests.helpers import interpreter, left_out, recorder

# Each pytest process gets one thread: two processes whose thread pools wait for each other's cores crawl.
torch.set_num_threads(1)

# What was measured on this machine must not decide which kernels are tested.
NO_CACHE = tempfile.TemporaryDirectory()
os.environ["ENVOI_CACHE_DIR"] = NO_CACHE.name


def pytest_addoption(parser: pytest.Parser) -> None:
    """Those of the recorder."""
    recorder.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Record if asked to; prepare Triton's interpreter where it is chosen."""
    recorder.configure(config)
    if env.interpreting():
        interpreter.configure(config)


@pytest.fixture
def tidy_gpu() -> Iterator[None]:
    """Memory that nobody wrote is NaN, or a huge number; what a large case took goes back: others share the GPU."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.empty_cache()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """In the interpreter only what is meant for it: elsewhere kernels are compiled, and most would take hours."""
    is_file = collection_path.suffix == ".py"
    return True if is_file and env.interpreting() and not interpreter.is_for_interpreter(collection_path) else None


@pytest.hookimpl(trylast=True)  # what -k and -m leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what this process can't run."""
    left_out.deselect(config, items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Of a worker of pytest-xdist."""
    left_out.send_home(session.config)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """One of them ended."""
    left_out.receive(node.config, node)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say what was left out."""
    for line in left_out.lines(config):
        terminalreporter.write_line(line)
