"""Shared experts over ranks: bits of one rank, rows that don't travel, placements, loads, parts, and lost ranks."""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from envoi.experts import with_shared
from envoi.ops.moe import moe
from envoi.ops.moe.parallel import ExpertParallel, collectives
from envoi.quant import FORMATS
from envoi.types import ExpertWeights, Routing
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.ranks import run_ranks
from tests.moe.layers import Layer, make
from tests.moe.parallel import cases
from tests.moe.parallel.test_placement import ENDS, PLACEMENT, pack_placed, tokens_of
from tests.moe.test_shared import gate_of, shared_layer

EVEN = [3, 8]


def shared_of(format: str, **kind) -> ExpertWeights:
    """Pack a shared expert of another size than the routed ones', 256 beside 128: two slots."""
    return shared_layer(256, **kind).pack(format)


def whole(layer: Layer, format: str, gate: torch.Tensor | None, **kind) -> ExpertWeights:
    return with_shared(layer.pack(format), shared_of(format, **kind), gate)


def open_shared(
    layer: Layer, format: str, rank: int, gate: torch.Tensor | None, placement: list[int] | None = None,
    kind: dict | None = None, given: Sequence[int] | None = None, **options,
) -> ExpertParallel:  # fmt: skip
    """Open a rank that has its part of the routed experts, placed or not, and all shared ones.

    given: what the constructor is given in place of the placement.
    """
    first, last = list(pairwise([0, *(EVEN if placement is None else ENDS)]))[rank]
    mine = layer.pack(format, first, last) if placement is None else pack_placed(layer, format, placement[first:last])
    experts = with_shared(mine, shared_of(format, **(kind or {})), gate)
    return ExpertParallel(experts, placement=given or placement, **options)


def run_shared(rank: int, num_ranks: int, tried: list[tuple], options: dict) -> list[list[torch.Tensor]]:
    found = []
    for format, given, gated, placement in tried:
        kind = {name: given[name] for name in ("bias", "activation") if name in given}
        layer, gate = make(**given), gate_of() if gated else None
        parallel = open_shared(layer, format, rank, gate, placement, kind, **options)
        inputs = tokens_of(layer, rank, num_ranks)
        found.append([parallel.moe(*inputs), parallel.moe(*inputs)])
        assert parallel.num_experts == 8
        ends = EVEN if placement is None else ENDS
        assert parallel.expert_offsets == [0, *(end + 2 * (r + 1) for r, end in enumerate(ends))]
        assert parallel.placement == (None if placement is None else tuple(placement))
        parallel.close()
    return found


def test_the_bits_of_one_rank():
    tried = [
        *((format, {}, number % 2 == 0, None) for number, format in enumerate(FORMATS)),
        ("bf16", {"bias": True, "activation": "swiglu_oai"}, False, PLACEMENT),
        ("fp8_block128", {"tokens": 3}, True, PLACEMENT),
        ("bf16", {"tokens": 0}, True, None),
        ("bf16", {"k": 8, "masked": 1.0}, False, None),
    ]
    outcomes = run_ranks(2, run_shared, tried, {})
    assert [outcome.text for outcome in outcomes] == ["", ""]
    for number, (format, given, gated, _) in enumerate(tried):
        kind = {name: given[name] for name in ("bias", "activation") if name in given}
        layer = make(**given)
        want = moe(layer.tokens, layer.routing, whole(layer, format, gate_of() if gated else None, **kind))
        for call in range(2):
            assert_same_bits(torch.cat([outcome.value[number][call] for outcome in outcomes]), want)


def rows_that_travel(rank: int, num_ranks: int) -> list[list[int]]:
    """Return the rows that this rank sends to others, with shared experts and without."""
    layer, exchanged, found = make(), collectives.exchange_rows, []

    def exchange(channel, rows, send, receive, step):
        found[-1].append(sum(send) - send[rank])
        return exchanged(channel, rows, send, receive, step)

    collectives.exchange_rows = exchange
    for parallel in (open_shared(layer, "bf16", rank, None), cases.open_parallel(layer, "bf16", rank, EVEN)):
        found.append([])
        parallel.moe(*tokens_of(layer, rank, num_ranks))
    return found


def test_their_rows_do_not_travel():
    for outcome in run_ranks(2, rows_that_travel):
        assert outcome.text == ""
        shared, alone = outcome.value
        assert shared == alone and min(alone) > 0


def parts_load_and_moves(rank: int, num_ranks: int) -> dict:
    """Call in parts, by a handle; look at the load; move routed experts; then refuse what counts shared ones."""
    layer, gate = make(), gate_of()
    parallel = open_shared(layer, "bf16", rank, gate, PLACEMENT)
    tokens, r = tokens_of(layer, rank, num_ranks)
    want = parallel.moe(tokens, r)
    load = parallel.load()
    found = {
        "experts": load.num_tokens_per_expert[-1].tolist(), "physical": load.num_tokens_per_physical[-1].tolist(),
        "ranks": load.num_tokens_per_rank[-1].tolist(), "placement": load.placement, "text": str(load), "said": [],
    }  # fmt: skip
    sent = parallel.dispatch(tokens, r.topk_ids, r.topk_weights)
    assert len(sent.offsets) == parallel.experts.num_local_experts + 1
    own = int(sent.offsets[-1] - sent.offsets[-2])
    assert own == int(sent.offsets[-2] - sent.offsets[-3]) == len(tokens)
    rows = parallel._exchange.run_experts(sent.received, parallel.experts)
    found["parts"] = torch.equal(parallel.combine(rows, sent), want)
    parallel.update_placement(load.placement)
    found["same"] = parallel.placement == tuple(PLACEMENT) and torch.equal(parallel.moe(tokens, r), want)
    other = [5, 5, 5, 6, 7, 0, 1, 2, 3, 4, -1]
    first, last = [0, *ENDS][rank : rank + 2]
    new = pack_placed(layer, "bf16", other[first:last])
    parallel.experts.gate_up[: last - first].copy_(new.gate_up)
    parallel.experts.down[: last - first].copy_(new.down)
    for wrong in ([*other, -1], [*other, -1, -1, -1, -1]):
        try:
            parallel.update_placement(wrong)
        except ValueError as error:
            found["said"].append(str(error))
    parallel.update_placement(other)
    found["moved"] = torch.equal(parallel.moe(tokens, r), want)
    parallel.close()
    again = open_shared(layer, "bf16", rank, gate, PLACEMENT, given=load.placement)
    found["again"] = again.placement == tuple(PLACEMENT) and torch.equal(again.moe(tokens, r), want)
    return found


def test_parts_loads_and_moves():
    layer = make()
    counts = [int((layer.routing.topk_ids == e).sum()) for e in range(8)]
    for outcome in run_ranks(2, parts_load_and_moves):
        assert outcome.text == ""
        found = outcome.value
        assert found["experts"] == counts and found["parts"] and found["same"]
        assert found["moved"] and found["again"]
        assert found["placement"] == (*PLACEMENT[:5], -1, -1, *PLACEMENT[5:], -1, -1)
        assert found["physical"][5:7] == found["physical"][13:] == [30, 30]
        assert sum(found["ranks"]) == sum(counts) + 120
        assert found["text"].startswith("bound by rank") and "its expert -1" not in found["text"]
        for said, came in zip(found["said"], (12, 15), strict=True):
            assert said.endswith(f"an expert for each of the 11 that all ranks have packed, got {came}"), said


def differ(rank: int, num_ranks: int) -> list[str]:
    """Open ranks of which one has another shared expert, or none, or a gate; return the errors."""
    layer, found = make(), []
    routed = layer.pack("bf16", *([0, *EVEN][rank : rank + 2]))
    one, two, gated = (
        with_shared(routed, shared_layer(128).pack()), with_shared(routed, shared_of("bf16")),
        with_shared(routed, shared_layer(128).pack(), gate_of()),
    )  # fmt: skip
    for pair in ((one, two), (routed, one), (one, gated)):
        try:
            ExpertParallel(pair[rank])
        except ValueError as error:
            found.append(str(error))
    return found


def test_ranks_with_other_shared_experts_are_refused():
    for outcome in run_ranks(2, differ):
        assert outcome.text == "" and len(outcome.value) == 3
        for said, text in zip(outcome.value, ("num_shared=2", "num_shared=1", "shared_gate=True"), strict=True):
            assert "experts" in said and text in said


def bounded(rank: int, num_ranks: int) -> list:
    """Open for so many slots of a routing, which more are refused; a wrong id is refused by its number."""
    layer, found = make(), []
    parallel = open_shared(layer, "bf16", rank, None, max_tokens=30, num_topk=3)
    inputs = tokens_of(layer, rank, num_ranks)
    found.append(parallel.moe(*inputs))
    tokens, r = inputs
    more = Routing(torch.ones(30, 4), torch.zeros(30, 4, dtype=torch.int32), 8)
    wrong = Routing(r.topk_weights, torch.where(r.topk_ids == 0, 8, r.topk_ids), 8)
    for given in (more, wrong):
        try:
            parallel.moe(tokens, given)
        except ValueError as error:
            found.append(str(error))
    return found


def test_neither_num_topk_nor_ids_count_them():
    layer = make()
    outcomes = run_ranks(2, bounded)
    want = moe(layer.tokens, layer.routing, whole(layer, "bf16", None))
    assert_same_bits(torch.cat([outcome.value[0] for outcome in outcomes]), want)
    for outcome in outcomes:
        assert outcome.text == ""
        assert "expected at most 3 slots a token (num_topk), got 4" in outcome.value[1]
        assert "expected ids from 0 to 7, or -1 for a masked slot, got 8" in outcome.value[2]


def lose(rank: int, num_ranks: int) -> dict:
    """Go on without rank 1 of three."""
    layer, gate, ends = make(), gate_of(), [3, 5, 8]
    first, last = list(pairwise([0, *ends]))[rank]
    parallel = ExpertParallel(with_shared(layer.pack("bf16", first, last), shared_of("bf16"), gate), timeout_s=6.0)
    inputs = tokens_of(layer, rank, num_ranks)
    want = parallel.moe(*inputs)
    found = {}
    if rank != 1:
        left = parallel.without([1])
        needs = torch.isin(inputs[1].topk_ids, torch.tensor([3, 4])).any(1)
        got = left.moe(*inputs)
        same, lost = torch.equal(got[~needs], want[~needs]), bool(got[needs].isnan().all())
        assert 0 < int(needs.sum()) < len(needs)
        found = {"missing": left.missing_experts, "same": same, "offsets": left.expert_offsets, "lost": lost}
    dist.barrier()
    return found


def test_a_lost_rank_takes_no_shared_expert_with_it():
    want = {"missing": (3, 4), "same": True, "offsets": [0, 5, 10], "lost": True}
    outcomes = run_ranks(3, lose)
    assert [(outcome.text, outcome.value) for outcome in outcomes] == [("", want), ("", {}), ("", want)]
