"""Deselection of the tests that this run can't run, with a count at its end."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from envoi import env
from envoi.runtime import triton_compat
from tests.helpers.tools import pairs

COUNTS = pytest.StashKey[Counter]()
KEY = "left_out"


def reason(item: pytest.Item) -> str:
    """Return what this process lacks to run a test, or "".

    The marker `gpu` asks for one GPU, `gpu(2)` for two, `gpu(arch="sm_90")` for a Hopper; `default_triton` for the
    Triton of the default pair; `slow` for `--slow`, which `make test-slow` gives.
    """
    if item.get_closest_marker("slow") and not item.config.getoption("--slow"):
        return "--slow"
    if item.get_closest_marker("default_triton") and pairs.default().triton != triton_compat.VERSION:
        return f"Triton {pairs.default().triton}"
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return ""
    count, arch = marker.args[0] if marker.args else 1, marker.kwargs.get("arch")
    if count > torch.cuda.device_count():
        return "a GPU" if count == 1 else f"{count} GPUs"
    return "" if arch in (None, "sm_{}{}".format(*torch.cuda.get_device_capability())) else f"a GPU of {arch}"


def is_for_gpus(path: Path) -> bool:
    """Return whether all tests of a file need a GPU, by the file's name."""
    return path.name.endswith("_gpu.py")


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remove them from `items`, by name and with a count."""
    reasons = [reason(item) for item in items]
    left_out = [item for item, why in zip(items, reasons, strict=True) if why]
    config.stash[COUNTS] = Counter(why for why in reasons if why)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item, why in zip(items, reasons, strict=True) if not why]


def send_home(config: pytest.Config) -> None:
    """Send the counts from a worker of pytest-xdist, which alone knows the tests, to the process that started it."""
    if hasattr(config, "workerinput"):
        config.workeroutput[KEY] = dict(config.stash.get(COUNTS, Counter()))  # pyright: ignore[reportAttributeAccessIssue]


def receive(config: pytest.Config, node: Any) -> None:
    """Receive the counts of a worker. All workers send equal counts; one that crashed sends none."""
    sent = getattr(node, "workeroutput", {}).get(KEY)
    if sent is not None:
        config.stash[COUNTS] = Counter(sent)


def lines(config: pytest.Config) -> Iterable[str]:
    """Return the lines for the end of the run."""
    only = "only" if env.interpreting() else "not"
    yield f"TRITON_INTERPRET={env.interpreting():d}: {only} the tests in folders called `interpreted`"
    if not torch.cuda.is_available():
        yield "needs a GPU: the files *_gpu.py"
    for why, count in config.stash.get(COUNTS, Counter()).items():
        yield f"needs {why}: {count} deselected"
