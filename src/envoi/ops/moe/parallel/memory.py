"""Memory of ExpertParallel on GPUs: allocated on all ranks, then connected, so that none waits for one that failed."""

import platform
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from envoi.ops.moe.parallel import gathered, gathered_device, hosts_device, nvlink, symmetric_memory
from envoi.ops.moe.parallel.collectives import Channel, gather_texts
from envoi.ops.moe.parallel.hosts import Grid
from envoi.ops.moe.parallel.opening import OPENING, first_error
from envoi.ops.moe.parallel.symmetric_memory import Domain, SharedLayout
from envoi.plan.exchange import presum_pays
from envoi.types import ExpertWeights

Buffers = gathered_device.Buffers | hosts_device.Buffers
NVLINK = "all ranks reach each other's memory"
BY_HOST = "ranks are grouped by host"
# Objects of equal sizes, such as those of a model's layers, use the same memory in turn.
_domains: "weakref.WeakValueDictionary[tuple, Domain]" = weakref.WeakValueDictionary()
_buffers: "weakref.WeakValueDictionary[tuple, Buffers]" = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Owner:
    """Rank for whose object memory is made. name: the object's; device: its experts'."""

    channel: Channel
    name: str
    expert_offsets: tuple[int, ...]
    timeout_s: float
    device: torch.device


def new_domain(owner: Owner, layout: SharedLayout, group: dist.ProcessGroup) -> tuple[Domain | None, str]:
    """Return memory that all ranks share over NVLink, or None, and the reason. Collective."""
    made: list[Domain] = []

    def allocate() -> None:
        offsets = list(owner.expert_offsets)
        made.append(symmetric_memory.allocate(layout, owner.channel.rank, offsets, owner.timeout_s, owner.device))
        made[0].watch = owner.channel.watch

    failed = _in_steps(owner.channel, allocate, lambda: symmetric_memory.connect(made[0], group))
    return (None, failed) if failed else (made[0], "")


def open_domain(
    owner: Owner, experts: ExpertWeights, layout: SharedLayout, group: dist.ProcessGroup
) -> tuple[Domain | None, str]:
    """Return memory over NVLink, an earlier object's if all ranks have it; or None, and the reason. Collective."""
    refusals = gather_texts(owner.channel, nvlink.why_not_kernels(experts), OPENING)
    names = gather_texts(owner.channel, platform.node(), OPENING)
    if any(refusals) or len(set(names)) > 1:
        return None, next(filter(None, refusals), "the ranks are on several hosts")
    key = tuple(owner.channel.watch.ranks), layout, owner.expert_offsets, owner.timeout_s
    domain = _domains.get(key)
    if domain is not None and any(domain.codes[0]):
        domain = None  # a rank was lost: the flags can't be trusted any more
    if all(gather_texts(owner.channel, "known" if domain is not None else "", OPENING)):
        return domain, NVLINK
    domain, failed = new_domain(owner, layout, group)
    if domain is not None:
        _domains[key] = domain
    return domain, failed or NVLINK


def run_layer(
    owner: Domain | Buffers, tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor,
    experts: ExpertWeights,
) -> torch.Tensor:  # fmt: skip
    """Run the layer: tokens [M, H] bf16 of this rank -> [M, H] bf16; NaN if a rank was late or was refused."""
    given = tokens, topk_weights, topk_ids, experts
    if isinstance(owner, Domain):
        return nvlink.run_layer(owner, *given)
    if isinstance(owner, hosts_device.Buffers):
        return hosts_device.run_layer(owner, *given)
    return gathered_device.run_layer(owner, *given)


def refuse(owner: Domain | Buffers) -> None:
    """Take part in a call whose arguments this rank's host refuses."""
    if isinstance(owner, Domain):
        nvlink.refuse(owner)
    elif isinstance(owner, hosts_device.Buffers):
        hosts_device.refuse(owner)
    else:
        gathered_device.refuse(owner)


def exchange_of(domain: Domain | None, buffers: Buffers | None, room: gathered.Room | None) -> tuple[bool, str]:
    """Return `presum` and `exchange` of an `ExpertParallel` with this memory."""
    if isinstance(buffers, hosts_device.Buffers):
        return buffers.layout.whole.presum, "hosts"
    if buffers is not None:
        return buffers.layout.presum, "gathered"
    if room is not None:
        return room.layout.presum, "gathered" if room.hosts is None else "hosts"
    return (False, "counted") if domain is None else (domain.layout.presum, "memory")


def with_presum(layout: SharedLayout, intermediate: int, presum: bool | None) -> SharedLayout:
    """Return the layout with `presum` of `ExpertParallel`; None = if it is predicted to be faster."""
    if presum is None:
        sizes = layout.hidden, intermediate, layout.num_topk, layout.max_tokens
        presum = presum_pays(*sizes, layout.num_ranks, layout.format)
    return replace(layout, presum=presum)


def open_gathered(owner: Owner, layout: SharedLayout, group: dist.ProcessGroup) -> gathered_device.Buffers | None:
    """Return buffers around collectives of the group, those of an earlier object if all ranks have them. Collective.

    None if a rank is out of memory.
    """
    key = group.group_name, layout, owner.expert_offsets, owner.timeout_s
    found, known = _known(owner.channel, key)
    if known:
        return cast(gathered_device.Buffers, found)
    made: list[gathered_device.Buffers] = []

    def allocate() -> None:
        offsets = list(owner.expert_offsets)
        made.append(gathered_device.open_buffers(layout, owner.channel.rank, offsets, owner.timeout_s, owner.device))

    if _in_steps(owner.channel, allocate):
        return None
    _buffers[key] = made[0]
    gathered_device.connect(made[0], owner.channel)
    return made[0]


def open_hosts(
    owner: Owner, experts: ExpertWeights, layout: SharedLayout, hosts: Sequence[str], rail: Any
) -> tuple[hosts_device.Buffers | None, str]:
    """Return buffers of ranks grouped by host, those of an earlier object if all ranks have them; or None, and why.

    hosts: of each rank. rail: see `hosts_device.connect`. Collective.
    """
    refusals = gather_texts(owner.channel, nvlink.why_not_kernels(experts), OPENING)
    if any(refusals):
        return None, next(filter(None, refusals))
    grid = Grid.of(hosts)
    whole = hosts_device.HostsLayout(layout, grid.num_hosts)
    key = tuple(owner.channel.watch.ranks), tuple(hosts), whole, owner.expert_offsets, owner.timeout_s
    found, known = _known(owner.channel, key)
    if known:
        return cast(hosts_device.Buffers, found), BY_HOST
    made: list[hosts_device.Buffers] = []
    alone = whole.inside.num_ranks == 1

    def allocate() -> None:
        sizes = whole, grid, owner.channel.rank, owner.expert_offsets, owner.timeout_s, owner.device
        made.append(hosts_device.open_buffers(*sizes, shared=not alone))

    def share() -> None:
        domain, watch = made[0].domain, owner.channel.watch
        if alone:
            return symmetric_memory.set_peers(domain, [domain.memory.data_ptr()])
        name = f"{owner.name}/memory of host {int(grid.host[owner.channel.rank])}"
        store = watch.ask(lambda store: PrefixStore(name, store), owner.timeout_s)
        return symmetric_memory.connect_part(domain, name, store)

    failed = _in_steps(owner.channel, allocate, share)
    if failed:
        return None, failed
    hosts_device.connect(made[0], rail, owner.channel.watch)
    _buffers[key] = made[0]
    return made[0], BY_HOST


def _known(channel: Channel, key: tuple) -> tuple[Buffers | None, bool]:
    """Return the buffers of an earlier object, and whether all ranks have theirs. Collective."""
    found = _buffers.get(key)
    if found is not None and (found.domain.watch.failure is not None or any(found.domain.codes[0])):
        found = None  # a rank was lost, and the collectives were ended
    return found, all(gather_texts(channel, "known" if found is not None else "", OPENING))


def _in_steps(channel: Channel, *steps: Callable[[], None]) -> str:
    """Take each step on all ranks before the next; return the first rank's error, "" if there was none. Collective."""
    for step in steps:
        for rank, text in enumerate(gather_texts(channel, first_error(step), OPENING)):
            if text:
                return f"rank {rank}: {text}"
    return ""
