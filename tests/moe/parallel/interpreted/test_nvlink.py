"""Kernels between the ranks of an NVLink domain, several ranks in one process."""

from itertools import pairwise

import pytest
import torch

from envoi.epilogues.activation import written
from envoi.ops.moe import moe
from envoi.ops.moe.parallel import combine_kernels, dispatch_kernels, nvlink
from envoi.ops.moe.parallel.combine_kernels import (
    BAD_IDS,
    FINE,
    LATE_AT_COMBINE,
    LATE_AT_DISPATCH,
    LOST,
    OUTCOME,
    REFUSED,
)
from envoi.ops.moe.parallel.nvlink import SharedLayout
from envoi.ops.moe.permute import sort_slots
from envoi.quant import FORMATS
from envoi.types import Routing
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.slow import mostly_slow
from tests.moe.layers import make
from tests.moe.own import reglu
from tests.moe.parallel import domains as ranks
from tests.moe.parallel.cases import Case

SMALL = {"tokens": 11, "experts": 6, "k": 2, "hidden": 128, "intermediate": 128}
ENDS = {"even": [2, 4, 6], "uneven": [1, 5, 6]}


def layout_of(layer, num_ranks, format, max_tokens=12, num_topk=4, presum=False):
    return SharedLayout(
        num_ranks, layer.routing.num_experts, max_tokens, num_topk, layer.tokens.shape[1], format, presum
    )


def run(layer, format, token_ends, expert_ends, **sizes):
    opened = ranks.open_all(layout_of(layer, len(token_ends), format, **sizes), [0, *expert_ends])
    packed = [layer.pack(format, first, last) for first, last in pairwise([0, *expert_ends])]
    parts = ranks.split(layer, token_ends)
    return opened, packed, parts


@pytest.mark.parametrize("format", mostly_slow(FORMATS, quick=["bf16", "fp8_block128", "mxfp4"]))
def test_the_bits_of_one_rank(format):
    layer = make(**SMALL)
    opened, packed, parts = run(layer, format, [4, 4, 11], ENDS["uneven"])
    want = moe(layer.tokens, layer.routing, layer.pack(format))
    for _ in range(2):  # the second call uses the memory as the first call wrote it
        assert_same_bits(torch.cat(ranks.moe(opened, parts, packed)), want)
    assert not torch.stack([domain.report for domain in opened]).any()


@pytest.mark.parametrize(
    "changes",
    [
        {"masked": 1.0},
        {"k": 4, "masked": 0.5},
        {"bias": True, "activation": "swiglu_oai"},
        {"tokens": 3},
        {"activation": written(reglu)},
    ],
)
def test_other_layers(changes):
    layer = make(**(SMALL | changes))
    tokens = len(layer.tokens)
    opened, packed, parts = run(layer, "bf16", [0, tokens // 2, tokens], ENDS["even"])
    assert_same_bits(torch.cat(ranks.moe(opened, parts, packed)), moe(layer.tokens, layer.routing, layer.pack()))


@pytest.mark.parametrize(("tokens", "k", "experts", "chunks"), [(1, 1, 1, 32), (256, 4, 200, 32), (257, 4, 31, 1)])
def test_slots_ranked_in_pieces_are_sorted(monkeypatch, tokens, k, experts, chunks):
    """Check the routing sent: where an expert's slots begin, and the place of each, as in a stable sort."""
    monkeypatch.setattr(nvlink, "MAX_CHUNKS", chunks)
    monkeypatch.setattr(dispatch_kernels, "COUNTED", type(dispatch_kernels.COUNTED)(32))  # a piece at once
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(experts, (tokens, k), generator=generator, dtype=torch.int32)
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    layout = SharedLayout(1, experts, 400, 32, 16, "bf16")
    domain = ranks.open_all(layout, [0, experts])[0]
    staged = torch.randn(tokens, 16, generator=generator).bfloat16()
    ranked = nvlink.stage_tokens(domain, staged, ids)
    assert_same_bits(layout.tokens_in(domain.memory)[:tokens], staged)
    ranks.flags(domain)[0] = nvlink.num_chunks(layout)  # one after the other, the first would wait for the last
    nvlink.send_routing(domain, ids, ids.float(), ranked)
    want = sort_slots(ids, experts)
    offsets, positions = layout.regions.slot_offsets, layout.regions.slot_pos
    offsets, positions = (domain.memory[begin:].view(torch.int32) for begin in (offsets, positions))
    assert_same_bits(offsets[: experts + 1], want.offsets)
    assert_same_bits(positions[: ids.numel()].view(ids.shape), want.slot_to_pos)
    assert_same_bits(domain.offsets, want.offsets)


@pytest.mark.parametrize("hot", [(5,), (1, 2, 3)], ids=["one expert", "three of one rank"])
def test_all_to_few_experts(hot):
    layer = Case("fp8_block128", SMALL, hot=hot).build()
    opened, packed, parts = run(layer, "fp8_block128", [0, 4, 8, 11], [1, 4, 5, 6])
    want = moe(layer.tokens, layer.routing, layer.pack("fp8_block128"))
    assert_same_bits(torch.cat(ranks.moe(opened, parts, packed)), want)


def test_no_tokens_at_all():
    layer = make(**(SMALL | {"tokens": 0}))
    opened, packed, parts = run(layer, "bf16", [0, 0, 0], ENDS["even"])
    assert [out.shape for out in ranks.moe(opened, parts, packed)] == [(0, 128)] * 3
    assert all(int(domain.offsets.abs().max()) == 0 for domain in opened)


def test_the_host_knows_the_kernels_constants(monkeypatch):
    monkeypatch.undo()  # not the sizes for the interpreter
    assert set(nvlink.LATE_STEPS) == {LATE_AT_DISPATCH.value, LATE_AT_COMBINE.value}
    assert combine_kernels.REFUSED_ON_HOST.value == nvlink.REFUSED_ON_HOST
    assert (dispatch_kernels.PIECE.value, dispatch_kernels.RANKED.value) == (nvlink.PIECE, nvlink.RANKED)


def test_a_token_may_name_an_expert_twice():
    layer = make(**(SMALL | {"experts": 3, "tokens": 12}))
    layer.routing.topk_ids.fill_(0)
    opened, packed, parts = run(layer, "bf16", [4, 8, 12], [1, 2, 3], max_tokens=4, num_topk=2)
    assert_same_bits(torch.cat(ranks.moe(opened, parts, packed)), moe(layer.tokens, layer.routing, layer.pack()))


@pytest.mark.parametrize(
    ("format", "changes"),
    mostly_slow(
        [("bf16", {"masked": 0.4}), ("bf16", {"k": 1}), ("fp8_block128", {"tokens": 5, "k": 4})],
        quick=[("bf16", {"masked": 0.4}), ("fp8_block128", {"tokens": 5, "k": 4})],
    ),
)
def test_rows_that_meet_on_a_rank_are_summed_there(format, changes):
    layer = make(**(SMALL | changes))
    tokens = len(layer.tokens)
    opened, packed, parts = run(layer, format, [0, tokens // 2, tokens], ENDS["uneven"], presum=True)
    rows = by_rank(layer, format, ENDS["uneven"])
    want = sum((row.float() for row in rows), torch.zeros_like(layer.tokens, dtype=torch.float32)).bfloat16()
    for _ in range(2):
        assert_same_bits(torch.cat(ranks.moe(opened, parts, packed)), want)


def by_rank(layer, format, ends):
    """Compute each rank's partial sum of every token, rounded, as it is sent."""
    ids, found = layer.routing.topk_ids, []
    for first, last in pairwise([0, *ends]):
        mine = torch.where((ids >= first) & (ids < last), ids - first, -1)
        routing = Routing(layer.routing.topk_weights, mine, last - first)
        found.append(moe(layer.tokens, routing, layer.pack(format, first, last)))
    return found


def send_routing(domain, layer, error_code=0):
    ids, weights = layer.routing.topk_ids, layer.routing.topk_weights
    ranked = nvlink.stage_tokens(domain, layer.tokens, ids)
    nvlink.send_routing(domain, ids, weights, ranked, error_code)


def test_a_late_rank_is_named_and_nothing_goes_on():
    layer = make(**SMALL)
    opened, _, _ = run(layer, "bf16", [11, 11], [3, 6])
    domain = opened[0]
    ranks.flags(domain)[0] = torch.tensor([nvlink.num_chunks(domain.layout), nvlink.num_chunks(domain.layout) - 1])
    send_routing(domain, layer)
    assert domain.report.tolist() == [[0, LATE_AT_DISPATCH.value], [0, 0]]
    assert int(domain.state[OUTCOME.value]) == LOST.value
    assert domain.offsets.tolist() == [0] * 4
    nvlink.combine_barrier(domain)
    assert not ranks.flags(opened[1])[1].any(), "a rank that gave up says that it has met the others"
    assert nvlink.sum_rows(domain, layer.routing.topk_ids).isnan().all()


def test_a_rank_late_with_its_rows_is_named():
    layer = make(**SMALL)
    opened, _, _ = run(layer, "bf16", [11, 11], [3, 6])
    domain = opened[0]
    nvlink.combine_barrier(domain)
    assert domain.report.tolist() == [[0, LATE_AT_COMBINE.value], [0, 0]]
    assert int(domain.state[OUTCOME.value]) == LOST.value


@pytest.mark.parametrize("wrong", [6, -2])
def test_bad_ids_refuse_the_call_on_all_and_only_this_call(wrong):
    layer = make(**SMALL)
    opened, packed, parts = run(layer, "bf16", [5, 8, 11], ENDS["even"])
    want = moe(layer.tokens, layer.routing, layer.pack())
    bad = parts[1][1].topk_ids.clone()
    parts[1][1].topk_ids[2, 1] = wrong
    # An error of the first turn is dropped in the second, which judges the routing sent again.
    outs = ranks.moe(opened, parts, packed)
    assert all(out.isnan().all() for out in outs)
    assert [domain.report.tolist() for domain in opened] == [[[0, 0, 0], [0, BAD_IDS.value, 0]]] * 3
    assert all(int(domain.state[OUTCOME.value]) == REFUSED.value for domain in opened)
    parts[1][1].topk_ids.copy_(bad)
    assert_same_bits(torch.cat(ranks.moe(opened, parts, packed)), want)
    assert all(int(domain.state[OUTCOME.value]) == FINE.value for domain in opened)
