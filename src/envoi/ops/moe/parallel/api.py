"""Public class `envoi.ExpertParallel`: experts spread over the ranks of a torch.distributed group."""

import itertools
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from envoi.check import describe, expect_tensor
from envoi.ops.moe import op
from envoi.ops.moe.parallel import opening, regroup
from envoi.ops.moe.parallel.collectives import complaint, refuse_together
from envoi.ops.moe.parallel.exchange import Dispatched, OnDevice, Owner, Rows, Team
from envoi.ops.moe.parallel.load import Load, forget, load_of
from envoi.ops.moe.parallel.nvlink import SharedLayout
from envoi.ops.moe.parallel.placement import Placed, as_numbers, check_options, missing_experts, routed_offsets
from envoi.ops.moe.parallel.registered import CLOSED, instances, moe_parallel
from envoi.ops.moe.parallel.trace import STEP as TRACE
from envoi.ops.moe.parallel.trace import Timeline, trace_call
from envoi.ops.moe.parallel.warm_up import FIRST, CountedCall, ParallelCall, compile_together
from envoi.ops.moe.warm_up import check_jobs, compiles, prepare, without_tensors
from envoi.runtime import shortcuts
from envoi.runtime.custom_op import traced
from envoi.runtime.devices import Target, limited
from envoi.runtime.prepared.calls import MISSED, Calls, Plannable, copied, plain, scratch_bytes
from envoi.runtime.prepared.replay import NOTHING_GIVEN, Given, WorkspaceError
from envoi.types import ExpertWeights, Routing

_serials: dict[str, itertools.count] = {}


class ExpertParallel:
    """MoE layer over the ranks of a group. Rank r owns the experts after those of rank r - 1, as many as it packed.

    experts: this rank's experts, from `envoi.experts.pack`; with shared ones (`envoi.experts.with_shared`) the same of
        these on every rank, which compute a token's on its own rank. Neither num_topk nor a placement counts them.
    group: a torch.distributed process group of gloo or NCCL, or a DeviceMesh of one dimension; None = the default
        group. Every rank of it makes the object, with the same arguments but experts and num_sms, and experts of the
        same hidden, intermediate, format, activation and limit; the number of experts may differ.
    timeout_s: bounds every wait for a peer, and during the opening their sum; NCCL has 30 s to connect, at least.
    max_tokens, num_topk: the most tokens that a rank will have, and slots of a token. With both, unless counted, a call
        copies no size to the host, never waits for the device, and can be captured in a CUDA graph; all objects of a
        group must be called and replayed in the same order on every rank, on one stream; and memory for the most rows
        there can be is allocated once for all of the same sizes (docs/several_machines.md). In the first call, or in
        `warm_up`, the ranks compile all that calls need, and wait for each other; no later call compiles.
    exchange: how tokens are exchanged, and what is sent back. Those with "hosts" or "gathered" need max_tokens and
        num_topk.
        "auto": by kernels that read and write peers' memory where all GPUs reach it (one host, NVLink), else "gathered"
        or "counted", whichever `envoi.estimates.exchange` predicts to be faster;
        "rows": the same, and for every slot a row is sent back, which gives the bits of one rank;
        "sums": the same, but a token's rows are summed on each rank before they are sent back: fewer bytes, none of
        them during the second GEMM, one rounding more, and bits that depend on the number of ranks. Over NVLink "auto"
        may be this, if it is predicted to be faster;
        "hosts", "hosts+sums": a token crosses to another host once, over NCCL between ranks of the same local rank, and
        is passed on there by the kernels; its rows come back the same way, one for each slot, or one sum for each host.
        Hosts have equally many ranks. On one host it is "rows" or "sums"; where GPUs of a host don't reach each other's
        memory, "gathered" or "counted";
        "gathered", "gathered+sums": by NCCL's collectives of constant size between all ranks alike;
        "counted": by collectives of counted rows, one for each slot, for each of which the host waits. Over NCCL peers
        wait beyond timeout_s for a rank that compiles meanwhile. Over gloo, also with experts on GPUs, rows are always
        counted, whatever is asked for: the attributes `exchange` and `why` say so.
    num_sms: the most multiprocessors that a call's launches take, as in `envoi.gemm`; may differ by rank. None = all.
    placement: a layer's row of what engines call physical_to_logical_map, the same on every rank: which expert of a
        routing each one is that ranks have packed, in their order, integers [num_physical]. Several of equal weights
        may be one expert, its replicas: token m of rank r takes number (m + r) modulo how many there are. -1 = unused.
        None = each is the expert of its own number. `envoi.experts.balanced_placement` makes one; `load().placement`,
        which has -1 for shared experts besides, is one too.
    num_experts: with a placement, the experts of a routing if some of them may be missing: tokens routed to one come
        out NaN, all others as ever. None = those that the placement names, each of which has to be there.
    results: "bf16", or "fp8_1x128": over NVLink rows are sent back in E4M3 with a float32 factor for each 128 columns,
        which have to divide hidden: half the bytes, an error of 0.026 more (docs/several_machines.md), and bits that
        the number of ranks doesn't change. Not with sums, which "auto" then isn't, nor with "gathered" or "counted".
        Where "auto" or "hosts" isn't by NVLink alone rows stay bf16: the attribute `results` says so.
    hosts: with exchange "hosts", the name of the host of each rank of the group; None = the machines' names. One name
        for all is one host; ranks of one name have to be on one machine.
    presum, fused: deprecated. presum: True means exchange "sums", False "rows", with hosts "hosts+sums" and "hosts".
        fused: False changes nothing, True is refused. What it chose was slower, and was removed.

    Attributes: num_experts (of a routing), expert_offsets (rank r owns expert_offsets[r] : expert_offsets[r + 1]; with
        a placement, or shared experts, a rank's last, these are physical experts), placement (a tuple, or None),
        missing_experts (see num_experts), group, transport ("nvlink", "nccl" or "gloo"), why (the reason for that
        transport), exchange ("memory" over NVLink, "hosts", "gathered" or "counted"), presum (True or False), results.

    Threads may share an object: its calls run one at a time, each is matched with any call of another rank, and each
    returns the rows of its own tokens; where rows are counted all of them need the same k. Two objects on one NCCL
    group, or over NVLink of the same sizes, must not be called by two threads at once, as calls of different layers
    could be matched: give each object a group of its own (`dist.new_group`).

    Example, 4 ranks with 4 experts each: `ExpertParallel(pack(...)).moe(tokens, routing)`, where routing.num_experts is
    16 and rank 1 owns experts 4 to 7.

    Raises ValueError, on every rank, if the ranks disagree or one of them refuses its arguments; PeerTimeout if one
    is missing.
    """

    @torch.inference_mode(False)  # counts that a call, or a thread, adds to outside of that mode too
    def __init__(
        self, experts: ExpertWeights, group: dist.ProcessGroup | DeviceMesh | None = None,
        timeout_s: float = opening.DEFAULT_TIMEOUT_S, max_tokens: int | None = None, num_topk: int | None = None,
        presum: bool | None = None, hosts: str | Sequence[str] | None = None, fused: bool | None = None, *,
        exchange: str = "auto", num_sms: int | None = None,
        placement: Sequence[int] | torch.Tensor | None = None, num_experts: int | None = None, results: str = "bf16",
    ):  # fmt: skip
        options = experts, timeout_s, max_tokens, num_topk, exchange, num_sms, hosts, presum, fused, results
        refusal = complaint(opening.check_options, *options) or complaint(check_options, placement, num_experts)
        if not dist.is_initialized():
            raise ValueError(
                refusal or "group: expected an initialised torch.distributed; call init_process_group first"
            )
        exchange, warned = opening.wanted_by(exchange, hosts, presum, fused)
        for text in warned:
            warnings.warn(text, DeprecationWarning, 3)
        self.group = group = opening.resolve_group(group)
        self._backend = dist.get_backend_config(group)
        self._options = {
            "timeout_s": timeout_s, "max_tokens": max_tokens, "num_topk": num_topk, "hosts": hosts,
            "exchange": exchange, "num_sms": num_sms, "results": results,
        }  # fmt: skip
        # Unique, and equal on all ranks, which count their groups' objects alike, also those that are refused.
        ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
        self.name = f"envoi {ranks} #{next(_serials.setdefault(ranks, itertools.count()))}"
        self.channel = channel = opening.open_channel(group, experts, timeout_s, self.name)
        refuse_together(channel, refusal, opening.OPENING)
        self.experts, self.timeout_s, self.num_sms = experts, timeout_s, num_sms
        self.max_tokens, self.num_topk = max_tokens, num_topk
        same = {"timeout_s": f"{float(timeout_s):g}", "sizes": f"{max_tokens=} {num_topk=} {exchange=} {num_experts=}"}
        same["sizes"] += f" {results=}"
        hosts = opening.HOSTNAME if hosts is None else list(hosts) if isinstance(hosts, tuple) else hosts
        given = None if placement is None else as_numbers(placement)
        peers = opening.tell_peers(channel, experts, same | {"hosts": repr(hosts)}, num_sms, given)
        self._kernels = repr([peer.kernels for peer in peers])
        wanted, backend = opening.EXCHANGES[exchange]._replace(results=opening.RESULTS[results]), None
        self._hosts = tuple[str, ...]()
        if wanted.route == "hosts":
            self._hosts = opening.hosts_of(peers, hosts)
            wanted = wanted if self._hosts else wanted._replace(route=None)
        if self._hosts and channel.queues and not any(peer.why_not for peer in peers):
            backend = opening.connect_rail(channel, group, self._hosts, self.name, timeout_s)
        channel.watch.opened([peer.by_store for peer in peers])
        self._team = team = Team.of(channel, peers, self.name, experts, num_experts)
        self.expert_offsets, self.num_experts = list(team.expert_offsets), team.num_experts
        self.placement, self._may_lack = None if given is None else team.routed(given), num_experts is not None
        self._layout = opening.layout_of(team, experts, max_tokens, num_topk)
        self._exchange: opening.Exchange | None
        sizes = team, experts.intermediate, self._layout
        self._exchange, self.why = opening.open_exchange(*sizes, wanted, group, self._hosts, backend)
        self._lock = self._exchange.lock
        self.exchange, self.presum = self._exchange.name, self._exchange.presum
        self.results = self._exchange.results
        self.transport = "nvlink" if self.exchange == "memory" else "nccl" if channel.queues else "gloo"
        self._is_loaded = not compiles(experts.device)
        instances[self.name] = self

    def moe(
        self, tokens: torch.Tensor, routing: Routing, *, out: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Run the layer on this rank's tokens [M, H]: [M, H]; M may differ by rank and be 0. Collective.

        tokens, routing: in the dtypes and shapes that `envoi.moe` takes; topk_ids over all num_experts, -1 = masked
        slot; k is at most num_topk, to which masked slots are added, and where rows are counted equal on all ranks.
        out: contiguous, on 16 bytes, of the tokens' shape and dtype, sharing no memory with them: takes the result.
        workspace: as in `envoi.gemm`, memory for the call's own use, of `workspace_bytes` or more; may differ by rank.

        Equals `envoi.moe` with batch_invariant on one rank that holds all experts and the tokens of all ranks, bit for
        bit, whichever of the replicas compute, since their weights are equal; with presum, up to the rounding of a
        rank's sums, with results in FP8 up to that of rows.
        Raises ValueError on every rank if any rank's arguments are refused, PeerTimeout if a rank is lost or late.
        Unless rows are counted the host doesn't wait for that: the rank whose arguments are wrong raises at once (but
        for ids, which only the device knows), the output is NaN everywhere, and a later call or `check` raises. Calls
        that are compiled or traced refuse what they can on this rank alone.
        """
        given = NOTHING_GIVEN
        if out is not None or workspace is not None:
            if refusal := complaint(opening.check_given, out, workspace, tokens, self.experts.device):
                return self._run(tokens, routing, self.experts, refusal)  # the peers have to hear of it
            given = Given(None if out is None else [out], workspace)
        if shortcuts.PREPARED and self._calls is not None and type(routing) is Routing and plain():
            return self._moe_prepared(tokens, routing, given)
        return copied(self._moe(tokens, routing), given)

    def _moe(self, tokens: torch.Tensor, routing: Routing) -> torch.Tensor:
        refusal = "" if torch.compiler.is_compiling() else complaint(op.check_call, tokens, routing, self.experts)
        if refusal and (traced() or self.name not in instances):  # then peers exchange nothing either
            raise ValueError(refusal)
        if refusal:
            return self._run(tokens, routing, self.experts, refusal)
        rows, slots, dtype = op.as_rows(tokens, routing)
        weights, ids = op.widened(slots.topk_weights, slots.topk_ids)
        out = moe_parallel(rows, weights, ids, routing.num_experts, self.name, *op.flatten(self.experts))
        return out if rows is tokens and dtype == out.dtype else out.to(dtype).view(tokens.shape)

    def _moe_prepared(self, tokens: torch.Tensor, routing: Routing, given: Given) -> torch.Tensor:
        """Run the layer by prepared launches, if these shapes have any; its checks are those of `_run`."""
        with self._lock, self._limits():
            calls, experts = self._calls, self.experts
            if calls is None or not self._is_loaded:  # closed meanwhile; in the first call ranks wait for each other
                return copied(self._moe(tokens, routing), given)
            exchange = cast(OnDevice, self._exchange)
            exchange.check_lateness()
            exchange.note(None)
            constants = "moe_parallel", routing.num_experts, self.num_sms, *op.constants_of(experts)
            arguments, tensors = self._call_on(tokens, routing)
            try:
                out = calls.replay(constants, tensors, given)
                if out is MISSED:
                    call = Plannable(self._launch_call, arguments, owner=exchange.owner)
                    out = calls.run(constants, tensors, partial(self._moe, tokens, routing), call, given)
            except WorkspaceError as error:  # before any launch
                return self._run(tokens, routing, experts, str(error))
            exchange.check()
            return out

    def _call_on(self, tokens: torch.Tensor, routing: Routing) -> tuple[tuple, tuple]:
        """Return the arguments of `_launch_call` but the first, and all tensors among them."""
        team, experts = self._team, self.experts
        tensors = tokens, routing.topk_weights, routing.topk_ids, *op.tensors_of(experts), team.history
        table = () if team.placed is None else (team.placed.table,)
        return (tokens, routing, experts, team.history, team.placed), tensors + table

    def _launch_call(
        self, owner: Owner, tokens: torch.Tensor, routing: Routing, experts: ExpertWeights, history: torch.Tensor,
        placed: Placed | None,
    ) -> torch.Tensor:  # fmt: skip
        """Launch what a call does, on this memory. Raises ValueError for arguments that `_moe` refuses."""
        refusal = complaint(op.check_call, tokens, routing, experts)
        rows, slots, dtype = op.as_rows(tokens, routing)
        if refusal := refusal or self._refusal(rows, slots, experts):
            raise ValueError(refusal)
        exchange = OnDevice(owner)
        exchange.domain.history = history
        out = exchange.run_layer(rows, *op.widened(slots.topk_weights, slots.topk_ids), experts, placed)
        return out if rows is tokens and dtype == out.dtype else out.to(dtype).view(tokens.shape)

    def workspace_bytes(self, tokens: torch.Tensor, routing: Routing) -> int:
        """Return the bytes of `workspace=` of a call with tensors like these, which may be on "meta". Not collective.

        0 if the call needs none, as where rows are counted, of any tensors. More tokens need more. Else raises
        ValueError as `moe` does, and for tensors that no call could be planned for.
        """
        if not isinstance(exchange := self._open_exchange(), OnDevice):
            return 0
        with self._lock, self._on_device():
            arguments, tensors = self._call_on(tokens, routing)
            return scratch_bytes(tensors, Plannable(self._launch_call, arguments, owner=exchange.owner))

    def dispatch(self, tokens: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> Dispatched:
        """Send this rank's tokens [M, H] to the ranks of their experts; return the rows of this rank's. Collective.

        For experts that aren't Envoi's: `moe` is dispatch, experts, combine, with the same bits. Every rank calls
        `combine` next, on the same stream. Arguments are those of `moe`: tokens in bf16 or fp16, topk_ids [M, k] int32
        or int64, -1 = masked slot, topk_weights [M, k] float32, bf16 or fp16.

        Unless counted, rows are in memory that the next call of any object of these sizes writes, P is the most that
        there can be, and a CUDA graph can hold both calls. Raises as `moe` does. Not for torch.compile.
        """
        routing, rows, dtype = Routing(topk_weights, topk_ids, self.num_experts), tokens, torch.bfloat16
        refusal = complaint(op.check_call, tokens, routing, self.experts)
        if not refusal:
            rows, routing, dtype = op.as_rows(tokens, routing)
            routing = Routing(*op.widened(routing.topk_weights, routing.topk_ids), self.num_experts)
        with self._lock, self._on_device():
            received = self._dispatch(rows, routing, refusal)
            self._open_exchange().note(received)
        return Dispatched(*received[:3], tuple(tokens.shape), dtype, received)

    def combine(self, rows: torch.Tensor, handle: Dispatched, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Send rows back to the ranks of their tokens; return the sum of each of this rank's tokens. Collective.

        rows [P, H] bf16, contiguous: what the experts made of handle.rows, in their order, each times its weight in
        handle.topk_weights. handle: what `dispatch` returned for the last call, once. out: takes the result, as for
        `moe`.

        Returns tokens of the shape and dtype that `dispatch` took: the sums of their rows in the order of the slots, in
        float32, rounded once; with presum of each rank's, or host's, sums. Raises ValueError on this rank alone for
        wrong arguments, PeerTimeout if a rank is lost or late.
        """
        if not isinstance(handle, Dispatched):
            raise ValueError(f"handle: expected what dispatch returned, got {describe(handle)}")
        expect_tensor("rows", rows, torch.bfloat16, tuple(handle.rows.shape), self.experts.device)
        if not rows.is_contiguous() or rows.data_ptr() % 16:
            raise ValueError("rows: expected a contiguous tensor at a multiple of 16 bytes, got another")
        if out is not None:
            opening.check_out(out, torch.empty(handle.shape, dtype=handle.dtype, device=self.experts.device))
        with self._lock, self._on_device():
            exchange = self._open_exchange()
            if exchange.pending is not handle.received:  # where rows are counted, peers would expect other numbers
                raise ValueError("handle: expected that of the last call, whose rows a later one hasn't replaced")
            exchange.note(None)
            total = exchange.combine(rows, handle.received, by_others=True)
        self.check()
        total = total.to(handle.dtype).view(handle.shape)
        return total if out is None else out.copy_(total)

    @property
    def _calls(self) -> Calls | None:
        """Prepared calls, None where the host takes part in a call."""
        return self._exchange.domain.calls if isinstance(self._exchange, OnDevice) else None

    def _limits(self) -> AbstractContextManager[None]:
        return nullcontext() if self.num_sms is None else limited(self.num_sms)

    def _on_device(self) -> AbstractContextManager:
        """Context of a call: this rank's GPU, and its share of it."""
        found = ExitStack()
        if self.experts.device.type == "cuda" or isinstance(self._exchange, OnDevice):
            found.enter_context(torch.cuda.device(self.experts.device))
        found.enter_context(self._limits())
        return found

    def warm_up(self, jobs: int | None = None, progress: bool = True) -> int:
        """Compile and load all kernels that calls with up to max_tokens tokens need; return how many. Collective.

        Afterwards no call compiles, whatever its number of tokens; the first call does the same, but prepares none.
        Where rows are counted, any call may compile without it, and after it those that have fewer slots a token than
        num_topk. Ranks of one host share Triton's cache on disk, and so the work, for which peers may take longer than
        timeout_s. Layers of equal sizes, format and timeout_s share their kernels: one is enough.

        jobs: processes with which this rank compiles; by default the CPUs are divided among the ranks of a host.
        progress: show it on stderr if it takes longer than two seconds. Unless rows are counted, or ENVOI_PREPARED=0 or
        ENVOI_SAFE_LAUNCH=1 is set, calls with up to 64 tokens, and with 72, 80 .. 256, are made, and so prepared, too.
        On CPUs there is nothing to compile.

        Raises ValueError on every rank if one is given wrong arguments, or if rows are counted and max_tokens and
        num_topk weren't given; RuntimeError if a kernel can't be compiled; PeerTimeout if a rank is lost.
        """
        device = self.experts.device
        refusal = complaint(check_jobs, jobs, progress)
        if not refusal and compiles(device) and None in (self.max_tokens, self.num_topk):
            refusal = "warm_up: expected max_tokens and num_topk, got None: without them any number of rows may come"
        refuse_together(self.channel, refusal, "warm-up")
        if not compiles(device):
            return 0
        with self._lock, self._on_device():
            call = self._call_without_memory()
            sites = compile_together(self.channel, call, Target.of(device), jobs, progress)
            if isinstance(self._exchange, OnDevice):
                self._is_loaded = True
                self._exchange.domain.has_kernels.add(self._kernels)
            if shortcuts.PREPARED and self._calls is not None:
                prepare(self.moe, self.experts, self.num_experts, call.most, call.num_topk)
                torch.cuda.synchronize(device)
        self.check()
        return len(sites)

    def _call_without_memory(self) -> ParallelCall | CountedCall:
        """Return this rank's call, on memory like that of its calls; or what runs counted rows, at most all ranks'."""
        layout = replace(cast(SharedLayout, self._layout), presum=self.presum, results=opening.RESULTS[self.results])
        k, experts = cast(int, self.num_topk), without_tensors(self.experts)
        num_experts = None if self._team.placed is None else self.num_experts
        if not isinstance(self._exchange, OnDevice):
            return CountedCall(layout.num_ranks * layout.slot_capacity, k, experts, num_experts, layout.num_experts)
        sizes = self.channel.rank, tuple(self.expert_offsets), self.timeout_s
        ranks = tuple(str(rank) for rank in range(layout.num_ranks))
        hosts = {"memory": (), "gathered": ranks, "hosts": self._hosts}[self.exchange]
        return ParallelCall(layout, k, *sizes, experts, hosts, num_experts)

    def check(self) -> None:
        """Raise the error of an earlier call, if one failed; where the host doesn't wait, of calls the device reached.

        After `torch.cuda.synchronize()` these are all calls. Not a collective call.
        """
        if self._exchange is not None:
            self._exchange.check()
        elif self.channel.watch.failure is not None:
            raise self.channel.watch.failure

    def load(self) -> Load:
        """Return the tokens that the last 128 calls brought to each expert and rank: see `Load`. Not a collective call.

        Neither a call nor this waits for the device: what the device has yet to do counts when it is done, replays of
        CUDA graphs too. Refused calls don't count. With exchange "hosts" a rank counts the experts of its own host,
        with "gathered" its own; the others' stay 0.
        """
        team = self._team
        return load_of(team.history, self.expert_offsets, team.placed, team.physical(self.placement))

    def update_placement(self, placement: Sequence[int] | torch.Tensor) -> None:
        """Go on with another placement from the next call on, also in graphs that were captured before. Collective.

        placement: as in the constructor. Every rank calls this between the same two calls, or replays, on their stream,
        and between these writes the weights that have moved to it, in place, into the tensors of `experts`:
        nothing notices a call for which ranks have different ones. The host doesn't wait for the device. `load` begins
        anew. Not while a graph is captured. Raises ValueError on every rank if one's is refused or they differ.
        """
        with self._lock, self._on_device():
            now = self.placement, self._may_lack, complaint(self._open_exchange)
            given = regroup.agree_on(self._team, placement, *now)
            cast(Placed, self._team.placed).update(cast(tuple, self._team.physical(given)))
            forget(self._team.history)
            self.placement = given

    @property
    def missing_experts(self) -> tuple[int, ...]:
        """Experts of a routing that no rank has, in ascending order: tokens routed to one come out NaN."""
        return () if self.placement is None else missing_experts(self.placement, self.num_experts)

    def without(
        self, ranks: Sequence[int], group: dist.ProcessGroup | DeviceMesh | None = None, **options: Any
    ) -> "ExpertParallel":
        """Return an object like this one over the ranks that are left, and close this one. Collective over those.

        ranks: global ranks that are lost: `PeerTimeout.ranks`. group: of those that are left, in their order; None = a
        new one, which every call makes: of many layers give all but the first the `group` of the first one's result
        (`dist.new_group` may wait for lost ranks). options: of the constructor, in place of this object's.

        Experts with a replica on a rank that is left are computed there, with the same bits. The others are
        `missing_experts`: tokens routed to one come out NaN, and no other token changes. Takes as long as an opening;
        graphs have to be captured again. Needs the store of the default group, so the process that hosts it.
        Raises ValueError for ranks that aren't the group's, PeerTimeout if a rank that is left doesn't come, as where
        another is lost or ranks name different ones.
        """
        watch, routed = self.channel.watch, routed_offsets(self.expert_offsets, self.experts.num_shared)
        places = regroup.places_left(watch, ranks)
        group = regroup.group_of(watch, [watch.ranks[place] for place in places], self._backend, group)
        given = regroup.options_left(self._options, places, self.placement or range(routed[-1]), routed)
        given |= {"num_experts": self.num_experts, **options}
        made = ExpertParallel(self.experts, group, **given)
        self.close()  # not before: peers may still read this rank's memory until they open the new one
        return made

    def trace(self, tokens: torch.Tensor, routing: Routing) -> Timeline:
        """Return a timeline of one call: what each role of each multiprocessor did, and when. Collective; NVLink only.

        The call is compiled with clocks in its kernels, captured in a CUDA graph, and its sixth replay is recorded.
        Every rank returns what all ranks recorded. Raises ValueError on every rank if one's arguments are refused.
        """
        rows, slots, _ = op.as_rows(tokens, routing)
        refusal = self._refusal(rows, slots, self.experts)
        if self.exchange != "memory" or self.experts.device.type != "cuda":
            refusal = "trace: expected GPUs that exchange tokens through each other's memory, got exchange "
            refusal += f"{self.exchange!r} on {self.experts.device}"
        refuse_together(self.channel, refusal, TRACE)
        with self._lock, self._on_device():
            call, run = cast(ParallelCall, self._call_without_memory()), partial(self._moe, rows, slots)
            return trace_call(self.channel, cast(OnDevice, self._exchange).domain, call, len(rows), run)

    def close(self) -> None:
        """Free the object's memory; later calls raise ValueError. Not a collective call.

        Its gloo group, some threads and sockets, is freed with the object itself, which mustn't be kept for that.
        Over NVLink, peers must have finished with this rank's memory: close, or end a `with`, after a barrier of all.
        """
        with self._lock:
            instances.pop(self.name, None)
            self._exchange = None

    def __enter__(self) -> "ExpertParallel":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        x, num_ranks = self.experts, len(self.expert_offsets) - 1
        sizes = f"num_experts={self.num_experts}, hidden={x.hidden}, intermediate={x.intermediate}"
        way = f"{x.format}, {self.transport}, {self.exchange}" + ", closed" * (self._exchange is None)
        return f"ExpertParallel(rank {self.channel.rank} of {num_ranks}, {sizes}, {way})"

    def _run(self, tokens: torch.Tensor, routing: Routing, experts: ExpertWeights, refusal: str = "") -> torch.Tensor:
        with self._lock, self._on_device():  # exchanges of two calls that interleave would be taken for each other's
            exchange, received = self._open_exchange(), self._dispatch(tokens, routing, refusal)
            out = exchange.combine(exchange.run_experts(received, experts), received)
            # Not before: peers that don't know of the failure yet take part in this call, so this rank has to.
            exchange.check()
            return out

    def _dispatch(self, tokens: torch.Tensor, routing: Routing, refusal: str) -> Rows:
        exchange = self._open_exchange()
        refusal = refusal or self._refusal(tokens, routing, self.experts)
        exchange.note(None)
        if isinstance(exchange, OnDevice):
            exchange.check_lateness()
            device = exchange.domain.memory.device
            if self._kernels not in exchange.domain.has_kernels and compiles(device):
                compile_together(self.channel, self._call_without_memory(), Target.of(device), None, False, FIRST)
                exchange.domain.has_kernels.add(self._kernels)
            self._is_loaded = True
        # Of wrong arguments nothing is looked at: a routing may be anything.
        weights, ids = (tokens, tokens) if refusal else (routing.topk_weights, routing.topk_ids)
        return exchange.dispatch(tokens, weights, ids, self._team, refusal)

    def _open_exchange(self) -> opening.Exchange:
        if self._exchange is None:
            raise ValueError(CLOSED)
        return self._exchange

    def _refusal(self, tokens: torch.Tensor, routing: Routing, experts: ExpertWeights) -> str:
        """Return what is wrong with this rank's arguments, as far as the host knows, or ""."""
        wrong = complaint(op.check_tokens, tokens, routing, experts)
        most = self.max_tokens, self.num_topk
        return wrong or complaint(opening.check_sizes, tokens, routing, self.num_experts, *most)
