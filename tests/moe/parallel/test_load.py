"""`ExpertParallel.load()`: what it counts, over gloo, and what it says of a busy layer."""

from itertools import pairwise

import pytest
import torch

from envoi.integrations.transformers import report
from envoi.ops.moe.parallel.load import HISTORY, NO_CALL, Load, empty_history, load_of, note
from envoi.types import Routing
from tests.helpers.ranks import run_ranks
from tests.helpers.slow import mostly_slow
from tests.moe.layers import make
from tests.moe.parallel import cases

LAYER = {"tokens": 20, "experts": 8, "k": 2, "hidden": 128, "intermediate": 128, "masked": 0.2}


def counted(ids: torch.Tensor, num_experts: int) -> list[int]:
    return [int((ids == expert).sum()) for expert in range(num_experts)]


def test_calls_keep_their_order_and_the_oldest_are_forgotten():
    history = empty_history(3, torch.device("cpu"))
    found = load_of(history, [0, 1, 3])
    assert found.num_tokens_per_expert.eq(NO_CALL).all()
    assert found.num_tokens_per_rank.eq(NO_CALL).all()
    assert found.busiest() is None
    assert str(found) == "no tokens yet"
    for call in range(HISTORY + 5):
        note(history, torch.tensor([call, 0, 1]))
        last = load_of(history, [0, 1, 3]).num_tokens_per_expert
        assert last[-1].tolist() == [call, 0, 1]
        assert int((last[:, 0] == NO_CALL).sum()) == max(0, HISTORY - call - 1)
    assert last[:, 0].tolist() == list(range(5, HISTORY + 5))
    assert load_of(history, [0, 1, 3]).num_tokens_per_rank[-1].tolist() == [HISTORY + 4, 1]


def test_a_load_is_a_copy():
    history = empty_history(2, torch.device("cpu"))
    note(history, torch.tensor([1, 2]))
    before = load_of(history, [0, 2])
    note(history, torch.tensor([3, 4]))
    assert before.num_tokens_per_expert[-1].tolist() == [1, 2]


def test_a_busy_layer_names_its_rank_and_expert():
    rows = torch.full((4, 6), NO_CALL, dtype=torch.int32)
    rows[1] = torch.tensor([0, 0, 0, 0, 0, 0])  # a call without tokens bounds nothing
    rows[2] = torch.tensor([1, 1, 2, 6, 1, 1])
    rows[3] = torch.tensor([6, 0, 1, 2, 1, 2])
    found = Load(rows, (0, 2, 4, 6)).busiest()
    assert found is not None
    assert (found.num_calls, found.rank, found.rank_calls, found.expert) == (2, 1, 1, 3)
    assert found.rank_load == pytest.approx(11 / 8)
    assert found.expert_load == pytest.approx(8 / 4)
    assert found.imbalance == pytest.approx((8 / 4 + 6 / 4) / 2)
    assert str(found) == (
        "bound by rank 1, the busiest in 1 of 2 calls, with 1.38 times the mean; its expert 3 has 2.00 times the mean; "
        "a call's busiest rank has 1.75 times the mean"
    )


def test_a_bound_is_never_below_the_mean():
    """Most calls, even or small ones, don't decide: the rank with the most tokens does."""
    for rows, calls in (
        ([[10, 10], [10, 10], [9, 12]], 3),
        ([[6, 5], [6, 5], [0, 100]], 1),
        ([[3, 3]], 1),
    ):
        found = Load(torch.tensor(rows, dtype=torch.int32), (0, 1, 2)).busiest()
        assert found is not None
        totals = torch.tensor(rows).sum(0)
        assert (found.rank, found.rank_calls) == (int(totals.argmax()), calls)
        assert found.rank_load == pytest.approx(float(totals.max() / totals.float().mean())) and found.rank_load >= 1


def run_calls(rank: int, num_ranks: int, way: str) -> tuple[list, list, str]:
    """Make three calls, of which the host refuses the second one; return the last rows of the load."""
    layer, ends = make(**LAYER), [3, 8] if num_ranks == 2 else [1, 3, 5, 8]
    token_ends = [4] * (num_ranks - 1) + [20]
    if way == "counted":
        parallel = cases.open_parallel(layer, "bf16", rank, ends)
    else:
        hosts = {"exchange": "hosts", "hosts": ["a", "a", "b", "b"]} if way == "hosts" else {"exchange": "gathered"}
        parallel = cases.open_parallel(layer, "bf16", rank, ends, max_tokens=20, num_topk=3, **hosts)
    tokens, routing = cases.part_of(layer, rank, token_ends)
    parallel.moe(tokens, routing)
    wrong = Routing(routing.topk_weights, routing.topk_ids + (100 if rank == 0 else 0), routing.num_experts)
    refused = False
    try:
        parallel.moe(tokens, wrong)
    except ValueError:
        refused = True
    parallel.moe(tokens[:1], Routing(routing.topk_weights[:1], routing.topk_ids[:1], routing.num_experts))
    module = torch.nn.Module()
    module.layer = torch.nn.Module()
    module.layer.parallel = parallel  # pyright: ignore[reportAttributeAccessIssue]
    load = parallel.load()
    said = str(report(module))
    assert refused
    return load.num_tokens_per_expert[-3:].tolist(), load.num_tokens_per_rank[-3:].tolist(), said


@pytest.mark.parametrize(
    ("way", "num_ranks"), mostly_slow([("counted", 2), ("gathered", 2), ("hosts", 4)], [("hosts", 4)])
)
def test_all_ranks_count_the_tokens_of_all(way, num_ranks):
    outcomes = run_ranks(num_ranks, run_calls, way)
    assert [outcome.text for outcome in outcomes] == [""] * num_ranks
    layer, ends = make(**LAYER), [0, 3, 8] if num_ranks == 2 else [0, 1, 3, 5, 8]
    ids = layer.routing.topk_ids
    third = torch.cat([ids[0:1], ids[4:5]])  # the first rank's and the last one's; those between have none
    want = [[NO_CALL] * 8, counted(ids, 8), counted(third, 8)]
    by_rank = [
        [NO_CALL] * num_ranks if row[0] == NO_CALL else [sum(row[a:b]) for a, b in pairwise(ends)] for row in want
    ]
    for outcome in outcomes:
        assert outcome.value[:2] == (want, by_rank)
        lines = outcome.value[2].splitlines()
        assert lines[1].split() == [
            "1",
            "Module",
            "bf16",
            "ExpertParallel",
            "over",
            "gloo",
            "yes",
            lines[1].split()[-1],
        ]
        assert " ".join(lines[2:]).startswith("layer: bound by rank ")
