"""Public class `envoi.ExpertParallel`: experts spread over the ranks of a torch.distributed group."""

import itertools
import platform
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from numbers import Real
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from envoi.check import describe, expect_int
from envoi.moe.op import (
    as_rows,
    check_ids,
    check_tokens,
    constants_of,
    empty_out,
    flatten,
    mlp_flops,
    tensors_of,
    unflatten,
)
from envoi.moe.parallel import nccl, nvlink, symmetric_memory
from envoi.moe.parallel.collectives import Channel, gather_ints, gather_texts
from envoi.moe.parallel.dispatch import REFUSED_ON_HOST
from envoi.moe.parallel.symmetric_memory import Domain, SharedLayout
from envoi.moe.parallel.timeout import PeerTimeout, Watch
from envoi.moe.router.reference import count_tokens
from envoi.plan.presum import pays
from envoi.runtime import shortcuts
from envoi.runtime.custom_op import operator
from envoi.runtime.prepared.calls import plain
from envoi.types import ExpertWeights, Routing

NVLINK = "all ranks reach each other's memory"
DEFAULT_TIMEOUT_S = 10.0
MAX_TIMEOUT_S = 2000  # kernels take it in microseconds, as int32
CONNECT_TRIES = 5  # gloo's tries to connect, each with its timeout

_serials: dict[str, itertools.count] = {}
# The operator finds its object by name.
_instances: "weakref.WeakValueDictionary[str, ExpertParallel]" = weakref.WeakValueDictionary()
# Objects of equal sizes, such as those of a model's layers, use the same memory in turn.
_domains: "weakref.WeakValueDictionary[tuple, Domain]" = weakref.WeakValueDictionary()


class ExpertParallel:
    """MoE layer over the ranks of a group. Rank r owns the experts after those of rank r - 1, as many as it packed.

    experts: this rank's experts, from `envoi.experts.pack`.
    group: a torch.distributed process group of gloo or NCCL, or a DeviceMesh of one dimension; None = the default
        group. Every rank of it makes the object, with the same hidden, intermediate, format, activation and timeout_s;
        the number of experts may differ.
    timeout_s: bounds every wait for a peer, and the sum of all waits while the group is being opened.
    max_tokens, num_topk: the most tokens that a rank will have, and slots of a token. With both, ranks whose GPUs reach
        each other's memory (one host, NVLink) use kernels that read and write it. For that, room for
        max_tokens * num_topk rows of bf16 and num_ranks times as many in the experts' format is allocated once for all
        objects of the same sizes (a model's layers); between the GEMMs, a call takes num_ranks * max_tokens * num_topk
        rows of intermediate from torch's allocator. A call then copies no size to the host, never waits for the
        device, and can be captured in a CUDA graph. Calls and replays of all objects of a group must have the same
        order on every rank, on one stream. A new number of tokens may compile kernels: within timeout_s, as peers wait
        for them.
    presum: over NVLink, sum a token's rows on each rank before they are sent back: fewer bytes sent, but none of them
        during the second GEMM, one rounding more, and bits that depend on the number of ranks. The room in bf16 is
        then max_tokens * num_ranks rows, but a call takes as many rows of hidden, in bf16, as it takes of intermediate.
        None = if a model of the time predicts that it is faster with max_tokens: for small intermediate sizes. Ignored
        over gloo and NCCL.

    Attributes: num_experts (over all ranks), expert_offsets (rank r owns expert_offsets[r] : expert_offsets[r + 1]),
    transport ("nvlink", "nccl" or "gloo"), why (the reason for that transport), presum (True or False).

    Threads may share an object: its calls run one at a time. A call of one rank is then matched with any call of
    another, and each returns the rows of its own tokens; over gloo and NCCL all of them need the same k. Two objects on
    one NCCL group, or over NVLink of the same sizes, must not be called by two threads at once, because calls of
    different layers could be matched: give each object a group of its own (`dist.new_group`).

    Example, 4 ranks with 4 experts each: `ExpertParallel(pack(...)).moe(tokens, routing)`, where routing.num_experts is
    16 and rank 1 owns experts 4 to 7.

    Raises ValueError, on every rank, if the ranks disagree or one of them refuses its arguments; PeerTimeout if one
    is missing.
    """

    def __init__(
        self, experts: ExpertWeights, group: dist.ProcessGroup | DeviceMesh | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S, max_tokens: int | None = None, num_topk: int | None = None,
        presum: bool | None = None,
    ):  # fmt: skip
        refusal = _complaint(_check_options, experts, timeout_s, max_tokens, num_topk, presum)
        if not dist.is_initialized():
            raise ValueError(
                refusal or "group: expected an initialised torch.distributed; call init_process_group first"
            )
        group = _process_group(group)
        self.name = _name(dist.get_process_group_ranks(group))  # also if arguments are refused: all ranks count alike
        self.channel = _open_channel(group, *_usable(experts, timeout_s), self.name)
        _raise_together(gather_texts(self.channel, refusal, "opening the group"), refusal)
        self.experts, self.timeout_s = experts, timeout_s
        sizes = _agree(self.channel, experts, timeout_s, max_tokens, num_topk, presum)
        self.channel.watch.opened()
        self._lock: Any = threading.RLock()
        self.expert_offsets = [0, *itertools.accumulate(sizes)]
        self.num_experts = self.expert_offsets[-1]
        self.max_tokens, self.num_topk = max_tokens, num_topk
        self.transport = "gloo" if self.channel.data is self.channel.control else "nccl"
        self.domain, self.why = self._open_domain(group, presum)
        if self.domain is not None:
            self.transport, self._lock = "nvlink", self.domain.lock  # objects that share memory take turns
        self.presum = self.domain is not None and self.domain.layout.presum
        _instances[self.name] = self

    def moe(self, tokens: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Run the layer on this rank's tokens [M, H]: [M, H]; M may differ by rank and be 0. Collective.

        tokens, routing: in the dtypes and shapes that `envoi.moe` takes; topk_ids over all num_experts, -1 = masked
        slot; k may be anything, over gloo and NCCL the same on every rank.

        Equals `envoi.moe` on one rank that holds all experts and the tokens of all ranks, bit for bit; with presum, up
        to the rounding of a rank's sums, and in mxfp4 on Hopper with few tokens, for which one rank has kernels of its
        own, up to that of sums along K.
        Raises ValueError on every rank if any rank's arguments are refused, PeerTimeout if a rank is lost or late. Over
        NVLink the host doesn't wait for that: the rank whose arguments are wrong raises at once (but for ids, which
        only the device knows), the output is NaN everywhere, and a later call or `check` raises. A `routing` that is no
        Routing of tensors is an error on this rank alone.
        """
        if shortcuts.PREPARED and self.domain is not None and type(routing) is Routing and plain():
            return self._moe_prepared(tokens, routing)
        return self._moe(tokens, routing)

    def _moe(self, tokens: torch.Tensor, routing: Routing) -> torch.Tensor:
        rows, slots, dtype = as_rows(tokens, routing)
        ids, weights = slots.topk_ids, slots.topk_weights
        out = _moe_parallel(rows, weights, ids, routing.num_experts, self.name, *flatten(self.experts))
        return out if rows is tokens and dtype == out.dtype else out.to(dtype).view(tokens.shape)

    def _moe_prepared(self, tokens: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Run the layer by prepared launches, if these shapes have any; its checks are those of `_run_over_nvlink`."""
        with self._lock:
            domain, experts = self.domain, self.experts
            if domain is None:  # closed meanwhile
                return self._moe(tokens, routing)
            self._check_lateness()
            constants = "moe_parallel", routing.num_experts, *constants_of(experts)
            tensors = tokens, routing.topk_weights, routing.topk_ids, *tensors_of(experts)
            out = domain.calls.run(constants, tensors, partial(self._moe, tokens, routing))
            self.check()
            return out

    def check(self) -> None:
        """Raise the error of an earlier call, if one failed; over NVLink, of calls that the device has reached.

        After `torch.cuda.synchronize()` these are all calls. Not a collective call.
        """
        self._check_lateness()
        if self.domain is not None and any(self.domain.codes[1]):
            self._raise_refusal(self.domain)

    def close(self) -> None:
        """Free the object's memory; later calls raise ValueError. Not a collective call.

        Over NVLink, peers must have finished with this rank's memory: close after a barrier of all ranks.
        """
        with self._lock:
            _instances.pop(self.name, None)
            self.domain = None

    def _run(self, tokens: torch.Tensor, routing: Routing, experts: ExpertWeights) -> torch.Tensor:
        with self._lock:  # exchanges of two calls that interleave would be taken for each other's
            refusal = self._refusal(tokens, routing, experts)
            if self.domain is not None:
                return self._run_over_nvlink(self.domain, refusal, tokens, routing, experts)
            return self._run_over_collectives(refusal, tokens, routing, experts)

    def _run_over_collectives(
        self, refusal: str, tokens: torch.Tensor, routing: Routing, experts: ExpertWeights
    ) -> torch.Tensor:
        if not refusal:
            refusal = _complaint(check_ids, routing.topk_ids, self.num_experts)
        k = routing.topk_ids.shape[1] if not refusal else 0
        counts = count_tokens(routing.topk_ids, self.num_experts).tolist() if not refusal else [0] * self.num_experts
        header = gather_ints(self.channel, [int(bool(refusal)), k, *counts], "dispatch: exchange of counts")
        if header[:, 0].any():
            _raise_together(gather_texts(self.channel, refusal, "exchange of refusals"), refusal)
        _same_everywhere("routing.topk_ids: num_topk", header[:, 1].tolist())
        return nccl.run_layer(
            tokens, routing.topk_weights, routing.topk_ids, experts, header[:, 2:], self.expert_offsets, self.channel
        )

    def _run_over_nvlink(
        self, domain: Domain, refusal: str, tokens: torch.Tensor, routing: Routing, experts: ExpertWeights
    ) -> torch.Tensor:
        self._check_lateness()
        with torch.cuda.device(domain.memory.device):
            if refusal:
                domain.watch.store.set(f"refused/{domain.rank}", refusal)
                nvlink.refuse(domain)
                raise ValueError(refusal)
            out = nvlink.run_layer(domain, tokens, routing.topk_weights, routing.topk_ids, experts)
        # Not before: peers that don't know of the failure yet take part in this call, so this rank has to.
        self.check()
        return out

    def _check_lateness(self) -> None:
        """Raise PeerTimeout if a rank was late in this call or any before it: the group can't be used any more."""
        watch = self.channel.watch if self.domain is None else self.domain.watch
        if watch.failure is None and self.domain is not None and any(self.domain.codes[0]):
            codes = list(self.domain.codes[0])
            late = [rank for rank, code in enumerate(codes) if code]
            names = watch.first_to_say([watch.ranks[rank] for rank in late])
            watch.failure = PeerTimeout(names, nvlink.LATE_STEPS[codes[late[0]]], self.timeout_s, rank=watch.rank)
        if watch.failure is not None:
            raise watch.failure

    def _raise_refusal(self, domain: Domain) -> None:
        """Raise ValueError for arguments refused in this call or an earlier one, unless this rank's host has raised it.

        Resets the codes that it reads from `report`.
        """
        codes = list(domain.codes[1])
        complaining = [rank for rank, code in enumerate(codes) if code]
        for rank in complaining:  # not all: the device may write others meanwhile
            domain.codes[1][rank] = 0
        refused = [r for r in complaining if (r, codes[r]) != (domain.rank, REFUSED_ON_HOST)]
        if not refused:
            return
        text = f"routing.topk_ids: expected ids from 0 to {self.num_experts - 1}, or -1 for a masked slot"
        if codes[refused[0]] == REFUSED_ON_HOST:
            text = domain.watch.store.get(f"refused/{refused[0]}").decode()
        raise ValueError(f"rank {refused[0]} of the group refused its arguments in an earlier call: {text}")

    def _open_domain(self, group: dist.ProcessGroup, presum: bool | None) -> tuple[Domain | None, str]:
        """Return the memory shared over NVLink, or None, and the reason. Collective."""
        if self.transport == "gloo":
            return None, "the group is one of gloo"
        if self.max_tokens is None or self.num_topk is None:
            return None, "max_tokens and num_topk weren't given"
        refusals = gather_texts(self.channel, nvlink.supports_nvlink(self.experts), "opening the group")
        hosts = gather_texts(self.channel, platform.node(), "opening the group")
        if any(refusals) or len(set(hosts)) > 1:
            return None, next(filter(None, refusals), "the ranks are on several hosts")
        layout = SharedLayout(
            self.channel.num_ranks, self.num_experts, self.max_tokens, self.num_topk, self.experts.hidden,
            self.experts.format,
        )  # fmt: skip
        if presum is None:
            presum = pays(
                layout.hidden,
                self.experts.intermediate,
                layout.num_topk,
                layout.max_tokens,
                layout.num_ranks,
                layout.format,
            )
        layout = replace(layout, presum=presum)
        key = (tuple(self.channel.watch.ranks), layout, tuple(self.expert_offsets), self.timeout_s)
        domain = _domains.get(key)
        if domain is not None and any(domain.codes[0]):
            domain = None  # a rank was lost: the flags can't be trusted any more
        if all(gather_texts(self.channel, "known" if domain is not None else "", "opening the group")):
            return domain, NVLINK
        domain, why = self._new_domain(layout, group)
        if domain is not None:
            _domains[key] = domain
        return domain, why

    def _new_domain(self, layout: SharedLayout, group: dist.ProcessGroup) -> tuple[Domain | None, str]:
        """Allocate on all ranks, then map, so that no rank waits in the mapping for one that is out of memory."""
        domain = None

        def allocate() -> None:
            nonlocal domain
            arguments = (layout, self.channel.rank, self.expert_offsets, self.timeout_s, self.experts.device)
            domain = symmetric_memory.allocate(*arguments)
            domain.watch = self.channel.watch

        def connect() -> None:
            symmetric_memory.connect(cast(Domain, domain), group)

        for step in (allocate, connect):
            troubles = gather_texts(self.channel, _trouble(step), "opening the group")
            failed = [f"rank {rank}: {text}" for rank, text in enumerate(troubles) if text]
            if failed:
                return None, failed[0]
        return domain, NVLINK

    def _refusal(self, tokens: torch.Tensor, routing: Routing, experts: ExpertWeights) -> str:
        """Return what is wrong with this rank's arguments, as far as the host knows, or ""."""
        return _complaint(check_tokens, tokens, routing, experts) or _complaint(self._check_sizes, tokens, routing)

    def _check_sizes(self, tokens: torch.Tensor, routing: Routing) -> None:
        if routing.num_experts != self.num_experts:
            raise ValueError(
                f"routing.num_experts: expected {self.num_experts} over all ranks, got {routing.num_experts}"
            )
        if self.max_tokens is not None and len(tokens) > self.max_tokens:
            raise ValueError(f"tokens: expected at most {self.max_tokens} of them (max_tokens), got {len(tokens)}")
        k = routing.topk_ids.shape[1]
        if self.num_topk is not None and k > self.num_topk:
            raise ValueError(f"routing.topk_ids: expected at most {self.num_topk} slots a token (num_topk), got {k}")


def _check_options(
    experts: ExpertWeights, timeout_s: float, max_tokens: int | None, num_topk: int | None, presum: bool | None
) -> None:
    if not isinstance(experts, ExpertWeights):
        raise ValueError(f"experts: expected ExpertWeights from envoi.experts.pack, got {type(experts).__name__}")
    if not _is_timeout(timeout_s):
        raise ValueError(f"timeout_s: expected a positive number of seconds up to {MAX_TIMEOUT_S}, got {timeout_s!r}")
    for name, value in (("max_tokens", max_tokens), ("num_topk", num_topk)):
        if value is not None:
            expect_int(name, value, 1)
    if presum is not None and not isinstance(presum, bool):
        raise ValueError(f"presum: expected True, False or None, got {presum!r}")


def _is_timeout(seconds: object) -> bool:
    return isinstance(seconds, Real) and not isinstance(seconds, bool) and 0 < float(seconds) <= MAX_TIMEOUT_S


def _usable(experts: ExpertWeights, timeout_s: float) -> tuple[torch.device, float]:
    """Return the experts' device and the timeout; for arguments to be refused, defaults that can tell the peers so."""
    device = experts.device if isinstance(experts, ExpertWeights) else torch.device("cpu")
    return device, timeout_s if _is_timeout(timeout_s) else DEFAULT_TIMEOUT_S


def _raise_together(refusals: list[str], mine: str) -> None:
    """Raise ValueError on all ranks if one refused its arguments: the others would hang in the next exchange."""
    first = next((rank for rank, text in enumerate(refusals) if text), None)
    if first is not None:
        raise ValueError(mine or f"rank {first} of the group refused its arguments: {refusals[first]}")


def _trouble(step: Callable[[], None]) -> str:
    """Run a step; return the first line of its RuntimeError, or ""."""
    try:
        step()
    except RuntimeError as error:
        return str(error).partition("\n")[0] or type(error).__name__
    return ""


def _complaint(check: Callable, *arguments: object) -> str:
    """Run a check; return the text of its ValueError, or ""."""
    try:
        check(*arguments)
    except ValueError as error:
        return str(error)
    return ""


def _process_group(group: Any) -> dist.ProcessGroup:
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


def _open_channel(group: dist.ProcessGroup, device: torch.device, timeout_s: float, name: str) -> Channel:
    ranks = dist.get_process_group_ranks(group)
    # Only through the default group's store can ranks be told anything when a collective can't reach them.
    store = PrefixStore(name, dist.distributed_c10d._get_default_store())
    watch = Watch(store, ranks, dist.get_rank(), timeout_s)
    left_s = watch.join("opening the group")  # gloo would wait for a lost rank once for each try
    start = time.monotonic()
    try:
        # Not dist.new_group: it reuses names of destroyed groups, and gloo can't open a name twice.
        a_try = timedelta(seconds=left_s / CONNECT_TRIES)
        gloo = ProcessGroupGloo(PrefixStore("gloo", store), group.rank(), group.size(), a_try)
        gloo._set_default_timeout(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        watch.fail("opening the group", error, time.monotonic() - start)
    control = cast(dist.ProcessGroup, gloo)
    if "nccl" in dist.get_backend(group):
        return Channel(control, group, device, watch)
    return Channel(control, control, torch.device("cpu"), watch)


def _name(ranks: list[int]) -> str:
    """Make a unique name, equal on all ranks of a group, whatever other groups some of them belong to."""
    members = ",".join(map(str, ranks))
    return f"envoi {members} #{next(_serials.setdefault(members, itertools.count()))}"


def _agree(
    channel: Channel, experts: ExpertWeights, timeout_s: float, max_tokens: int | None, num_topk: int | None,
    presum: bool | None,
) -> list[int]:  # fmt: skip
    """Return every rank's number of experts. Raises ValueError unless all else is equal on all ranks. Collective."""
    mine = f"hidden={experts.hidden} intermediate={experts.intermediate} format={experts.format}"
    mine += f" activation={experts.activation} swiglu_limit={experts.swiglu_limit} bias={experts.down_bias is not None}"
    texts = gather_texts(channel, mine, "opening the group")
    _same_everywhere("experts", texts)
    _same_everywhere("timeout_s", gather_texts(channel, f"{float(timeout_s):g}", "opening the group"))
    _same_everywhere("sizes", gather_texts(channel, f"{max_tokens=} {num_topk=} {presum=}", "opening the group"))
    return gather_ints(channel, [experts.num_local_experts], "opening the group")[:, 0].tolist()


def _same_everywhere(what: str, values: list) -> None:
    for rank, value in enumerate(values):
        if value != values[0]:
            raise ValueError(
                f"{what}: expected the same on every rank, got {values[0]} on rank 0, {value} on rank {rank}"
            )


@operator("moe_parallel", empty_out, mlp_flops)
def _moe_parallel(
    tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, parallel: str,
    gate_up: torch.Tensor, gate_up_sf: torch.Tensor | None, gate_up_bias: torch.Tensor | None,
    down: torch.Tensor, down_sf: torch.Tensor | None, down_bias: torch.Tensor | None,
    format: str, activation: str, swiglu_limit: float | None, gate_up_tame: bool, down_tame: bool,
    order: str, gate_up_layout: str,
) -> torch.Tensor:  # fmt: skip
    experts = unflatten(
        gate_up, gate_up_sf, gate_up_bias, down, down_sf, down_bias, format, activation, swiglu_limit, gate_up_tame,
        down_tame, order, gate_up_layout,
    )  # fmt: skip
    if parallel not in _instances:
        raise ValueError("ExpertParallel: expected an open object, got one that was closed")
    return _instances[parallel]._run(tokens, Routing(topk_weights, topk_ids, num_experts), experts)
