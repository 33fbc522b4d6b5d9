"""Choices of the exchange: gathering or counting tokens, summing rows before they are sent."""

import pytest

from envoi.estimates.exchange import WITHIN_A_HOST, Link, gathering_pays, presum_pays

NCCL = WITHIN_A_HOST


def pays(link=NCCL, num_ranks=4, max_tokens=64, num_topk=6, hidden=4096, token_bytes=4272, presum=False):
    return gathering_pays(link, num_ranks, max_tokens, num_topk, hidden, token_bytes, presum)


def test_few_tokens_are_gathered_and_many_are_counted():
    assert pays(max_tokens=2048)
    assert not pays(max_tokens=6000)  # rows of slots that the rank doesn't own: 663 MB more for 1700 us
    chosen = [pays(max_tokens=m) for m in range(1, 8192, 50)]
    assert chosen == sorted(chosen, reverse=True), "more tokens never turn to gathering"


@pytest.mark.parametrize("presum", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 8, 64])
def test_the_sides_are_the_formulas_of_the_page(num_ranks, presum):
    """Count bytes of tokens that each name k ranks at random, and compare both sides at the crossover."""
    k, hidden, token_bytes, tokens = 8, 2048, 2200, 1000
    needed = 1 - (1 - 1 / num_ranks) ** k
    gathered = (num_ranks - 1) * tokens * (token_bytes + 4096 * (1 if presum else k))
    counted = (num_ranks - 1) * tokens * (token_bytes * needed + 4096 * k / num_ranks)
    crossover_us = (gathered - counted) / (50 * 1e3)
    for factor, want in ((1.01, True), (0.99, crossover_us < 0)):
        link = Link(50.0, max(0.0, crossover_us) * factor)
        assert pays(link, num_ranks, tokens, k, hidden, token_bytes, presum) is want


def sizes(hidden, num_topk, max_tokens, num_ranks=4):
    return {"hidden": hidden, "num_topk": num_topk, "max_tokens": max_tokens, "num_ranks": num_ranks}


@pytest.mark.parametrize(
    ("layer", "intermediate", "faster"),
    [
        (sizes(2048, 8, 64), 768, False),
        (sizes(2048, 8, 2048), 768, True),
        (sizes(2048, 8, 8192), 768, True),
        (sizes(4096, 6, 64), 2048, False),
        (sizes(4096, 6, 2048), 2048, False),
        (sizes(4096, 6, 8192), 2048, False),
        (sizes(7168, 8, 2048), 2048, False),
    ],
    ids=str,
)
def test_sums_pay_as_measured_on_four_h200(layer, intermediate, faster):
    assert presum_pays(**layer, intermediate=intermediate, format="fp8_block128") == faster
