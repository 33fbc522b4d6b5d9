"""dispatch and combine with experts between them: the bits of `moe`, shapes and dtypes, refusals, faults."""

import pytest
import torch

from envoi.ops.moe import moe, reference
from envoi.types import ExpertRows, QuantTensor
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.ranks import run_ranks
from tests.moe.layers import make
from tests.moe.parallel import cases
from tests.moe.parallel.cases import Case
from tests.moe.parallel.test_ranks import hot_case

SIZES = {"max_tokens": 70, "num_topk": 9}
WAYS = {
    "counted": {"exchange": "counted"},
    "gathered": SIZES | {"exchange": "gathered"},
    "gathered+sums": SIZES | {"exchange": "gathered+sums"},
    "hosts": SIZES | {"exchange": "hosts", "hosts": ["a", "b"]},
}


def own_experts(sent, experts) -> torch.Tensor:
    """Run Envoi's experts on the rows of a dispatch."""
    slots = torch.arange(len(sent.topk_weights), dtype=torch.int32)
    return reference.expert_mlp(ExpertRows(sent.rows, sent.offsets, slots, sent.topk_weights), experts)


def both(rank: int, num_ranks: int, tried: list[Case], options: dict) -> list[tuple]:
    """Run each case by `moe` and in parts; return both, and the result with `out` and with fp16 tokens [1, M, H]."""
    found = []
    for case in tried:
        layer, (token_ends, expert_ends) = case.build(), case.cuts(num_ranks)
        parallel = cases.open_parallel(layer, case.format, rank, expert_ends, **options)
        tokens, r = cases.part_of(layer, rank, token_ends)
        sent = parallel.dispatch(tokens, r.topk_ids, r.topk_weights)
        assert isinstance(sent.rows, QuantTensor) == (case.format != "bf16")
        assert sent.offsets.dtype == torch.int32 and len(sent.offsets) == parallel.experts.num_local_experts + 1
        assert int(sent.offsets[-1]) <= sent.rows.shape[0] == len(sent.topk_weights)
        assert sent.topk_weights.dtype == torch.float32
        out = torch.empty_like(tokens)
        assert parallel.combine(own_experts(sent, parallel.experts), sent, out=out) is out
        half = parallel.dispatch(tokens.half()[None], r.topk_ids[None].long(), r.topk_weights[None])
        in_half = parallel.combine(own_experts(half, parallel.experts), half)
        found.append((parallel.moe(tokens, r), out, in_half))
        parallel.close()
    return found


@pytest.mark.parametrize(("way", "num_ranks"), [("counted", 4), ("gathered", 3), ("gathered+sums", 2), ("hosts", 2)])
def test_the_bits_of_moe_with_its_own_experts_between(way, num_ranks):
    tried = [
        Case("bf16", {"masked": 0.3}, expert_ends=[*range(1, num_ranks), 8]), hot_case("fp8_block128", num_ranks),
        Case("bf16", {"tokens": 0}),
    ]  # fmt: skip
    outcomes = run_ranks(num_ranks, both, tried, WAYS[way])
    assert [outcome.text for outcome in outcomes] == [""] * num_ranks
    for number, case in enumerate(tried):
        for outcome in outcomes:
            want, out, in_half = outcome.value[number]
            assert_same_bits(out, want)
            assert in_half.dtype == torch.float16 and in_half.shape == (1, *want.shape)
            assert_same_bits(in_half[0], want.half())
        if not way.endswith("sums"):
            layer = case.build()
            whole = moe(layer.tokens, layer.routing, layer.pack(case.format))
            assert_same_bits(torch.cat([outcome.value[number][1] for outcome in outcomes]), whole)


def other_experts(rank: int, num_ranks: int, options: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Let expert e multiply tokens by e + 1; return the result, and the sum that a float64 oracle has."""
    layer = make(tokens=12, experts=8, k=3, masked=0.2)
    parallel = cases.open_parallel(layer, "bf16", rank, [3, 8], **options)
    tokens, r = cases.part_of(layer, rank, [5, 12])
    sent = parallel.dispatch(tokens, r.topk_ids, r.topk_weights)
    number = torch.bucketize(torch.arange(len(sent.rows)), sent.offsets[1:], right=True) + [0, 3][rank]
    rows = (sent.rows.double() * ((number + 1) * sent.topk_weights).unsqueeze(1)).bfloat16()
    factors = torch.where(r.topk_ids < 0, 0.0, (r.topk_ids + 1) * r.topk_weights.double())
    want = (tokens.double().unsqueeze(1) * factors.unsqueeze(2)).bfloat16().double().sum(1)
    return parallel.combine(rows, sent), want


@pytest.mark.parametrize("way", ["counted", "gathered", "hosts"])
def test_experts_of_anyone_can_stand_between(way):
    for outcome in run_ranks(2, other_experts, WAYS[way]):
        assert outcome.text == ""
        got, want = outcome.value
        torch.testing.assert_close(got.double(), want, rtol=2**-7, atol=1e-6)


def mistakes(rank: int, num_ranks: int, options: dict) -> list[str]:
    """Pass wrong arguments to dispatch on rank 1, then to combine on every rank; a right call follows each."""
    layer = make(tokens=12, experts=8, k=3)
    parallel = cases.open_parallel(layer, "bf16", rank, [4, 8], **options)
    tokens, r = cases.part_of(layer, rank, [5, 12])
    want, found = parallel.moe(tokens, r), []
    for wrong in (tokens.double(), tokens[:, :-1]):
        try:
            parallel.dispatch(wrong if rank == 1 else tokens, r.topk_ids, r.topk_weights)
        except ValueError as error:
            found.append(str(error))
        assert torch.equal(parallel.moe(tokens, r), want)
    sent = parallel.dispatch(tokens, r.topk_ids, r.topk_weights)
    rows = own_experts(sent, parallel.experts)
    for given, options in (
        ((rows.float(), sent), {}), ((rows[:-1], sent), {}), ((rows, rows), {}),
        ((rows, sent), {"out": torch.empty_like(tokens).float()}),
    ):  # fmt: skip
        try:
            parallel.combine(*given, **options)
        except ValueError as error:
            found.append(str(error))
    assert torch.equal(parallel.combine(rows, sent), want)
    parallel.close()
    try:
        parallel.dispatch(tokens, r.topk_ids, r.topk_weights)
    except ValueError as error:
        found.append(str(error))
    return found


@pytest.mark.parametrize("way", ["counted", "gathered"])
def test_what_is_wrong_is_said(way):
    starts = (
        "tokens: expected bfloat16 or float16", "tokens: expected bfloat16 or float16 [num_tokens, 256]",
        "rows: expected", "rows: expected", "handle: expected what dispatch returned, got", "out: expected",
        "ExpertParallel: expected an open object",
    )  # fmt: skip
    for rank, outcome in enumerate(run_ranks(2, mistakes, WAYS[way])):
        assert outcome.text == ""
        assert len(outcome.value) == len(starts)
        for number, (text, start) in enumerate(zip(outcome.value, starts, strict=True)):
            told = "rank 1 of the group refused its arguments: " if number < 2 and rank == 0 else ""
            assert text.startswith(told + start), text


def other_handles(rank: int, num_ranks: int, options: dict) -> list[str]:
    """Combine on rank 1 by a handle of an earlier dispatch, another object's and a used one; on all by the last one."""
    layer = make(tokens=12, experts=8, k=3)
    parallel, other = (cases.open_parallel(layer, "bf16", rank, [4, 8], **options) for _ in range(2))
    tokens, r = cases.part_of(layer, rank, [5, 12])
    given, want, found = (tokens, r.topk_ids, r.topk_weights), parallel.moe(tokens, r), []

    def refused(handle) -> None:
        if rank == 1:
            try:
                parallel.combine(own_experts(handle, parallel.experts), handle)
            except ValueError as error:
                found.append(str(error))

    earlier, others = parallel.dispatch(*given), other.dispatch(*given)
    sent = parallel.dispatch(*given)
    refused(earlier)
    refused(others)
    assert torch.equal(parallel.combine(own_experts(sent, parallel.experts), sent), want)
    refused(sent)
    assert torch.equal(parallel.moe(tokens, r), want)
    return found


def test_a_handle_other_than_that_of_the_last_dispatch_is_refused():
    outcomes = run_ranks(2, other_handles, WAYS["counted"] | {"timeout_s": 6.0})
    assert [outcome.text for outcome in outcomes] == ["", ""]
    assert len(outcomes[1].value) == 3
    assert all(text.startswith("handle: expected that of the last call") for text in outcomes[1].value)


def lost(rank: int, num_ranks: int, options: dict) -> tuple[str, list[int]]:
    """Let rank 1 leave between dispatch and combine; return the other's error."""
    layer = make(tokens=12, experts=8, k=3)
    parallel = cases.open_parallel(layer, "bf16", rank, [4, 8], timeout_s=4.0, **options)
    tokens, r = cases.part_of(layer, rank, [5, 12])
    sent = parallel.dispatch(tokens, r.topk_ids, r.topk_weights)
    if rank == 1:
        cases.os._exit(3)
    try:
        parallel.combine(own_experts(sent, parallel.experts), sent)
    except cases.PeerTimeout as error:
        return error.step, error.ranks
    return "", []


def test_a_rank_lost_between_them_is_named():
    assert run_ranks(2, lost, WAYS["gathered"])[0].value == ("combine", [1])


def opened_in_inference_mode(rank: int, num_ranks: int, options: dict) -> list[torch.Tensor]:
    """Open in inference mode; return a call's result outside of it, and one within."""
    layer, ends = make(tokens=12, experts=8, k=3), [4, 8]
    with torch.inference_mode():
        parallel = cases.open_parallel(layer, "bf16", rank, ends, **options)
    given = cases.part_of(layer, rank, [5, 12])
    outs = [parallel.moe(*given)]
    with torch.inference_mode():
        outs.append(parallel.moe(*given).clone())
    assert (parallel.load().num_tokens_per_expert[-1] >= 0).all()
    return outs


def test_what_was_opened_in_inference_mode_runs_outside_of_it():
    for outcome in run_ranks(2, opened_in_inference_mode, WAYS["counted"]):
        assert outcome.text == ""
        assert_same_bits(*outcome.value)
