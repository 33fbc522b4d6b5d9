"""Changes of an open ExpertParallel: another placement, and ranks that are left when others are lost."""

import json
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import torch.distributed as dist

from envoi.ops.moe.parallel.collectives import Channel, complaint, gather_texts, refuse_together
from envoi.ops.moe.parallel.failure import CONNECT_S, Watch
from envoi.ops.moe.parallel.placement import Placed, as_numbers, check_placement, check_same, missing_experts
from envoi.ops.moe.parallel.store import connect

WITHOUT, UPDATE = "going on without lost ranks", "update of the placement"
_tries: dict[str, count] = {}


def places_left(watch: Watch, ranks: Any) -> list[int]:
    """Return the places in a group of those that aren't among `ranks`, global ranks, as `PeerTimeout.ranks` has them.

    Raises ValueError for ranks that aren't the group's, or unless this one is left.
    """
    if not isinstance(ranks, list | tuple | set | frozenset) or not ranks or not set(ranks) <= set(watch.ranks):
        raise ValueError(f"ranks: expected some of the group's ranks {watch.ranks}, got {ranks!r}")
    if watch.rank in ranks:
        raise ValueError(f"ranks: expected others than this one, {watch.rank}, got {sorted(ranks)}")
    return [place for place, rank in enumerate(watch.ranks) if rank not in ranks]


def group_of(watch: Watch, ranks: list[int], backend: str) -> dist.ProcessGroup:
    """Make a group of some of a group's ranks, global ones, once all of them have come. Collective over these.

    backend: of the new group. Raises PeerTimeout, as an opening does, if one of them doesn't come.
    """
    name = f"{watch.name} of {','.join(map(str, ranks))}"
    name = f"{name} #{next(_tries.setdefault(name, count()))}"  # ranks that came apart have all failed once
    # Not in new_group: it waits for a rank that doesn't come as long as its collectives may take.
    Watch(connect(), name, ranks, watch.rank, watch.timeout_s).join(WITHOUT)
    longest = timedelta(seconds=max(CONNECT_S, watch.timeout_s)) if "nccl" not in backend else None
    made: Any = dist.new_group(ranks, longest, backend, use_local_synchronization=True)
    return made


def options_left(
    options: dict[str, Any], places: Sequence[int], placement: Sequence[int], expert_offsets: Sequence[int]
) -> dict[str, Any]:
    """Return an object's options with the parts of its placement and hosts that are those of ranks in these places."""
    held = [expert for place in places for expert in placement[expert_offsets[place] : expert_offsets[place + 1]]]
    hosts = options["hosts"]
    if isinstance(hosts, list | tuple):
        hosts = [hosts[place] for place in places]
    return options | {"placement": held, "hosts": hosts}


def agree_on(channel: Channel, placement: Any, placed: Placed | None, may_lack: bool) -> list[int]:
    """Return a new placement of a caller as a list. Collective; ValueError on every rank if they can't all use it.

    placed: the present one. may_lack: experts may be missing.
    """

    def check() -> None:
        if placed is None:
            raise ValueError("update_placement: expected an object that was opened with a placement, got one without")
        numbers = as_numbers(placement)
        check_placement(numbers, placed.num_physical, placed.num_experts)
        missing = missing_experts(numbers, placed.num_experts)
        if missing and not may_lack:
            raise ValueError(f"placement: expected every expert, got none that is {missing[0]}")

    refuse_together(channel, complaint(check), UPDATE)
    texts = gather_texts(channel, json.dumps(as_numbers(placement)), UPDATE)
    check_same([json.loads(text) for text in texts])
    return as_numbers(placement)
