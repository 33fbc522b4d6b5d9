"""Placement of experts on ranks: an expert is on one of them or, replicated, on several.

Physical experts are those that ranks have packed; experts are those of a routing. A placement is a layer's map from
the first to the second, which engines and load balancers call `physical_to_logical_map`: entry p is the expert whose
weights physical expert p has, -1 if it isn't used; those of rank r follow those of rank r - 1. Its inverse is applied
to `topk_ids` before anything else, so that an exchange knows physical experts alone.

Shared experts are physical ones of each rank, its last; a placement of theirs has -1 there, callers' have no entry for
them. The same launch adds a token's slots for those of the token's own rank, so that its row doesn't travel.

A token's choice of an expert goes to replica (token + rank) modulo the number of replicas; `token` is the token's index
among those of its rank, `rank` that rank. This needs no communication, and gives each replica as many of a rank's
tokens as any other, but for chance, whatever the ranks' numbers of tokens. The busiest rank bounds a layer, and
replicas are there to relieve it, so one on the token's own rank isn't preferred: a rank with most of the tokens would
then have all the work that the replicas were to share. The rank is added because with a token or two on each rank all
of them would choose the first replica.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from envoi.check import describe, expect_int
from envoi.ops.moe import reference
from envoi.ops.moe.choose import has_kernels
from envoi.ops.moe.launches import launch_kernel
from envoi.ops.moe.permute import AddedSlots

KERNELS = "envoi.ops.moe.parallel.placement_kernels"
BLOCK = 256  # choices that a program maps
UNUSED = -1  # physical expert that is none
BAD_ID = -2  # what an id becomes that is neither an expert nor -1: the exchange refuses it


@dataclass(frozen=True)
class Placed:
    """Placement on a device, as calls apply it.

    table int32 [num_experts + 1 + 2 * num_physical]: where each expert's replicas begin in the part behind it; physical
    experts sorted by expert; the expert of each physical one, -1 = none. Its size doesn't depend on the placement, so
    that another one can be written over it, and captured graphs go on with that. num_experts: of a routing. rank: of
    the tokens. first_shared: this rank's first shared expert among all physical ones, of which num_shared follow each
    other. shared_gate: as in `ExpertWeights`.
    """

    table: torch.Tensor
    num_experts: int
    rank: int
    first_shared: int = 0
    num_shared: int = 0
    shared_gate: torch.Tensor | None = None

    @staticmethod
    def on(device: torch.device, placement: Sequence[int], num_experts: int, rank: int, **shared: Any) -> "Placed":
        """Return a placement on a device. shared: the other fields."""
        return Placed(table_of(placement, num_experts).to(device), num_experts, rank, **shared)

    def update(self, placement: Sequence[int]) -> None:
        """Write another placement of as many, in the order of the device's stream; the host doesn't wait."""
        self.table.copy_(table_of(placement, self.num_experts), non_blocking=True)

    @property
    def num_physical(self) -> int:
        """Number of physical experts over all ranks."""
        return (len(self.table) - self.num_experts - 1) // 2

    @property
    def logical(self) -> torch.Tensor:
        """Expert that each physical one is, int32 [num_physical], -1 = none, on the device."""
        return self.table[self.num_experts + 1 + self.num_physical :]


def with_shared(placement: Sequence[int] | None, expert_offsets: Sequence[int], num_shared: int) -> list[int]:
    """Return a placement of routed physical experts as one of all, num_shared more at the end of each rank.

    placement: None = each is the expert of its own number. expert_offsets: rank r has physical experts
    expert_offsets[r] : expert_offsets[r + 1], with the shared ones.
    """
    offsets, found = routed_offsets(expert_offsets, num_shared), list[int]()
    given = range(offsets[-1]) if placement is None else placement
    for first, last in pairwise(offsets):
        found += [*given[first:last], *[UNUSED] * num_shared]
    return found


def without_shared(placement: Sequence[int], expert_offsets: Sequence[int], num_shared: int) -> Sequence[int]:
    """Return a placement of routed physical experts: the given one, or that of which `with_shared` made it."""
    routed = [expert for a, b in pairwise(expert_offsets) for expert in placement[a : b - num_shared]]
    same = list(placement) == with_shared(routed, expert_offsets, num_shared)
    return routed if same else placement


def routed_offsets(expert_offsets: Sequence[int], num_shared: int) -> list[int]:
    """Return where the routed experts of each rank begin among all routed physical ones."""
    return [offset - rank * num_shared for rank, offset in enumerate(expert_offsets)]


def table_size(num_experts: int, num_physical: int) -> int:
    """Return the elements of a table: see `Placed`."""
    return num_experts + 1 + 2 * num_physical


def table_of(placement: Sequence[int], num_experts: int) -> torch.Tensor:
    """Return a placement as a table on the CPU: see `Placed`."""
    replicas = replicas_of(placement, num_experts)
    offsets = accumulate(map(len, replicas), initial=0)
    used = [p for found in replicas for p in found]
    unused = [0] * (len(placement) - len(used))  # never read
    return torch.tensor([*offsets, *used, *unused, *placement], dtype=torch.int32, device="cpu")


def replicas_of(placement: Sequence[int], num_experts: int) -> list[list[int]]:
    """Return the physical experts that each expert is, in ascending order."""
    found: list[list[int]] = [[] for _ in range(num_experts)]
    for p, expert in enumerate(placement):
        if expert != UNUSED:
            found[expert].append(p)
    return found


def as_numbers(placement: Any) -> list[int]:
    """Return a caller's placement as a list. Raises ValueError unless it is a list, or a flat tensor, of integers."""
    if isinstance(placement, torch.Tensor):
        kind = placement.dtype
        if placement.ndim != 1 or kind.is_floating_point or kind.is_complex or kind == torch.bool:
            raise ValueError(
                "placement: expected an expert for each physical one, integers [num_physical], got "
                f"{describe(placement)}"
            )
        placement = placement.tolist()
    if not isinstance(placement, list | tuple):
        raise ValueError(
            f"placement: expected an expert for each physical one, integers [num_physical], got {describe(placement)}"
        )
    for p, expert in enumerate(placement):
        if not isinstance(expert, int) or isinstance(expert, bool) or expert < UNUSED:
            raise ValueError(f"placement: expected experts from 0 on, or -1 for an unused one, got {expert!r} at {p}")
    return list(placement)


def check_options(placement: Any, num_experts: Any) -> None:
    """Raise ValueError unless these are options of `ExpertParallel`, as far as one rank can tell."""
    if placement is not None:
        as_numbers(placement)
    elif num_experts is not None:
        raise ValueError(f"num_experts: expected None without a placement, got {num_experts!r}")
    if num_experts is not None:
        expect_int("num_experts", num_experts, 1)


def check_placement(placement: Sequence[int], num_physical: int, num_experts: int | None) -> int:
    """Return the number of experts that a placement is of. Raises ValueError unless it fits the ranks.

    num_experts: None = as many as it names, each of which has to be there. With a number some may be missing.
    """
    if len(placement) != num_physical:
        raise ValueError(
            f"placement: expected an expert for each of the {num_physical} that all ranks have packed, "
            f"got {len(placement)}"
        )
    most = max(placement, default=UNUSED) + 1
    if num_experts is None:
        there = set(placement)
        lacking = next((e for e in range(most) if e not in there), None if most else 0)
        if lacking is not None:
            raise ValueError(
                f"placement: expected every expert, got none that is {lacking}; pass num_experts if some may be missing"
            )
        return most
    if most > num_experts:
        p = placement.index(most - 1)
        raise ValueError(f"placement: expected experts below num_experts {num_experts}, got {most - 1} at {p}")
    return num_experts


def check_same(placements: Sequence[Sequence[int] | None]) -> None:
    """Raise ValueError unless the ranks' placements are equal; name the first entry in which one differs."""
    first = placements[0]
    for rank, other in enumerate(placements):
        if first is None or other is None:
            if first is not other:
                with_one, without = (rank, 0) if first is None else (0, rank)
                raise ValueError(
                    f"placement: expected one on every rank, got none on rank {without}, one on {with_one}"
                )
        elif len(other) != len(first):
            raise ValueError(
                f"placement: expected the same on every rank, got {len(first)} entries on rank 0, {len(other)} on rank "
                f"{rank}"
            )
        elif other != first:
            p = next(i for i, (x, y) in enumerate(zip(first, other, strict=True)) if x != y)
            raise ValueError(
                f"placement: expected the same on every rank, got expert {first[p]} at {p} on rank 0, "
                f"{other[p]} on rank {rank}"
            )


def place(
    placed: Placed, topk_weights: torch.Tensor, topk_ids: torch.Tensor, tokens: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights and the physical experts, float32 and int32 [M, k], of the experts topk_ids [M, k] int32.

    Then those of the shared experts, [M, k + num_shared]; tokens [M, H]: for their gate, if there is one. -1 stays; an
    id that is no expert becomes BAD_ID. A missing expert becomes some physical one with the weight NaN,
    which makes the token's sum NaN and changes no other token.
    """
    device, gate = topk_ids.device, placed.shared_gate
    if not has_kernels(device):
        return place_by_torch(placed, topk_weights, topk_ids, tokens)
    given = topk_ids if gate is None or tokens is None else tokens  # not read without a gate
    added = AddedSlots.of(given, topk_ids, placed.num_shared, gate, BLOCK)
    weights, ids = added.empty_slots(device)
    if not ids.numel():
        return weights, ids
    sizes = placed.rank, placed.num_experts, placed.num_physical, placed.first_shared
    slots = topk_ids.contiguous(), topk_weights.contiguous()
    arguments = *slots, placed.table, *added.given, ids, weights, *added.sizes, *sizes, *added.form
    launch_kernel(KERNELS, "place_kernel", added.grid, arguments, {"num_warps": 4})
    return weights, ids


def place_by_torch(
    placed: Placed, topk_weights: torch.Tensor, topk_ids: torch.Tensor, tokens: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute what `place` does by operators of torch."""
    N, P = placed.num_experts, placed.num_physical
    begin, replicas = placed.table[: N + 1].long(), placed.table[N + 1 : N + 1 + P]
    fine = (topk_ids >= 0) & (topk_ids < N)
    e = torch.where(fine, topk_ids, 0).long()
    count = begin[e + 1] - begin[e]
    token = torch.arange(len(topk_ids), device=topk_ids.device).unsqueeze(1)
    chosen = replicas[(begin[e] + (token + placed.rank) % count.clamp(min=1)).clamp(max=P - 1)]
    found = torch.where(count > 0, chosen, (e % P).to(torch.int32))
    ids = torch.where(fine, found, torch.where(topk_ids == UNUSED, UNUSED, BAD_ID).to(torch.int32))
    weights = torch.where(fine & (count == 0), float("nan"), topk_weights)
    shared = placed.first_shared, placed.num_shared, placed.shared_gate
    return reference.with_shared(topk_ids if tokens is None else tokens, weights, ids, *shared)


def missing_experts(placement: Sequence[int], num_experts: int) -> tuple[int, ...]:
    """Return the experts that no physical one is, in ascending order."""
    return tuple(sorted(set(range(num_experts)) - set(placement)))


def balanced_placement(
    num_tokens_per_expert: torch.Tensor | Sequence[float], num_physical_per_rank: Sequence[int]
) -> list[int]:
    """Compute a placement that gives ranks even loads, for `ExpertParallel(placement=)`.

    num_tokens_per_expert [N]: the load to expect, for example the sum over calls of `ExpertParallel.load()`'s.
    num_physical_per_rank: experts that each rank will pack, at least N together. Those above N are replicas; what isn't
    needed for one on each rank is -1.

    Each replica is given to the expert whose replicas have most tokens each. Then, those with most tokens first, each
    is put on the rank with fewest so far, among ranks with room and, if there is one, without that expert:
    longest processing time first (Graham, SIAM J. Appl. Math. 17, 1969). Needs neither GPU nor group; ranks with the
    same numbers compute the same. Raises ValueError for too few of them, and for loads that are negative or no numbers.
    """
    loads = check_loads(num_tokens_per_expert)
    if not isinstance(num_physical_per_rank, list | tuple):
        raise ValueError(
            f"num_physical_per_rank: expected a number for each rank, got {describe(num_physical_per_rank)}"
        )
    room = [expect_int("num_physical_per_rank", n, 0) for n in num_physical_per_rank]
    if sum(room) < len(loads):
        raise ValueError(
            f"num_physical_per_rank: expected at least {len(loads)} together, one an expert, got {sum(room)}"
        )
    replicas = [1] * len(loads)
    for _ in range(sum(room) - len(loads)):
        more = [e for e, n in enumerate(replicas) if n < len(room)]
        if not more:
            break
        replicas[max(more, key=lambda e: (loads[e] / replicas[e], -e))] += 1
    shares = [load / n for load, n in zip(loads, replicas, strict=True)]
    found: list[list[int]] = [[] for _ in room]
    totals = [0.0] * len(room)
    for e in sorted(range(len(loads)), key=lambda e: (-shares[e], e)):
        for _ in range(replicas[e]):
            free = [r for r, mine in enumerate(found) if len(mine) < room[r]]
            rank = min(
                [r for r in free if e not in found[r]] or free, key=lambda r: (totals[r], len(found[r]) - room[r])
            )
            found[rank].append(e)
            totals[rank] += shares[e]
    return [e for mine, n in zip(found, room, strict=True) for e in [*sorted(mine), *[UNUSED] * (n - len(mine))]]


def check_loads(num_tokens_per_expert: Any) -> list[float]:
    """Return loads as a list. Raises ValueError unless they are numbers of at least 0, one for each expert."""
    given = num_tokens_per_expert
    if isinstance(given, torch.Tensor) and given.ndim == 1:
        given = given.tolist()
    expected = "num_tokens_per_expert: expected numbers of at least 0, one for each expert, got"
    if not isinstance(given, list | tuple):
        raise ValueError(f"{expected} {describe(given)}")
    if not given:
        raise ValueError(f"{expected} none")
    for expert, load in enumerate(given):
        if not isinstance(load, int | float) or not 0 <= load < float("inf"):
            raise ValueError(f"{expected} {load!r} at {expert}")
    return [float(load) for load in given]
