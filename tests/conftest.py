"""Common ground of all tests: threads, no measured configs, which tests need a GPU, a record of kernels that ran."""

import os
import tempfile
from collections.abc import Iterator

import pytest
import torch

from envoi import triton_compat
from tests.helpers import recorder
from tests.helpers.tools import pairs

# Each pytest process gets one thread: two processes whose thread pools wait for each other's cores crawl.
torch.set_num_threads(1)

# What was measured on this machine must not decide which kernels are tested.
NO_CACHE = tempfile.TemporaryDirectory()
os.environ["ENVOI_CACHE_DIR"] = NO_CACHE.name


def pytest_addoption(parser: pytest.Parser) -> None:
    """Those of the recorder."""
    recorder.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Record if asked to."""
    recorder.configure(config)


@pytest.fixture
def tidy_gpu() -> Iterator[None]:
    """Memory that nobody wrote is NaN, or a huge number; what a large case took goes back: others share the GPU."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.empty_cache()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect, by name and with a count, what the machine has too few GPUs for, and what isn't for this Triton.

    `gpu` is one, `gpu(2)` two.
    """
    kept, left_out = [], []
    is_default = pairs.default().triton == triton_compat.VERSION
    for item in items:
        marker = item.get_closest_marker("gpu")
        needed = 0 if marker is None else marker.args[0] if marker.args else 1
        possible = needed <= torch.cuda.device_count() and (is_default or not item.get_closest_marker("default_triton"))
        (kept if possible else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
