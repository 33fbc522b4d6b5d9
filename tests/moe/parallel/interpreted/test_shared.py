"""Shared experts over ranks by kernels: their slots, over NVLink's memory and a rail, and in prepared calls."""

from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch

from envoi.experts import with_shared
from envoi.ops.moe import moe
from envoi.ops.moe.parallel import ExpertParallel
from envoi.ops.moe.parallel.nvlink import SharedLayout
from envoi.ops.moe.parallel.placement import Placed, place, place_by_torch, routed_offsets
from envoi.ops.moe.parallel.placement import with_shared as all_physical
from envoi.types import ExpertWeights, Routing
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.slow import mostly_slow
from tests.moe.layers import make
from tests.moe.parallel import domains
from tests.moe.parallel.interpreted.test_nvlink import SMALL
from tests.moe.parallel.interpreted.test_placement import MOVED, PLACEMENT
from tests.moe.parallel.interpreted.test_prepared import SIZES, WAYS, inputs
from tests.moe.parallel.test_placement import pack_placed
from tests.moe.test_shared import gate_of, shared_layer

CPU = torch.device("cpu")


def shared_of(format: str, size: int = 256) -> ExpertWeights:
    return shared_layer(size, hidden=128, tokens=1).pack(format)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("num_tokens", "k"), [(0, 3), (1, 1), (67, 5), (3, 0)])
def test_the_kernel_does_what_torch_does(num_tokens, k, gated):
    source, gate = torch.Generator().manual_seed(num_tokens), gate_of(160) if gated else None
    ids = torch.randint(-4, 8, (num_tokens, k), generator=source, dtype=torch.int32)
    weights, tokens = torch.rand(num_tokens, k, generator=source), torch.randn(num_tokens, 160, generator=source)
    physical = all_physical(PLACEMENT, [0, 4, 10], 2)
    assert physical == [2, 0, -1, -1, 1, 2, 3, 2, -1, -1] and routed_offsets([0, 4, 10], 2) == [0, 2, 6]
    placed = Placed.on(CPU, physical, 4, 1, first_shared=8, num_shared=2, shared_gate=gate)
    (got_weights, got), want = place(placed, weights, ids, tokens.bfloat16()), None
    want_weights, want = place_by_torch(placed, weights, ids, tokens.bfloat16())
    assert torch.equal(got, want)
    assert torch.equal(got_weights[:, :k], want_weights[:, :k])
    torch.testing.assert_close(got_weights, want_weights, rtol=2e-6, atol=0)
    assert (got[:, k:] == torch.tensor([8, 9])).all()
    apart = [torch.stack((x, x), 2)[:, :, 0] for x in (weights, ids, tokens.bfloat16())]
    for x, expected in zip(place(placed, *apart), (got_weights, got), strict=True):
        assert torch.equal(x, expected)


@pytest.mark.parametrize(
    ("format", "presum"),
    mostly_slow([("bf16", False), ("fp8_block128", False), ("bf16", True)], [("fp8_block128", False)]),
)
def test_tokens_have_the_bits_of_one_rank(format, presum):
    """On three ranks of which one has no tokens and one no routed experts."""
    layer, gate, ends = make(**SMALL), gate_of(128), [2, 2, 6]
    shared = shared_of(format)
    offsets = [0, 4, 6, 12]
    opened = domains.open_all(SharedLayout(3, 12, 12, 4, 128, format, presum), offsets)
    packed = [with_shared(layer.pack(format, a, b), shared, gate) for a, b in pairwise([0, *ends])]
    parts = []
    for rank, (tokens, r) in enumerate(domains.split(layer, [4, 4, 11])):
        physical = all_physical(None, offsets, 2)
        placed = Placed.on(CPU, physical, 6, rank, first_shared=offsets[rank + 1] - 2, num_shared=2, shared_gate=gate)
        weights, ids = place(placed, r.topk_weights, r.topk_ids, tokens)
        parts.append((tokens, Routing(weights, ids, 12)))
    got = torch.cat(domains.moe(opened, parts, packed))
    want = moe(layer.tokens, layer.routing, with_shared(layer.pack(format), shared, gate))
    if presum:  # of rounded sums
        torch.testing.assert_close(got.float(), want.float(), rtol=2**-6, atol=2**-6)
    else:
        assert_same_bits(got, want)


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_prepared_calls(fake, monkeypatch, way, placed):
    """Also with a gate that is written over, and with another placement."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    placement, gate = PLACEMENT if placed else None, gate_of(128)
    mine = make(**SIZES).pack() if placement is None else pack_placed(make(**SIZES), "bf16", placement)
    experts = with_shared(mine, shared_of("bf16", 128), gate)
    parallel = ExpertParallel(experts, max_tokens=8, num_topk=2, placement=placement)
    count = mine.num_local_experts + 1
    layout = SharedLayout(1, count, 8, 3, 128, "bf16")
    assert parallel._layout == layout
    domains.use(parallel, domains.open_all(layout, [0, count])[0] if way == "memory" else WAYS[way](layout))
    everything = with_shared(make(**SIZES).pack("bf16"), shared_of("bf16", 128), gate)
    for turn in range(3 if placed else 2):
        for seed in range(2):
            tokens, routing = inputs(seed)
            before = len(fake.calls)
            assert_same_bits(parallel.moe(tokens, routing), moe(tokens, routing, everything))
            assert len(fake.calls) > before
        counts = [int((routing.topk_ids == e).sum()) for e in range(4)]
        load = parallel.load()
        assert load.num_tokens_per_expert[-1].tolist() == counts
        assert load.num_tokens_per_physical[-1, -1] == len(tokens)
        if turn == 0:
            for x in (parallel.experts, everything):
                x.shared_gate.mul_(-2.0)
        elif turn == 1 and placed:
            other = pack_placed(make(**SIZES), "bf16", MOVED)
            parallel.experts.gate_up[: count - 1].copy_(other.gate_up)
            parallel.experts.down[: count - 1].copy_(other.down)
            parallel.update_placement(MOVED)
    assert not parallel._calls.refusals()
    assert len(parallel._calls.known) == 1
