"""ExpertParallel by two collectives of constant size: the bits of one rank, and faults that raise errors in time."""

import pytest
import torch

from envoi.ops.moe import moe
from envoi.ops.moe.parallel.opening import DEFAULT_TIMEOUT_S
from envoi.types import Routing
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.choices import force
from tests.helpers.ranks import run_ranks
from tests.helpers.slow import mostly_slow
from tests.moe.layers import make
from tests.moe.parallel import cases
from tests.moe.parallel.cases import Case
from tests.moe.parallel.test_ranks import MISTAKES, all_cases, on_one_rank

SIZES = {"max_tokens": 70, "num_topk": 9}


@pytest.fixture(autouse=True)
def one_rank_as_many(monkeypatch):
    """One rank has kernels of its own for few tokens and 4-bit weights, whose bits differ."""
    force(monkeypatch, decode_mx=False)


@pytest.mark.parametrize("num_ranks", mostly_slow([2, 4], [2]))
def test_the_bits_of_one_rank(num_ranks):
    tried = [*all_cases(num_ranks, 10), Case("fp8_row", {"limit": 0.5, "k": 8}, expert_ends=[*range(1, num_ranks), 8])]
    outcomes = run_ranks(num_ranks, cases.run_gathered, tried, SIZES)
    assert [outcome.text for outcome in outcomes] == [""] * num_ranks
    for number, case in enumerate(tried):
        assert_same_bits(torch.cat([outcome.value[number] for outcome in outcomes]), on_one_rank(case))


@pytest.mark.parametrize("format", ["bf16", "fp8_block128"])
def test_rows_are_summed_on_their_ranks_with_presum(format):
    case = Case(format, {"masked": 0.3}, [20, 20, 60], [1, 5, 8])
    outcomes = run_ranks(3, cases.run_gathered, [case], SIZES | {"presum": True})
    assert [outcome.text for outcome in outcomes] == [""] * 3
    layer, total = case.build(), torch.zeros(60, 256)
    for first, last in ((0, 1), (1, 5), (5, 8)):
        ids = layer.routing.topk_ids
        mine = torch.where((ids >= first) & (ids < last), ids - first, -1)
        routing = Routing(layer.routing.topk_weights, mine, last - first)
        total += moe(layer.tokens, routing, layer.pack(format, first, last)).float()
    assert_same_bits(torch.cat([outcome.value[0] for outcome in outcomes]), total.bfloat16())


def test_two_collectives_of_constant_size():
    seen = [outcome.value for outcome in run_ranks(2, cases.run_gathered_twice, SIZES)]
    few_tokens, many_tokens = seen[0]
    assert few_tokens == many_tokens == seen[1][0] == seen[1][1]
    assert [step for step, _ in few_tokens] == ["dispatch", "combine"]


@pytest.mark.parametrize(
    ("kind", "step"),
    mostly_slow([("dies before", "dispatch"), ("dies within", "combine")], [("dies within", "combine")]),
)
def test_a_lost_rank_is_named_on_every_other(kind, step):
    outcomes = run_ranks(4, cases.fault, kind, 30.0, SIZES)
    for rank in (0, 2, 3):
        error, text, same_again = outcomes[rank].value
        assert (error, same_again) == ("PeerTimeout", True)
        assert f"{step}: rank 1 is lost or did not answer" in text


def test_one_ranks_mistake_is_an_error_on_all():
    wrong = {"many": "tokens: expected at most 70 of them (max_tokens), got 71"}
    wrong |= {kind: MISTAKES[kind] for kind in ("id", "dtype", "num_experts")}
    outcomes = run_ranks(4, cases.mistakes, list(wrong), SIZES)
    for number, (kind, message) in enumerate(wrong.items()):
        for rank, outcome in enumerate(outcomes):
            error, text, seconds = outcome.value[number]
            assert error == "ValueError", f"{kind}, rank {rank}: {error} {text}"
            assert message in text
            assert text.startswith("rank 1 of the group refused its arguments") == (rank != 1)
            assert seconds < DEFAULT_TIMEOUT_S


def test_k_may_differ_by_rank():
    layer = make(k=4, masked=0.0)
    fewer = Routing(layer.routing.topk_weights.clone(), layer.routing.topk_ids.clone(), 8)
    fewer.topk_ids[30:, 2:] = -1  # what rank 1 doesn't pass
    outcomes = run_ranks(2, cases.run_two_ks, SIZES)
    assert_same_bits(torch.cat([outcome.value for outcome in outcomes]), moe(layer.tokens, fewer, layer.pack()))
