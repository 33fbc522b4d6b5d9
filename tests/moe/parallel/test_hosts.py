"""Ranks grouped by host: the bits of one rank, a token over the network once, and errors that name what is wrong."""

import pytest
import torch

from envoi.gemm.hopper_w4a16 import few
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.ranks import run_ranks
from tests.moe.parallel import cases
from tests.moe.parallel.cases import Case
from tests.moe.parallel.test_ranks import on_one_rank, random_cases

SIZES = {"max_tokens": 60, "num_topk": 8}
GROUPINGS = {"2 x 2": list("aabb"), "mixed": list("abba"), "4 x 1": list("abcd")}


@pytest.fixture(autouse=True)
def one_rank_as_many(monkeypatch):
    """One rank has kernels of its own for few tokens and 4-bit weights, whose bits differ."""
    monkeypatch.setattr(few, "MOST_ROWS", -1)


@pytest.mark.parametrize("hosts", GROUPINGS.values(), ids=GROUPINGS)
def test_the_bits_of_one_rank(hosts):
    tried = [
        Case("bf16"),
        Case("fp8_block128", token_ends=[0, 0, 0, 60]),
        Case("bf16", one_expert=5),  # one host has no expert that is named
        *random_cases(4, 4, seed=3),
    ]
    outcomes = run_ranks(4, cases.run_by_host, tried, SIZES | {"hosts": hosts})
    assert [outcome.text for outcome in outcomes] == [""] * 4
    for number, case in enumerate(tried):
        assert_same_bits(torch.cat([outcome.value[0][number] for outcome in outcomes]), on_one_rank(case))


def test_a_token_crosses_to_another_host_once():
    outcomes = run_ranks(6, cases.run_by_host, [Case("bf16", {"k": 6})], SIZES | {"hosts": list("aaabbb")})
    for outcome in outcomes:
        assert outcome.text == ""
        _, seen, token_bytes = outcome.value
        tokens, rows = 16 + 60 * token_bytes, 60 * 8 * 256 * 2
        assert seen == [
            ("dispatch between hosts", tokens),  # to the one rank of this place on the other host
            ("dispatch within the host", 2 * 2 * tokens),  # those of both hosts, to two ranks
            ("combine within the host", 2 * 2 * rows),
            ("combine between hosts", rows),
        ]


def test_one_host_is_no_grouping():
    outcomes = run_ranks(2, cases.wrong_hosts, [SIZES | {"hosts": ["a", "a"]}])
    assert [outcome.value for outcome in outcomes] == [["opened"]] * 2


WRONG = {
    "sizes": (SIZES | {"hosts": list("aaab")}, "expected as many ranks on every host, got 3 on 'a', 1 on 'b'"),
    "nowhere": (SIZES | {"hosts": ["a", "a", "", "b"]}, "expected a host for every rank, got none for rank 2"),
    "few": (SIZES | {"hosts": list("ab")}, "expected a name for each of the 4 ranks, got 2"),
    "kind": (SIZES | {"hosts": "x"}, "expected the name of each rank's host, \"hostname\" or None, got str 'x'"),
    "no sizes": ({"hosts": list("aabb")}, "expected max_tokens and num_topk with them, got None"),
    "no slots": ({"hosts": list("aabb"), "max_tokens": 60}, "expected max_tokens and num_topk with them, got None"),
    "presum": (SIZES | {"hosts": list("aabb"), "presum": True}, "expected presum None or False with them, got True"),
    "different": (
        (SIZES | {"hosts": list("abab")}, SIZES | {"hosts": list("aabb")}),
        "expected the same on every rank, got a, b, a, b on rank 0, a, a, b, b on rank 1",
    ),
}  # fmt: skip


def test_what_is_wrong_is_one_error_on_every_rank():
    outcomes = run_ranks(4, cases.wrong_hosts, [given for given, _ in WRONG.values()])
    for outcome in outcomes:
        assert outcome.text == ""
        for text, (_, message) in zip(outcome.value, WRONG.values(), strict=True):
            assert text.startswith("ValueError: hosts: ")
            assert message in text
