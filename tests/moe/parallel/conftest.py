"""Fixtures of the tests of several ranks."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.helpers.choices import force


@pytest.fixture(autouse=True)
def one_rank_as_many(monkeypatch):
    """One rank has kernels of its own for few tokens and 4-bit weights, whose bits differ."""
    force(monkeypatch, decode_mx=False)


@pytest.fixture
def lone_rank(tmp_path) -> Iterator[None]:
    """Open a group of which this process is the only rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
