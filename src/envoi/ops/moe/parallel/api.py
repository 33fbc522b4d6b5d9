"""Public class `envoi.ExpertParallel`: experts spread over the ranks of a torch.distributed group."""

import itertools
import threading
import warnings
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from envoi.estimates.exchange import gathering_pays, link_of
from envoi.ops.moe.op import (
    as_rows,
    check_call,
    check_ids,
    check_tokens,
    constants_of,
    empty_out,
    flatten,
    mlp_flops,
    tensors_of,
    unflatten,
    widened,
)
from envoi.ops.moe.parallel import counted, gathered, hosts_device, memory, nvlink
from envoi.ops.moe.parallel.collectives import connect_ranks, gather_texts
from envoi.ops.moe.parallel.dispatch import REFUSED_ON_HOST
from envoi.ops.moe.parallel.hosts import Hosts, agree_on_hosts, connect_hosts, connect_rail
from envoi.ops.moe.parallel.load import Load, empty_history, load_of, note
from envoi.ops.moe.parallel.opening import (
    DEFAULT_TIMEOUT_S,
    OPENING,
    agree_on_kernels,
    agree_on_sizes,
    check_options,
    check_out,
    check_sizes,
    complaint,
    device_and_timeout,
    name_object,
    open_channel,
    raise_together,
    ranks_by_store,
    resolve_group,
    same_everywhere,
)
from envoi.ops.moe.parallel.symmetric_memory import Domain, SharedLayout
from envoi.ops.moe.parallel.timeout import PeerTimeout
from envoi.ops.moe.parallel.trace import STEP as TRACE
from envoi.ops.moe.parallel.trace import Timeline, trace_call, untraceable
from envoi.ops.moe.parallel.warm_up import FIRST, CountedCall, ParallelCall, compile_together, compiled_form, unbounded
from envoi.ops.moe.warm_up import check_jobs, compiles, prepare, without_tensors
from envoi.runtime import shortcuts
from envoi.runtime.custom_op import operator, traced
from envoi.runtime.devices import Target
from envoi.runtime.prepared.calls import MISSED, Calls, Plannable, copied, plain
from envoi.runtime.prepared.replay import NOTHING_GIVEN, Given
from envoi.types import ExpertWeights, Routing

# The operator finds its object by name.
_instances: "weakref.WeakValueDictionary[str, ExpertParallel]" = weakref.WeakValueDictionary()


class ExpertParallel:
    """MoE layer over the ranks of a group. Rank r owns the experts after those of rank r - 1, as many as it packed.

    experts: this rank's experts, from `envoi.experts.pack`.
    group: a torch.distributed process group of gloo or NCCL, or a DeviceMesh of one dimension; None = the default
        group. Every rank of it makes the object, with the same hidden, intermediate, format, activation and timeout_s;
        the number of experts may differ.
    timeout_s: bounds every wait for a peer, and during the opening their sum; NCCL has 30 s to connect, at least.
    max_tokens, num_topk: the most tokens that a rank will have, and slots of a token. With both, ranks whose GPUs reach
        each other's memory (one host, NVLink) use kernels that read and write it. For that, room for
        max_tokens * num_topk rows of bf16 and num_ranks times as many in the experts' format is allocated once for all
        objects of the same sizes (a model's layers); between the GEMMs, a call takes num_ranks * max_tokens * num_topk
        rows of intermediate from torch's allocator. A call then copies no size to the host, never waits for the
        device, and can be captured in a CUDA graph. Calls and replays of all objects of a group must have the same
        order on every rank, on one stream. In the first call, or in `warm_up`, the ranks compile all that calls with
        up to max_tokens tokens need, and wait for each other; no later call compiles. Other ranks, over NCCL
        and gloo, gather all tokens with collectives of constant size, if `envoi.estimates.exchange` predicts that this
        is faster than to count first; over NCCL what is said above of the host, graphs, order and compiling is true of
        that too, and room for num_ranks * max_tokens * num_topk rows is allocated thrice, twice in bf16 and once in the
        experts' format. Where rows are counted over NCCL, peers wait beyond timeout_s for a rank that compiles then.
    presum: over NVLink, sum a token's rows on each rank before they are sent back: fewer bytes sent, but none of them
        during the second GEMM, one rounding more, and bits that depend on the number of ranks. The room in bf16 is
        then max_tokens * num_ranks rows, but a call takes as many rows of hidden, in bf16, as it takes of intermediate.
        None = if a model of the time predicts that it is faster with max_tokens: for small intermediate sizes. Over
        NCCL and gloo None means False, and True is ignored where tokens are counted.
    hosts: the name of the host of each rank of the group, or "hostname": a token then crosses to another host once,
        between ranks of the same place on their hosts, and is passed on there, between GPUs by the kernels of NVLink;
        its rows come back the same way, one for each slot, or with presum one sum for each host. Hosts have equally
        many ranks. Needs max_tokens and num_topk. None = rows travel between all ranks alike, as they do if GPUs of a
        host don't reach each other's memory (`why` says so). Over NCCL the room of max_tokens is that of NVLink
        for the tokens of num_ranks / ranks of a host ranks, in bf16 once more.
    fused: deprecated: False changes nothing and warns, True is refused. What it chose was slower, and was removed.

    Attributes: num_experts (over all ranks), expert_offsets (rank r owns expert_offsets[r] : expert_offsets[r + 1]),
    transport ("nvlink", "nccl" or "gloo"), why (the reason for that transport), exchange ("memory" over NVLink,
    "hosts", "gathered" or "counted") and presum (True or False).

    Threads may share an object: its calls run one at a time. A call of one rank is then matched with any call of
    another, and each returns the rows of its own tokens; where rows are counted all of them need the same k. Two
    objects on one NCCL group, or over NVLink of the same sizes, must not be called by two threads at once, because
    calls of different layers could be matched: give each object a group of its own (`dist.new_group`).

    Example, 4 ranks with 4 experts each: `ExpertParallel(pack(...)).moe(tokens, routing)`, where routing.num_experts is
    16 and rank 1 owns experts 4 to 7.

    Raises ValueError, on every rank, if the ranks disagree or one of them refuses its arguments; PeerTimeout if one
    is missing.
    """

    def __init__(
        self, experts: ExpertWeights, group: dist.ProcessGroup | DeviceMesh | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S, max_tokens: int | None = None, num_topk: int | None = None,
        presum: bool | None = None, hosts: str | Sequence[str] | None = None, fused: bool | None = None,
    ):  # fmt: skip
        refusal = complaint(check_options, experts, timeout_s, max_tokens, num_topk, presum, fused)
        if not dist.is_initialized():
            raise ValueError(
                refusal or "group: expected an initialised torch.distributed; call init_process_group first"
            )
        if fused is False:
            warnings.warn("fused: False is what ExpertParallel does; leave the argument away", DeprecationWarning, 2)
        group = resolve_group(group)
        # Also if arguments are refused: all ranks count alike.
        self.name = name_object(dist.get_process_group_ranks(group))
        self.channel = open_channel(group, *device_and_timeout(experts, timeout_s), self.name)
        raise_together(gather_texts(self.channel, refusal, OPENING), refusal)
        self.experts, self.timeout_s = experts, timeout_s
        sizes = agree_on_sizes(self.channel, experts, timeout_s, max_tokens, num_topk, presum)
        self._kernels = agree_on_kernels(self.channel, experts)
        names = [] if hosts is None else agree_on_hosts(self.channel, hosts, (max_tokens, num_topk), experts.device)
        self._hosts = tuple(names) if len(set(names)) > 1 else ()
        over_gloo = self.channel.data is self.channel.control
        grouped = connect_hosts(self.channel, names, self.name, timeout_s) if self._hosts and over_gloo else None
        rail = connect_rail(self.channel, group, names, self.name, timeout_s) if self._hosts and not over_gloo else None
        self.channel.watch.opened(ranks_by_store(self.channel))
        self._lock: Any = threading.RLock()
        self.expert_offsets = [0, *itertools.accumulate(sizes)]
        self.num_experts = self.expert_offsets[-1]
        self.rank_ends = torch.tensor(self.expert_offsets[1:], dtype=torch.int32, device=experts.device)
        self.max_tokens, self.num_topk = max_tokens, num_topk
        self._history = empty_history(self.num_experts, experts.device)
        self.transport = "gloo" if self.channel.data is self.channel.control else "nccl"
        self.room: gathered.Room | None = None
        self.buffers: memory.Buffers | None = None
        self.domain, self.why = self._open_domain(group, presum) if rail is None else (None, "")
        if self.domain is not None:
            self.transport = "nvlink"
        elif rail is not None:
            layout = replace(self._layout(cast(int, max_tokens), cast(int, num_topk)), presum=bool(presum))
            self.buffers, self.why = memory.open_hosts(self._owner, experts, layout, self._hosts, rail)
        if self.domain is None and self.buffers is None:
            self._open_room(bool(presum), group, grouped)
        shared = self._shared()
        if shared is not None:
            self._lock = shared.lock  # objects that share memory take turns
        self.presum, self.exchange = memory.exchange_of(self.domain, self.buffers, self.room)
        self._is_loaded = not compiles(experts.device)
        if self.exchange == "counted" and self.transport == "nccl":
            counted.oversee_calls(self.channel)
        _instances[self.name] = self

    def moe(self, tokens: torch.Tensor, routing: Routing, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Run the layer on this rank's tokens [M, H]: [M, H]; M may differ by rank and be 0. Collective.

        tokens, routing: in the dtypes and shapes that `envoi.moe` takes; topk_ids over all num_experts, -1 = masked
        slot; k is at most num_topk, to which masked slots are added, and where rows are counted equal on all ranks.
        out: contiguous, on 16 bytes, of the tokens' shape and dtype, sharing no memory with them: takes the result.

        Equals `envoi.moe` on one rank that holds all experts and the tokens of all ranks, bit for bit; with presum, up
        to the rounding of a rank's sums, and in mxfp4 on Hopper with few tokens, for which one rank has kernels of its
        own, up to that of sums along K.
        Raises ValueError on every rank if any rank's arguments are refused, PeerTimeout if a rank is lost or late. Over
        NVLink, and where tokens are gathered over NCCL, the host doesn't wait for that: the rank whose arguments are
        wrong raises at once (but for ids, which only the device knows), the output is NaN everywhere, and a later call
        or `check` raises. Calls that are compiled or traced refuse what they can on this rank alone.
        """
        refusal = "" if out is None else complaint(check_out, out, tokens)
        if refusal:
            return self._run(tokens, routing, self.experts, refusal)  # the peers have to hear of it
        given = NOTHING_GIVEN if out is None else Given([out])
        if shortcuts.PREPARED and self._calls is not None and type(routing) is Routing and plain():
            return self._moe_prepared(tokens, routing, given)
        return copied(self._moe(tokens, routing), given)

    def _moe(self, tokens: torch.Tensor, routing: Routing) -> torch.Tensor:
        refusal = "" if torch.compiler.is_compiling() else complaint(check_call, tokens, routing, self.experts)
        if refusal and (traced() or self.name not in _instances):  # then peers exchange nothing either
            raise ValueError(refusal)
        if refusal:
            return self._run(tokens, routing, self.experts, refusal)
        rows, slots, dtype = as_rows(tokens, routing)
        weights, ids = widened(slots.topk_weights, slots.topk_ids)
        out = _moe_parallel(rows, weights, ids, routing.num_experts, self.name, *flatten(self.experts))
        return out if rows is tokens and dtype == out.dtype else out.to(dtype).view(tokens.shape)

    def _moe_prepared(self, tokens: torch.Tensor, routing: Routing, given: Given) -> torch.Tensor:
        """Run the layer by prepared launches, if these shapes have any; its checks are those of `_run_on_device`."""
        with self._lock:
            calls, experts = self._calls, self.experts
            if calls is None or not self._is_loaded:  # closed meanwhile; in the first call ranks wait for each other
                return copied(self._moe(tokens, routing), given)
            self._check_lateness()
            constants = "moe_parallel", routing.num_experts, *constants_of(experts)
            tensors = tokens, routing.topk_weights, routing.topk_ids, *tensors_of(experts), self._history
            out = calls.replay(constants, tensors, given)
            if out is MISSED:
                arguments = tokens, routing, experts, self._history
                call = Plannable(self._launch_call, arguments, owner=self.domain or self.buffers)
                out = calls.run(constants, tensors, partial(self._moe, tokens, routing), call, given)
            self.check()
            return out

    def _launch_call(
        self, owner: Domain | memory.Buffers, tokens: torch.Tensor, routing: Routing, experts: ExpertWeights,
        history: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Launch what a call does, on this memory. Raises ValueError for arguments that `_moe` refuses."""
        refusal = complaint(check_call, tokens, routing, experts)
        rows, slots, dtype = as_rows(tokens, routing)
        if refusal := refusal or self._refusal(rows, slots, experts):
            raise ValueError(refusal)
        domain = owner if isinstance(owner, Domain) else owner.domain
        domain.history = history
        slots = widened(slots.topk_weights, slots.topk_ids)
        out = memory.run_layer(owner, *compiled_form(rows, *slots, domain.layout.num_topk), experts)
        return out if rows is tokens and dtype == out.dtype else out.to(dtype).view(tokens.shape)

    @property
    def _calls(self) -> Calls | None:
        """Prepared calls, None where the host takes part in a call."""
        owner = self.domain or self.buffers
        return None if owner is None else owner.calls

    def warm_up(self, jobs: int | None = None, progress: bool = True) -> int:
        """Compile and load all kernels that calls with up to max_tokens tokens need; return how many. Collective.

        Afterwards no call compiles, whatever its number of tokens; the first call does the same, but prepares none.
        Where rows are counted (`exchange`), any call may compile without it, and after it those that have fewer slots a
        token than num_topk. Ranks of one host share Triton's cache on disk, and so the work. Peers may take longer
        than timeout_s to compile. Layers of equal sizes, format and timeout_s share their kernels: one is enough.

        jobs: processes with which this rank compiles; by default the CPUs are divided among the ranks of a host.
        progress: show it on stderr if it takes longer than two seconds. Unless rows are counted (`exchange`), calls
        with up to 64 tokens, and with 72, 80 .. 256, are prepared too, by making each of them, if neither
        ENVOI_PREPARED=0 nor ENVOI_SAFE_LAUNCH=1 is set. On CPUs there is nothing to compile.

        Raises ValueError on every rank if one is given wrong arguments, or if rows are counted and max_tokens and
        num_topk weren't given; RuntimeError if a kernel can't be compiled; PeerTimeout if a rank is lost.
        """
        device = self.experts.device
        missing = unbounded(self.max_tokens, self.num_topk) if compiles(device) else ""
        refusal = complaint(check_jobs, jobs, progress) or missing
        raise_together(gather_texts(self.channel, refusal, "warm-up"), refusal)
        if not compiles(device):
            return 0
        shared = self._shared()
        with self._lock, torch.cuda.device(device):
            call = self._call_without_memory()
            sites = compile_together(self.channel, call, Target.of(device), jobs, progress)
            if shared is not None:
                self._is_loaded = True
                shared.has_kernels.add(self._kernels)
            if shortcuts.PREPARED and self._calls is not None:
                prepare(self.moe, self.experts, self.num_experts, call.most, call.num_topk)
                torch.cuda.synchronize(device)
        self.check()
        return len(sites)

    def _call_without_memory(self) -> ParallelCall | CountedCall:
        """Return this rank's call, on memory like that of its calls; or what runs counted rows, at most all ranks'."""
        layout = self._layout(cast(int, self.max_tokens), cast(int, self.num_topk))
        layout = replace(layout, presum=self.presum)
        k, experts = layout.num_topk, without_tensors(self.experts)
        if self._shared() is None:
            return CountedCall(layout.num_ranks * layout.max_tokens * k, k, experts)
        sizes = self.channel.rank, tuple(self.expert_offsets), self.timeout_s
        hosts = self._hosts if self.exchange == "hosts" else ()
        return ParallelCall(layout, k, *sizes, experts, self.buffers is not None, hosts)

    def check(self) -> None:
        """Raise the error of an earlier call, if one failed; where the host doesn't wait, of calls the device reached.

        After `torch.cuda.synchronize()` these are all calls. Not a collective call.
        """
        self._check_lateness()
        shared = self._shared()
        if shared is not None and any(shared.codes[1]):
            self._raise_refusal(shared)

    def load(self) -> Load:
        """Return the tokens that the last 128 calls brought to each expert and rank: see `Load`. Not a collective call.

        Neither a call nor this waits for the device: what the device has yet to do counts when it is done, replays of
        CUDA graphs too. Refused calls don't count. With exchange "hosts" a rank counts the experts of its own host; the
        others' stay 0.
        """
        return load_of(self._history, self.expert_offsets)

    def trace(self, tokens: torch.Tensor, routing: Routing) -> Timeline:
        """Return a timeline of one call: what each role of each multiprocessor did, and when. Collective; NVLink only.

        The call is compiled with clocks in its kernels, captured in a CUDA graph, and its sixth replay is recorded.
        Every rank returns what all ranks recorded. Other calls take as long as without it.
        Raises ValueError on every rank if one's arguments are refused, or if tokens travel otherwise.
        """
        rows, slots, _ = as_rows(tokens, routing)
        refusal = untraceable(self.exchange, self.experts.device) or self._refusal(rows, slots, self.experts)
        raise_together(gather_texts(self.channel, refusal, TRACE), refusal)
        with self._lock, torch.cuda.device(self.experts.device):
            call, run = cast(ParallelCall, self._call_without_memory()), partial(self._moe, rows, slots)
            return trace_call(self.channel, cast(Domain, self.domain), call, len(rows), run)

    def close(self) -> None:
        """Free the object's memory; later calls raise ValueError. Not a collective call.

        Over NVLink, peers must have finished with this rank's memory: close after a barrier of all ranks.
        """
        with self._lock:
            _instances.pop(self.name, None)
            self.domain = self.buffers = None

    def _run(self, tokens: torch.Tensor, routing: Routing, experts: ExpertWeights, refusal: str = "") -> torch.Tensor:
        with self._lock:  # exchanges of two calls that interleave would be taken for each other's
            refusal = refusal or self._refusal(tokens, routing, experts)
            shared = self._shared()
            if shared is not None:
                return self._run_on_device(shared, refusal, tokens, routing, experts)
            if self.room is not None:
                return self._run_gathered(self.room, refusal, tokens, routing, experts)
            return self._run_counted(refusal, tokens, routing, experts)

    def _run_counted(
        self, refusal: str, tokens: torch.Tensor, routing: Routing, experts: ExpertWeights
    ) -> torch.Tensor:
        ids = None if refusal else routing.topk_ids
        numbers = counted.agree(self.channel, ids, self.expert_offsets, self.rank_ends)
        if any(numbers.refused):
            refusal = refusal or complaint(check_ids, routing.topk_ids, self.num_experts)
            raise_together(gather_texts(self.channel, refusal, "exchange of refusals"), refusal)
        same_everywhere("routing.topk_ids: num_topk", numbers.k)
        note(self._history, numbers.experts)
        return counted.run_layer(
            tokens, routing.topk_weights, routing.topk_ids, experts, numbers, self.expert_offsets, self.rank_ends,
            self.channel,
        )  # fmt: skip

    def _run_gathered(
        self, room: gathered.Room, refusal: str, tokens: torch.Tensor, routing: Routing, experts: ExpertWeights
    ) -> torch.Tensor:
        refusal = refusal or complaint(check_ids, routing.topk_ids, self.num_experts)
        out = None
        if refusal:
            gathered.refuse(room)
        else:
            out = gathered.run_layer(room, tokens, routing.topk_weights, routing.topk_ids, experts)
        if out is None:
            raise_together(gather_texts(self.channel, refusal, "exchange of refusals"), refusal)
        return cast(torch.Tensor, out)

    def _run_on_device(
        self, domain: Domain, refusal: str, tokens: torch.Tensor, routing: Routing, experts: ExpertWeights
    ) -> torch.Tensor:
        self._check_lateness()
        domain.history = self._history
        device = domain.memory.device
        with torch.cuda.device(device):
            if self._kernels not in domain.has_kernels and compiles(device):
                compile_together(self.channel, self._call_without_memory(), Target.of(device), None, False, FIRST)
                domain.has_kernels.add(self._kernels)
            self._is_loaded = True
            if refusal:
                key = f"refused/{self.channel.rank}"
                with suppress(RuntimeError):  # without a store the peers hear of a refusal, not which
                    domain.watch.ask(lambda store: store.set(key, refusal), self.timeout_s)
                memory.refuse(self.buffers or domain)
                raise ValueError(refusal)
            given = *compiled_form(tokens, routing.topk_weights, routing.topk_ids, domain.layout.num_topk), experts
            out = memory.run_layer(self.buffers or domain, *given)
        # Not before: peers that don't know of the failure yet take part in this call, so this rank has to.
        self.check()
        return out

    def _shared(self) -> Domain | None:
        """Return the memory of calls that only the device follows, None if the host does."""
        return self.domain if self.buffers is None else self.buffers.domain

    def _check_lateness(self) -> None:
        """Raise PeerTimeout if a rank was late in this call or any before it: the group can't be used any more."""
        shared = self._shared()
        watch = self.channel.watch if shared is None else shared.watch
        codes = [] if shared is None else self._late_codes(shared)
        if watch.failure is None and any(codes):
            late = [rank for rank, code in enumerate(codes) if code]
            step = nvlink.LATE_STEPS[codes[late[0]]]
            if self.buffers is not None:  # who is late is asked of all
                # Within a host a flag was waited for; elsewhere rows of another call have come, without a wait.
                by_flag = isinstance(self.buffers, hosts_device.Buffers) and any(self.buffers.domain.codes[0])
                with suppress(PeerTimeout):
                    waited_s, number = self.timeout_s if by_flag else 0.0, self.buffers.calls_begun
                    watch.fail(step, TimeoutError(step), waited_s, number=number)
            else:
                names = watch.first_to_say([watch.ranks[rank] for rank in late])
                watch.failure = PeerTimeout(names, step, self.timeout_s, rank=watch.rank)
        if watch.failure is not None:
            raise watch.failure

    def _late_codes(self, shared: Domain) -> list[int]:
        """Return the code of each rank that shares memory with this one, then those of other hosts."""
        codes = list(shared.codes[0])
        return codes + list(self.buffers.late_codes) if isinstance(self.buffers, hosts_device.Buffers) else codes

    def _raise_refusal(self, domain: Domain) -> None:
        """Raise ValueError for arguments refused in this call or an earlier one, unless this rank's host has raised it.

        Resets the codes that it reads from `report`.
        """
        codes = list(domain.codes[1])
        complaining = [(at, code) for at, code in enumerate(codes) if code]
        for at, _ in complaining:  # not all: the device may write others meanwhile
            domain.codes[1][at] = 0
        if isinstance(self.buffers, hosts_device.Buffers):
            complaining = [self.buffers.culprit(*said) for said in complaining]
        refused = [said for said in complaining if said != (self.channel.rank, REFUSED_ON_HOST)]
        if not refused:
            return
        rank, code = refused[0]
        text = f"routing.topk_ids: expected ids from 0 to {self.num_experts - 1}, or -1 for a masked slot"
        if code == REFUSED_ON_HOST:
            text = domain.watch.ask(lambda store: store.get(f"refused/{rank}"), self.timeout_s).decode()
        raise ValueError(f"rank {rank} of the group refused its arguments in an earlier call: {text}")

    def _open_domain(self, group: dist.ProcessGroup, presum: bool | None) -> tuple[Domain | None, str]:
        """Return the memory shared over NVLink, or None, and the reason. Collective."""
        if self.transport == "gloo":
            return None, "the group is one of gloo"
        if self.max_tokens is None or self.num_topk is None:
            return None, "max_tokens and num_topk weren't given"
        layout = self._layout(self.max_tokens, self.num_topk)
        layout = memory.with_presum(layout, self.experts.intermediate, presum)
        return memory.open_domain(self._owner, self.experts, layout, group)

    @property
    def _owner(self) -> memory.Owner:
        offsets = tuple(self.expert_offsets)
        return memory.Owner(self.channel, self.name, offsets, self.timeout_s, self.experts.device)

    def _layout(self, max_tokens: int, num_topk: int) -> SharedLayout:
        sizes = self.channel.num_ranks, self.num_experts, max_tokens, num_topk
        return SharedLayout(*sizes, self.experts.hidden, self.experts.format)

    def _open_room(self, presum: bool, group: dist.ProcessGroup, hosts: Hosts | None) -> None:
        """Prepare to gather tokens if sizes were given and counting would take longer, or by host. Collective."""
        device = self.experts.device
        if self.transport == "nccl":
            connect_ranks(self.channel, self.channel.data, OPENING)
        if self.max_tokens is None or self.num_topk is None or (device.type == "cuda") != (self.transport == "nccl"):
            return
        layout = replace(self._layout(self.max_tokens, self.num_topk), presum=presum)
        link = link_of(self.transport, len(self.channel.watch.ranks_by_store) == layout.num_ranks)
        if hosts is None and not gathering_pays(
            link, layout.num_ranks, layout.max_tokens, layout.num_topk, layout.hidden, layout.token_bytes, presum,
        ):  # fmt: skip
            return
        if self.transport == "gloo":
            self.room = gathered.Room(layout, self.expert_offsets, self.rank_ends, self.channel, self._history, hosts)
        elif not any(gather_texts(self.channel, nvlink.why_not_kernels(self.experts), OPENING)):
            self.buffers = memory.open_gathered(self._owner, layout, group)

    def _refusal(self, tokens: torch.Tensor, routing: Routing, experts: ExpertWeights) -> str:
        """Return what is wrong with this rank's arguments, as far as the host knows, or ""."""
        sizes = self.num_experts, self.max_tokens, self.num_topk
        return complaint(check_tokens, tokens, routing, experts) or complaint(check_sizes, tokens, routing, *sizes)


@operator("moe_parallel", empty_out, mlp_flops)
def _moe_parallel(
    tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, parallel: str,
    gate_up: torch.Tensor, gate_up_sf: torch.Tensor | None, gate_up_bias: torch.Tensor | None, down: torch.Tensor,
    down_sf: torch.Tensor | None, down_bias: torch.Tensor | None, format: str, activation: str,
    swiglu_limit: float | None, gate_up_bounded: bool, down_bounded: bool, order: str, gate_up_layout: str,
    gate_up_scale: torch.Tensor | None, down_scale: torch.Tensor | None, gate_up_zeros: torch.Tensor | None,
    down_zeros: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    experts = unflatten(
        gate_up, gate_up_sf, gate_up_bias, down, down_sf, down_bias, format, activation, swiglu_limit, gate_up_bounded,
        down_bounded, order, gate_up_layout, gate_up_scale, down_scale, gate_up_zeros, down_zeros,
    )  # fmt: skip
    if parallel not in _instances:
        raise ValueError("ExpertParallel: expected an open object, got one that was closed")
    return _instances[parallel]._run(tokens, Routing(topk_weights, topk_ids, num_experts), experts)
