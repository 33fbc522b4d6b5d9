"""Setup shared by all tests: threads, no measured configs, deselection."""

import gc
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from envoi import env
from envoi.runtime import prepared, workspace
from tests.helpers import interpreter, left_out, spoiled
from tests.helpers.spoiled import spoil

gc.disable()  # until all tests are collected: next to nothing of what that makes is garbage

# Configs measured on this machine must not decide which kernels are tested.
NO_CACHE = tempfile.TemporaryDirectory()
os.environ["ENVOI_CACHE_DIR"] = NO_CACHE.name


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--slow`."""
    parser.addoption("--slow", action="store_true", help="run tests marked `slow` too")


def pytest_configure(config: pytest.Config) -> None:
    """Prepare Triton's interpreter if it is chosen."""
    if env.interpreting():
        interpreter.configure(config)


@pytest.fixture(scope="module", autouse=True)
def fresh_compiler() -> None:
    """Forget what torch.compile has compiled for other files: its limit of compilations of a function counts them."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@pytest.fixture
def tidy_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill new memory, and what launches share, with NaN or a huge number; free a large case's: the GPU is shared.

    Prepared calls are forgotten: a test that chooses another kernel would get those of the test before.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    spoil(math.nan)
    monkeypatch.setattr(workspace.Scratch, "take", spoiled.take)
    prepared.clear()
    yield
    prepared.clear()
    torch.use_deterministic_algorithms(False)
    torch.cuda.empty_cache()


@pytest.fixture
def packs_for_hopper(monkeypatch) -> None:
    """Pack as on a Hopper GPU, whose kernels read 4-bit weights in the order of its tensor cores."""
    monkeypatch.setattr("envoi.ops.moe.packing.implementation", lambda device: "hopper")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Collect interpreter tests under the interpreter alone, and no others: most of those would take hours.

    Without a GPU leave out files of GPU tests, whose imports take long.
    """
    if collection_path.suffix != ".py":
        return None
    if env.interpreting() != interpreter.is_for_interpreter(collection_path):
        return True
    return True if left_out.is_for_gpus(collection_path) and not torch.cuda.is_available() else None


@pytest.hookimpl(trylast=True)  # runs after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that this process can't run."""
    left_out.deselect(config, items)


def pytest_collection_finish() -> None:
    """Take what is alive now out of Python's garbage collection: each would look at all modules and tests again."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send counts from a worker of pytest-xdist."""
    left_out.send_home(session.config)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Receive the counts of a worker that ended."""
    left_out.receive(node.config, node)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the deselected tests."""
    for line in left_out.lines(config):
        terminalreporter.write_line(line)
