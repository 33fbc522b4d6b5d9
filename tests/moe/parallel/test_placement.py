"""Placement of experts on ranks, replicas among them: the map, balance, bits over gloo, and moves."""

from itertools import pairwise

import pytest
import torch

from envoi.experts import balanced_placement, pack
from envoi.ops.moe import moe
from envoi.ops.moe.parallel import ExpertParallel
from envoi.ops.moe.parallel.load import NO_CALL, empty_history, load_of, note
from envoi.ops.moe.parallel.placement import BAD_ID, Placed, check_placement, place
from envoi.quant import FORMATS
from envoi.types import ExpertWeights, Routing
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.ranks import run_ranks
from tests.moe.layers import Layer, make
from tests.moe.parallel import cases

CPU = torch.device("cpu")
# 8 experts on two ranks that pack 5 and 6: 3 has three replicas, two of them on one rank; 0 has two.
PLACEMENT = [3, 0, 7, 5, 3, 1, 2, 3, 6, 4, 0]
ENDS = [5, 11]
ONE_UNUSED = [3, 0, 7, 5, 3, 1, 2, -1, 6, 4, 0]
SIZES = {"max_tokens": 70, "num_topk": 9}


def replicas_of(placement: list[int], expert: int) -> list[int]:
    return [p for p, e in enumerate(placement) if e == expert]


def physical_of(placement: list[int], num_experts: int, e: int, token: int, rank: int) -> int:
    """Say which physical expert a choice goes to."""
    if e == -1 or not 0 <= e < num_experts:
        return -1 if e == -1 else BAD_ID
    replicas = replicas_of(placement, e)
    return replicas[(token + rank) % len(replicas)] if replicas else e % len(placement)


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize(("placement", "num_experts"), [(PLACEMENT, 8), (ONE_UNUSED, 8), ([2, -1, 2, 0], 5)])
def test_each_choice_goes_to_a_replica(placement, num_experts, rank):
    ids = torch.randint(-3, num_experts + 3, (50, 4), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    weights = torch.rand(50, 4)
    got_weights, got = place(Placed.on(CPU, placement, num_experts, rank), weights, ids)
    want = [[physical_of(placement, num_experts, e, m, rank) for e in row] for m, row in enumerate(ids.tolist())]
    assert (got.tolist(), got.dtype) == (want, torch.int32)
    lost = torch.tensor([[0 <= e < num_experts and e not in placement for e in row] for row in ids.tolist()])
    assert torch.equal(got_weights.isnan(), lost)
    assert torch.equal(got_weights[~lost], weights[~lost])


def test_another_placement_is_written_over_the_first():
    ids = torch.arange(8, dtype=torch.int32).repeat(6, 1)
    placed = Placed.on(CPU, PLACEMENT, 8, 1)
    address = placed.table.data_ptr()
    for other in (ONE_UNUSED, [0, 1, 2, 3, 4, 5, 6, 7, 7, 7, 7], PLACEMENT):
        placed.update(other)
        want = place(Placed.on(CPU, other, 8, 1), torch.zeros(6, 8), ids)[1]
        assert torch.equal(place(placed, torch.zeros(6, 8), ids)[1], want)
        assert placed.logical.tolist() == other
    assert placed.table.data_ptr() == address


def zipf(num_experts: int, seed: int) -> torch.Tensor:
    """Return shares of experts of Zipf's law with exponent 1.2, in an order of the seed."""
    shares = torch.arange(1, num_experts + 1, dtype=torch.float64) ** -1.2
    return (shares / shares.sum())[torch.randperm(num_experts, generator=torch.Generator().manual_seed(seed))]


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("num_experts", [64, 128, 256])
def test_a_skewed_layer_is_balanced_by_a_tenth_of_replicas(num_experts, num_ranks):
    """As much as Zipf's shares themselves allow, and with tokens that are drawn from them and routed by the rule."""
    num_physical = num_experts + num_experts // 10
    room = [num_physical * (r + 1) // num_ranks - num_physical * r // num_ranks for r in range(num_ranks)]
    for seed in range(3):
        shares = zipf(num_experts, seed)
        placement = balanced_placement(shares, room)
        assert sorted(set(placement)) == list(range(num_experts)) and len(placement) == num_physical
        ranks = torch.repeat_interleave(torch.arange(num_ranks), torch.tensor(room))
        counts = torch.bincount(torch.tensor(placement), minlength=num_experts)
        of_each = (shares / counts)[placement]
        loads = torch.zeros(num_ranks, dtype=torch.float64).index_add(0, ranks, of_each)
        assert loads.max() <= 1.15 * loads.mean()
        if num_ranks == 8:  # the first expert alone has more
            assert shares.max() > 1.15 * loads.mean()
        source = torch.Generator().manual_seed(seed)
        ids = torch.multinomial(shares.expand(4096, -1), 8, generator=source).to(torch.int32)
        # Tokens choose 8 different experts, so the load to expect is what they have had: half of them are looked at.
        seen = torch.bincount(ids[:2048].flatten().long(), minlength=num_experts)
        placement = balanced_placement(seen, room)
        _, chosen = place(Placed.on(CPU, placement, num_experts, 0), torch.zeros(2048, 8), ids[2048:])
        tokens = torch.bincount(ranks[chosen.flatten().long()], minlength=num_ranks).double()
        assert tokens.max() <= 1.15 * tokens.mean()


def test_one_hot_expert_is_on_every_rank_and_what_is_left_over_is_empty():
    assert balanced_placement([100, 1, 1, 1], [2, 2, 2, 2]).count(0) == 4
    assert balanced_placement(torch.tensor([5, 5]), [3, 3]) == [0, 1, -1, 0, 1, -1]
    assert balanced_placement([3, 0, 0], [0, 3]) == [0, 1, 2]
    even = balanced_placement([1] * 6, [2, 2, 2])
    assert sorted(even) == list(range(6))


@pytest.mark.parametrize(
    ("loads", "room", "said"),
    [
        ([1, 2, 3], [1, 1], "num_physical_per_rank: expected at least 3 together, one an expert, got 2"),
        ([1, -1], [1, 1], "num_tokens_per_expert: expected numbers of at least 0, one for each expert, got -1 at 1"),
        ([float("nan")], [1], "num_tokens_per_expert: expected numbers of at least 0, .*, got nan at 0"),
        (
            torch.ones(2, 3),
            [4],
            "num_tokens_per_expert: expected numbers of at least 0, one for each expert, got float",
        ),
        ([], [1], "num_tokens_per_expert: expected numbers of at least 0, .*, got none"),
        ([1], [-1, 3], "num_physical_per_rank: expected an int of at least 0, got -1"),
        ([1], 3, "num_physical_per_rank: expected a number for each rank, got int 3"),
    ],
)
def test_loads_and_numbers_that_cannot_be(loads, room, said):
    with pytest.raises(ValueError, match="^" + said.replace("(", r"\(")):
        balanced_placement(loads, room)


def pack_placed(layer: Layer, format: str, placement: list[int]) -> ExpertWeights:
    """Pack the experts of a placement; an unused one has expert 0's weights times 2, which nothing may use."""
    device = layer.gate_up.device
    at = torch.tensor([max(e, 0) for e in placement], device=device)
    factor = torch.tensor([2.0 if e < 0 else 1.0 for e in placement], device=device).view(-1, 1, 1).bfloat16()
    bias = {} if layer.gate_up_bias is None else {"gate_up_bias": layer.gate_up_bias[at]}
    bias |= {} if layer.down_bias is None else {"down_bias": layer.down_bias[at]}
    return pack(layer.gate_up[at] * factor, layer.down[at], format, activation=layer.activation, **bias)


def open_placed(layer: Layer, format: str, rank: int, ends: list[int], placement, **options) -> ExpertParallel:
    first, last = list(pairwise([0, *ends]))[rank]
    numbers = placement.tolist() if isinstance(placement, torch.Tensor) else placement
    return ExpertParallel(pack_placed(layer, format, numbers[first:last]), placement=placement, **options)


def tokens_of(layer: Layer, rank: int, num_ranks: int) -> tuple[torch.Tensor, Routing]:
    return cases.part_of(layer, rank, [len(layer.tokens) * (r + 1) // num_ranks for r in range(num_ranks)])


def run_placed(rank: int, num_ranks: int, tried: list[tuple], options: dict) -> list[list[torch.Tensor]]:
    """Run each layer with each of its placements, by `moe` and in parts."""
    found = []
    for format, given, placement in tried:
        layer = make(**given)
        parallel = open_placed(layer, format, rank, ENDS, placement, **options)
        inputs = tokens_of(layer, rank, num_ranks)
        outs = [parallel.moe(*inputs), parallel.moe(*inputs)]
        assert parallel.num_experts == 8 and parallel.expert_offsets == [0, *ENDS] and parallel.missing_experts == ()
        parallel.close()
        found.append(outs)
    return found


WAYS = {"counted": {}, "gathered": SIZES | {"exchange": "gathered"}}


def test_the_bits_of_one_rank_whichever_replica_computes():
    tried = [
        *((format, {}, PLACEMENT) for format in FORMATS),
        ("bf16", {"bias": True, "activation": "swiglu_oai"}, torch.tensor(ONE_UNUSED, dtype=torch.int32)),
        ("fp8_block128", {"tokens": 3}, PLACEMENT),
        ("bf16", {"tokens": 0}, tuple(PLACEMENT)),
        ("bf16", {"k": 8, "masked": 0.4}, [7, 6, 5, 4, 3, 2, 1, 0, 0, 0, 0]),
    ]
    outcomes = run_ranks(2, run_placed, tried, {})
    assert [outcome.text for outcome in outcomes] == ["", ""]
    for number, (format, given, _) in enumerate(tried):
        layer = make(**given)
        want = moe(layer.tokens, layer.routing, layer.pack(format))
        for call in range(2):
            assert_same_bits(torch.cat([outcome.value[number][call] for outcome in outcomes]), want)


def parts_and_load(rank: int, num_ranks: int) -> dict:
    """Return what an object with a placement makes in parts, its load, and what `load` says in words."""
    layer = make()
    parallel = open_placed(layer, "bf16", rank, ENDS, PLACEMENT)
    tokens, r = tokens_of(layer, rank, num_ranks)
    sent = parallel.dispatch(tokens, r.topk_ids, r.topk_weights)
    number = torch.bucketize(torch.arange(len(sent.rows)), sent.offsets[1:], right=True)
    mine = torch.tensor(PLACEMENT[parallel.expert_offsets[rank] :])[number]
    rows = (sent.rows.double() * ((mine + 1) * sent.topk_weights).unsqueeze(1)).bfloat16()
    out = parallel.combine(rows, sent)
    factors = torch.where(r.topk_ids < 0, 0.0, (r.topk_ids + 1) * r.topk_weights.double())
    want = (tokens.double().unsqueeze(1) * factors.unsqueeze(2)).bfloat16().double().sum(1)
    load = parallel.load()
    return {
        "out": out, "want": want, "experts": load.num_tokens_per_expert[-2:].tolist(),
        "physical": load.num_tokens_per_physical[-1].tolist(), "ranks": load.num_tokens_per_rank[-1].tolist(),
        "busiest": load.busiest(),
    }  # fmt: skip


def test_parts_and_load_of_a_placement():
    layer, counts = make(), [0] * 11
    for rank in range(2):
        _, r = tokens_of(layer, rank, 2)
        for m, row in enumerate(r.topk_ids.tolist()):
            for e in row:
                if e >= 0:
                    counts[physical_of(PLACEMENT, 8, e, m, rank)] += 1
    experts = [sum(counts[p] for p in replicas_of(PLACEMENT, e)) for e in range(8)]
    ranks = [sum(counts[:5]), sum(counts[5:])]
    assert experts == [int((layer.routing.topk_ids == e).sum()) for e in range(8)]
    for outcome in run_ranks(2, parts_and_load):
        assert outcome.text == ""
        found = outcome.value
        torch.testing.assert_close(found["out"].double(), found["want"], rtol=2**-7, atol=1e-6)
        assert found["experts"] == [[NO_CALL] * 8, experts]
        assert (found["physical"], found["ranks"]) == (counts, ranks)
        busiest, used = found["busiest"], sum(e >= 0 for e in PLACEMENT)
        at = [0, 5, 11][busiest.rank :][:2]
        assert busiest.rank == ranks.index(max(ranks))
        assert busiest.expert == PLACEMENT[counts.index(max(counts[slice(*at)]), *at)]
        assert busiest.expert_load == pytest.approx(max(counts[slice(*at)]) / (sum(counts) / used))


def moved(rank: int, num_ranks: int) -> list:
    """Change placement and weights between two calls; return outputs, loads and refusals."""
    layer, found = make(), []
    parallel = open_placed(layer, "bf16", rank, ENDS, PLACEMENT)
    first, last = parallel.expert_offsets[rank : rank + 2]
    inputs = tokens_of(layer, rank, num_ranks)
    found.append(parallel.moe(*inputs))
    other = [5, 5, 5, 6, 7, 0, 1, 2, 3, 4, -1]
    for tensor, moved_to in zip(
        (parallel.experts.gate_up, parallel.experts.down),
        (lambda p: (p.gate_up, p.down))(pack_placed(layer, "bf16", other[first:last])), strict=True,
    ):  # fmt: skip
        tensor.copy_(moved_to)
    parallel.update_placement(torch.tensor(other))
    assert parallel.placement == tuple(other) and parallel.load().busiest() is None
    found.append(parallel.moe(*inputs))
    found.append(parallel.load().num_tokens_per_expert[-2:].tolist())
    different = [*other[:-1], rank]
    for wrong in (other[:-1], different, [0] * 11, [9, *other[1:]], "x", None):
        mine = wrong if rank == 1 or wrong is different else other
        try:
            parallel.update_placement(mine)
            found.append("taken")
        except ValueError as error:
            found.append(str(error))
    found.append(parallel.moe(*inputs))
    return found


def test_a_placement_moves_between_two_calls():
    outcomes = run_ranks(2, moved)
    assert [outcome.text for outcome in outcomes] == ["", ""]
    layer = make()
    want = moe(layer.tokens, layer.routing, layer.pack())
    for call in (0, 1, -1):
        assert_same_bits(torch.cat([outcome.value[call] for outcome in outcomes]), want)
    said = (
        "placement: expected an expert for each of the 11 that all ranks have packed, got 10",
        "placement: expected the same on every rank, got expert 0 at 10 on rank 0, 1 on rank 1",
        "placement: expected every expert, got none that is 1",
        "placement: expected experts below num_experts 8, got 9 at 0",
        "placement: expected an expert for each physical one, integers [num_physical], got str 'x'",
        "placement: expected an expert for each physical one, integers [num_physical], got NoneType",
    )
    for rank, outcome in enumerate(outcomes):
        counts = [int((layer.routing.topk_ids == e).sum()) for e in range(8)]
        assert outcome.value[2] == [[NO_CALL] * 8, counts]
        for text, found in zip(said, outcome.value[3:-1], strict=True):
            told = "" if rank == 1 or "same on every" in text else "rank 1 of the group refused its arguments: "
            assert found == told + text


def refused(rank: int, num_ranks: int, tried: list) -> list[str]:
    """Open with each of these options, a tuple of two = rank 0's and rank 1's; return the errors."""
    found, layer = [], make()
    for given in tried:
        mine = given[rank] if isinstance(given, tuple) else given
        try:
            first, last = list(pairwise([0, *ENDS]))[rank]
            ExpertParallel(pack_placed(layer, "bf16", PLACEMENT[first:last]), **mine).close()
            found.append("opened")
        except ValueError as error:
            found.append(str(error))
    return found


REFUSED = [
    ({"placement": PLACEMENT}, "opened"),
    ({"placement": PLACEMENT[:-1]}, "placement: expected an expert for each of the 11 that"),
    ({"placement": [1] * 11}, "placement: expected every expert, got none that is 0; pass num_experts if some"),
    ({"placement": [-1] * 11}, "placement: expected every expert, got none that is 0"),
    ({"placement": [1] * 11, "num_experts": 2}, "opened"),
    ({"placement": PLACEMENT, "num_experts": 7}, "placement: expected experts below num_experts 7, got 7 at 2"),
    ({"placement": [*PLACEMENT[:-1], -2]}, "placement: expected experts from 0 on, or -1 for an unused one, got -2 at"),
    ({"placement": [*PLACEMENT[:-1], 0.5]}, "placement: expected experts from 0 on, or -1 for an unused one, got 0.5"),
    ({"placement": torch.zeros(11)}, "placement: expected an expert for each physical one, integers [num_phy"),
    ({"placement": torch.zeros(1, 11).long()}, "placement: expected an expert for each physical one, integ"),
    ({"num_experts": 8}, "num_experts: expected None without a placement, got 8"),
    ({"placement": PLACEMENT, "num_experts": 0}, "num_experts: expected an int of at least 1, got 0"),
    (({"placement": PLACEMENT}, {}), "placement: expected one on every rank, got none on rank 1, one on 0"),
    (
        ({"placement": PLACEMENT}, {"placement": PLACEMENT[::-1]}),
        "placement: expected the same on every rank, got expert 3 at 0 on rank 0, 0 on rank 1",
    ),
    (({"placement": PLACEMENT}, {"placement": [0]}), "placement: expected the same on every rank, got 11 entries"),
]  # fmt: skip


def test_placements_that_do_not_fit_are_refused_on_every_rank():
    outcomes = run_ranks(2, refused, [given for given, _ in REFUSED])
    for outcome in outcomes:
        assert outcome.text == ""
        for (given, said), found in zip(REFUSED, outcome.value, strict=True):
            assert found.startswith(said), (given, found)


def bad_ids(rank: int, num_ranks: int, options: dict) -> tuple[str, bool]:
    """Pass the number of a physical expert that is no expert; return the error, and whether the next call is right."""
    layer = make()
    parallel = open_placed(layer, "bf16", rank, ENDS, PLACEMENT, **options)
    tokens, routing = tokens_of(layer, rank, num_ranks)
    want = parallel.moe(tokens, routing)
    wrong = Routing(routing.topk_weights, routing.topk_ids.clone(), 8)
    wrong.topk_ids[2, 1] = 9 if rank == 1 else 1
    text = ""
    for given in (wrong, routing):
        try:
            out = parallel.moe(tokens, given)
        except ValueError as error:
            text = str(error)
    return text, torch.equal(out, want)


def test_ids_are_of_experts_not_of_physical_ones():
    for outcome in run_ranks(2, bad_ids, {}):
        assert outcome.text == ""
        text, right = outcome.value
        assert "topk_ids: expected ids from 0 to 7, or -1 for a masked slot, got 9 at token 2, slot 1" in text and right


def closed_and_moved(rank: int, num_ranks: int) -> list[str]:
    """Close an object, on rank 1 first, and move its experts; return the errors."""
    layer, found = make(), []
    parallel = open_placed(layer, "bf16", rank, ENDS, PLACEMENT)
    for closed in (rank == 1, True):
        if closed:
            parallel.close()
        try:
            parallel.update_placement(PLACEMENT)
        except ValueError as error:
            found.append(str(error))
    return found


def test_a_closed_object_has_no_placement_to_change():
    said = "ExpertParallel: expected an open object, got one that was closed"
    for rank, outcome in enumerate(run_ranks(2, closed_and_moved)):
        assert outcome.text == ""
        assert outcome.value == ["rank 1 of the group refused its arguments: " * (rank == 0) + said, said]


def test_an_expert_far_away_is_refused_at_once():
    with pytest.raises(ValueError, match="^placement: expected every expert, got none that is 1; pass num_experts"):
        check_placement([0, 1 << 60], 2, None)


def test_tokens_of_a_missing_expert_are_no_load_of_another():
    """They are computed by physical expert 3, which isn't used."""
    placement, history = [0, 1, 2, -1], empty_history(4, CPU)
    ids = place(Placed.on(CPU, placement, 8, 0), torch.zeros(1, 2), torch.tensor([[1, 7]], dtype=torch.int32))[1]
    note(history, torch.bincount(ids.flatten(), minlength=4))
    load = load_of(history, [0, 4], Placed.on(CPU, placement, 8, 0), tuple(placement))
    assert load.num_tokens_per_expert[-1].tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    assert load.num_tokens_per_physical[-1].tolist() == [0, 1, 0, 1]
