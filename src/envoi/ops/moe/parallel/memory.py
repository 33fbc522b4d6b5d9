"""Opening of an exchange: which one ranks use, and its memory, allocated on all ranks and then connected.

No rank waits for one that failed: each step is taken on all ranks before the next.
"""

import platform
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from envoi.estimates.exchange import gathering_pays, link_of, presum_pays
from envoi.ops.moe.parallel import nvlink, symmetric_memory
from envoi.ops.moe.parallel.collectives import connect_ranks, gather_texts
from envoi.ops.moe.parallel.constant import Constant, Room
from envoi.ops.moe.parallel.counted import Counted
from envoi.ops.moe.parallel.exchange import Exchange, OnDevice, Owner, Team
from envoi.ops.moe.parallel.opening import OPENING, Grid, Hosts, Wanted, first_error
from envoi.ops.moe.parallel.rail import HostsLayout, open_rail
from envoi.ops.moe.parallel.symmetric_memory import SharedLayout
from envoi.types import ExpertWeights

NVLINK = "all ranks reach each other's memory"
# Exchanges of earlier objects: those of equal sizes, such as a model's layers, use the same memory in turn.
_opened: "weakref.WeakValueDictionary[tuple, OnDevice]" = weakref.WeakValueDictionary()


def open_exchange(
    team: Team, experts: ExpertWeights, layout: SharedLayout | None, wanted: Wanted, group: dist.ProcessGroup,
    hosts: Sequence[str], connected: Any,
) -> tuple[Exchange, str]:  # fmt: skip
    """Return the exchange of a group, and why it is none by kernels over NVLink, or why it is. Collective.

    layout: None without max_tokens and num_topk. hosts: each rank's host, if tokens are exchanged by host; connected:
    then the `Hosts` of gloo, or NCCL's backend of the rail.
    """
    channel, why = team.channel, ""
    if not channel.queues:
        why = "the group is one of gloo"
        if hosts and layout is not None:
            return Constant(Room(replace(layout, presum=bool(wanted.presum)), channel, connected), "hosts"), why
    elif hosts and layout is not None:
        layout = replace(layout, presum=bool(wanted.presum))
        found, why = _open_rail(team, experts, layout, hosts, group, connected, "hosts")
        if found is not None:
            return found, why
    elif layout is None:
        why = "max_tokens and num_topk weren't given"
    elif wanted.route is not None:
        why = f"exchange is {wanted.route!r}"
    else:
        found, why = open_domain(team, experts, with_presum(layout, experts.intermediate, wanted.presum), group)
        if found is not None:
            return found, why
    return _open_collective(team, experts, layout, wanted, group), why


def with_presum(layout: SharedLayout, intermediate: int, presum: bool | None) -> SharedLayout:
    """Return the layout of memory over NVLink; presum: None = if it is predicted to be faster."""
    if presum is None:
        sizes = layout.hidden, intermediate, layout.num_topk, layout.max_tokens
        presum = presum_pays(*sizes, layout.num_ranks, layout.format)
    return replace(layout, presum=presum)


def open_domain(
    team: Team, experts: ExpertWeights, layout: SharedLayout, group: dist.ProcessGroup
) -> tuple[OnDevice | None, str]:
    """Return the exchange by memory that all ranks share over NVLink, or None, and the reason. Collective."""
    refusals = gather_texts(team.channel, nvlink.why_not_kernels(experts), OPENING)
    names = gather_texts(team.channel, platform.node(), OPENING)
    if any(refusals) or len(set(names)) > 1:
        return None, next(filter(None, refusals), "the ranks are on several hosts")

    def allocate() -> Owner:
        sizes = layout, team.channel.rank, list(team.expert_offsets), team.timeout_s, team.device
        domain = symmetric_memory.allocate(*sizes)
        domain.watch = team.channel.watch
        return domain

    def connect(domain: Any) -> None:
        symmetric_memory.connect(domain, group)

    return _open(team, "memory", (layout,), NVLINK, allocate, connect)


def _open_rail(
    team: Team, experts: ExpertWeights, layout: SharedLayout, hosts: Sequence[str], group: dist.ProcessGroup,
    backend: Any, name: str,
) -> tuple[OnDevice | None, str]:  # fmt: skip
    """Return the exchange by a rail between hosts, and within them by memory; or None, and why. Collective."""
    refusals = gather_texts(team.channel, nvlink.why_not_kernels(experts), OPENING)
    if any(refusals):
        return None, next(filter(None, refusals))
    grid, rank = Grid.of(hosts), team.channel.rank
    alone = len(grid.grid) == 1

    def allocate() -> Owner:
        sizes = HostsLayout(layout, grid.num_hosts), grid, rank, team.expert_offsets, team.timeout_s, team.device
        return open_rail(*sizes, shared=not alone)

    def share(made: Any) -> None:
        if alone:
            return symmetric_memory.set_peers(made.domain, [made.domain.memory.data_ptr()])
        at = f"{team.name}/memory of host {int(grid.host[rank])}"
        store = team.channel.watch.ask(lambda store: PrefixStore(at, store), team.timeout_s)
        return symmetric_memory.connect_part(made.domain, at, store)

    def begin(made: Any) -> None:
        made.connect(backend, team.channel.watch)

    key = tuple(hosts), layout, group.group_name
    return _open(team, name, key, "ranks are grouped by host", allocate, share, begin)


def _open_collective(
    team: Team, experts: ExpertWeights, layout: SharedLayout | None, wanted: Wanted, group: dist.ProcessGroup
) -> Exchange:
    """Return an exchange between all ranks alike: of constant sizes if that is faster than to count. Collective."""
    channel = team.channel
    if channel.queues:
        connect_ranks(channel, channel.data, OPENING)
    fits = (team.device.type == "cuda") == channel.queues
    if layout is None or wanted.route == "counted" or not fits or not _gathers(team, layout, wanted):
        return Counted(channel)
    layout, names = replace(layout, presum=bool(wanted.presum)), [str(rank) for rank in range(layout.num_ranks)]
    if not channel.queues:
        return Constant(Room(layout, channel, Hosts(Grid.of(names), channel, None)), "gathered")
    found, _ = _open_rail(team, experts, layout, names, group, group, "gathered")
    return Counted(channel) if found is None else found


def _gathers(team: Team, layout: SharedLayout, wanted: Wanted) -> bool:
    """Tell whether sizes are to be constant, by the caller's wish or else by an estimate."""
    on_one_host = len(team.channel.watch.ranks_by_store) == layout.num_ranks
    link = link_of("nccl" if team.channel.queues else "gloo", on_one_host)
    sizes = layout.num_ranks, layout.max_tokens, layout.num_topk, layout.hidden, layout.token_bytes
    return wanted.route == "gathered" or gathering_pays(link, *sizes, bool(wanted.presum))


def _open(
    team: Team, name: str, sizes: tuple, why: str, allocate: Callable[[], Owner], *steps: Callable[[Any], None]
) -> tuple[OnDevice | None, str]:
    """Return an earlier object's exchange if all ranks have it; else a new one; or None and the first rank's error.

    steps: are taken with what `allocate` has returned. Collective.
    """
    key = name, tuple(team.channel.watch.ranks), *sizes, team.expert_offsets, team.timeout_s
    found = _opened.get(key)
    if found is not None and (found.domain.watch.failure is not None or any(found.domain.codes[0])):
        found = None  # a rank was lost: flags can't be trusted any more, and collectives were ended
    if all(gather_texts(team.channel, "known" if found is not None else "", OPENING)):
        return found, why
    made: list[Owner] = []
    for step in (lambda: made.append(allocate()), *(lambda step=step: step(made[0]) for step in steps)):
        for rank, text in enumerate(gather_texts(team.channel, first_error(step), OPENING)):
            if text:
                return None, f"rank {rank}: {text}"
    _opened[key] = found = OnDevice(name, made[0], team.channel.rank)
    return found, why
