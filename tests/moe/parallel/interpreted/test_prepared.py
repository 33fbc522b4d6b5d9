"""Prepared calls of ExpertParallel over a shared memory, on one rank: bits, errors of the device, a closed object."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from envoi.moe import moe
from envoi.moe.parallel import ExpertParallel, PeerTimeout
from envoi.moe.parallel.shared_device import BAD_IDS, LATE_AT_COMBINE
from envoi.moe.parallel.symmetric_memory import SharedLayout
from envoi.runtime import shortcuts
from envoi.runtime.prepared import replay
from envoi.types import Routing
from tests.helpers.accuracy import assert_same_bits
from tests.moe.layers import make
from tests.moe.parallel.domains import open_all
from tests.runtime.interpreted.conftest import fake

__all__ = ["fake"]

SIZES = {"tokens": 5, "experts": 4, "k": 2, "hidden": 128, "intermediate": 128, "masked": 0.2}


@pytest.fixture
def group(tmp_path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def open_here(monkeypatch, format: str) -> ExpertParallel:
    """Open an object of one rank that takes the path over NVLink: its memory is the process's own."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    layer = make(**SIZES)
    parallel = ExpertParallel(layer.pack(format), max_tokens=8, num_topk=2)
    (parallel.domain,) = open_all(SharedLayout(1, 4, 8, 2, 128, format), [0, 4])
    parallel.domain.watch, parallel._lock = parallel.channel.watch, parallel.domain.lock
    return parallel


def inputs(seed: int) -> tuple[torch.Tensor, Routing]:
    layer = make(**SIZES, seed=seed)
    return layer.tokens, layer.routing


@pytest.mark.parametrize("format", ["bf16", "fp8_block128", "mxfp4_mxfp8"])
@pytest.mark.usefixtures("group")
def test_bits(fake, monkeypatch, format):
    parallel, experts = open_here(monkeypatch, format), make(**SIZES).pack(format)
    for seed in range(4):
        tokens, routing = inputs(seed)
        before = len(fake.calls)
        got = parallel.moe(tokens, routing)
        assert (len(fake.calls) > before) == (seed >= 2)
        shortcuts.PREPARED = False
        want = parallel.moe(tokens, routing)
        assert_same_bits(got, want)
        monkeypatch.setattr(shortcuts, "PREPARED", True)
    assert_same_bits(want, moe(tokens, routing, experts))
    (known,) = parallel.domain.calls.known.values()
    assert isinstance(known, replay.Prepared)


@pytest.mark.usefixtures("group")
def test_errors(fake, monkeypatch):
    parallel = open_here(monkeypatch, "bf16")
    for seed in range(3):
        parallel.moe(*inputs(seed))
    assert fake.calls
    tokens, routing = inputs(3)
    bad = Routing(routing.topk_weights, routing.topk_ids.clone().fill_(9), 4)
    with pytest.raises(ValueError, match="refused its arguments in an earlier call: routing.topk_ids: expected ids"):
        parallel.moe(tokens, bad)
    assert parallel.domain.report.tolist() == [[0], [0]]
    parallel.moe(tokens, routing)
    for wrong, said in (
        ((tokens.float(), routing), "tokens: expected bfloat16"),
        ((tokens, Routing(routing.topk_weights, routing.topk_ids, 5)), "routing.num_experts: expected 4"),
    ):
        with pytest.raises(ValueError, match=said):
            parallel.moe(*wrong)
        parallel.domain.report.zero_()
    parallel.domain.report[1, 0] = BAD_IDS.value
    with pytest.raises(ValueError, match="refused its arguments"):
        parallel.moe(tokens, routing)
    parallel.domain.report[0, 0] = LATE_AT_COMBINE.value
    for _ in range(2):
        with pytest.raises(PeerTimeout, match="combine"):
            parallel.moe(tokens, routing)


@pytest.mark.usefixtures("group")
def test_a_closed_object_keeps_no_memory(fake, monkeypatch):
    parallel = open_here(monkeypatch, "bf16")
    for seed in range(3):
        parallel.moe(*inputs(seed))
    parallel.close()
    with pytest.raises(ValueError, match="expected an open object"):
        parallel.moe(*inputs(0))
