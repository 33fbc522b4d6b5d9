"""Opening of an ExpertParallel: arguments, the process group, what all ranks have to agree on, and their hosts.

Ranks may be grouped by host, so that a token crosses to another host once. Host g of G has L ranks; its rank of local
rank l exchanges with the ranks l of the other hosts (a rail), and then with the ranks of its own host. Example: hosts
a, a, b, b: rails {0, 2} and {1, 3}. Over gloo `constant` exchanges tokens so; over NCCL `rail`, with kernels within a
host.
"""

import hashlib
import itertools
import platform
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from numbers import Real
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from envoi.check import describe, expect_int, expect_tensor
from envoi.ops.moe.op import constants_of, tensors_of
from envoi.ops.moe.parallel.collectives import Channel, connect_ranks, gather_ints, gather_texts
from envoi.ops.moe.parallel.failure import Watch
from envoi.ops.moe.parallel.store import connect, is_on_this_host
from envoi.runtime.program import ALIGNMENT
from envoi.types import ExpertWeights, Routing, expect_experts

OPENING = "opening the group"
DEFAULT_TIMEOUT_S = 10.0
MAX_TIMEOUT_S = 2000  # kernels take it in microseconds, as int32
NO_FUSED = "tokens, L1 and L2 in one launch took 1.02 times as long as in two over 12 layers on 4 GPUs, and was removed"
CONNECT_TRIES = 5  # gloo's tries to connect, each with its timeout

_serials: dict[str, itertools.count] = {}


class Wanted(NamedTuple):
    """Exchange that a caller wants. route: "hosts", "gathered", "counted", or None: the fastest that there is.

    presum: sum a token's rows before they are sent back; None = where that is predicted to be faster.
    """

    route: str | None
    presum: bool | None


EXCHANGES = {
    "auto": Wanted(None, None), "rows": Wanted(None, False), "sums": Wanted(None, True),
    "hosts": Wanted("hosts", False), "hosts+sums": Wanted("hosts", True),
    "gathered": Wanted("gathered", False), "gathered+sums": Wanted("gathered", True),
    "counted": Wanted("counted", False),
}  # fmt: skip


def wanted_by(exchange: str, hosts: Any, presum: Any, fused: Any) -> tuple[str, list[str]]:
    """Return the `exchange` that deprecated arguments mean, and a warning for each of them."""
    warned = []
    if fused is False:
        warned.append("fused: False is what ExpertParallel does; leave the argument away")
    if isinstance(presum, bool):
        suffix = ("sums" if presum else "rows") if hosts is None else ("hosts+sums" if presum else "hosts")
        warned.append(f'presum: is deprecated; pass exchange="{suffix}" instead')
        exchange = suffix
    elif hosts is not None and exchange == "auto":
        warned.append('hosts: without exchange is deprecated; pass exchange="hosts" too')
        exchange = "hosts"
    return exchange, warned


def check_options(
    experts: ExpertWeights, timeout_s: float, max_tokens: int | None, num_topk: int | None, exchange: str,
    num_sms: int | None, hosts: Any, presum: bool | None, fused: bool | None,
) -> None:  # fmt: skip
    """Raise ValueError unless the options of `ExpertParallel` have the right types and values."""
    expect_experts(experts)
    if not _is_timeout(timeout_s):
        raise ValueError(f"timeout_s: expected a positive number of seconds up to {MAX_TIMEOUT_S}, got {timeout_s!r}")
    for name, value in (("max_tokens", max_tokens), ("num_topk", num_topk), ("num_sms", num_sms)):
        if value is not None:
            expect_int(name, value, 1)
    if presum is not None and not isinstance(presum, bool):
        raise ValueError(f"presum: expected True, False or None, got {presum!r}")
    if fused is not None and fused is not False:
        raise ValueError(f"fused: expected None or False, got {fused!r}; {NO_FUSED}")
    if not isinstance(exchange, str) or exchange not in EXCHANGES:
        raise ValueError(f"exchange: expected one of {', '.join(map(repr, EXCHANGES))}, got {exchange!r}")
    if presum is not None and exchange != "auto":
        raise ValueError(f"presum: expected None with exchange {exchange!r}, which says it, got {presum}")
    route = EXCHANGES[exchange].route
    if hosts is not None and exchange not in ("auto", "hosts", "hosts+sums"):
        raise ValueError(f'hosts: expected None, or exchange "hosts" or "hosts+sums", got exchange {exchange!r}')
    if route == "gathered" and None in (max_tokens, num_topk):
        raise ValueError(f"exchange: expected max_tokens and num_topk with {exchange!r}, got None")


def check_out(out: torch.Tensor, tokens: torch.Tensor) -> None:
    """Raise ValueError unless a call on these tokens can write its result there."""
    expect_tensor("out", out, tokens.dtype, tokens.shape, tokens.device)
    if not out.is_contiguous() or out.data_ptr() % ALIGNMENT:
        raise ValueError("out: expected a contiguous tensor at a multiple of 16 bytes, got another")


def check_sizes(
    tokens: torch.Tensor, routing: Routing, num_experts: int, max_tokens: int | None, num_topk: int | None
) -> None:
    """Raise ValueError unless a call's sizes are those that an object was opened for."""
    if routing.num_experts != num_experts:
        raise ValueError(f"routing.num_experts: expected {num_experts} over all ranks, got {routing.num_experts}")
    if max_tokens is not None and len(tokens) > max_tokens:
        raise ValueError(f"tokens: expected at most {max_tokens} of them (max_tokens), got {len(tokens)}")
    k = routing.topk_ids.shape[1]
    if num_topk is not None and k > num_topk:
        raise ValueError(f"routing.topk_ids: expected at most {num_topk} slots a token (num_topk), got {k}")


def _is_timeout(seconds: object) -> bool:
    return isinstance(seconds, Real) and not isinstance(seconds, bool) and 0 < float(seconds) <= MAX_TIMEOUT_S


def device_and_timeout(experts: ExpertWeights, timeout_s: float) -> tuple[torch.device, float]:
    """Return the experts' device and the timeout; for arguments to be refused, defaults that can tell the peers so."""
    device = experts.device if isinstance(experts, ExpertWeights) else torch.device("cpu")
    return device, timeout_s if _is_timeout(timeout_s) else DEFAULT_TIMEOUT_S


def raise_together(refusals: list[str], mine: str) -> None:
    """Raise ValueError on all ranks if one refused its arguments: the others would hang in the next exchange."""
    first = next((rank for rank, text in enumerate(refusals) if text), None)
    if first is not None:
        raise ValueError(mine or f"rank {first} of the group refused its arguments: {refusals[first]}")


def first_error(step: Callable[[], None]) -> str:
    """Run a step; return the first line of its RuntimeError, or ""."""
    try:
        step()
    except RuntimeError as error:
        return str(error).partition("\n")[0] or type(error).__name__
    return ""


def complaint(check: Callable, *arguments: object) -> str:
    """Run a check; return the text of its ValueError, or ""."""
    try:
        check(*arguments)
    except ValueError as error:
        return str(error)
    return ""


def resolve_group(group: Any) -> dist.ProcessGroup:
    """Return the process group of a caller's `group`. Raises ValueError for anything else, or if it lacks this rank."""
    if group is None:
        return dist.distributed_c10d._get_default_group()
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or tuple(range(group.ndim))
            last = repr(names[-1]).replace("'", '"')
            choice = f"mesh[{last}] or mesh.get_group({last})" if group.mesh_dim_names else f"mesh.get_group({last})"
            raise ValueError(
                f"group: expected a mesh of one dimension, got {group.ndim} ({', '.join(map(str, names))}): "
                f"pass one of them, as {choice}"
            )
        group = group.get_group() if group.get_coordinate() is not None else dist.GroupMember.NON_GROUP_MEMBER
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"group: this rank ({dist.get_rank()}) isn't a member of it; only its members make the object")
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            "group: expected a torch.distributed process group, a DeviceMesh of one dimension or None, "
            f"got {describe(group)}"
        )
    if group not in dist.distributed_c10d._world.pg_map:
        raise ValueError("group: expected an open process group, got one that was destroyed")
    return group


def open_channel(group: dist.ProcessGroup, device: torch.device, timeout_s: float, name: str) -> Channel:
    """Connect this rank to all others. Collective; raises PeerTimeout."""
    ranks = dist.get_process_group_ranks(group)
    # Only through the default group's store can ranks be told anything when a collective can't reach them.
    watch = Watch(connect(), name, ranks, dist.get_rank(), timeout_s)
    left_s = watch.join(OPENING)  # gloo would wait for a lost rank once for each try

    def make(store: Store) -> ProcessGroupGloo:
        # Not dist.new_group: it reuses names of destroyed groups, and gloo can't open a name twice.
        a_try = timedelta(seconds=left_s / CONNECT_TRIES)
        return ProcessGroupGloo(PrefixStore(f"{name}/gloo", store), group.rank(), group.size(), a_try)

    gloo = watch.connect(OPENING, make, left_s)
    gloo._set_default_timeout(timedelta(seconds=timeout_s))
    control = cast(dist.ProcessGroup, gloo)
    if "nccl" in dist.get_backend(group):
        return Channel(control, group, device, watch)
    return Channel(control, control, torch.device("cpu"), watch)


def name_object(ranks: list[int]) -> str:
    """Make a unique name, equal on all ranks of a group, whatever other groups some of them belong to."""
    members = ",".join(map(str, ranks))
    return f"envoi {members} #{next(_serials.setdefault(members, itertools.count()))}"


def agree_on_sizes(
    channel: Channel, experts: ExpertWeights, timeout_s: float, max_tokens: int | None, num_topk: int | None,
    exchange: str,
) -> list[int]:  # fmt: skip
    """Return every rank's number of experts. Raises ValueError unless all else is equal on all ranks. Collective."""
    mine = f"hidden={experts.hidden} intermediate={experts.intermediate} format={experts.format}"
    mine += f" activation={experts.activation} swiglu_limit={experts.swiglu_limit} bias={experts.down_bias is not None}"
    texts = gather_texts(channel, mine, OPENING)
    same_everywhere("experts", texts)
    same_everywhere("timeout_s", gather_texts(channel, f"{float(timeout_s):g}", OPENING))
    same_everywhere("sizes", gather_texts(channel, f"{max_tokens=} {num_topk=} {exchange=}", OPENING))
    return gather_ints(channel, [experts.num_local_experts], OPENING)[:, 0].tolist()


def agree_on_kernels(channel: Channel, experts: ExpertWeights, num_sms: int | None) -> str:
    """Return a text, equal on all ranks, that decides which kernels a call on given memory needs. Collective."""
    forms = [None if x is None else (tuple(x.shape), x.stride(), x.dtype) for x in tensors_of(experts)]
    kinds = gather_texts(channel, repr((constants_of(experts), forms, num_sms)), OPENING)
    return hashlib.sha256(repr(kinds).encode()).hexdigest()


def same_everywhere(what: str, values: list) -> None:
    """Raise ValueError unless all ranks' values are equal."""
    for rank, value in enumerate(values):
        if value != values[0]:
            raise ValueError(
                f"{what}: expected the same on every rank, got {values[0]} on rank 0, {value} on rank {rank}"
            )


def ranks_by_store(channel: Channel) -> list[int]:
    """Return, for each rank of the group, 1 if it runs on the host of the default group's store. Collective."""
    here = is_on_this_host(dist.distributed_c10d._get_default_store())
    return gather_ints(channel, [here], OPENING)[:, 0].tolist()


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


def connect_hosts(channel: Channel, names: Sequence[str], name: str, timeout_s: float) -> Hosts:
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
