"""Prepared calls of ExpertParallel, its kernels compiled without a GPU: a replay's parameters are right."""

from contextlib import nullcontext

import pytest
import torch

from envoi.ops.moe.parallel import ExpertParallel
from envoi.ops.moe.parallel.nvlink import Domain, SharedLayout
from envoi.runtime.prepared.replay import Prepared
from envoi.runtime.program import tensors_in
from tests.helpers.choices import force
from tests.helpers.slow import mostly_slow
from tests.moe.layers import make
from tests.moe.parallel.domains import hosts_alone, open_all, use
from tests.runtime.conftest import hopper
from tests.runtime.prepared_cases import Case
from tests.runtime.test_prepared_hopper import assert_replayed

__all__ = ["hopper"]


def in_memory(layout: SharedLayout) -> Domain:
    return open_all(layout, [0, 4])[0]


WAYS = {"memory": in_memory, "one launch": in_memory, "hosts": hosts_alone}
SIZES = {"tokens": 16, "experts": 4, "k": 2, "hidden": 256, "intermediate": 256}


@pytest.mark.usefixtures("lone_rank")
@pytest.mark.parametrize(
    ("way", "format", "presum", "num_launches"),
    mostly_slow([
        ("memory", "bf16", False, 7), ("memory", "fp8_block128", False, 8), ("memory", "fp8_row", True, 9),
        ("one launch", "fp8_block128", False, 6),
        ("hosts", "bf16", False, 14), ("hosts", "fp8_block128", True, 16),
    ], quick=[("memory", "bf16", False, 7), ("hosts", "bf16", False, 14)]),
)  # fmt: skip
def test_parameters(hopper, monkeypatch, way, format, presum, num_launches):
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    force(monkeypatch, one_launch=way == "one launch" or None)
    parallel = ExpertParallel(make(**SIZES).pack(format), max_tokens=16, num_topk=2)
    owner = WAYS[way](SharedLayout(1, 4, 16, 2, 256, format, presum))
    use(parallel, owner)

    def arguments(i: int) -> tuple[tuple, dict]:
        layer = make(**SIZES, seed=i)
        return (layer.tokens, layer.routing, layer.pack(format)), {}

    def run(tokens, routing, experts):
        parallel.experts = experts  # objects of a model's layers share a domain
        return parallel.moe(tokens, routing)

    assert_replayed(Case(run, arguments), hopper, parallel._calls, list(tensors_in(owner)))
    assert len(hopper.calls) == num_launches
    made = [found for found in parallel._calls.known.values() if isinstance(found, Prepared)]
    assert len(made) == 1
    # As before a first call, in which the ranks wait for each other: objects of other weights share the calls.
    parallel._is_loaded = False
    with monkeypatch.context() as patched:
        patched.setattr(parallel._calls, "replay", lambda *_: pytest.fail("a replay"))
        patched.setattr(parallel._calls, "run", lambda *_: pytest.fail("recorded, or a replay"))
        run(*arguments(0)[0])
    assert parallel._is_loaded
