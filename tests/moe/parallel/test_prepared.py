"""Prepared calls of ExpertParallel over NVLink, its kernels compiled without a GPU: a replay's parameters are right."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from envoi.moe.parallel import ExpertParallel
from envoi.moe.parallel.symmetric_memory import SharedLayout
from tests.moe.layers import make
from tests.moe.parallel.domains import open_all
from tests.runtime.conftest import hopper
from tests.runtime.prepared_cases import Case
from tests.runtime.test_prepared_hopper import assert_replayed

__all__ = ["hopper"]

SIZES = {"tokens": 16, "experts": 4, "k": 2, "hidden": 256, "intermediate": 256}


@pytest.fixture
def group(tmp_path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("format", "presum", "num_launches"), [("bf16", False, 7), ("fp8_block128", False, 8), ("fp8_row", True, 9)]
)
def test_parameters(hopper, monkeypatch, format, presum, num_launches):
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    parallel = ExpertParallel(make(**SIZES).pack(format), max_tokens=16, num_topk=2)
    (domain,) = open_all(SharedLayout(1, 4, 16, 2, 256, format, presum), [0, 4])
    domain.watch, parallel.domain, parallel._lock = parallel.channel.watch, domain, domain.lock

    def arguments(i: int) -> tuple[tuple, dict]:
        layer = make(**SIZES, seed=i)
        return (layer.tokens, layer.routing, layer.pack(format)), {}

    def run(tokens, routing, experts):
        parallel.experts = experts  # objects of a model's layers share a domain
        return parallel.moe(tokens, routing)

    assert_replayed(Case(run, arguments), hopper, domain.calls, domain.calls.owned)
    assert len(hopper.calls) == num_launches
