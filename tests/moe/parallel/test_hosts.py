"""Ranks grouped by host, as far as objects are opened: errors that name what is wrong."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from envoi.ops.moe import moe
from envoi.ops.moe.parallel import opening as module
from envoi.ops.moe.parallel.failure import PeerTimeout
from envoi.ops.moe.parallel.opening import Peer, hosts_of
from envoi.types import Routing
from tests.helpers.ranks import run_ranks
from tests.moe.parallel import cases

SIZES = {"max_tokens": 60, "num_topk": 8, "exchange": "hosts"}


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


WRONG = {
    "sizes": (SIZES | {"hosts": list("aaab")}, "expected as many ranks on every host, got 3 on 'a', 1 on 'b'"),
    "nowhere": (SIZES | {"hosts": ["a", "a", "", "b"]}, "expected a host for every rank, got none for rank 2"),
    "few": (SIZES | {"hosts": list("ab")}, "expected a name for each of the 4 ranks, got 2"),
    "kind": (SIZES | {"hosts": "x"}, "expected the name of each rank's host, \"hostname\" or None, got str 'x'"),
    "different": (
        (SIZES | {"hosts": list("abab")}, SIZES | {"hosts": list("aabb")}),
        "expected the same on every rank, got ['a', 'b', 'a', 'b'] on rank 0, ['a', 'a', 'b', 'b'] on rank 1",
    ),
}  # fmt: skip


def test_what_is_wrong_is_one_error_on_every_rank():
    outcomes = run_ranks(4, cases.wrong_hosts, [given for given, _ in WRONG.values()])
    for outcome in outcomes:
        assert outcome.text == ""
        for text, (_, message) in zip(outcome.value, WRONG.values(), strict=True):
            assert text.startswith("ValueError: hosts: ")
            assert message in text


def test_machines_that_cannot_be_grouped():
    on_x, on_y = (Peer({}, 2, "", "host", machine, True, "") for machine in "xy")
    assert hosts_of([on_x] * 4, list("abab")) == tuple("abab")  # one machine as two hosts
    assert hosts_of([on_x, on_x], "hostname") == ()
    with pytest.raises(ValueError, match="host 'a' on one machine, got rank 0 on 'x' and rank 2 on 'y'"):
        hosts_of([on_x, on_x, on_y, on_y], list("abab"))


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

    watch = SimpleNamespace(left_s=1.0, connect=lambda *_: made.append(object()) or made[-1])
    channel: Any = SimpleNamespace(rank=0, watch=watch)
    monkeypatch.setattr(module.collectives, "connect_ranks", connect_ranks)
    group = Group()
    with pytest.raises(PeerTimeout):
        module.connect_rail(channel, group, "ab", "first", 1.0)  # pyright: ignore[reportArgumentType]
    second = module.connect_rail(channel, group, "ab", "second", 1.0)  # pyright: ignore[reportArgumentType]
    assert second is made[1] is not connected[0]
    assert module.connect_rail(channel, group, "ab", "third", 1.0) is second  # pyright: ignore[reportArgumentType]


class Group:
    """Stand-in for a process group, which objects are kept by."""
