"""Common ground of all tests: threads, and which tests need a GPU."""

import pytest
import torch

# Each pytest process gets one thread: two processes whose thread pools wait for each other's cores crawl.
torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect, by name and with a count, what the machine has too few GPUs for: `gpu` is one, `gpu(2)` two."""
    kept, left_out = [], []
    for item in items:
        marker = item.get_closest_marker("gpu")
        needed = 0 if marker is None else marker.args[0] if marker.args else 1
        (kept if needed <= torch.cuda.device_count() else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
