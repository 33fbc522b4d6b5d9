"""Load of an `ExpertParallel`: how many tokens each expert, and with it each rank, had in the last calls."""

from dataclasses import dataclass
from itertools import pairwise

import torch

from envoi.ops.moe.parallel.placement import Placed

HISTORY = 128  # calls that are kept, a power of two
NO_CALL = -1


@dataclass(frozen=True)
class Busiest:
    """Rank and expert that bound a layer in the calls of a `Load`: the busiest rank, for which the others wait.

    num_calls: calls with a token. rank: the one with the most tokens in all of them together. rank_calls: those in
        which it had the most, or as many as another.
    imbalance: the busiest rank's tokens over the mean of all ranks, averaged over calls, 1 = even: a layer bound by its
        experts takes so many times as long.
    rank_load, expert_load: tokens over the mean of all ranks, of all experts; with a placement of the physical
        ones that it uses. Shared experts count for ranks alone.
    """

    num_calls: int
    rank: int
    rank_calls: int
    imbalance: float
    rank_load: float
    expert: int
    expert_load: float

    def __str__(self) -> str:
        return (
            f"bound by rank {self.rank}, the busiest in {self.rank_calls} of {self.num_calls} calls, with "
            f"{self.rank_load:.2f} times the mean; its expert {self.expert} has {self.expert_load:.2f} times the mean; "
            f"a call's busiest rank has {self.imbalance:.2f} times the mean"
        )


@dataclass(frozen=True)
class Load:
    """Tokens that the last calls of an `ExpertParallel` brought to each expert, from all ranks; equal on all of them.

    num_tokens_per_expert [calls, num_experts] int32, the newest call last: slots with the expert, on the device where
    they were counted; -1 for calls that haven't been made. expert_offsets: rank r owns experts expert_offsets[r] :
    expert_offsets[r + 1]. With a placement, or shared experts, these are physical experts: per_physical
    [calls, num_physical] int32, and placement, which experts they are, -1 for unused and shared ones; calls before the
    last `update_placement` aren't kept. Tokens of a missing expert, which come out NaN, count for the physical expert
    that computed them, and for the expert that it is, if any.

    Tensors are filled in the order of the device's stream; printing a Load, or `busiest`, waits for them.
    """

    num_tokens_per_expert: torch.Tensor
    expert_offsets: tuple[int, ...]
    per_physical: torch.Tensor | None = None
    placement: tuple[int, ...] | None = None

    @property
    def num_tokens_per_physical(self) -> torch.Tensor:
        """Tokens of each physical expert, [calls, num_physical] int32; without a placement, of each expert."""
        return self.num_tokens_per_expert if self.per_physical is None else self.per_physical

    @property
    def num_tokens_per_rank(self) -> torch.Tensor:
        """Tokens of each rank's experts: [calls, num_ranks] int32, -1 for calls that haven't been made."""
        counts = self.num_tokens_per_physical
        ranks = [counts[:, a:b].sum(1, dtype=torch.int32) for a, b in pairwise(self.expert_offsets)]
        return torch.where(counts[:, :1] != NO_CALL, torch.stack(ranks, 1), NO_CALL)

    def busiest(self) -> Busiest | None:
        """Return what bound the calls; None if none had a token. Waits for the device."""
        experts, ranks = self.num_tokens_per_physical.cpu().double(), self.num_tokens_per_rank.cpu().double()
        used = ranks.sum(1) > 0
        if not used.any():
            return None
        experts, ranks = experts[used], ranks[used]
        wins = (ranks == ranks.amax(1, keepdim=True)).sum(0)
        totals = ranks.sum(0)
        # By tokens, as large calls take the time; of several the rank that more calls wait for, of those the lower.
        rank = max(range(len(totals)), key=lambda r: (float(totals[r]), int(wins[r]), -r))
        first, last = self.expert_offsets[rank], self.expert_offsets[rank + 1]
        # Shared experts have every token of their rank, which no placement changes: of all others the busiest.
        owned = torch.tensor(self.placement or range(experts.shape[1]), device="cpu") >= 0
        of_experts = torch.where(owned, experts.sum(0), 0.0)
        busy = first + int(of_experts[first:last].argmax())
        return Busiest(
            len(ranks), rank, int(wins[rank]), float((ranks.amax(1) / ranks.mean(1)).mean()),
            float(totals[rank] / totals.mean()), busy if self.placement is None else self.placement[busy],
            float(of_experts[busy] / of_experts[owned].mean()),
        )  # fmt: skip

    def __str__(self) -> str:
        found = self.busiest()
        return "no tokens yet" if found is None else str(found)


def empty_history(num_experts: int, device: torch.device) -> torch.Tensor:
    """Allocate a history: int32 [HISTORY + 1, num_experts], a ring of calls, then a row that begins with their number.

    Each call writes the row of its number modulo HISTORY, on the device, so that a replayed graph counts too.
    """
    return torch.zeros(HISTORY + 1, max(1, num_experts), dtype=torch.int32, device=device)


def note(history: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> None:
    """Add a call whose tokens are known on the host."""
    number = history[HISTORY, 0]
    row = (number % HISTORY).long().view(1)
    counts = num_tokens_per_expert.to(history.device, torch.int32, non_blocking=True)
    history.index_copy_(0, row, counts.view(1, -1))
    number += 1


def forget(history: torch.Tensor) -> None:
    """Forget all calls, in the order of the device's stream; the host doesn't wait."""
    history[HISTORY, 0].zero_()


def load_of(
    history: torch.Tensor, expert_offsets: list[int], placed: Placed | None = None,
    placement: tuple[int, ...] | None = None,
) -> Load:  # fmt: skip
    """Copy a history, with a placement one of physical experts, to a Load, on its device; the host doesn't wait."""
    number = history[HISTORY, 0]
    ages = torch.arange(HISTORY - 1, -1, -1, dtype=torch.int32, device=history.device)
    calls = number - 1 - ages  # the number of each call, the newest last; below 0 for calls not made
    found = history.index_select(0, calls % HISTORY)
    made = (calls >= 0).unsqueeze(1)
    counts = torch.where(made, found, NO_CALL)
    if placed is None:
        return Load(counts, tuple(expert_offsets))
    experts = found.new_zeros(HISTORY, placed.num_experts + 1)  # the last one takes what an unused one has
    experts.index_add_(1, torch.where(placed.logical < 0, placed.num_experts, placed.logical), found)
    return Load(torch.where(made, experts[:, :-1], NO_CALL), tuple(expert_offsets), counts, placement)
