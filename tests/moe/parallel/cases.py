"""Functions that the tests' ranks run; each is called on every rank as fn(rank, num_ranks, ...)."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from envoi.ops.moe import moe
from envoi.ops.moe.parallel import ExpertParallel, PeerTimeout, collectives, counted, opening
from envoi.ops.moe.parallel import opening as opening_hosts
from envoi.ops.moe.router import route
from envoi.runtime.compiling import compiling
from envoi.types import Routing
from tests.helpers.ranks import GUARD_S
from tests.moe.layers import Layer, make


@dataclass
class Case:
    """Layer of a test, and the ends of each rank's share of its tokens and experts.

    hot: experts that take all slots, from token to token in turn.
    """

    format: str = "bf16"
    layer: dict[str, Any] = field(default_factory=dict)
    token_ends: list[int] = field(default_factory=list)
    expert_ends: list[int] = field(default_factory=list)
    hot: tuple[int, ...] = ()

    def build(self) -> Layer:
        layer = make(**self.layer)
        if self.hot:
            ids = layer.routing.topk_ids
            turn = torch.arange(len(ids)).unsqueeze(1) + torch.arange(ids.shape[1])
            ids.copy_(torch.tensor(self.hot)[turn % len(self.hot)])
        return layer

    def cuts(self, num_ranks: int) -> tuple[list[int], list[int]]:
        layer = self.build()
        even = [[total * (r + 1) // num_ranks for r in range(num_ranks)] for total in (len(layer.tokens), 8)]
        return self.token_ends or even[0], self.expert_ends or even[1]


def part_of(layer: Layer, rank: int, ends: list[int]) -> tuple[torch.Tensor, Routing]:
    first, last = list(pairwise([0, *ends]))[rank]
    r = layer.routing
    routing = Routing(r.topk_weights[first:last].clone(), r.topk_ids[first:last].clone(), r.num_experts)
    return layer.tokens[first:last].clone(), routing


def open_parallel(layer: Layer, format: str, rank: int, ends: list[int], device="cpu", **kwargs) -> ExpertParallel:
    first, last = list(pairwise([0, *ends]))[rank]
    packed = to(layer, device).pack(format, first, last)
    return ExpertParallel(packed, **kwargs)


def to(layer: Layer, device) -> Layer:
    moved = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in vars(layer).items()
    }
    return Layer(**moved)


def as_callers_have_them(rank: int, num_ranks: int) -> list[torch.Tensor]:
    """Tokens [1, M, H] with int64 ids, fp16 tokens, and fp32 tokens under autocast, each beside bf16 [M, H]."""
    layer = make(tokens=8, experts=8, k=2, hidden=128, intermediate=128)
    parallel = open_parallel(layer, "bf16", rank, [4, 8])
    tokens, routing = part_of(layer, rank, [3, 8])
    longer = Routing(routing.topk_weights[None], routing.topk_ids[None].long(), routing.num_experts)
    outs = [parallel.moe(tokens, routing), parallel.moe(tokens[None], longer), parallel.moe(tokens.half(), routing)]
    with torch.autocast("cpu", torch.bfloat16):
        outs.append(parallel.moe(tokens.float(), routing))
    return outs


def run_cases(rank: int, num_ranks: int, cases: list[Case]) -> list[torch.Tensor]:
    outs = []
    for case in cases:
        layer, (token_ends, expert_ends) = case.build(), case.cuts(num_ranks)
        parallel = open_parallel(layer, case.format, rank, expert_ends)
        outs.append(parallel.moe(*part_of(layer, rank, token_ends)))
        parallel.close()
    return outs


def run_counted(rank: int, num_ranks: int, layer: dict[str, Any]) -> tuple[list[tuple[str, int]], list[int]]:
    """Run a call; return its collectives, each with the rows that this rank sends to others, and those it has to."""
    made, gathered, exchanged = make(**layer), collectives.gather_tensors, collectives.exchange_rows
    ends = [8 * (r + 1) // num_ranks for r in range(num_ranks)]
    tokens, routing = part_of(made, rank, [len(made.tokens) * (r + 1) // num_ranks for r in range(num_ranks)])
    parallel, seen = open_parallel(made, "bf16", rank, ends), []

    def gather(channel, mine, step):
        seen.append((step, 1))
        return gathered(channel, mine, step)

    def exchange(channel, rows, send, receive, step):
        seen.append((step, sum(send) - send[rank]))
        return exchanged(channel, rows, send, receive, step)

    collectives.gather_tensors, collectives.exchange_rows = gather, exchange
    parallel.moe(tokens, routing)
    others = [slice(first, last) for r, (first, last) in enumerate(pairwise([0, *ends])) if r != rank]
    needed = [((routing.topk_ids >= e.start) & (routing.topk_ids < e.stop)).any(1).sum() for e in others]
    mine = slice(ends[rank] - 8 // num_ranks, ends[rank])
    ids = made.routing.topk_ids
    from_others = ((ids >= mine.start) & (ids < mine.stop)).sum()
    own = ((routing.topk_ids >= mine.start) & (routing.topk_ids < mine.stop)).sum()
    return seen, [int(sum(needed)), int(from_others - own)]


def wrong_hosts(rank: int, num_ranks: int, tried: list[Any]) -> list[str]:
    """Open with each of these hosts, a tuple = those of rank 0 and of all others; return the errors."""
    found, layer = [], make()
    for given in tried:
        mine = given[min(rank, 1)] if isinstance(given, tuple) else given
        try:
            open_parallel(layer, "bf16", rank, [8 * (r + 1) // num_ranks for r in range(num_ranks)], **mine)
            found.append("opened")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def uneven_hostnames(rank: int, num_ranks: int, sizes: dict[str, Any]) -> str:
    """Open by hostname where the last rank is on a host of its own; return the error."""
    opening_hosts.socket.gethostname = lambda: "first" if rank < num_ranks - 1 else "second"
    try:
        open_parallel(make(), "bf16", rank, [8 * (r + 1) // num_ranks for r in range(num_ranks)], **sizes)
    except ValueError as error:
        return str(error)
    return "opened"


def run_on_gpus(rank: int, num_ranks: int, cases: list[Case]) -> list[tuple[torch.Tensor, str]]:
    """Run each case with a GPU a rank; return this rank's outputs, and by what they travelled."""
    device = torch.device("cuda", rank)
    outs = []
    for case in cases:
        layer, (token_ends, expert_ends) = case.build(), case.cuts(num_ranks)
        parallel = open_parallel(layer, case.format, rank, expert_ends, device)
        tokens, r = part_of(layer, rank, token_ends)
        routing = Routing(r.topk_weights.to(device), r.topk_ids.to(device), r.num_experts)
        outs.append((parallel.moe(tokens.to(device), routing).cpu(), parallel.transport))
    return outs


def run_compiled(rank: int, num_ranks: int) -> bool:
    layer, ends = make(), [8 * (r + 1) // num_ranks for r in range(num_ranks)]
    parallel, gate = open_parallel(layer, "mxfp8", rank, ends), torch.randn(8, 256).bfloat16()

    def step(tokens):
        return parallel.moe(tokens, route(tokens, gate, 2)) + 1

    return torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(layer.tokens), step(layer.tokens))


def run_groups(rank: int, num_ranks: int) -> list[torch.Tensor]:
    """Run two pairs of ranks and the world, objects interleaved, one closed and opened again."""
    layer = make()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    small = open_parallel(layer, "bf16", rank % 2, [4, 8], group=pairs[rank // 2])
    if rank < 2:  # makes the counts of objects differ between the pairs
        small.close()
        small = open_parallel(layer, "bf16", rank % 2, [4, 8], group=pairs[0])
    large = open_parallel(layer, "bf16", rank, [2, 4, 6, 8])
    inputs = part_of(layer, rank % 2, [20, 60]), part_of(layer, rank, [20, 30, 30, 60])
    return [small.moe(*inputs[0]), large.moe(*inputs[1]), small.moe(*inputs[0])]


def say(rank: int, word: str) -> None:
    """Tell the other ranks a word, through the store."""
    dist.distributed_c10d._get_default_store().set(f"{word} {rank}", "")


def hear(ranks: list[int], word: str) -> None:
    """Wait, as long as it takes, until these ranks have said a word."""
    store = dist.distributed_c10d._get_default_store()
    store.wait([f"{word} {rank}" for rank in ranks], timedelta(seconds=GUARD_S))


def fault(rank: int, num_ranks: int, kind: str, timeout_s: float) -> tuple[str, str, bool]:
    """Make rank 1 fail in one of several ways; return the errors of the others, and whether they came again.

    The late rank stays silent until the others have given up: if they didn't, nothing here would end.
    """
    layer, ends = make(), [8 * (r + 1) // num_ranks for r in range(num_ranks)]
    parallel = open_parallel(layer, "bf16", rank, ends, timeout_s=timeout_s)
    inputs = part_of(layer, rank, [60 * (r + 1) // num_ranks for r in range(num_ranks)])
    parallel.moe(*inputs)
    if rank == 1:
        if kind == "dies before":
            os._exit(3)
        if kind == "dies within":
            counted.Counted.combine = lambda *_: os._exit(3)
        if kind == "is late":
            hear([0, 2, 3], "gave up")
    try:
        parallel.moe(*inputs)
    except RuntimeError as first:
        say(rank, "gave up")
        try:
            parallel.moe(*inputs)
        except RuntimeError as second:
            return type(first).__name__, str(first), second is first
    return "", "nothing happened", False


def compile_meanwhile(rank: int, num_ranks: int, timeout_s: float, seconds: float) -> tuple[torch.Tensor | None, str]:
    """Let rank 1 compile for longer than its peers are patient, then call; return the output, or the error."""
    layer, ends = make(), [8 * (r + 1) // num_ranks for r in range(num_ranks)]
    parallel = open_parallel(layer, "bf16", rank, ends, timeout_s=timeout_s)
    parallel.channel.watch.wait_for_compilers()  # as on a GPU
    inputs = part_of(layer, rank, [60 * (r + 1) // num_ranks for r in range(num_ranks)])
    parallel.moe(*inputs)
    if rank == 1:
        with compiling():
            time.sleep(seconds)
    try:
        return parallel.moe(*inputs), ""
    except RuntimeError as error:
        return None, str(error)


def by_threads(rank: int, num_ranks: int, num_threads: int, num_calls: int) -> list[str]:
    """Call one object from several threads, each with inputs of its own; return each thread's failure, if any."""
    ends = [8 * (r + 1) // num_ranks for r in range(num_ranks)]
    parallel = open_parallel(make(), "bf16", rank, ends, timeout_s=60.0)
    everything = make().pack("bf16")

    def run(thread: int) -> str:
        for call in range(num_calls):
            layer = make(tokens=7 + call % 5, seed=1000 * rank + 100 * thread + call)
            try:
                got = parallel.moe(layer.tokens, layer.routing)
            except Exception as error:
                return f"call {call} of thread {thread}: {type(error).__name__}: {error}"
            if not torch.equal(got, moe(layer.tokens, layer.routing, everything)):
                return f"call {call} of thread {thread}: other rows"
        return ""

    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(run, range(num_threads)))


def open_late(rank: int, num_ranks: int, timeout_s: float) -> tuple[str, list[int], float, str]:
    """Open rank 1 after the others have given up, then all together; return how both openings ended."""
    layer, ends = make(), [8 * (r + 1) // num_ranks for r in range(num_ranks)]
    if rank == 1:
        hear([0, 2], "gave up")
    start = time.monotonic()
    try:
        open_parallel(layer, "bf16", rank, ends, timeout_s=timeout_s)
        text, ranks, seconds = "opened", [], 0.0
    except PeerTimeout as error:
        text, ranks, seconds = str(error), error.ranks, time.monotonic() - start
    say(rank, "gave up")
    dist.barrier()
    parallel = open_parallel(layer, "bf16", rank, ends, timeout_s=60.0)
    tokens, routing = part_of(layer, rank, [60 * (r + 1) // num_ranks for r in range(num_ranks)])
    again = torch.equal(parallel.moe(tokens, routing), moe(tokens, routing, layer.pack("bf16")))
    return text, ranks, seconds, "right" if again else "wrong"


def vanish_while_opening(rank: int, num_ranks: int, timeout_s: float) -> tuple[str, float]:
    """Let rank 1 join and die before the ranks have connected; return the others' error and its seconds."""
    if rank == 1:
        opening.ProcessGroupGloo = lambda *_: os._exit(3)
    start = time.monotonic()
    try:
        open_parallel(make(), "bf16", rank, [8 * (r + 1) // num_ranks for r in range(num_ranks)], timeout_s=timeout_s)
    except PeerTimeout as error:
        return str(error), time.monotonic() - start
    return "opened", 0.0


def of_groups(rank: int, num_ranks: int) -> dict[str, str]:
    """Try values of `group`, right and wrong, on the first rank, which is in the group, and the last, which isn't."""
    layer = make()
    some = dist.new_group(list(range(num_ranks - 1)))
    line = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("ep",))
    grid = init_device_mesh("cpu", (num_ranks // 2, 2), mesh_dim_names=("dp", "ep"))
    tried = {"text": "x", "number": 3, "ranks": [0, 1], "grid": grid}
    if rank == num_ranks - 1:
        tried["of others"] = some
    found = {}
    for name, group in tried.items():
        try:
            ExpertParallel(layer.pack("bf16"), group)
            found[name] = "opened"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    for mesh, size, place in ((line, num_ranks, rank), (grid["ep"], 2, rank % 2)):
        parallel = open_parallel(layer, "bf16", place, [8 * (r + 1) // size for r in range(size)], group=mesh)
        same = torch.equal(parallel.moe(layer.tokens, layer.routing), moe(layer.tokens, layer.routing, layer.pack()))
        found[f"mesh of {size}"] = "right" if same else "wrong"
    return found


def mistakes(rank: int, num_ranks: int, kinds: list[str]) -> list[tuple[str, str, float]]:
    """Make one mistake after the other; return the name, the text and the seconds of each error."""
    found = []
    for kind in kinds:
        start = time.monotonic()
        try:
            mistake(rank, num_ranks, kind)
            found.append(("", "", 0.0))
        except Exception as error:
            found.append((type(error).__name__, str(error), time.monotonic() - start))
    return found


def mistake(rank: int, num_ranks: int, kind: str) -> None:
    """Make rank 1 pass an argument that differs from its peers'."""
    layer, ends = make(), [8 * (r + 1) // num_ranks for r in range(num_ranks)]
    wrong = rank == 1
    if kind == "format":
        open_parallel(layer, "mxfp8" if wrong else "bf16", rank, ends)
    if kind == "timeout":
        open_parallel(layer, "bf16", rank, ends, timeout_s=-1.0 if wrong else 10.0)
    if kind == "two timeouts":
        open_parallel(layer, "bf16", rank, ends, timeout_s=20 if wrong else 10.0)
    if kind == "max_tokens":
        open_parallel(layer, "bf16", rank, ends, max_tokens=0 if wrong else 60, num_topk=3)
    if kind == "hidden":
        layer = make(hidden=128) if wrong else layer
    sizes = {"max_tokens": 70, "num_topk": 3} if kind == "many" else {}
    parallel = open_parallel(layer, "bf16", rank, ends, **sizes)
    tokens, routing = part_of(layer, rank, [60 * (r + 1) // num_ranks for r in range(num_ranks)])
    weights, ids = routing.topk_weights, routing.topk_ids
    num_experts = 8
    if wrong and kind == "id":
        ids[3, 1] = 99
    if wrong and kind == "dtype":
        tokens = tokens.float()
    if wrong and kind == "many":
        tokens, weights, ids = (x[:1].expand(71, -1).contiguous() for x in (tokens, weights, ids))
    if wrong and kind == "num_experts":
        num_experts = 16
    if wrong and kind == "k":
        weights, ids = weights[:, :2].contiguous(), ids[:, :2].contiguous()
    if wrong and kind == "gradient":
        tokens = tokens.clone().requires_grad_()
    if wrong and kind == "meta":
        tokens = tokens.to("meta")
    if wrong and kind == "sparse":
        ids = ids.to_sparse()
    if kind == "batched":  # [B, S, ..], which is fine
        tokens, weights, ids = (x[None] for x in (tokens, weights, ids.long()))
        ids[0, 0, 0] = 99 if wrong else 1
    given: Any = Routing(weights, ids, num_experts)
    if wrong and kind == "routing":
        given = weights, ids
    parallel.moe(tokens, given)
