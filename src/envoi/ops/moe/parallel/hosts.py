"""Ranks grouped by host, so that a token crosses to another host once, between ranks of the same number there.

Host g of G has L ranks; its rank at place l exchanges with the ranks at place l of the other hosts (a rail), and then
with the ranks of its own host. Example: hosts a, a, b, b: rails {0, 2} and {1, 3}.

Over gloo `constant` exchanges tokens so; over NCCL `rail`, with kernels within a host.
"""

import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from envoi.check import describe
from envoi.ops.moe.parallel.collectives import Channel, connect_ranks, gather_texts
from envoi.ops.moe.parallel.opening import CONNECT_TRIES, OPENING, complaint, raise_together, same_everywhere

HOSTNAME = "hostname"
LEAST_NCCL_TIMEOUT_S = 600.0
_rails: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, ...], Any]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Grid:
    """Hosts of a group.

    host, local_rank [num_ranks] int64: each rank's host, and its number there. grid [local ranks, hosts] int64: the
    rank at each.
    """

    host: torch.Tensor
    local_rank: torch.Tensor
    grid: torch.Tensor

    @staticmethod
    def of(names: Sequence[str]) -> "Grid":
        """Arrange the ranks by the names of their hosts, equally many on each, in the order of the ranks."""
        order = list(dict.fromkeys(names))
        host = [order.index(x) for x in names]
        local_rank = [names[:rank].count(names[rank]) for rank in range(len(names))]
        grid = torch.empty(len(names) // len(order), len(order), dtype=torch.int64, device="cpu")
        for rank, (x, y) in enumerate(zip(local_rank, host, strict=True)):
            grid[x, y] = rank
        return Grid(torch.tensor(host, device="cpu"), torch.tensor(local_rank, device="cpu"), grid)

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return self.grid.shape[1]

    def rail(self, rank: int) -> list[int]:
        """Return the ranks of this rank's local rank on all hosts, in the order of the hosts."""
        return self.grid[self.local_rank[rank]].tolist()

    def inside(self, rank: int) -> list[int]:
        """Return the ranks of this rank's host, in the order of their places."""
        return self.grid[:, self.host[rank]].tolist()


@dataclass(frozen=True)
class Hosts:
    """Hosts of a group, and this rank's connections: to its rail, and to its host, None where it is there alone."""

    grid: Grid
    rail: Channel
    inside: Channel | None


def check_hosts(hosts: str | Sequence[str], num_ranks: int, sizes: tuple) -> None:
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


def check_backend(over_gloo: bool, device: torch.device) -> None:
    """Raise ValueError unless ranks on this device can be grouped by host over the group's backend."""
    if device.type == "cuda" and over_gloo:
        raise ValueError(f"hosts: expected a group of NCCL for experts on {device}, got one of gloo")
    if device.type != "cuda" and not over_gloo:
        raise ValueError(f"hosts: expected a group of gloo for experts on {device}, got one of NCCL")
    if not over_gloo and not dist.is_nccl_available():
        raise ValueError(f"hosts: expected a torch with NCCL built in, got {torch.__version__} without it")


def agree_on_hosts(
    channel: Channel, hosts: str | Sequence[str], sizes: tuple[int | None, int | None], device: torch.device
) -> list[str]:
    """Return every rank's host. Raises ValueError on all ranks if one is refused or they differ. Collective.

    device: the experts'.
    """
    over_gloo = channel.data is channel.control
    refusal = complaint(check_hosts, hosts, channel.num_ranks, sizes) or complaint(check_backend, over_gloo, device)
    raise_together(gather_texts(channel, refusal, OPENING), refusal)
    if hosts == HOSTNAME:
        hosts = gather_texts(channel, socket.gethostname(), OPENING)
        check_hosts(hosts, channel.num_ranks, sizes)  # the same names, so the same error, on all ranks
    same_everywhere("hosts", gather_texts(channel, ", ".join(hosts), OPENING))
    if not over_gloo:
        check_machines(list(hosts), gather_texts(channel, platform.node(), OPENING))
    return list(hosts)


def check_machines(hosts: list[str], machines: list[str]) -> None:
    """Raise ValueError if ranks on different machines were given one host: they don't share memory."""
    for rank, (host, machine) in enumerate(zip(hosts, machines, strict=True)):
        first = hosts.index(host)
        if machine != machines[first]:
            raise ValueError(
                f"hosts: expected ranks of host {host!r} on one machine, got rank {first} on {machines[first]!r} "
                f"and rank {rank} on {machine!r}"
            )


def connect_hosts(channel: Channel, names: list[str], name: str, timeout_s: float) -> Hosts:
    """Connect this rank to its rail and to its host, over gloo. Collective; raises PeerTimeout."""
    grid, mine = Grid.of(names), channel.rank
    if len(grid.grid) == 1:
        return Hosts(grid, channel, None)
    rail = _connect(channel, f"{name}/rail {grid.local_rank[mine]}", grid.rail(mine), timeout_s)
    inside = _connect(channel, f"{name}/host {grid.host[mine]}", grid.inside(mine), timeout_s)
    return Hosts(grid, rail, inside)


def connect_rail(channel: Channel, group: dist.ProcessGroup, names: Sequence[str], name: str, timeout_s: float) -> Any:
    """Connect this rank to its rail over NCCL: a backend of its own, which can be ended by itself. Collective.

    Objects of one group with the same hosts have one backend, which lives as long as the group. Closing an object
    doesn't free it: NCCL would wait until every graph that holds a collective of it is gone.
    """
    opened = _rails.setdefault(group, {})
    if tuple(names) not in opened:
        rail = _connect_nccl(channel, Grid.of(names), name, timeout_s)
        connect_ranks(channel, rail, OPENING)  # one that fails isn't for a later object
        opened[tuple(names)] = rail
    return opened[tuple(names)]


def _connect_nccl(channel: Channel, grid: Grid, name: str, timeout_s: float) -> Any:
    members = grid.rail(channel.rank)
    local_rank = int(grid.local_rank[channel.rank])

    def make(store: Store) -> Any:
        # torch ends the process where a collective takes longer than this; Envoi ends the collective long before.
        longest = timedelta(seconds=max(LEAST_NCCL_TIMEOUT_S, 10 * timeout_s))
        nccl: Any = dist.ProcessGroupNCCL
        return nccl(PrefixStore(f"{name}/rail {local_rank}", store), members.index(channel.rank), len(members), longest)

    return channel.watch.connect(OPENING, make, channel.watch.left_s)


def _connect(channel: Channel, name: str, members: list[int], timeout_s: float) -> Channel:
    left_s = channel.watch.left_s

    def make(store: Store) -> ProcessGroupGloo:
        a_try = timedelta(seconds=left_s / CONNECT_TRIES)
        return ProcessGroupGloo(PrefixStore(name, store), members.index(channel.rank), len(members), a_try)

    gloo = channel.watch.connect(OPENING, make, left_s)
    gloo._set_default_timeout(timedelta(seconds=timeout_s))
    group = cast(dist.ProcessGroup, gloo)
    return Channel(group, group, channel.device, channel.watch)
