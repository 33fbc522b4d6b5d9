"""Cases of `envoi.ExpertParallel`: several ranks in one process, on its kernels; without them in processes over gloo.
Those of `RANKS` have a process each on GPUs too: over NVLink, or on one GPU that they share.

Judged like `envoi.moe` of all ranks' tokens; with presum each rank's rows of a token are first summed in bf16. Without
presum, kernels' bits are also those of `envoi.moe` on one rank, or with results in FP8 of one rank with these.
"""

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

import envoi
from envoi.ops.moe.choose import has_kernels
from envoi.ops.moe.parallel.nvlink import SharedLayout
from envoi.ops.moe.parallel.placement import Placed, place
from envoi.ops.moe.parallel.placement import with_shared as all_physical
from envoi.types import Routing
from tests.fuzz.approx import wrong
from tests.fuzz.draw import Case, Draw
from tests.fuzz.experts import Device, Layer, layer, oracle, with_shared
from tests.fuzz.formats import SCHEMES
from tests.helpers.ranks import gpu_ranks, own_device, run_ranks
from tests.moe.parallel import domains
from tests.promises.same_bits import bits

ALIGNED = 16  # bytes of hidden that NVLink's kernels copy at once
TIMEOUT_S = 60.0
RANKS = "expert_parallel_ranks"
RESULTS = "fp8_1x128"


@dataclass(frozen=True)
class Setting:
    """Layer, the ends of each rank's share of its tokens and experts, and whether ranks sum before they send.

    results: the scheme of rows that are sent back, None for bf16.
    placement: of experts on ranks, whose ends are then of physical experts; or None. num_shared: of the layer's
    experts, the last ones, which no end, placement or routing counts; each rank has them.
    """

    layer: Layer
    token_ends: list[int]
    expert_ends: list[int]
    presum: bool
    placement: list[int] | None = None
    num_shared: int = 0
    results: str | None = None

    @property
    def num_routed(self) -> int:
        """Number of experts of a routing."""
        return self.layer.routing.num_experts - self.num_shared

    @property
    def offsets(self) -> list[int]:
        """Where each rank's physical experts begin, the shared ones among them."""
        return [0, *(end + self.num_shared * (rank + 1) for rank, end in enumerate(self.expert_ends))]

    @property
    def physical(self) -> list[int]:
        """Expert of the layer that each rank has, rank by rank."""
        routed, N = self.placement or range(self.num_routed), self.num_routed
        parts = [routed[a:b] for a, b in pairwise([0, *self.expert_ends])]
        return [max(0, e) for part in parts for e in (*part, *range(N, N + self.num_shared))]

    @property
    def whole(self) -> Layer:
        """The layer whose routing names shared experts too, as its last."""
        routing = replace(self.layer.routing, num_experts=self.num_routed)
        return replace(self.layer, routing=with_shared(routing, self.num_shared))

    @property
    def summed(self) -> Layer:
        """The layer with physical experts, without a placement, so that each has its rank."""
        found = self.whole
        if not self.num_shared:
            return found
        ids = found.routing.topk_ids.clone()
        token = torch.arange(len(ids))[:, None]
        rank = torch.bucketize(token, torch.tensor(self.token_ends), right=True)
        owner = torch.bucketize(ids, torch.tensor(self.expert_ends), right=True)
        owner = torch.where(ids >= self.num_routed, rank, owner)
        first = torch.tensor(self.offsets)[1:][rank] - self.num_shared
        moved = torch.where(ids >= self.num_routed, ids - self.num_routed + first, ids + owner * self.num_shared)
        at = self.physical
        biases = found.biases and (found.biases[0][at], found.biases[1][at])
        routing = replace(found.routing, topk_ids=torch.where(ids < 0, ids, moved), num_experts=len(at))
        return replace(found, gate_up=found.gate_up[at], down=found.down[at], biases=biases, routing=routing)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.expert_ends)

    def part(self, rank: int, device: torch.device) -> tuple[torch.Tensor, Routing]:
        """Return a rank's tokens and routing."""
        first, last = list(pairwise([0, *self.token_ends]))[rank]
        r = self.layer.routing
        weights, ids = (x[first:last].to(device) for x in (r.topk_weights, r.topk_ids))
        return self.layer.tokens[first:last].to(device), Routing(weights, ids, self.num_routed)

    def pack(self, rank: int, device: torch.device) -> Any:
        """Pack a rank's experts."""
        first, last = self.offsets[rank : rank + 2]
        return replace(self.layer.pack(device, at=self.physical[first:last]), num_shared=self.num_shared)

    def placed(self, rank: int, device: torch.device) -> Placed | None:
        """Return what maps a rank's ids, None if nothing does."""
        if self.placement is None and not self.num_shared:
            return None
        shared = {"first_shared": self.offsets[rank + 1] - self.num_shared, "num_shared": self.num_shared}
        every = all_physical(self.placement, self.offsets, self.num_shared)
        return Placed.on(device, every, self.num_routed, rank, **shared)


def setting(draw: Draw) -> Setting:
    """Draw the setting of a case."""
    way = how(draw)
    in_one = way == "one process"
    given = layer(draw, most_experts=40)
    while given.routing.num_experts < 2 or (in_one and given.tokens.shape[1] % ALIGNED):
        given = layer(draw, most_experts=40)
    num_shared = min(draw.form.one((0, 0, 1, 2)), given.routing.num_experts - 2)
    M, E = len(given.tokens), given.routing.num_experts - num_shared
    given.routing.topk_ids.masked_fill_(given.routing.topk_ids >= E, -1)
    num_ranks = min(E, gpu_ranks() if way == "memory" else draw.form.one((2, 3)))
    if draw.chance(0.2):  # one rank has all tokens
        owner = draw.random.randrange(num_ranks)
        token_ends = [0] * owner + [M] * (num_ranks - owner)
    else:
        token_ends = [*sorted(draw.random.randint(0, M) for _ in range(num_ranks - 1)), M]
    expert_ends = [*sorted(draw.random.sample(range(1, E), num_ranks - 1)), E]
    found = Setting(given, token_ends, expert_ends, draw.form.chance(0.5), None, num_shared)
    if found.presum:  # sums of ranks depend on which replica computes
        return found
    if way != "gloo" and given.tokens.shape[1] % SCHEMES[RESULTS].columns == 0 and draw.form.chance(0.5):
        found = replace(found, results=RESULTS)
    if not draw.form.chance(0.5):
        return found
    placement = [*range(E), *(draw.random.randrange(-1, E) for _ in range(draw.form.random.randint(0, 6)))]
    draw.random.shuffle(placement)
    ends = [*sorted(draw.random.sample(range(1, len(placement)), num_ranks - 1)), len(placement)]
    return replace(found, placement=placement, expert_ends=ends)


def how(draw: Draw) -> str:
    """Return how ranks run: "gloo", "memory" or "one process"."""
    if draw.device.type == "cuda" and draw.operator == RANKS:
        return "memory"
    return "one process" if has_kernels(draw.device) else "gloo"


def expert_parallel(draw: Draw) -> Case:
    """Draw a case."""
    given, way = setting(draw), how(draw)
    sums = given.presum and way != "gloo"
    text = (
        f"{given.num_ranks} ranks, {way}, tokens to {given.token_ends}, experts to {given.expert_ends}, presum {sums}, "
        f"results {given.results}, placement {given.placement}, the last {given.num_shared} shared, {given.layer.text}"
    )

    def judge(got: tuple[torch.Tensor, bool]) -> str:
        out, summed = got
        ends, whole = (tuple(given.offsets[1:]), given.summed) if summed else ((), given.whole)
        device = Device(draw.device.type == "cuda", way != "gloo", ends, given.results)
        tokens = given.layer.tokens
        said = given.layer.stored[2] or ("" if out.dtype == tokens.dtype else f"output is {out.dtype}")
        said = said or wrong(out, oracle(whole, device), tokens.dtype)
        return said or ("" if summed or way == "gloo" else other_bits(out, given, draw.device))

    return Case(text, partial(_one, draw), judge)


def other_bits(out: torch.Tensor, given: Setting, device: torch.device) -> str:
    """Return how many rows have other bits than on one rank, "" if none has."""
    r, alone = given.layer.routing, [len(given.placement or range(given.num_routed))]
    if given.results is None:
        routing = Routing(r.topk_weights.to(device), r.topk_ids.to(device), given.num_routed)
        packed = replace(given.layer.pack(device), num_shared=given.num_shared)
        want = envoi.moe(given.layer.tokens.to(device), routing, packed, batch_invariant=True).cpu()
    else:
        want = run_in_one_process(replace(given, token_ends=[len(out)], expert_ends=alone), device)
    count = int((bits(out) != bits(want)).any(-1).sum())
    return f"{count} of {len(out)} rows have other bits than on one rank" if count else ""


def _one(draw: Draw) -> Any:
    result = run([draw], [])[0]
    if isinstance(result, Exception):
        raise result
    return result


def run(draws: list[Draw], cases: list[Case]) -> list[Any]:
    """Run the cases of some draws: each one's output [M, H] and whether ranks summed first, or its exception."""
    if not draws:
        return []
    drawn = [replace_draw(draw) for draw in draws]
    if how(drawn[0]) == "one process":
        return [attempt_in_one_process(draw) for draw in drawn]
    sizes = [setting(replace_draw(draw)).num_ranks for draw in drawn]
    seeds = [(draw.seed, draw.sizes, str(draw.device), draw.family) for draw in drawn]
    backend = "nccl" if drawn[0].device.type == "cuda" else "gloo"
    outcomes = run_ranks(max(sizes), on_rank, drawn[0].operator, seeds, backend=backend)
    return [gathered(outcomes[:size], number) for number, size in enumerate(sizes)]


def replace_draw(draw: Draw) -> Draw:
    """Return a draw of the same case from its beginning."""
    return Draw(draw.operator, draw.seed, draw.sizes, str(draw.device), draw.family)


def gathered(outcomes: list[Any], number: int) -> Any:
    """Join the ranks' outputs of one case, or return its first error."""
    for rank, outcome in enumerate(outcomes):
        if outcome.error:
            return RuntimeError(f"rank {rank}: {outcome.error}: {outcome.text}")
        if isinstance(outcome.value[number], str):
            return RuntimeError(f"rank {rank}: {outcome.value[number]}")
    parts = [outcome.value[number] for outcome in outcomes]
    return torch.cat([out for out, _ in parts]), parts[0][1]


def on_rank(rank: int, num_ranks: int, operator: str, seeds: list[tuple[int, str, str, int]]) -> list[Any]:
    """Run cases on a rank; return the output of its tokens and whether ranks summed, or an error's text, for each.

    A case of fewer ranks is the first ones', in a group of their own; the others have None.
    """
    groups: dict[int, Any] = {num_ranks: None}
    found = []
    for case in seeds:
        draw = Draw(operator, *case)
        given, device = setting(draw), own_device(draw.device.type)
        if given.num_ranks not in groups:
            groups[given.num_ranks] = dist.new_group(list(range(given.num_ranks)))
        mine = rank < given.num_ranks
        found.append(_on_rank(rank, given, groups[given.num_ranks], device) if mine else None)
    return found


def _on_rank(rank: int, given: Setting, group: Any, device: torch.device) -> Any:
    options: dict[str, Any] = {}
    if device.type == "cuda":
        most = max(1, *(last - first for first, last in pairwise([0, *given.token_ends])))
        options = {"max_tokens": most, "num_topk": given.layer.routing.topk_ids.shape[1], "presum": given.presum}
        options["results"] = given.results or "bf16"
    parallel = None
    try:
        parallel = envoi.ExpertParallel(
            given.pack(rank, device), group, timeout_s=TIMEOUT_S, **options, placement=given.placement
        )
        out = parallel.moe(*given.part(rank, device)).cpu()
        parallel.check()
        result: Any = (out, parallel.presum)
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    dist.barrier(group)  # also after an error, for which the others would wait
    if parallel is not None:
        parallel.close()
    return result


def attempt_in_one_process(draw: Draw) -> Any:
    """Run a case with all ranks in this process; return its output and whether ranks summed first, or its exception."""
    given = setting(draw)
    try:
        return run_in_one_process(given, draw.device), given.presum
    except Exception as error:
        return error


def run_in_one_process(given: Setting, device: torch.device) -> torch.Tensor:
    """Return the output of all ranks in this process, each step on every rank in turn."""
    M, k = given.layer.routing.topk_ids.shape
    layout = SharedLayout(
        given.num_ranks,
        given.offsets[-1],
        max(1, M),
        k + given.num_shared,
        given.layer.tokens.shape[1],
        given.layer.format,
        given.presum,
        given.results,
    )
    opened = domains.open_all(layout, given.offsets, str(device))
    parts = []
    for rank in range(given.num_ranks):
        tokens, routing = given.part(rank, device)
        routing = replace(routing, topk_weights=routing.topk_weights.float(), topk_ids=routing.topk_ids.int())
        if (placed := given.placed(rank, device)) is not None:
            slots = place(placed, routing.topk_weights.contiguous(), routing.topk_ids.contiguous())
            routing = Routing(*slots, given.offsets[-1])
        parts.append((tokens.bfloat16(), routing))
    outs = domains.moe(opened, parts, [given.pack(rank, device) for rank in range(given.num_ranks)])
    return on_the_host(torch.cat(outs), given.layer.tokens.dtype)


def on_the_host(out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an output on the CPU, converted on its device as `moe` does: there a NaN of fp16 has other bits."""
    return out.to(dtype).cpu()
