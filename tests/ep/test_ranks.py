"""Experts over real processes: the bits of one rank, whatever the shares; and faults that end in words."""

import random

import pytest
import torch

from envoi.ep import ExpertParallel
from envoi.experts import moe
from envoi.gemm.hopper_w4a16 import few
from envoi.quant import FORMATS
from tests.ep import cases
from tests.ep.cases import Case
from tests.experts.layers import make
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.ranks import run_ranks


def on_one_rank(case: Case) -> torch.Tensor:
    layer = case.build()
    return moe(layer.tokens, layer.routing, layer.pack(case.format))


@pytest.fixture(autouse=True)
def one_rank_as_many(monkeypatch):
    """One rank has kernels of its own for few tokens and 4-bit weights, whose bits differ."""
    monkeypatch.setattr(few, "MOST_ROWS", -1)


def random_cases(num_ranks: int, count: int, seed: int) -> list[Case]:
    draw = random.Random(seed)
    found = []
    for number in range(count):
        tokens = draw.randint(0, 50)
        layer = {
            "tokens": tokens, "k": draw.randint(1, 8), "seed": number, "masked": draw.choice([0.0, 0.2, 1.0]),
            "hidden": draw.choice([128, 256]), "intermediate": 128, "bias": draw.random() < 0.3,
        }  # fmt: skip
        token_ends = sorted(draw.randint(0, tokens) for _ in range(num_ranks - 1)) + [tokens]
        expert_ends = sorted(draw.sample(range(1, 8), num_ranks - 1)) + [8]
        found.append(Case(draw.choice(list(FORMATS)), layer, token_ends, expert_ends))
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_bits_of_one_rank(num_ranks):
    nothing, all_on_last = [0] * num_ranks, [0] * (num_ranks - 1) + [60]
    tried = [Case(format) for format in FORMATS]
    tried += [
        Case("fp8_block128", token_ends=all_on_last),
        Case("bf16", {"tokens": 0}, nothing),
        Case("mxfp4", {"masked": 1.0}),
        Case("mxfp4_mxfp8", {"tokens": 5}),
        Case("bf16", one_expert=5),
        Case("bf16", {"bias": True, "activation": "swiglu_oai"}),
        Case("fp8_row", {"limit": 0.5, "k": 8}, expert_ends=[*range(1, num_ranks), 8]),
        *random_cases(num_ranks, 16, seed=num_ranks),
    ]
    outcomes = run_ranks(num_ranks, cases.run_cases, tried)
    assert [outcome.error for outcome in outcomes] == [""] * num_ranks
    for number, case in enumerate(tried):
        assert_same_bits(torch.cat([outcome.value[number] for outcome in outcomes]), on_one_rank(case))


def test_more_slots_than_a_rank_has_experts():
    case = Case("bf16", {"experts": 24, "k": 16}, expert_ends=[4, 24])
    outcomes = run_ranks(2, cases.run_cases, [case])
    assert_same_bits(torch.cat([outcome.value[0] for outcome in outcomes]), on_one_rank(case))


def test_compiles_as_one_graph():
    assert [(outcome.value, outcome.text) for outcome in run_ranks(2, cases.run_compiled)] == [(True, "")] * 2


def test_several_groups_and_objects_at_once():
    outcomes = run_ranks(4, cases.run_groups)
    want = on_one_rank(Case())
    for pair in (outcomes[:2], outcomes[2:]):
        for call in (0, 2):
            assert_same_bits(torch.cat([outcome.value[call] for outcome in pair]), want)
    assert_same_bits(torch.cat([outcome.value[1] for outcome in outcomes]), want)


@pytest.mark.parametrize(
    ("kind", "step"),
    [("dies before", "exchange of counts"), ("dies within", "combine"), ("is late", "exchange of counts")],
)
def test_a_lost_rank_is_named_on_every_other(kind, step):
    timeout_s = 4.0
    outcomes = run_ranks(4, cases.fault, kind, timeout_s)
    assert outcomes[1].value == ("late" if kind == "is late" else None)
    for rank in (0, 2, 3):
        error, text, seconds, again, more_seconds = outcomes[rank].value.split("|")
        assert (error, again) == ("PeerTimeout", "PeerTimeout")
        assert "rank 1 is lost or did not answer" in text
        assert step in text
        assert float(seconds) < timeout_s + 1.0
        assert float(more_seconds) < 0.5


MISTAKES = {
    "id": "topk_ids: expected ids from 0 to 7, or -1 for a masked slot, got 99 at token 3, slot 1",
    "dtype": "tokens: expected bfloat16 [num_tokens, 256], got float32",
    "num_experts": "routing.num_experts: expected 8 over all ranks, got 16",
    "k": "num_topk: expected the same on every rank, got 3 on rank 0, 2 on rank 1",
    "timeout": "timeout_s: expected a positive number of seconds up to 2000, got -1.0",
    "max_tokens": "max_tokens: expected an int of at least 1, got 0",
    "hidden": "experts: expected the same on every rank, got hidden=256",
    "format": "experts: expected the same on every rank, got hidden=256",
}


def test_one_ranks_mistake_is_an_error_on_all():
    outcomes = run_ranks(4, cases.mistakes, list(MISTAKES))
    for number, (kind, message) in enumerate(MISTAKES.items()):
        for rank, outcome in enumerate(outcomes):
            error, text, seconds = outcome.value[number]
            assert error == "ValueError", f"{kind}, rank {rank}: {error} {text}"
            assert message in text
            assert seconds < 3
            if kind not in ("k", "hidden", "format") and rank != 1:
                assert text.startswith("rank 1 of the group refused its arguments")


def test_refusals_without_a_group():
    packed = make().pack()
    with pytest.raises(ValueError, match="group: expected an initialised torch.distributed"):
        ExpertParallel(packed)
    with pytest.raises(ValueError, match="experts: expected ExpertWeights from envoi.experts.pack, got list"):
        ExpertParallel([packed])
    with pytest.raises(ValueError, match="timeout_s: expected a positive number of seconds up to 2000, got 0"):
        ExpertParallel(packed, timeout_s=0)
    with pytest.raises(ValueError, match="presum: expected True, False or None, got 2"):
        ExpertParallel(packed, presum=2)


@pytest.mark.gpu(2)
def test_the_same_over_nccl():
    tried = [Case(format) for format in FORMATS] + random_cases(2, 8, seed=5)
    outcomes = run_ranks(2, cases.run_on_gpus, tried, backend="nccl")
    for number, case in enumerate(tried):
        assert all(outcome.value[number][1] == "nccl" for outcome in outcomes)
        layer = cases.to(case.build(), "cuda")
        routing = layer.routing.__class__(
            layer.routing.topk_weights.cuda(), layer.routing.topk_ids.cuda(), layer.routing.num_experts
        )
        want = moe(layer.tokens, routing, layer.pack(case.format)).cpu()
        assert_same_bits(torch.cat([outcome.value[number][0] for outcome in outcomes]), want)
