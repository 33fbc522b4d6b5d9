"""Opening of an ExpertParallel: arguments, the process group, and what all ranks have to agree on."""

import hashlib
import itertools
from collections.abc import Callable
from datetime import timedelta
from numbers import Real
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from envoi.check import describe, expect_int, expect_tensor
from envoi.ops.moe.op import constants_of, tensors_of
from envoi.ops.moe.parallel.collectives import Channel, gather_ints, gather_texts
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
    if exchange not in EXCHANGES:
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
