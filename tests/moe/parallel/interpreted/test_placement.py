"""Placement by the kernel: what torch's operators make of it, over NVLink's memory and a rail, in prepared calls."""

from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch

from envoi.ops.moe import moe
from envoi.ops.moe.parallel import ExpertParallel
from envoi.ops.moe.parallel.nvlink import SharedLayout
from envoi.ops.moe.parallel.placement import BLOCK, Placed, place, place_by_torch
from envoi.quant import FORMATS
from envoi.types import Routing
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.slow import mostly_slow
from tests.moe.layers import make
from tests.moe.parallel import domains
from tests.moe.parallel.interpreted.test_nvlink import SMALL
from tests.moe.parallel.interpreted.test_prepared import SIZES, WAYS, inputs
from tests.moe.parallel.test_placement import pack_placed, physical_of

CPU = torch.device("cpu")
PLACEMENT, MOVED = [2, 0, 1, 2, 3, 2], [3, 1, 0, -1, 2, 1]  # of 4 experts


@pytest.mark.parametrize(("num_tokens", "k"), [(0, 3), (1, 1), (7, 3), (BLOCK // 4 + 3, 5)])
@pytest.mark.parametrize(("placement", "num_experts"), [(PLACEMENT, 4), ([0], 1), ([3, -1, 3, 1], 6)])
def test_the_kernel_does_what_torch_does(num_tokens, k, placement, num_experts):
    source = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(-4, num_experts + 4, (num_tokens, k), generator=source, dtype=torch.int32)
    ids.view(-1)[:1] = torch.iinfo(torch.int32).max
    weights = torch.rand(num_tokens, k, generator=source)
    placed = Placed.on(CPU, placement, num_experts, 2)
    got, want = place(placed, weights, ids), place_by_torch(placed, weights, ids)
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[0].isnan(), want[0].isnan())
    assert torch.equal(got[0].nan_to_num(-1), want[0].nan_to_num(-1))


@pytest.mark.parametrize(
    ("format", "presum"),
    mostly_slow([("bf16", False), ("fp8_block128", False), ("bf16", True)], [("fp8_block128", False)]),
)
def test_tokens_have_the_bits_of_one_rank(format, presum):
    layer, placement, ends = make(**SMALL), [5, 0, 4, 1, 5, 2, 3, 0, 5], [2, 7, 9]
    opened = domains.open_all(SharedLayout(3, 9, 12, 2, 128, format, presum), [0, *ends])
    packed = [pack_placed(layer, format, placement[a:b]) for a, b in pairwise([0, *ends])]
    parts = []
    for rank, (tokens, r) in enumerate(domains.split(layer, [4, 4, 11])):
        weights, ids = place(Placed.on(CPU, placement, 6, rank), r.topk_weights, r.topk_ids)
        parts.append((tokens, Routing(weights, ids, 9)))
    assert len({int(s) for _, r in parts for s in r.topk_ids.flatten()} - {-1}) > 6, "no replica has a token"
    got = torch.cat(domains.moe(opened, parts, packed))
    want = moe(layer.tokens, layer.routing, layer.pack(format))
    if presum:  # of rounded sums
        torch.testing.assert_close(got.float(), want.float(), rtol=2**-6, atol=2**-6)
    else:
        assert_same_bits(got, want)


@pytest.mark.parametrize("format", mostly_slow(FORMATS, quick=["fp8_block128", "mxfp4_mxfp8"]))
def test_a_missing_expert_spoils_its_tokens_alone(format):
    """A weight that is NaN is NaN in the sum, whatever quantises the activations, and in no other token's."""
    layer, placement, ends = make(**SMALL), [5, 0, 4, 1], [2, 4]
    opened = domains.open_all(SharedLayout(2, 4, 12, 2, 128, format), [0, *ends])
    packed = [pack_placed(layer, format, placement[a:b]) for a, b in pairwise([0, *ends])]
    parts = []
    for rank, (tokens, r) in enumerate(domains.split(layer, [5, 11])):
        weights, ids = place(Placed.on(CPU, placement, 6, rank), r.topk_weights, r.topk_ids)
        parts.append((tokens, Routing(weights, ids, 4)))
    needs = torch.isin(layer.routing.topk_ids, torch.tensor([2, 3])).any(1)
    assert 0 < needs.sum() < 11
    got, want = torch.cat(domains.moe(opened, parts, packed)), moe(layer.tokens, layer.routing, layer.pack(format))
    assert got[needs].isnan().all()
    assert_same_bits(got[~needs], want[~needs])


def open_placed(monkeypatch, way: str, placement: list[int], **options) -> ExpertParallel:
    """Open an object of one rank with a placement of 4 experts that goes this way."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    packed = pack_placed(make(**SIZES), "bf16", placement)
    parallel = ExpertParallel(packed, max_tokens=8, num_topk=2, placement=placement, **options)
    layout = SharedLayout(1, len(placement), 8, 2, 128, "bf16")
    domains.use(parallel, domains.open_all(layout, [0, len(placement)])[0] if way == "memory" else WAYS[way](layout))
    return parallel


@pytest.mark.parametrize("way", WAYS)
def test_prepared_calls_go_on_with_another_placement(fake, monkeypatch, way):
    parallel = open_placed(monkeypatch, way, PLACEMENT)
    everything = make(**SIZES).pack("bf16")
    for placement in (PLACEMENT, MOVED, PLACEMENT):
        other = pack_placed(make(**SIZES), "bf16", placement)
        parallel.experts.gate_up.copy_(other.gate_up)
        parallel.experts.down.copy_(other.down)
        if placement != list(parallel.placement):
            parallel.update_placement(placement)
        for seed in range(2):
            tokens, routing = inputs(seed)
            before = len(fake.calls)
            assert_same_bits(parallel.moe(tokens, routing), moe(tokens, routing, everything))
            assert len(fake.calls) > before
        load, ids = parallel.load(), routing.topk_ids
        assert load.num_tokens_per_expert[-1].tolist() == [int((ids == e).sum()) for e in range(4)]
        chosen = [physical_of(placement, 4, e, m, 0) for m, row in enumerate(ids.tolist()) for e in row]
        assert load.num_tokens_per_physical[-1].tolist() == [chosen.count(p) for p in range(6)]
        assert (load.num_tokens_per_expert[:, 0] >= 0).sum() == 2
    assert not parallel._calls.refusals()
    assert len(parallel._calls.known) == 1


def test_a_wrong_id_is_one_that_is_no_experts(fake, monkeypatch):
    parallel = open_placed(monkeypatch, "memory", PLACEMENT)
    tokens, routing = inputs(0)
    parallel._exchange = type(parallel._exchange)(parallel._exchange.owner, "memory", 0, parallel.num_experts)
    for wrong in (4, -2):
        bad = Routing(routing.topk_weights, routing.topk_ids.clone().fill_(wrong), 4)
        with pytest.raises(ValueError, match="topk_ids: expected ids from 0 to 3, or -1 for a masked slot"):
            parallel.moe(tokens, bad)


@pytest.mark.parametrize("way", WAYS)
def test_tokens_of_missing_experts_come_out_nan(fake, monkeypatch, way):
    parallel = open_placed(monkeypatch, way, [0, 3, 0], num_experts=4)
    assert parallel.missing_experts == (1, 2)
    for seed in range(2):
        tokens, routing = inputs(seed)
        needs = torch.isin(routing.topk_ids, torch.tensor([1, 2])).any(1)
        got = parallel.moe(tokens, routing)
        assert got[needs].isnan().all()
        assert_same_bits(got[~needs], moe(tokens, routing, make(**SIZES).pack())[~needs])
