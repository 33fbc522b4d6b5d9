"""Exchange of an ExpertParallel: tokens to the ranks that own their experts, and rows back to the ranks of the tokens.

    exchange    name        between hosts    within a host         the host
    OnDevice    memory                       kernels over NVLink   launches, and waits for nothing
    OnDevice    hosts       NCCL (a rail)    kernels over NVLink   the same
    OnDevice    gathered    NCCL (a rail)    one rank a host       the same
    Counted     counted     gloo or NCCL, all ranks alike          waits for each of three collectives

The first three are one exchange with two levels, a rail between hosts and a domain within one, either of which may be
trivial. Their sizes follow from max_tokens and num_topk alone. `counted` sends as many rows as there are.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from envoi.ops.moe.parallel import nvlink, rail
from envoi.ops.moe.parallel.collectives import Channel
from envoi.ops.moe.parallel.failure import BEGUN, PeerTimeout
from envoi.ops.moe.parallel.load import empty_history
from envoi.ops.moe.parallel.nvlink import REFUSED_ON_HOST, Domain
from envoi.ops.moe.parallel.placement import Placed, check_placement, place, routed_offsets, with_shared, without_shared
from envoi.ops.moe.parallel.rail import Rail
from envoi.runtime.program import ALIGNMENT
from envoi.spans import span
from envoi.types import ExpertWeights, Matrix

Owner = Domain | Rail


@dataclass(frozen=True)
class Team:
    """Ranks of an object, as one of them knows them. peers: `opening.Peer`s. name: the object's.

    expert_offsets: rank r owns experts expert_offsets[r] : expert_offsets[r + 1]; rank_ends [num_ranks] int32: one past
    each rank's last expert, on the device. history: where the load of the object's calls is added. format: of experts.
    placed: the placement, with which "experts" are physical ones here and in all of an exchange; or None. With shared
    experts there always is one: they are physical experts alone.
    """

    channel: Channel
    peers: Sequence[Any]
    name: str
    expert_offsets: tuple[int, ...]
    rank_ends: torch.Tensor
    history: torch.Tensor
    format: str
    placed: Placed | None = None

    @staticmethod
    def of(
        channel: Channel, peers: Sequence[Any], name: str, experts: ExpertWeights, num_experts: int | None
    ) -> "Team":
        """Return the team of these peers. num_experts: of a routing, None = those that the placement names, if any.

        Raises ValueError, on all ranks alike, for a placement that doesn't fit.
        """
        offsets, device = tuple(accumulate((peer.num_experts for peer in peers), initial=0)), experts.device
        given, placed, num_shared, rank = peers[channel.rank].placement, None, experts.num_shared, channel.rank
        given = None if given is None else without_shared(given, offsets, num_shared)
        if given is not None or num_shared:
            num_routed = routed_offsets(offsets, num_shared)[-1]
            num_experts = num_routed if given is None else check_placement(given, num_routed, num_experts)
            shared = {"first_shared": offsets[rank + 1] - num_shared, "num_shared": num_shared}
            whole = with_shared(given, offsets, num_shared)
            placed = Placed.on(device, whole, num_experts, rank, shared_gate=experts.shared_gate, **shared)
        ends = torch.tensor(offsets[1:], dtype=torch.int32, device=device)
        return Team(channel, peers, name, offsets, ends, empty_history(offsets[-1], device), experts.format, placed)

    @property
    def num_experts(self) -> int:
        """Number of experts of a routing."""
        return self.expert_offsets[-1] if self.placed is None else self.placed.num_experts

    @property
    def num_shared(self) -> int:
        """Number of each rank's shared experts, and of slots that a token has of them."""
        return 0 if self.placed is None else self.placed.num_shared

    def physical(self, placement: Sequence[int] | None) -> tuple[int, ...] | None:
        """Return a caller's placement as one of all physical experts, None if there is none and nothing is shared."""
        return None if self.placed is None else tuple(with_shared(placement, self.expert_offsets, self.num_shared))

    def routed(self, placement: Sequence[int]) -> tuple[int, ...]:
        """Return a caller's placement without the entries of shared experts, which that of a `Load` has."""
        return tuple(without_shared(placement, self.expert_offsets, self.num_shared))


class Rows(NamedTuple):
    """Rows that a rank has received for its experts, sorted by expert, and what the exchange needs to send them back.

    rows [P, H]: bf16, or quantised. offsets [E + 1] int32. weights [P] float32. topk_ids [M, k]: of this rank's tokens,
    with a placement physical experts.
    """

    rows: Matrix
    offsets: torch.Tensor
    weights: torch.Tensor
    topk_ids: torch.Tensor
    back: Any = None


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


@dataclass(frozen=True)
class OnDevice:
    """Exchange by kernels, and over a rail by NCCL. Objects of equal sizes, such as a model's layers, have one in turn.

    owner: the memory. name: of the exchange; rank: this one, within the group; num_experts: of routings, None = as many
    as the memory is for; what launches needs none of these.
    """

    owner: Owner
    name: str = ""
    rank: int = 0
    num_experts: int | None = None

    @property
    def rail(self) -> Rail | None:
        """The rail, None within one host."""
        return self.owner if isinstance(self.owner, Rail) else None

    @property
    def domain(self) -> Domain:
        """Memory that the ranks of this host share."""
        return self.owner if isinstance(self.owner, Domain) else self.owner.domain

    @property
    def presum(self) -> bool:
        """Tell whether a rank, or with a rail a host, sums a token's rows before they are sent back."""
        return self.domain.layout.presum if self.rail is None else self.rail.layout.whole.presum

    @property
    def results(self) -> str:
        """Scheme of the rows that are sent back."""
        return self.domain.layout.results or "bf16"

    @property
    def lock(self) -> Any:
        """Lock that a call holds: objects that share memory take turns."""
        return self.domain.lock

    @property
    def pending(self) -> Rows | None:
        """Rows that the last call has dispatched, if they are to be combined; of all objects that share the memory."""
        return self.domain.pending

    def note(self, dispatched: Rows | None) -> None:
        """Set `pending`."""
        self.domain.pending = dispatched

    def dispatch(
        self, tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, team: Team, refusal: str
    ) -> Rows:
        """Send this rank's tokens [M, H] bf16 and return the rows of its experts. Collective.

        refusal: why this rank's arguments are wrong, or "". Raises ValueError with it, once the peers know.
        """
        watch = self.domain.watch
        if refusal:
            with suppress(RuntimeError):  # without a store the peers hear of a refusal, not which
                watch.ask(lambda store: store.set(f"refused/{self.rank}", refusal), watch.timeout_s)
            self.refuse()
            raise ValueError(refusal)
        self.domain.history = team.history
        return self.send(tokens, topk_weights, topk_ids, team.placed)

    def send(
        self, tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, placed: Placed | None = None
    ) -> Rows:
        """Launch dispatch of tokens [M, H] bf16; the rows are in memory that the next call reuses."""
        num_topk = self.domain.layout.num_topk - (0 if placed is None else placed.num_shared)
        tokens, weights, ids = compiled_form(tokens, topk_weights, topk_ids, num_topk)
        with span("dispatch"):
            if placed is not None:
                weights, ids = place(placed, weights, ids, tokens)
            self._launches.dispatch(self.owner, tokens, weights, ids)
        domain = self.domain
        return Rows(domain.rows, domain.offsets, domain.row_weights, ids)

    def run_experts(self, received: Rows, experts: ExpertWeights) -> torch.Tensor:
        """Run this rank's experts on the rows: what `combine` takes. L2 sends them, but with presum over NVLink."""
        num_hosts = 1 if self.rail is None else self.rail.layout.num_hosts
        return nvlink.run_local_experts(self.domain, experts, num_hosts * received.topk_ids.numel())

    def combine(self, rows: torch.Tensor, received: Rows, by_others: bool = False) -> torch.Tensor:
        """Send rows back; return the sums of those of this rank's tokens, [M, H] bf16. Collective.

        by_others: rows [P, H] bf16 aren't from `run_experts`. NaN if a rank was late or refused its arguments.
        """
        if by_others and not self.domain.layout.presum:
            nvlink.send_rows(self.domain, rows)
        with span("combine"):
            return self._launches.combine(self.owner, rows, received.topk_ids)

    def run_layer(
        self, tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, experts: ExpertWeights,
        placed: Placed | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Launch a layer: tokens [M, H] bf16 of this rank -> [M, H] bf16; NaN if a rank was late or was refused."""
        received = self.send(tokens, topk_weights, topk_ids, placed)
        return self.combine(self.run_experts(received, experts), received)

    def refuse(self) -> None:
        """Launch a call without tokens that tells all peers that this rank's arguments are wrong."""
        hidden, memory = self.domain.layout.hidden, self.domain.memory
        tokens, ids = memory.new_empty(0, hidden, dtype=torch.bfloat16), memory.new_empty(0, 1, dtype=torch.int32)
        self._launches.dispatch(self.owner, tokens, ids.float(), ids, REFUSED_ON_HOST)
        self._launches.combine(self.owner, tokens, ids)

    @property
    def _launches(self) -> Any:
        return nvlink if self.rail is None else rail

    def check(self) -> None:
        """Raise PeerTimeout for a rank that was late, ValueError for arguments refused in calls the device reached."""
        self.check_lateness()
        if any(self.domain.codes[1]):
            self._raise_refusal()

    def check_lateness(self) -> None:
        """Raise PeerTimeout if a rank was late in any call so far: the group can't be used any more."""
        watch, by_flag = self.domain.watch, any(self.domain.codes[0])
        codes = [*self.domain.codes[0], *(self.rail.late_codes if self.rail is not None else ())]
        if watch.failure is None and any(codes):
            late = [rank for rank, code in enumerate(codes) if code]
            step = nvlink.LATE_STEPS[codes[late[0]]]
            if self.rail is not None:  # who is late is asked of all
                # Within a host a flag was waited for; elsewhere rows of another call have come, without a wait.
                waited_s = watch.timeout_s if by_flag else 0.0
                with suppress(PeerTimeout):
                    watch.fail(step, TimeoutError(step), waited_s, number=int(self.rail.host[BEGUN]))
            else:
                names = watch.first_to_say([watch.ranks[rank] for rank in late])
                watch.failure = PeerTimeout(names, step, watch.timeout_s, rank=watch.rank)
        if watch.failure is not None:
            raise watch.failure

    def _raise_refusal(self) -> None:
        """Raise ValueError for arguments refused in a call so far, unless this rank's host has; reset their codes."""
        codes = self.domain.codes[1]
        said = [(at, code) for at, code in enumerate(list(codes)) if code]
        for at, _ in said:  # not all: the device may write others meanwhile
            codes[at] = 0
        if self.rail is not None:
            said = [self.rail.culprit(*one) for one in said]
        said = [one for one in said if one != (self.rank, REFUSED_ON_HOST)]
        if not said:
            return
        (rank, code), watch = said[0], self.domain.watch
        most = (self.num_experts or self.domain.layout.num_experts) - 1
        text = f"routing.topk_ids: expected ids from 0 to {most}, or -1 for a masked slot"
        if code == REFUSED_ON_HOST:
            text = watch.ask(lambda store: store.get(f"refused/{rank}"), watch.timeout_s).decode()
        raise ValueError(f"rank {rank} of the group refused its arguments in an earlier call: {text}")


def compiled_form(
    tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_topk: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a call's arguments in the form for which a warm-up has compiled: num_topk slots, on 16 bytes.

    Slots that are added are masked ones. Rows of tokens may be apart by a multiple of 16.
    """
    more = num_topk - topk_ids.shape[1]
    if more:
        topk_weights = functional.pad(topk_weights, (0, more))
        topk_ids = functional.pad(topk_ids, (0, more), value=-1)
    return _aligned(tokens), _aligned(topk_weights.contiguous()), _aligned(topk_ids.contiguous())


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a contiguous copy if Triton would compile another kernel for its address or for its rows' stride."""
    rows_fit = x.stride(1) == 1 and (x.stride(0) % ALIGNMENT == 0 or x.stride(0) == x.shape[1])
    return x if rows_fit and x.data_ptr() % ALIGNMENT == 0 else x.clone(memory_format=torch.contiguous_format)
