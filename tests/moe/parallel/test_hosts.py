"""Ranks grouped by host: the bits of one rank, a token over the network once, and errors that name what is wrong."""

import pytest
import torch

from envoi.ops.moe import moe
from envoi.ops.moe.parallel import hosts as module
from envoi.ops.moe.parallel.hosts import check_backend, check_machines
from envoi.ops.moe.parallel.timeout import PeerTimeout
from envoi.types import Routing
from tests.helpers.accuracy import assert_same_bits
from tests.helpers.choices import force
from tests.helpers.ranks import run_ranks
from tests.moe.parallel import cases
from tests.moe.parallel.cases import Case
from tests.moe.parallel.test_ranks import on_one_rank, random_cases

SIZES = {"max_tokens": 60, "num_topk": 8}
GROUPINGS = {"2 x 2": list("aabb"), "mixed": list("abba"), "4 x 1": list("abcd")}


@pytest.fixture(autouse=True)
def one_rank_as_many(monkeypatch):
    """One rank has kernels of its own for few tokens and 4-bit weights, whose bits differ."""
    force(monkeypatch, decode_mx=False)


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


def summed_by_host(layer, format: str, expert_ends: list[int], hosts: list[str]) -> torch.Tensor:
    """Compute each host's sum of every token's rows, rounded, and sum these in the order of the hosts."""
    ids, total = layer.routing.topk_ids, torch.zeros_like(layer.tokens, dtype=torch.float32)
    owner = torch.bucketize(ids, torch.tensor(expert_ends), right=True)
    host = torch.tensor([list(dict.fromkeys(hosts)).index(name) for name in hosts])
    for number in range(len(set(hosts))):
        mine = torch.where((ids >= 0) & (host[owner.clamp(max=len(hosts) - 1)] == number), ids, -1)
        routing = Routing(layer.routing.topk_weights, mine, layer.routing.num_experts)
        total += moe(layer.tokens, routing, layer.pack(format)).float()
    return total.bfloat16()


@pytest.mark.parametrize("hosts", GROUPINGS.values(), ids=GROUPINGS)
def test_with_presum_a_host_sends_one_sum_for_each_token(hosts):
    tried = [Case("bf16"), Case("fp8_row", {"k": 4, "masked": 0.3}), Case("bf16", one_expert=5)]
    outcomes = run_ranks(4, cases.run_by_host, tried, SIZES | {"hosts": hosts, "presum": True})
    for number, case in enumerate(tried):
        want = summed_by_host(case.build(), case.format, case.cuts(4)[1], hosts)
        assert_same_bits(torch.cat([outcome.value[0][number] for outcome in outcomes]), want)
        if case.one_expert is None and len(set(hosts)) > 2:
            assert not torch.equal(want, on_one_rank(case)), "sums of hosts round like one rank's"
    rows = 60 * 256 * 2
    for outcome in outcomes:
        sent = dict(outcome.value[1])
        assert sent["combine between hosts"] == rows * (len(set(hosts)) - 1)


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


def test_backends_and_machines_that_cannot_be_grouped(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 3)
    check_backend(True, cpu)
    with pytest.raises(ValueError, match="expected a group of NCCL for experts on cuda:3, got one of gloo"):
        check_backend(True, cuda)
    with pytest.raises(ValueError, match="expected a group of gloo for experts on cpu, got one of NCCL"):
        check_backend(False, cpu)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(ValueError, match="expected a torch with NCCL built in, got .* without it"):
        check_backend(False, cuda)
    check_machines(["a", "b", "a"], ["x", "x", "x"])  # one machine as two hosts
    with pytest.raises(ValueError, match="host 'a' on one machine, got rank 0 on 'x' and rank 2 on 'y'"):
        check_machines(["a", "b", "a"], ["x", "x", "y"])


def test_hostnames_of_different_numbers_of_ranks(monkeypatch):
    outcomes = run_ranks(3, cases.uneven_hostnames, SIZES)
    for outcome in outcomes:
        assert outcome.value == "hosts: expected as many ranks on every host, got 2 on 'first', 1 on 'second'"


def test_a_rail_that_cant_be_connected_is_none_of_later_objects(monkeypatch):
    made, connected = [], []

    def connect_ranks(channel, rail, step) -> None:
        if not connected:
            connected.append(rail)
            raise PeerTimeout([1], step, 1.0)

    monkeypatch.setattr(module, "_connect_nccl", lambda *_: made.append(object()) or made[-1])
    monkeypatch.setattr(module, "connect_ranks", connect_ranks)
    group = Group()
    with pytest.raises(PeerTimeout):
        module.connect_rail(None, group, "ab", "first", 1.0)  # pyright: ignore[reportArgumentType]
    second = module.connect_rail(None, group, "ab", "second", 1.0)  # pyright: ignore[reportArgumentType]
    assert second is made[1] is not connected[0]
    assert module.connect_rail(None, group, "ab", "third", 1.0) is second  # pyright: ignore[reportArgumentType]


class Group:
    """Stand-in for a process group, which objects are kept by."""
