"""Ranks grouped by host, so that a token crosses to another host once, between ranks of the same place there.

Host g of G has L ranks; its rank at place l exchanges with the ranks at place l of the other hosts (a rail), and then
with the ranks of its own host. Example: hosts a, a, b, b: rails {0, 2} and {1, 3}.
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from envoi.check import describe
from envoi.moe.parallel.collectives import Channel, exchange_equal, gather_tensors, gather_texts
from envoi.moe.parallel.opening import CONNECT_TRIES, OPENING, complaint, raise_together, same_everywhere

HOSTNAME = "hostname"


@dataclass(frozen=True)
class Hosts:
    """Hosts of a group, and this rank's connections.

    host, place [num_ranks] int64: each rank's host, and its place there. grid [places, hosts] int64: the rank at each.
    rail: to the ranks of this place on all hosts, in the order of the hosts. inside: to the ranks of this host, in the
    order of their places.
    """

    host: torch.Tensor
    place: torch.Tensor
    grid: torch.Tensor
    rail: Channel
    inside: Channel


def check_hosts(hosts: str | Sequence[str], num_ranks: int, sizes: tuple, presum: bool | None) -> None:
    """Raise ValueError unless every rank is on a host, and all hosts have equally many. sizes: max_tokens, num_topk."""
    if hosts == HOSTNAME:
        names = [HOSTNAME] * num_ranks  # what they are is asked later
    elif isinstance(hosts, str) or not isinstance(hosts, Sequence) or not all(isinstance(x, str) for x in hosts):
        raise ValueError(f'hosts: expected the name of each rank\'s host, "hostname" or None, got {describe(hosts)}')
    else:
        names = list(hosts)
    if len(names) != num_ranks:
        raise ValueError(f"hosts: expected a name for each of the {num_ranks} ranks, got {len(names)}")
    if "" in names:
        raise ValueError(f"hosts: expected a host for every rank, got none for rank {names.index('')}")
    counts = {name: names.count(name) for name in names}
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{count} on {name!r}" for name, count in counts.items())
        raise ValueError(f"hosts: expected as many ranks on every host, got {found}")
    if None in sizes:
        raise ValueError("hosts: expected max_tokens and num_topk with them, got None")
    if presum:
        raise ValueError("hosts: expected presum None or False with them, got True")


def agree_on_hosts(
    channel: Channel, hosts: str | Sequence[str], sizes: tuple[int | None, int | None], presum: bool | None
) -> list[str]:
    """Return every rank's host. Raises ValueError on all ranks if one is refused or they differ. Collective."""
    over_gloo = channel.data is channel.control
    refusal = "" if over_gloo else "hosts: expected None over NCCL, where ranks aren't grouped by host yet"
    refusal = refusal or complaint(check_hosts, hosts, channel.num_ranks, sizes, presum)
    raise_together(gather_texts(channel, refusal, OPENING), refusal)
    if hosts == HOSTNAME:
        hosts = gather_texts(channel, socket.gethostname(), OPENING)
        check_hosts(hosts, channel.num_ranks, sizes, presum)  # the same names, so the same error, on all ranks
    same_everywhere("hosts", gather_texts(channel, ", ".join(hosts), OPENING))
    return list(hosts)


def connect_hosts(channel: Channel, names: list[str], name: str, timeout_s: float) -> Hosts:
    """Connect this rank to its rail and to its host. Collective; raises PeerTimeout."""
    order = list(dict.fromkeys(names))
    host = [order.index(x) for x in names]
    place = [names[:rank].count(names[rank]) for rank in range(len(names))]
    grid = torch.empty(len(names) // len(order), len(order), dtype=torch.int64, device="cpu")
    for rank, (x, y) in enumerate(zip(place, host, strict=True)):
        grid[x, y] = rank
    mine = channel.rank
    rail = _connect(channel, f"{name}/rail {place[mine]}", grid[place[mine]].tolist(), timeout_s)
    inside = _connect(channel, f"{name}/host {host[mine]}", grid[:, host[mine]].tolist(), timeout_s)
    return Hosts(torch.tensor(host, device="cpu"), torch.tensor(place, device="cpu"), grid, rail, inside)


def gather_by_rail(hosts: Hosts, mine: torch.Tensor) -> torch.Tensor:
    """Gather tensors of one shape from all ranks: [num_ranks, *shape]. Each crosses to another host once."""
    across = gather_tensors(hosts.rail, mine, "dispatch between hosts")
    return gather_tensors(hosts.inside, across, "dispatch within the host")[hosts.place, hosts.host]


def return_by_rail(hosts: Hosts, slots: torch.Tensor) -> torch.Tensor:
    """Send rows of slots back to their ranks: [num_ranks, S, H] by destination -> [hosts, S, H] bf16 by source host.

    A slot's row is on one rank of its owner's host; on the others it is 0.
    """
    inside = exchange_equal(hosts.inside, slots[hosts.grid], "combine within the host")
    merged = inside.view(torch.int16).sum(0, dtype=torch.int16).view(slots.dtype)  # bits of the one row that isn't 0
    return exchange_equal(hosts.rail, merged, "combine between hosts")


def _connect(channel: Channel, name: str, members: list[int], timeout_s: float) -> Channel:
    left_s = channel.watch.left_s

    def make(store: Store) -> ProcessGroupGloo:
        a_try = timedelta(seconds=left_s / CONNECT_TRIES)
        return ProcessGroupGloo(PrefixStore(name, store), members.index(channel.rank), len(members), a_try)

    gloo = channel.watch.connect(OPENING, make, left_s)
    gloo._set_default_timeout(timedelta(seconds=timeout_s))
    group = cast(dist.ProcessGroup, gloo)
    return Channel(group, group, channel.device, channel.watch)
