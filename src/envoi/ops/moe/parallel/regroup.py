"""Changes of an open ExpertParallel: another placement, and ranks that are left when others are lost."""

import json
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from typing import Any, cast

import torch.distributed as dist

from envoi.ops.moe.parallel.collectives import complaint, gather_texts, refuse_together
from envoi.ops.moe.parallel.exchange import Team
from envoi.ops.moe.parallel.failure import CONNECT_S, Watch
from envoi.ops.moe.parallel.opening import resolve_group
from envoi.ops.moe.parallel.placement import as_numbers, check_placement, check_same, missing_experts
from envoi.ops.moe.parallel.store import connect

WITHOUT, UPDATE = "going on without lost ranks", "update of the placement"
_made: Counter[str] = Counter()  # groups by the name of their tries


def places_left(watch: Watch, ranks: Any) -> list[int]:
    """Return the places in a group of those that aren't among `ranks`, global ranks, as `PeerTimeout.ranks` has them.

    Raises ValueError for ranks that aren't the group's, or unless this one is left.
    """
    known = isinstance(ranks, list | tuple | set | frozenset) and all(rank in watch.ranks for rank in ranks)
    if not known or not ranks:
        raise ValueError(f"ranks: expected some of the group's ranks {watch.ranks}, got {ranks!r}")
    if watch.rank in ranks:
        raise ValueError(f"ranks: expected others than this one, {watch.rank}, got {sorted(ranks)}")
    return [place for place, rank in enumerate(watch.ranks) if rank not in ranks]


def group_of(watch: Watch, ranks: list[int], backend: str, given: Any = None) -> dist.ProcessGroup:
    """Make a group of some of a group's ranks, global ones, once all of them have come. Collective over these.

    backend: of the new group. given: a caller's group of these ranks, which is returned; None = make one. Raises
    PeerTimeout, as an opening does, if a rank doesn't come, ValueError for a group of others.
    """
    if given is not None:
        given = resolve_group(given)
        if (found := dist.get_process_group_ranks(given)) != ranks:
            raise ValueError(f"group: expected one of ranks {ranks}, got one of {found}")
        return given
    name = f"{watch.name} of {','.join(map(str, ranks))}"
    joined = _next_try(watch, ranks, name)
    # Not in the making of the group: it waits for a rank that doesn't come as long as its collectives may take.
    joined.join(WITHOUT)
    _made[name] += 1
    internals, kind = dist.distributed_c10d, dist.Backend(backend)
    longest = internals._get_default_timeout(kind)
    if "nccl" not in backend:
        longest = timedelta(seconds=max(CONNECT_S, watch.timeout_s))
    # Not dist.new_group: its names depend on how many other groups a rank is in, and where the default group has a
    # device, NCCL would split that one's communicator, for which it waits for lost ranks too.
    default = internals._get_default_group()
    device, default.bound_device_id = default.bound_device_id, None
    try:
        store = internals._get_default_store()
        sizes = len(ranks), ranks.index(watch.rank), ranks
        made, _ = internals._new_process_group_helper(*sizes, kind, store, joined.name, timeout=longest)
    finally:
        default.bound_device_id = device
    internals._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return cast(dist.ProcessGroup, made)


def _next_try(watch: Watch, ranks: list[int], name: str) -> Watch:
    """Return a watch of the first try to make a group that no rank has given up, so that ranks find each other."""
    numbers = count(_made[name])
    while True:
        found = Watch(connect(), f"{name} #{next(numbers)}", ranks, watch.rank, watch.timeout_s)
        try:
            if not found.ask(lambda store: store.check(["alarm"]), watch.timeout_s):
                return found
        except RuntimeError:  # the store is gone, or silent: to join says so
            return found


def options_left(
    options: dict[str, Any], places: Sequence[int], placement: Sequence[int], expert_offsets: Sequence[int]
) -> dict[str, Any]:
    """Return an object's options with the parts of its placement and hosts that are those of ranks in these places."""
    held = [expert for place in places for expert in placement[expert_offsets[place] : expert_offsets[place + 1]]]
    hosts = options["hosts"]
    if isinstance(hosts, list | tuple):
        hosts = [hosts[place] for place in places]
    return options | {"placement": held, "hosts": hosts}


def agree_on(
    team: Team, placement: Any, present: Sequence[int] | None, may_lack: bool, refusal: str = ""
) -> tuple[int, ...]:  # fmt: skip
    """Return a caller's new placement of routed experts. Collective; ValueError on all ranks if one can't use it.

    present: the one so far. may_lack: experts may be missing. refusal: why this rank can't have any, or "".
    """

    def check() -> None:
        if present is None:
            raise ValueError("update_placement: expected an object that was opened with a placement, got one without")
        routed = team.routed(as_numbers(placement))
        check_placement(routed, len(present), team.num_experts)
        missing = missing_experts(routed, team.num_experts)
        if missing and not may_lack:
            raise ValueError(f"placement: expected every expert, got none that is {missing[0]}")

    refuse_together(team.channel, refusal or complaint(check), UPDATE)
    given = team.routed(as_numbers(placement))
    check_same([tuple(json.loads(text)) for text in gather_texts(team.channel, json.dumps(given), UPDATE)])
    return given
