"""Prepared calls of ExpertParallel on one rank, by each way that kernels take: bits, errors of the device, closing.

Collectives, which a replay repeats between its launches, are copies here.
"""

import weakref
from contextlib import nullcontext

import pytest
import torch

from envoi.ops.moe import moe
from envoi.ops.moe.parallel import ExpertParallel, PeerTimeout
from envoi.ops.moe.parallel.combine_kernels import BAD_IDS, LATE_AT_COMBINE
from envoi.ops.moe.parallel.nvlink import SharedLayout
from envoi.runtime import shortcuts
from envoi.runtime.prepared import replay
from envoi.types import Routing
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.slow import mostly_slow
from tests.moe.layers import make
from tests.moe.parallel.domains import hosts_alone, open_all, use

SIZES = {"tokens": 5, "experts": 4, "k": 2, "hidden": 128, "intermediate": 128, "masked": 0.2}


WAYS = {"memory": lambda layout: open_all(layout, [0, 4])[0], "hosts": hosts_alone}


def open_here(monkeypatch, format: str, way: str = "memory", presum: bool = False) -> ExpertParallel:
    """Open an object of one rank that goes this way: its memory is the process's own."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    layer = make(**SIZES)
    parallel = ExpertParallel(layer.pack(format), max_tokens=8, num_topk=2)
    use(parallel, WAYS[way](SharedLayout(1, 4, 8, 2, 128, format, presum)))
    return parallel


def inputs(seed: int) -> tuple[torch.Tensor, Routing]:
    layer = make(**SIZES, seed=seed)
    return layer.tokens, layer.routing


@pytest.mark.parametrize(
    ("format", "way", "presum"),
    mostly_slow([
        ("bf16", "memory", False), ("fp8_block128", "memory", False), ("mxfp4_mxfp8", "memory", False),
        ("fp8_block128", "hosts", False), ("bf16", "hosts", True),
    ], quick=[("bf16", "memory", False), ("bf16", "hosts", True)]),
)  # fmt: skip
def test_bits(fake, monkeypatch, format, way, presum):
    parallel, experts = open_here(monkeypatch, format, way, presum), make(**SIZES).pack(format)
    for seed in range(2):
        tokens, routing = inputs(seed)
        before = len(fake.calls)
        got = parallel.moe(tokens, routing)
        assert len(fake.calls) > before
        shortcuts.PREPARED = False
        want = parallel.moe(tokens, routing)
        assert_same_bits(got, want)
        monkeypatch.setattr(shortcuts, "PREPARED", True)
    assert_same_bits(want, moe(tokens, routing, experts))
    assert not parallel._calls.refusals()
    (known,) = parallel._calls.known.values()
    assert isinstance(known, replay.Prepared)
    assert sum(step is not None for _, step in known._parts) == (0 if way == "memory" else 2)


@pytest.mark.parametrize("way", WAYS)
def test_out(fake, monkeypatch, way):
    parallel = open_here(monkeypatch, "bf16", way)
    for seed in range(2):
        tokens, routing = inputs(seed)
        out = torch.empty_like(tokens)
        assert parallel.moe(tokens, routing, out=out) is out
        assert_same_bits(out, parallel.moe(tokens, routing))
    for wrong in (out[:-1], out.float(), out.t().contiguous().t(), 7):
        with pytest.raises(ValueError, match="^out: expected"):
            parallel.moe(tokens, routing, out=wrong)
        parallel._exchange.domain.report.zero_()
    assert_same_bits(out, parallel.moe(tokens, routing))


@pytest.mark.parametrize("way", WAYS)
def test_errors(fake, monkeypatch, way):
    parallel = open_here(monkeypatch, "bf16", way)
    for seed in range(2):
        parallel.moe(*inputs(seed))
    assert fake.calls
    tokens, routing = inputs(2)
    bad = Routing(routing.topk_weights, routing.topk_ids.clone().fill_(9), 4)
    with pytest.raises(ValueError, match="refused its arguments in an earlier call: routing.topk_ids: expected ids"):
        parallel.moe(tokens, bad)
    report = parallel._exchange.domain.report
    assert report.tolist() == [[0], [0]]
    parallel.moe(tokens, routing)
    for wrong, said in (
        ((tokens.float(), routing), "tokens: expected bfloat16"),
        ((tokens, Routing(routing.topk_weights, routing.topk_ids, 5)), "routing.num_experts: expected 4"),
    ):
        with pytest.raises(ValueError, match=said):
            parallel.moe(*wrong)
        report.zero_()
    report[1, 0] = BAD_IDS.value
    with pytest.raises(ValueError, match="refused its arguments"):
        parallel.moe(tokens, routing)
    report[0, 0] = LATE_AT_COMBINE.value
    for _ in range(2):
        with pytest.raises(PeerTimeout, match="combine"):
            parallel.moe(tokens, routing)


@pytest.mark.parametrize("way", WAYS)
def test_a_closed_object_keeps_no_memory(fake, monkeypatch, way):
    parallel = open_here(monkeypatch, "bf16", way)
    for seed in range(2):
        parallel.moe(*inputs(seed))
    owner = weakref.ref(parallel._exchange.owner)
    parallel.close()
    assert owner() is None  # at once: GPU memory can't wait for the collector of cycles
    with pytest.raises(ValueError, match="expected an open object"):
        parallel.moe(*inputs(0))
