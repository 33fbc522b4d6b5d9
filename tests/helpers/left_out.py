"""Which tests this run can't run, said at its end: those of the interpreter, and those that need a GPU."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from envoi import env
from tests.helpers.interpreter import is_for_interpreter

COUNTS = pytest.StashKey[Counter]()
KEY = "left_out"


def reason(item: pytest.Item) -> str:
    """What this process lacks to run it; "" if nothing. The marker `gpu` asks for one GPU, `gpu(2)` for two,
    `gpu(arch="sm_90")` for one that is a Hopper."""
    if is_for_interpreter(item.path) and not env.interpreting():
        return "TRITON_INTERPRET=1"
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return ""
    count, arch = marker.args[0] if marker.args else 1, marker.kwargs.get("arch")
    if count > torch.cuda.device_count():
        return "a GPU" if count == 1 else f"{count} GPUs"
    return "" if arch in (None, "sm_{}{}".format(*torch.cuda.get_device_capability())) else f"a GPU of {arch}"


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take them out of `items`, by name and with a count."""
    reasons = [reason(item) for item in items]
    left_out = [item for item, why in zip(items, reasons, strict=True) if why]
    config.stash[COUNTS] = Counter(why for why in reasons if why)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item, why in zip(items, reasons, strict=True) if not why]


def send_home(config: pytest.Config) -> None:
    """From a worker of pytest-xdist, which alone knows the tests, to the process that started it."""
    if hasattr(config, "workerinput"):
        config.workeroutput[KEY] = dict(config.stash.get(COUNTS, Counter()))  # pyright: ignore[reportAttributeAccessIssue]


def receive(config: pytest.Config, node: Any) -> None:
    """The inverse. All workers send the same counts; one that crashed sends none."""
    sent = getattr(node, "workeroutput", {}).get(KEY)
    if sent is not None:
        config.stash[COUNTS] = Counter(sent)


def lines(config: pytest.Config) -> Iterable[str]:
    """For the end of the run."""
    if env.interpreting():
        yield "TRITON_INTERPRET=1: only the tests in folders called `interpreted`"
    for why, count in config.stash.get(COUNTS, Counter()).items():
        yield f"needs {why}: {count} deselected"
