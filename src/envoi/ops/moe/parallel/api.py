"""Public class `envoi.ExpertParallel`: experts spread over the ranks of a torch.distributed group."""

import itertools
import warnings
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from envoi.check import describe, expect_tensor
from envoi.ops.moe.op import (
    as_rows,
    check_call,
    check_tokens,
    constants_of,
    empty_out,
    flatten,
    mlp_flops,
    tensors_of,
    unflatten,
    widened,
)
from envoi.ops.moe.parallel.collectives import gather_texts
from envoi.ops.moe.parallel.exchange import Exchange, OnDevice, Owner, Rows, Team, domain_of, run_layer
from envoi.ops.moe.parallel.load import Load, empty_history, load_of
from envoi.ops.moe.parallel.memory import open_exchange
from envoi.ops.moe.parallel.opening import (
    DEFAULT_TIMEOUT_S,
    EXCHANGES,
    HOSTNAME,
    OPENING,
    agree_on_hosts,
    agree_on_kernels,
    agree_on_sizes,
    check_options,
    check_out,
    check_sizes,
    complaint,
    connect_hosts,
    connect_rail,
    device_and_timeout,
    name_object,
    open_channel,
    raise_together,
    ranks_by_store,
    resolve_group,
    wanted_by,
)
from envoi.ops.moe.parallel.symmetric_memory import SharedLayout
from envoi.ops.moe.parallel.trace import STEP as TRACE
from envoi.ops.moe.parallel.trace import Timeline, trace_call, untraceable
from envoi.ops.moe.parallel.warm_up import FIRST, CountedCall, ParallelCall, compile_together, unbounded
from envoi.ops.moe.warm_up import check_jobs, compiles, prepare, without_tensors
from envoi.runtime import shortcuts
from envoi.runtime.custom_op import operator, traced
from envoi.runtime.devices import Target, limited
from envoi.runtime.prepared.calls import MISSED, Calls, Plannable, copied, plain
from envoi.runtime.prepared.replay import NOTHING_GIVEN, Given
from envoi.types import ExpertWeights, Matrix, Routing

# The operator finds its object by name.
CLOSED = "ExpertParallel: expected an open object, got one that was closed"
_instances: "weakref.WeakValueDictionary[str, ExpertParallel]" = weakref.WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class Dispatched:
    """Rows that a rank has received for its experts: what `ExpertParallel.dispatch` returns and `combine` takes.

    rows [P, H]: tokens of all ranks sorted by (expert, source rank, slot); bf16, or a QuantTensor in the format's
        scheme for tokens. offsets [E + 1] int32, on the device: this rank's expert e owns rows offsets[e] :
        offsets[e + 1]; rows past offsets[E] are undefined. topk_weights [P] float32: the routing weight of each row.
    """

    rows: Matrix
    offsets: torch.Tensor
    topk_weights: torch.Tensor
    shape: tuple[int, ...] = field(repr=False)
    dtype: torch.dtype = field(repr=False)
    received: Rows = field(repr=False)


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
    exchange: how tokens are exchanged and what is sent back.
        "auto": the fastest way that there is, which may be "sums" over NVLink if a model of the time predicts it;
        "rows": the fastest way that sends a row for every slot back, which gives the bits of one rank;
        "sums": a token's rows are summed on each rank before they are sent back: fewer bytes sent, but none of them
        during the second GEMM, one rounding more, and bits that depend on the number of ranks. Over NVLink the room in
        bf16 is then max_tokens * num_ranks rows, but a call takes as many rows of hidden, in bf16, as it takes of
        intermediate. Where tokens are counted it is "rows";
        "hosts", "hosts+sums": a token crosses to another host once, between ranks of the same place on their hosts, and
        is passed on there, between GPUs by the kernels of NVLink; its rows come back the same way, one for each slot,
        or one sum for each host. Hosts have equally many ranks. If GPUs of a host don't reach each other's memory rows
        travel between all ranks alike (`why` says so). Over NCCL the room of max_tokens is that of NVLink for the
        tokens of num_ranks / ranks of a host ranks, in bf16 once more;
        "gathered", "gathered+sums": by collectives of constant size between all ranks alike, not over NVLink;
        "counted": by collectives of counted rows. All but "auto", "rows", "sums" and "counted" need max_tokens and
        num_topk.
    num_sms: the most multiprocessors that a call takes, as far as its launches' grids say, as in `envoi.gemm`; it may
        differ by rank. None = all.
    hosts: with exchange "hosts", the name of the host of each rank of the group; None = the machines' names.
    presum, fused: deprecated. presum: True means exchange "sums", False "rows", with hosts "hosts+sums" and "hosts".
        fused: False changes nothing, True is refused. What it chose was slower, and was removed.

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
        presum: bool | None = None, hosts: str | Sequence[str] | None = None, fused: bool | None = None, *,
        exchange: str = "auto", num_sms: int | None = None,
    ):  # fmt: skip
        options = experts, timeout_s, max_tokens, num_topk, exchange, num_sms, hosts, presum, fused
        refusal = complaint(check_options, *options)
        if not dist.is_initialized():
            raise ValueError(
                refusal or "group: expected an initialised torch.distributed; call init_process_group first"
            )
        exchange, warned = wanted_by(exchange, hosts, presum, fused)
        for text in warned:
            warnings.warn(text, DeprecationWarning, 2)
        group = resolve_group(group)
        # Also if arguments are refused: all ranks count alike.
        self.name = name_object(dist.get_process_group_ranks(group))
        self.channel = channel = open_channel(group, *device_and_timeout(experts, timeout_s), self.name)
        raise_together(gather_texts(channel, refusal, OPENING), refusal)
        self.experts, self.timeout_s, self.num_sms = experts, timeout_s, num_sms
        self.max_tokens, self.num_topk = max_tokens, num_topk
        sizes, wanted = agree_on_sizes(channel, experts, timeout_s, max_tokens, num_topk, exchange), EXCHANGES[exchange]
        self._kernels = agree_on_kernels(channel, experts, num_sms)
        self._hosts: tuple[str, ...] = ()
        if wanted.route == "hosts":
            names = agree_on_hosts(channel, hosts or HOSTNAME, (max_tokens, num_topk), experts.device)
            self._hosts = tuple(names) if len(set(names)) > 1 else ()
            wanted = wanted if self._hosts else wanted._replace(route=None)
        connected = None
        if self._hosts and channel.queues:
            connected = connect_rail(channel, group, self._hosts, self.name, timeout_s)
        elif self._hosts:
            connected = connect_hosts(channel, self._hosts, self.name, timeout_s)
        channel.watch.opened(ranks_by_store(channel))
        self.expert_offsets = [0, *itertools.accumulate(sizes)]
        self.num_experts, device = self.expert_offsets[-1], experts.device
        self._team = Team(
            channel, self.name, tuple(self.expert_offsets),
            torch.tensor(self.expert_offsets[1:], dtype=torch.int32, device=device), timeout_s, device,
            empty_history(self.num_experts, device), experts.format,
        )  # fmt: skip
        layout = None if max_tokens is None or num_topk is None else self._layout(max_tokens, num_topk)
        self._exchange: Exchange | None
        self._exchange, self.why = open_exchange(self._team, experts, layout, wanted, group, self._hosts, connected)
        self._lock = self._exchange.lock
        self.exchange, self.presum = self._exchange.name, self._exchange.presum
        self.transport = "nvlink" if self.exchange == "memory" else "nccl" if channel.queues else "gloo"
        self._is_loaded = not compiles(device)
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
        """Run the layer by prepared launches, if these shapes have any; its checks are those of `_run`."""
        with self._lock, self._limits():
            calls, experts = self._calls, self.experts
            if calls is None or not self._is_loaded:  # closed meanwhile; in the first call ranks wait for each other
                return copied(self._moe(tokens, routing), given)
            exchange = cast(OnDevice, self._exchange)
            exchange.check_lateness()
            exchange.domain.pending = None
            constants = "moe_parallel", routing.num_experts, self.num_sms, *constants_of(experts)
            history = self._team.history
            tensors = tokens, routing.topk_weights, routing.topk_ids, *tensors_of(experts), history
            out = calls.replay(constants, tensors, given)
            if out is MISSED:
                call = Plannable(self._launch_call, (tokens, routing, experts, history), owner=exchange.owner)
                out = calls.run(constants, tensors, partial(self._moe, tokens, routing), call, given)
            exchange.check()
            return out

    def _launch_call(
        self, owner: Owner, tokens: torch.Tensor, routing: Routing, experts: ExpertWeights, history: torch.Tensor
    ) -> torch.Tensor:
        """Launch what a call does, on this memory. Raises ValueError for arguments that `_moe` refuses."""
        refusal = complaint(check_call, tokens, routing, experts)
        rows, slots, dtype = as_rows(tokens, routing)
        if refusal := refusal or self._refusal(rows, slots, experts):
            raise ValueError(refusal)
        domain_of(owner).history = history
        out = run_layer(owner, rows, *widened(slots.topk_weights, slots.topk_ids), experts)
        return out if rows is tokens and dtype == out.dtype else out.to(dtype).view(tokens.shape)

    def dispatch(self, tokens: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> Dispatched:
        """Send this rank's tokens [M, H] to the ranks of their experts; return the rows of this rank's. Collective.

        For experts that aren't Envoi's: `moe` is dispatch, experts, combine, with the same bits. Every rank calls
        `combine` next, on the same stream. Arguments are those of `moe`: tokens in bf16 or fp16, topk_ids [M, k] int32
        or int64, -1 = masked slot, topk_weights [M, k] float32.

        Where the host doesn't wait ("memory", and "hosts" and "gathered" over NCCL) rows are in memory that the next
        call of any object of these sizes writes, P is the most that there can be, and a CUDA graph can hold both calls.
        Raises as `moe` does. Not for calls that torch.compile traces.
        """
        refusal = complaint(lambda: check_call(tokens, Routing(topk_weights, topk_ids, self.num_experts), self.experts))
        if refusal:
            rows, slots, dtype = tokens, None, torch.bfloat16
        else:
            rows, slots, dtype = as_rows(tokens, Routing(topk_weights, topk_ids, self.num_experts))
        weights, ids = (topk_weights, topk_ids) if slots is None else widened(slots.topk_weights, slots.topk_ids)
        with self._lock, self._on_device():
            received = self._dispatch(rows, Routing(weights, ids, self.num_experts), refusal)
            if isinstance(self._exchange, OnDevice):
                self._exchange.domain.pending = received
        return Dispatched(*received[:3], tuple(tokens.shape), dtype, received)

    def combine(self, rows: torch.Tensor, handle: Dispatched, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Send rows back to the ranks of their tokens; return the sum of each of this rank's tokens. Collective.

        rows [P, H] bf16, contiguous: what the experts made of handle.rows, in their order, each times its weight in
        handle.topk_weights. handle: what `dispatch` returned for the last call. out: takes the result, as for `moe`.

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
            check_out(out, torch.empty(handle.shape, dtype=handle.dtype, device=self.experts.device))
        with self._lock, self._on_device():
            exchange = self._open_exchange()
            if isinstance(exchange, OnDevice):
                if exchange.domain.pending is not handle.received:
                    raise ValueError("handle: expected that of the last call, whose rows a later one hasn't replaced")
                exchange.domain.pending = None
            total = exchange.combine(exchange.accept(rows, handle.received), handle.received)
        self.check()
        total = total.to(handle.dtype).view(handle.shape)
        return total if out is None else out.copy_(total)

    @property
    def _calls(self) -> Calls | None:
        """Prepared calls, None where the host takes part in a call."""
        return self._exchange.calls if isinstance(self._exchange, OnDevice) else None

    def _limits(self) -> AbstractContextManager[None]:
        return nullcontext() if self.num_sms is None else limited(self.num_sms)

    def _on_device(self) -> AbstractContextManager:
        """Context of a call: this rank's GPU, and its share of it."""
        if self.experts.device.type != "cuda" and not isinstance(self._exchange, OnDevice):
            return self._limits()
        found = ExitStack()
        found.enter_context(torch.cuda.device(self.experts.device))
        found.enter_context(self._limits())
        return found

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
        layout = self._layout(cast(int, self.max_tokens), cast(int, self.num_topk))
        layout = replace(layout, presum=self.presum)
        k, experts = layout.num_topk, without_tensors(self.experts)
        if not isinstance(self._exchange, OnDevice):
            return CountedCall(layout.num_ranks * layout.max_tokens * k, k, experts)
        sizes = self.channel.rank, tuple(self.expert_offsets), self.timeout_s
        ranks = tuple(str(rank) for rank in range(layout.num_ranks))
        hosts = {"memory": (), "gathered": ranks, "hosts": self._hosts}[self.exchange]
        return ParallelCall(layout, k, *sizes, experts, hosts)

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
        CUDA graphs too. Refused calls don't count. With exchange "hosts", and "gathered" over NCCL, a rank counts the
        experts of its own host, or its own; the others' stay 0.
        """
        return load_of(self._team.history, self.expert_offsets)

    def trace(self, tokens: torch.Tensor, routing: Routing) -> Timeline:
        """Return a timeline of one call: what each role of each multiprocessor did, and when. Collective; NVLink only.

        The call is compiled with clocks in its kernels, captured in a CUDA graph, and its sixth replay is recorded.
        Every rank returns what all ranks recorded. Other calls take as long as without it.
        Raises ValueError on every rank if one's arguments are refused, or if tokens travel otherwise.
        """
        rows, slots, _ = as_rows(tokens, routing)
        refusal = untraceable(self.exchange, self.experts.device) or self._refusal(rows, slots, self.experts)
        raise_together(gather_texts(self.channel, refusal, TRACE), refusal)
        with self._lock, self._on_device():
            call, run = cast(ParallelCall, self._call_without_memory()), partial(self._moe, rows, slots)
            return trace_call(self.channel, cast(OnDevice, self._exchange).domain, call, len(rows), run)

    def close(self) -> None:
        """Free the object's memory; later calls raise ValueError. Not a collective call.

        Over NVLink, peers must have finished with this rank's memory: close after a barrier of all ranks.
        """
        with self._lock:
            _instances.pop(self.name, None)
            self._exchange = None

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
        if isinstance(exchange, OnDevice):
            exchange.check_lateness()
            exchange.domain.pending, device = None, exchange.domain.memory.device
            if self._kernels not in exchange.domain.has_kernels and compiles(device):
                compile_together(self.channel, self._call_without_memory(), Target.of(device), None, False, FIRST)
                exchange.domain.has_kernels.add(self._kernels)
            self._is_loaded = True
        # Of wrong arguments nothing is looked at: a routing may be anything.
        weights, ids = (tokens, tokens) if refusal else (routing.topk_weights, routing.topk_ids)
        return exchange.dispatch(tokens, weights, ids, self._team, refusal)

    def _open_exchange(self) -> Exchange:
        if self._exchange is None:
            raise ValueError(CLOSED)
        return self._exchange

    def _layout(self, max_tokens: int, num_topk: int) -> SharedLayout:
        sizes = self.channel.num_ranks, self.num_experts, max_tokens, num_topk
        return SharedLayout(*sizes, self.experts.hidden, self.experts.format)

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
        raise ValueError(CLOSED)
    return _instances[parallel]._run(tokens, Routing(topk_weights, topk_ids, num_experts), experts)
