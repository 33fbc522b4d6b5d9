"""`envoi.ExpertParallel`: experts spread over the ranks of a torch.distributed group."""

import itertools
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from envoi.ep import staged
from envoi.ep.exchange import Channel, gather_ints, gather_texts
from envoi.ep.watch import Watch
from envoi.experts.op import check_ids, check_tokens, flatten, unflatten
from envoi.operators import operator
from envoi.router.reference import count_tokens
from envoi.types import ExpertWeights, Routing

_serials: dict[str, itertools.count] = {}
_instances: dict[str, "ExpertParallel"] = {}  # the operator finds its object by name


class ExpertParallel:
    """The MoE layer over the ranks of a group. Rank r owns the experts after those of rank r - 1, as many as it packed.

    experts: this rank's experts, from `envoi.experts.pack`.
    group: a torch.distributed process group of gloo or NCCL; None = the default group. Every rank of it makes the
        object, with the same hidden, intermediate, format and activation; the number of experts may differ.
    timeout_s: bounds every wait for a peer.

    Attributes: num_experts (over all ranks), expert_offsets (rank r owns expert_offsets[r] : expert_offsets[r + 1]),
    transport ("gloo" or "nccl").

    Example, 4 ranks with 4 experts each: `ExpertParallel(pack(...)).moe(tokens, routing)`, where routing.num_experts is
    16 and rank 1 owns experts 4 to 7.

    Raises ValueError, on every rank, if the ranks disagree; PeerTimeout if one doesn't come.
    """

    def __init__(self, experts: ExpertWeights, group: dist.ProcessGroup | None = None, timeout_s: float = 10.0):
        if not isinstance(experts, ExpertWeights):
            raise ValueError(f"experts: expected ExpertWeights from envoi.experts.pack, got {type(experts).__name__}")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s: expected a positive number of seconds, got {timeout_s!r}")
        if not dist.is_initialized():
            raise ValueError("group: expected an initialised torch.distributed; call init_process_group first")
        self.experts, self.timeout_s = experts, timeout_s
        group = group or dist.distributed_c10d._get_default_group()
        self.name = _name(dist.get_process_group_ranks(group))
        self.channel = _open_channel(group, experts.device, timeout_s, self.name)
        self.transport = "gloo" if self.channel.data is self.channel.control else "nccl"
        sizes = _agree(self.channel, experts)
        self.expert_offsets = [0, *itertools.accumulate(sizes)]
        self.num_experts = self.expert_offsets[-1]
        _instances[self.name] = self

    def moe(self, tokens: torch.Tensor, routing: Routing) -> torch.Tensor:
        """tokens [M, H] bf16 of this rank -> [M, H] bf16; M may differ from rank to rank and be 0. A collective call.

        routing: topk_ids over all num_experts, -1 = masked slot; k may be anything, the same on every rank.
        Equals `envoi.moe` on one rank that holds all experts and the tokens of all ranks, bit for bit.
        Raises ValueError on every rank if any rank's arguments are refused, PeerTimeout if a rank is lost or late.
        """
        ids, weights = routing.topk_ids, routing.topk_weights
        return torch.ops.envoi.moe_parallel(
            tokens, weights, ids, routing.num_experts, self.name, *flatten(self.experts)
        )

    def close(self) -> None:
        """The operator can't reach the object any more. Not a collective call."""
        _instances.pop(self.name, None)

    def _run(self, tokens: torch.Tensor, routing: Routing, experts: ExpertWeights) -> torch.Tensor:
        refusal = _refusal(tokens, routing, experts, self.num_experts)
        k = routing.topk_ids.shape[1] if not refusal else 0
        counts = count_tokens(routing.topk_ids, self.num_experts).tolist() if not refusal else [0] * self.num_experts
        header = gather_ints(self.channel, [int(bool(refusal)), k, *counts], "dispatch: exchange of counts")
        if header[:, 0].any():
            self._refuse_together(refusal)
        _same_everywhere("routing.topk_ids: num_topk", header[:, 1].tolist())
        return staged.moe(
            tokens, routing.topk_weights, routing.topk_ids, experts, header[:, 2:], self.expert_offsets, self.channel
        )

    def _refuse_together(self, refusal: str) -> None:
        """One rank's bad argument is an error on all, at once; waiting for it to come back would be a hang."""
        texts = gather_texts(self.channel, refusal, "exchange of refusals")
        first = next(rank for rank, text in enumerate(texts) if text)
        raise ValueError(refusal or f"rank {first} of the group refused its arguments: {texts[first]}")


def _refusal(tokens: torch.Tensor, routing: Routing, experts: ExpertWeights, num_experts: int) -> str:
    """What is wrong with this rank's arguments, or ""."""
    try:
        check_tokens(tokens, routing, experts)
        if routing.num_experts != num_experts:
            raise ValueError(f"routing.num_experts: expected {num_experts} over all ranks, got {routing.num_experts}")
        check_ids(routing.topk_ids, num_experts)
    except ValueError as error:
        return str(error)
    return ""


def _open_channel(group: dist.ProcessGroup, device: torch.device, timeout_s: float, name: str) -> Channel:
    ranks = dist.get_process_group_ranks(group)
    # The store of the default group is the one place to leave word for ranks that a collective can't reach.
    store = PrefixStore(name, dist.distributed_c10d._get_default_store())
    watch = Watch(store, ranks, dist.get_rank(), timeout_s)
    try:
        # Not dist.new_group: its names come back after a group is destroyed, and gloo can't open a name twice.
        timeout = timedelta(seconds=timeout_s)
        gloo = ProcessGroupGloo(PrefixStore("gloo", store), group.rank(), group.size(), timeout)
    except RuntimeError as error:
        watch.fail("opening the group", error)
    control = cast(dist.ProcessGroup, gloo)
    if "nccl" in dist.get_backend(group):
        return Channel(control, group, device, watch)
    return Channel(control, control, torch.device("cpu"), watch)


def _name(ranks: list[int]) -> str:
    """The same on all ranks of a group, whatever other groups some of them belong to, and never twice."""
    members = ",".join(map(str, ranks))
    return f"envoi {members} #{next(_serials.setdefault(members, itertools.count()))}"


def _agree(channel: Channel, experts: ExpertWeights) -> list[int]:
    """Every rank's number of experts, once all ranks have the same everything else."""
    mine = f"hidden={experts.hidden} intermediate={experts.intermediate} format={experts.format}"
    mine += f" activation={experts.activation} swiglu_limit={experts.swiglu_limit} bias={experts.down_bias is not None}"
    texts = gather_texts(channel, mine, "opening the group")
    _same_everywhere("experts", texts)
    return gather_ints(channel, [experts.num_local_experts], "opening the group")[:, 0].tolist()


def _same_everywhere(what: str, values: list) -> None:
    for rank, value in enumerate(values):
        if value != values[0]:
            raise ValueError(
                f"{what}: expected the same on every rank, got {values[0]} on rank 0, {value} on rank {rank}"
            )


def _moe_fake(tokens, *arguments):
    return torch.empty_like(tokens, memory_format=torch.contiguous_format)


@operator("moe_parallel", _moe_fake)
def _moe_parallel(
    tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, parallel: str,
    gate_up: torch.Tensor, gate_up_sf: torch.Tensor | None, gate_up_bias: torch.Tensor | None,
    down: torch.Tensor, down_sf: torch.Tensor | None, down_bias: torch.Tensor | None,
    format: str, activation: str, swiglu_limit: float | None, gate_up_tame: bool, down_tame: bool,
) -> torch.Tensor:  # fmt: skip
    experts = unflatten(
        gate_up, gate_up_sf, gate_up_bias, down, down_sf, down_bias, format, activation, swiglu_limit, gate_up_tame,
        down_tame,
    )  # fmt: skip
    if parallel not in _instances:
        raise ValueError("ExpertParallel: expected an open object, got one that was closed")
    return _instances[parallel]._run(tokens, Routing(topk_weights, topk_ids, num_experts), experts)
