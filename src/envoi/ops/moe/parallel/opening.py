"""Opening of an ExpertParallel: arguments, the process group, what all ranks have to agree on, and the exchange.

No rank waits for one that failed: each step is taken on all ranks before the next.
"""

import json
import platform
import socket
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from numbers import Real
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from envoi.check import describe, expect_divisible, expect_int, expect_no_gradients, expect_tensor
from envoi.estimates.exchange import BETWEEN_HOSTS, WITHIN_A_HOST, gathering_pays, presum_pays
from envoi.ops.moe.op import constants_of, tensors_of
from envoi.ops.moe.parallel import collectives, nvlink
from envoi.ops.moe.parallel.collectives import Channel
from envoi.ops.moe.parallel.counted import Counted
from envoi.ops.moe.parallel.exchange import OnDevice, Owner, Team
from envoi.ops.moe.parallel.failure import Watch
from envoi.ops.moe.parallel.nvlink import SharedLayout
from envoi.ops.moe.parallel.placement import check_same
from envoi.ops.moe.parallel.rail import Grid, HostsLayout, open_rail
from envoi.ops.moe.parallel.store import connect, is_on_this_host
from envoi.quant.formats import SCHEMES
from envoi.runtime.prepared.replay import check_workspace
from envoi.runtime.program import ALIGNMENT
from envoi.types import ExpertWeights, Routing, expect_experts

Exchange = OnDevice | Counted
OPENING = "opening the group"
DEFAULT_TIMEOUT_S = 10.0
MAX_TIMEOUT_S = 2000  # kernels take it in microseconds, as int32
NO_FUSED = "tokens, L1 and L2 in one launch took 1.02 times as long as in two over 12 layers on 4 GPUs, and was removed"
CONNECT_TRIES = 5  # gloo's tries to connect, each with its timeout
HOSTNAME = "hostname"
LEAST_NCCL_TIMEOUT_S = 600.0

_rails: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, ...], Any]]" = weakref.WeakKeyDictionary()
# Exchanges of earlier objects: those of equal sizes, such as a model's layers, use the same memory in turn.
_opened: "weakref.WeakValueDictionary[tuple, OnDevice]" = weakref.WeakValueDictionary()


class Peer(NamedTuple):
    """Rank, as it tells its peers about itself when an object is opened.

    same: arguments that have to be the same on all ranks, in words. kernels: what decides, with those of all, which
    kernels a call on given memory needs. host, machine: names. by_store: whether the default group's store is on this
    host. why_not: the reason why it has no kernels, or "". placement: as its caller gave it.
    """

    same: dict[str, str]
    num_experts: int
    kernels: str
    host: str
    machine: str
    by_store: bool
    why_not: str
    placement: list[int] | None = None


class Wanted(NamedTuple):
    """Exchange that a caller wants. route: "hosts", "gathered", "counted", or None: the fastest that there is.

    presum: sum a token's rows before they are sent back; None = where that is predicted to be faster. results: the
    scheme of rows that are sent back over NVLink, None for bf16.
    """

    route: str | None
    presum: bool | None
    results: str | None = None


EXCHANGES = {
    "auto": Wanted(None, None), "rows": Wanted(None, False), "sums": Wanted(None, True),
    "hosts": Wanted("hosts", False), "hosts+sums": Wanted("hosts", True),
    "gathered": Wanted("gathered", False), "gathered+sums": Wanted("gathered", True),
    "counted": Wanted("counted", False),
}  # fmt: skip
RESULTS = {"bf16": None, "fp8_1x128": "fp8_1x128"}  # schemes of rows sent back


def wanted_by(exchange: str, hosts: Any, presum: Any, fused: Any) -> tuple[str, list[str]]:
    """Return the `exchange` that deprecated arguments mean, and a warning for each of them."""
    warned = ["fused: False is what ExpertParallel does; leave the argument away"] if fused is False else []
    if isinstance(presum, bool):
        exchange = ("sums" if presum else "rows") if hosts is None else ("hosts+sums" if presum else "hosts")
        warned.append(f'presum: is deprecated; pass exchange="{exchange}" instead')
    elif hosts is not None and exchange == "auto":
        warned.append('hosts: without exchange is deprecated; pass exchange="hosts" too')
        exchange = "hosts"
    return exchange, warned


def check_options(
    experts: ExpertWeights, timeout_s: float, max_tokens: int | None, num_topk: int | None, exchange: str,
    num_sms: int | None, hosts: Any, presum: bool | None, fused: bool | None, results: str,
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
    if hosts is not None and exchange not in ("auto", "hosts", "hosts+sums"):
        raise ValueError(f'hosts: expected None, or exchange "hosts" or "hosts+sums", got exchange {exchange!r}')
    wanted = wanted_by(exchange, hosts, presum, None)[0]
    check_results("results", results, experts.hidden, EXCHANGES[wanted].presum)
    if RESULTS[results] is not None and EXCHANGES[wanted].route in ("gathered", "counted"):
        raise ValueError(f"results: expected 'bf16' with exchange {wanted!r}, got {results!r}")
    if EXCHANGES[wanted].route in ("gathered", "hosts") and None in (max_tokens, num_topk):
        raise ValueError(f"exchange: expected max_tokens and num_topk with {wanted!r}, got None")


def check_results(name: str, results: Any, hidden: int, presum: bool | None) -> None:
    """Raise ValueError unless rows of `hidden` columns can be sent back so. name: of the argument."""
    if not isinstance(results, str) or results not in RESULTS:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, RESULTS))}, got {results!r}")
    if RESULTS[results] is None:
        return
    if presum:
        raise ValueError(f"{name}: expected 'bf16' where sums are sent back, got {results!r}")
    expect_divisible(f"{name} {results!r}: hidden", hidden, SCHEMES[results].group[1], "its groups of columns")


def check_out(out: torch.Tensor, tokens: torch.Tensor) -> None:
    """Raise ValueError unless a call on these tokens can write its result there."""
    expect_tensor("out", out, tokens.dtype, tokens.shape, tokens.device)
    expect_no_gradients(("out",), (out,))
    if not out.is_contiguous() or out.data_ptr() % ALIGNMENT:
        raise ValueError("out: expected a contiguous tensor at a multiple of 16 bytes, got another")


def check_given(out: Any, workspace: Any, tokens: torch.Tensor, device: torch.device) -> None:
    """Raise ValueError unless a call can use the caller's memory, but for the size of a workspace."""
    expect_tensor("tokens", tokens)
    if out is not None:
        check_out(out, tokens)
    if workspace is not None:
        check_workspace(workspace, 0, device)


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


def open_channel(group: dist.ProcessGroup, experts: ExpertWeights, timeout_s: float, name: str) -> Channel:
    """Connect this rank to all others, also to tell them that its arguments are refused. Collective."""
    device = experts.device if isinstance(experts, ExpertWeights) else torch.device("cpu")
    timeout_s = timeout_s if _is_timeout(timeout_s) else DEFAULT_TIMEOUT_S
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


def tell_peers(
    channel: Channel, experts: ExpertWeights, same: dict[str, str], num_sms: int | None,
    placement: list[int] | None = None,
) -> list[Peer]:  # fmt: skip
    """Tell all ranks about this one, and return what each of them has told. Collective.

    same: arguments in words. Raises ValueError unless these, placement and the layers' sizes are equal on all ranks.
    """
    layer = f"hidden={experts.hidden} intermediate={experts.intermediate} format={experts.format}"
    layer += f" activation={experts.activation} swiglu_limit={experts.swiglu_limit}"
    layer += f" bias={experts.down_bias is not None}"
    if experts.num_shared:
        layer += f" num_shared={experts.num_shared} shared_gate={experts.shared_gate is not None}"
    forms = [None if x is None else (tuple(x.shape), x.stride(), x.dtype) for x in tensors_of(experts)]
    kernels = repr((constants_of(experts), forms, num_sms, placement is not None))
    mine = Peer(
        {"experts": layer} | same, experts.num_local_experts, kernels,
        socket.gethostname(), platform.node(), is_on_this_host(dist.distributed_c10d._get_default_store()),
        nvlink.why_not_kernels(experts), placement,
    )  # fmt: skip
    peers = [Peer(*json.loads(text)) for text in collectives.gather_texts(channel, json.dumps(mine), OPENING)]
    for what in mine.same:
        collectives.same_everywhere(what, [peer.same[what] for peer in peers])
    check_same([peer.placement for peer in peers])
    return peers


def hosts_of(peers: list[Peer], hosts: str | Sequence[str]) -> tuple[str, ...]:
    """Return each rank's host, none if all are on one. hosts: names, or HOSTNAME, which all ranks were given alike.

    Raises ValueError, on all ranks, unless every rank is on a host, ranks of one host are on one machine, whose memory
    they share, and all hosts have equally many.
    """
    names = [peer.host for peer in peers] if hosts == HOSTNAME else hosts
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(x, str) for x in names):
        raise ValueError(f'hosts: expected the name of each rank\'s host, "hostname" or None, got {describe(hosts)}')
    if len(names) != len(peers):
        raise ValueError(f"hosts: expected a name for each of the {len(peers)} ranks, got {len(names)}")
    if "" in names:
        raise ValueError(f"hosts: expected a host for every rank, got none for rank {names.index('')}")
    counts = Counter(names)
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{count} on {name!r}" for name, count in counts.items())
        raise ValueError(f"hosts: expected as many ranks on every host, got {found}")
    for rank, (host, peer) in enumerate(zip(names, peers, strict=True)):
        first = names.index(host)
        if peer.machine != peers[first].machine:
            raise ValueError(
                f"hosts: expected ranks of host {host!r} on one machine, got rank {first} on {peers[first].machine!r} "
                f"and rank {rank} on {peer.machine!r}"
            )
    return tuple(names) if len(counts) > 1 else ()


def connect_rail(channel: Channel, group: dist.ProcessGroup, names: Sequence[str], name: str, timeout_s: float) -> Any:
    """Connect this rank to its rail over NCCL: a backend of its own, which can be ended by itself. Collective.

    Objects of one group with the same hosts have one backend, which lives as long as the group. Closing an object
    doesn't free it: NCCL would wait until every graph that holds a collective of it is gone.
    """
    opened, grid, left_s = _rails.setdefault(group, {}), Grid.of(names), channel.watch.left_s
    local_rank = int(grid.local_rank[channel.rank])
    members = grid.grid[local_rank].tolist()

    def make(store: Store) -> Any:
        # torch ends the process where a collective takes longer than this; Envoi ends the collective long before.
        longest = timedelta(seconds=max(LEAST_NCCL_TIMEOUT_S, 10 * timeout_s))
        nccl: Any = dist.ProcessGroupNCCL
        return nccl(PrefixStore(f"{name}/rail {local_rank}", store), members.index(channel.rank), len(members), longest)

    if tuple(names) not in opened:
        rail = channel.watch.connect(OPENING, make, left_s)
        collectives.connect_ranks(channel, rail, OPENING)  # one that fails isn't for a later object
        opened[tuple(names)] = rail
    return opened[tuple(names)]


def open_exchange(
    team: Team, intermediate: int, layout: SharedLayout | None, wanted: Wanted, group: dist.ProcessGroup,
    hosts: Sequence[str], backend: Any,
) -> tuple[Exchange, str]:  # fmt: skip
    """Return the exchange of a group, and why it is none by kernels over NVLink, or why it is. Collective.

    layout: None without max_tokens and num_topk. hosts: each rank's host, if tokens are exchanged by host; backend:
    then NCCL's of the rail.
    """
    found = None
    if not team.channel.queues:
        return Counted(team.channel), "the group is one of gloo, over which rows are counted"
    if why := next(filter(None, (peer.why_not for peer in team.peers)), ""):
        layout = None
    elif layout is None:
        why = "max_tokens and num_topk weren't given"
    elif hosts:
        layout = replace(layout, presum=bool(wanted.presum))
        found, why = _open_rail(team, layout, hosts, group, backend, "hosts")
    elif wanted.route is not None:
        why = f"exchange is {wanted.route!r}"
    else:
        given = layout, intermediate, wanted.presum, team.num_shared, wanted.results
        found, why = open_domain(team, with_presum(*given), group)
    return found or _open_between_all(team, layout, wanted, group), why


def layout_of(team: Team, experts: ExpertWeights, max_tokens: int | None, num_topk: int | None) -> SharedLayout | None:
    """Return the layout of memory for the most tokens and slots, without presum; None if one of these isn't known."""
    if max_tokens is None or num_topk is None:
        return None
    sizes = team.channel.num_ranks, team.expert_offsets[-1], max_tokens, num_topk + team.num_shared
    return SharedLayout(*sizes, experts.hidden, experts.format)


def with_presum(
    layout: SharedLayout, intermediate: int, presum: bool | None, num_shared: int = 0, results: str | None = None
) -> SharedLayout:
    """Return the layout of memory over NVLink; presum: None = if it is predicted to be faster, and rows are bf16.

    num_shared: slots of a token whose rows don't travel. results: the scheme of rows that are sent back, None = bf16.
    """
    if presum is None:
        sizes = layout.hidden, intermediate, layout.num_topk - num_shared, layout.max_tokens
        presum = results is None and presum_pays(*sizes, layout.num_ranks, layout.format)
    return replace(layout, presum=presum, results=results)


def open_domain(team: Team, layout: SharedLayout, group: dist.ProcessGroup) -> tuple[OnDevice | None, str]:
    """Return the exchange by memory that all ranks share over NVLink, or None, and the reason. Collective."""
    if len({peer.machine for peer in team.peers}) > 1:
        return None, "the ranks are on several hosts"

    def allocate() -> Owner:
        sizes = team.channel.rank, list(team.expert_offsets), team.channel.watch.timeout_s
        return nvlink.allocate(layout, *sizes, team.rank_ends.device)

    why = "all ranks reach each other's memory"
    return _open(team, "memory", (layout,), why, allocate, lambda domain: nvlink.connect(domain, group))


def _open_rail(
    team: Team, layout: SharedLayout, hosts: Sequence[str], group: dist.ProcessGroup, backend: Any, name: str
) -> tuple[OnDevice | None, str]:
    """Return the exchange by a rail between hosts, and within them by memory; or None, and why. Collective."""
    grid, rank, watch = Grid.of(hosts), team.channel.rank, team.channel.watch
    alone = len(grid.grid) == 1

    def allocate() -> Owner:
        sizes = HostsLayout(layout, len(set(hosts))), grid, rank, team.expert_offsets, watch.timeout_s
        return open_rail(*sizes, team.rank_ends.device, shared=not alone)

    def share(made: Any) -> None:
        if alone:
            return nvlink.set_peers(made.domain, [made.domain.memory.data_ptr()])
        at = f"{team.name}/memory of host {int(grid.host[rank])}"
        store = watch.ask(lambda store: PrefixStore(at, store), watch.timeout_s)
        return nvlink.connect_part(made.domain, at, store)

    key = tuple(hosts), layout, group.group_name
    steps = share, lambda made: made.connect(backend, watch)
    return _open(team, name, key, "ranks are grouped by host", allocate, *steps)


def _open_between_all(team: Team, layout: SharedLayout | None, wanted: Wanted, group: dist.ProcessGroup) -> Exchange:
    """Return an exchange between all ranks alike over NCCL, of constant sizes if that is faster. Collective."""
    collectives.connect_ranks(team.channel, team.channel.data, OPENING)
    if layout is None or wanted.route == "counted":
        return Counted(team.channel)
    link = WITHIN_A_HOST if len({peer.machine for peer in team.peers}) == 1 else BETWEEN_HOSTS
    sizes = layout.num_ranks, layout.max_tokens, layout.num_topk, layout.hidden, layout.token_bytes
    if wanted.route != "gathered" and not gathering_pays(link, *sizes, bool(wanted.presum)):
        return Counted(team.channel)
    layout, names = replace(layout, presum=bool(wanted.presum)), [str(rank) for rank in range(layout.num_ranks)]
    found, _ = _open_rail(team, layout, names, group, group, "gathered")
    return found or Counted(team.channel)


def _open(
    team: Team, name: str, sizes: tuple, why: str, allocate: Callable[[], Owner], *steps: Callable[[Any], None]
) -> tuple[OnDevice | None, str]:
    """Return an earlier object's exchange if all ranks have it; else a new one; or None and the first rank's error.

    steps: are taken with what `allocate` has returned. Collective.
    """
    ranks = tuple(team.channel.watch.ranks)
    key = name, ranks, *sizes, team.expert_offsets, team.num_experts, team.channel.watch.timeout_s
    found = _opened.get(key)
    if found is not None and (found.domain.watch.failure is not None or any(found.domain.codes[0])):
        found = None  # a rank was lost: flags can't be trusted any more, and collectives were ended
    if all(collectives.gather_texts(team.channel, "known" if found is not None else "", OPENING)):
        return found, why
    made: list[Owner] = []
    for step in (lambda: made.append(allocate()), *(lambda step=step: step(made[0]) for step in steps)):
        error = collectives.complaint(step, kind=RuntimeError).partition("\n")[0].strip()
        for rank, text in enumerate(collectives.gather_texts(team.channel, error, OPENING)):
            if text:
                return None, f"rank {rank}: {text}"
    _opened[key] = found = OnDevice(made[0], name, team.channel.rank, team.num_experts)
    found.domain.watch = team.channel.watch
    return found, why
