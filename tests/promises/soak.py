"""Soak of `ExpertParallel`: many calls with changing tokens, routing and skew, eager and from graphs, of two objects,
on one stream and on two. Bits, memory and times are watched.

    python -m tests.promises soak --ranks 4 --calls 100000

Calls come in blocks of one kind (`KINDS`), each with a barrier before and a check of bits after it. What a call does
follows from the seed and its number, so that all ranks make the same calls in the same order. The two objects have
groups of their own and other sizes: only then may they be on two streams at a time.

Times are judged in blocks of calls that are alone on idle devices, each after a barrier: one that follows others waits
for their peers too, which is as long as the longest of them. Of those the text gives the share that is slow. A call's
time is its device's, from when this rank's host began to launch it, less how much later than usual the last host had
launched it, which the system may have interrupted: all ranks run on one host, whose clock they share. Calls that a host
launched much later than usual are left out and counted. The host's own time of a call that isn't from a graph is
compared with that of small operators of torch, beside each call and as many as usually take as long: what interrupts
one interrupts the other. More slow calls are wrong if chance doesn't explain them, and so is one that stalls.

Before that every scene is called eagerly, one call after another, a few times before graphs are captured and more
after, with Python's garbage collection as it is by default. No call after a scene's first may pause, for a compilation,
a load, an allocation or a collection: take over MOST_TIMES its median, and over PAUSE_S longer than that. These times
are until the device is done, so that every rank sees each one's pauses.
Ranks that share a GPU have it in turn, so that their times say nothing; MPS lets them have it at once.
"""

import argparse
import gc
import math
import random
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import envoi
from envoi.types import Routing
from tests.helpers.ranks import own_device, run_ranks, share_gpus
from tests.moe.layers import make
from tests.promises.evidence import Run
from tests.promises.same_bits import same

BLOCK = 500  # calls between two checks
SCENES = 48  # of each object: tokens and a routing for every rank
GRAPHS = 6  # scenes of each object that have a graph too
MOST_TIMES = 3.0  # of its median that a call may take
SETTLED = 0.2  # share of the calls after which memory mustn't grow
GPU_SLACK, CPU_SLACK = 8 << 20, 64 << 20  # bytes that the driver, or Python, may take meanwhile
GUARD_S = 590.0
LEAST_ALIKE = 20  # calls that have a median
CHANCE = 4.0  # deviations by which two numbers of equally rare events may differ
EARLY_CALLS, LATER_CALLS = 4, 30  # of a scene, whose pauses are counted, before graphs are captured and after
ON_CPU = 1  # of either kind after the first, where times say little
# Over its median, from which on a call has paused. Less is the recording of a prepared call, 5 ms once for a number of
# tokens; memory that torch gives back before a capture, and then asks the driver for again, 8 ms; and what interrupts a
# host: at most 40 of its medians, which are tens of microseconds, in 66,456 calls.
PAUSE_S = 1e-2
STALL = 100.0  # of its median that a host's time may never take, unless torch's operators beside it did
ALONE, REPLAYED, HOST, OF_TORCH = "alone", "alone, from a graph", "host", "operators of torch"
LATE = "hosts late, {}"  # of a kind of block, the calls that are left out
KINDS = ("eager", "graphs", "mixed", "two streams", ALONE)
ROUTINGS = ("even", "skewed", "one expert", "masked")


@dataclass
class Scene:
    """Tokens of this rank, their routing and the output that one rank gives, and a graph of the call or None."""

    tokens: torch.Tensor
    routing: Routing
    want: torch.Tensor
    graph: Any = None
    out: torch.Tensor | None = None


class Launched(NamedTuple):
    """Times of a call on this rank's host, in seconds: when its launch began and ended, by the clock of all ranks; and
    how long the operators of torch beside it took, 0 without any."""

    begin: float
    end: float
    of_torch: float


class Took(NamedTuple):
    """Milliseconds of a call: of the device, from when this rank's host began to launch it; until the last rank's host
    had launched it; of this rank's host; and of the operators of torch beside it, 0 without any."""

    device: float
    last_host: float = 0.0
    host: float = 0.0
    of_torch: float = 0.0


@dataclass
class Part:
    """Object under test with its scenes and its stream. calls: of each scene, by kind of block.

    eager_s: for each scene the seconds of all its first calls, in order.
    """

    parallel: envoi.ExpertParallel
    scenes: list[Scene]
    stream: Any = None
    calls: dict[tuple[str, int], list[Took]] = field(default_factory=lambda: defaultdict(list))
    eager_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def usual_host_s(self, kind: str, number: int) -> float:
        """Return the usual seconds of the host for a call of a scene, 0 as long as few are known."""
        known = self.calls.get((kind, number), [])
        return statistics.median(call.host for call in known) / 1e3 if len(known) >= LEAST_ALIKE else 0.0


@dataclass(frozen=True)
class Found:
    """Findings of a rank. grown: bytes.

    times: by kind of block the number of calls, of those beyond MOST_TIMES their median, and the most times.
    pauses: calls whose pauses were looked for, calls that paused, and the most seconds over a median.
    """

    calls: int
    checked: int
    wrong: int
    times: dict[str, tuple[int, int, float]]
    grown: int
    tokens: int
    load: str
    exchange: tuple[str, ...]
    pauses: tuple[int, int, float]


def sizes_of(device: torch.device) -> tuple[dict[str, int], dict[str, int]]:
    """Return the sizes of both objects, and their most tokens of a rank."""
    if device.type == "cuda":
        return (
            {"experts": 32, "k": 6, "hidden": 2048, "intermediate": 768, "tokens": 512},
            {"experts": 16, "k": 4, "hidden": 1024, "intermediate": 512, "tokens": 256},
        )
    return (
        {"experts": 8, "k": 2, "hidden": 128, "intermediate": 128, "tokens": 24},
        {"experts": 6, "k": 3, "hidden": 256, "intermediate": 128, "tokens": 9},
    )


def drawn_ids(draw: random.Random, tokens: int, experts: int, k: int) -> torch.Tensor:
    """Draw ids [tokens, k] int32, distinct in a token: even, skewed to few experts, with one of all, or masked."""
    kind = draw.choice(ROUTINGS)
    source = torch.Generator().manual_seed(draw.getrandbits(40))
    keys = torch.rand(tokens, experts, generator=source)
    if kind == "skewed":
        keys *= torch.arange(1, experts + 1) ** 1.5  # experts with low ids are chosen most
    if kind == "one expert":
        keys[:, draw.randrange(experts)] = -1.0
    ids = keys.argsort(1)[:, :k].to(torch.int32)
    share = {"masked": 0.6}.get(kind, 0.05)
    return ids.masked_fill(torch.rand(ids.shape, generator=source) < share, -1)


def drawn_tokens(draw: random.Random, most: int, num_ranks: int) -> list[int]:
    """Draw the number of tokens of each rank: like each other, few, of one rank alone, or any."""
    kind = draw.choice(("alike", "few", "one rank", "any", "most"))
    if kind == "alike":
        return [draw.randint(0, most)] * num_ranks
    if kind == "few":
        return [draw.randint(0, 4) for _ in range(num_ranks)]
    if kind == "one rank":
        owner = draw.randrange(num_ranks)
        return [draw.randint(1, most) if rank == owner else 0 for rank in range(num_ranks)]
    return [most if kind == "most" else draw.randint(0, most) for _ in range(num_ranks)]


def open_part(place: int, format: str, seed: int, rank: int, num_ranks: int, device: torch.device) -> Part:
    """Open one of the objects, in a group of its own, and make its scenes."""
    size: dict[str, Any] = sizes_of(device)[place]
    most, E, k = size["tokens"], size["experts"], size["k"]
    layer = make(**size, seed=place)
    first, last = E * rank // num_ranks, E * (rank + 1) // num_ranks
    gate_up, down = layer.gate_up.to(device), layer.down.to(device)
    given: dict[str, Any] = {"max_tokens": most, "num_topk": k, "presum": False}
    if device.type == "cpu" and place:
        given = {}  # rows are counted
    mine = envoi.experts.pack(gate_up[first:last], down[first:last], format)
    group: Any = dist.new_group()
    parallel = envoi.ExpertParallel(mine, group, timeout_s=30.0, **given)
    everything, scenes = envoi.experts.pack(gate_up, down, format), []
    tokens = layer.tokens.to(device)
    for number in range(SCENES):
        draw = random.Random(f"soak {seed} {place} {number}")
        count = drawn_tokens(draw, most, num_ranks)[rank]
        draw = random.Random(f"soak {seed} {place} {number} {rank}")
        ids = drawn_ids(draw, count, E, k).to(device)
        weights = torch.rand(count, k, generator=torch.Generator().manual_seed(draw.getrandbits(40))).to(device)
        x = tokens[torch.randint(most, (count,), generator=torch.Generator().manual_seed(number)).to(device)]
        routing = Routing(weights, ids, E)
        scenes.append(Scene(x, routing, envoi.moe(x, routing, everything, batch_invariant=True)))
    return Part(parallel, scenes)


def prepare(part: Part, device: torch.device) -> None:
    """Compile what calls need, call every scene, and capture and replay graphs of some. Collective."""
    if device.type == "cpu":
        call_eagerly(part, 1 + ON_CPU, device)
        return
    part.stream = torch.cuda.Stream(device)
    if part.parallel.exchange != "counted":
        part.parallel.warm_up(progress=False)
    call_eagerly(part, EARLY_CALLS, device)
    if part.parallel.exchange == "counted":
        return
    for scene in part.scenes[:GRAPHS]:
        dist.barrier()
        scene.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(scene.graph):
            scene.out = part.parallel.moe(scene.tokens, scene.routing)
        scene.graph.replay()
    torch.cuda.synchronize()


def call_eagerly(part: Part, count: int, device: torch.device) -> None:
    """Call every scene so many times, one call after another, and note how long each took. Collective."""
    for number, scene in enumerate(part.scenes):
        _settle(device.type == "cuda")
        for _ in range(count):
            start = time.monotonic()
            part.parallel.moe(scene.tokens, scene.routing)
            if device.type == "cuda":
                torch.cuda.synchronize()
            part.eager_s[number].append(time.monotonic() - start)


def pauses(parts: list[Part]) -> tuple[int, int, float]:
    """Return the number of eager calls after the first of each scene, of those that paused, and the most seconds over
    the median of its scene that one of all took."""
    late: list[tuple[float, float]] = []  # seconds over the median, and the median
    for part in parts:
        for first_and_others in part.eager_s.values():
            median = statistics.median(first_and_others[1:])
            late += [(seconds - median, median) for seconds in first_and_others[1:]]
    paused = sum(more > max(PAUSE_S, (MOST_TIMES - 1) * median) for more, median in late)
    return len(late), paused, max((more for more, _ in late), default=0.0)


def call(part: Part, number: int, kind: str, draw: random.Random) -> tuple[torch.Tensor, bool]:
    """Make a call of a scene, from its graph where it has one and the block or the draw says so; return if it was."""
    scene = part.scenes[number]
    graphs = {"graphs": 1.0, "mixed": 0.5, "two streams": 0.3, ALONE: 0.5}.get(kind, 0.0)
    if scene.graph is not None and draw.random() < graphs:
        scene.graph.replay()
        assert scene.out is not None
        return scene.out, True
    return part.parallel.moe(scene.tokens, scene.routing), False


def block(parts: list[Part], kind: str, count: int, draw: random.Random, device: torch.device) -> tuple[int, int]:
    """Make the calls of a block; return how many outputs were checked after it, and how many were wrong."""
    dist.barrier()
    on_gpu, last = device.type == "cuda", {}
    marks: list[tuple[Part, tuple[str, int], Any, Any]] = []
    launched: list[Launched] = []
    for _ in range(count):
        place = draw.randrange(2)
        part = parts[place]
        # In a block of graphs only scenes that have one.
        number = draw.randrange(GRAPHS if kind == "graphs" else SCENES)
        stream = torch.cuda.stream(part.stream) if on_gpu and kind == "two streams" else nullcontext()
        if kind == ALONE:
            _settle(on_gpu)
        with stream:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if on_gpu else (0.0, 0.0)
            start = time.monotonic()
            begin = _mark(begin, on_gpu)
            out, replayed = call(part, number, kind, draw)
            end = _mark(end, on_gpu)
            stop = time.monotonic()
            like = REPLAYED if kind == ALONE and replayed else kind
            usual_s = part.usual_host_s(like, number) if like == ALONE else 0.0
            launched.append(Launched(start, stop, launch_for(usual_s, device) if usual_s else 0.0))
            marks.append((part, (like, number), begin, end))
        last[place] = part.scenes[number], out
    if on_gpu:
        torch.cuda.synchronize()
    last_host_s = until_last_host(launched, on_gpu) if kind == ALONE else [0.0] * count
    for (part, key, begin, end), host, last_s in zip(marks, launched, last_host_s, strict=True):
        device_ms = begin.elapsed_time(end) if on_gpu else 1e3 * (end - begin)
        part.calls[key].append(Took(device_ms, 1e3 * last_s, 1e3 * (host.end - host.begin), 1e3 * host.of_torch))
    for part in parts:
        part.parallel.check()
    return len(last), sum(not same([out], [scene.want]) for scene, out in last.values())


def launch_for(seconds: float, device: torch.device) -> float:
    """Call small operators of torch for as long as given, if nothing interrupts that; return the seconds that it took,
    0 for 0."""
    number, x = round(seconds / _usual_s(device)), _number_on(device)
    if not number:
        return 0.0
    start = time.monotonic()
    for _ in range(number):
        torch.add(x, 1)  # a launch and an allocation
    return time.monotonic() - start


@cache
def _usual_s(device: torch.device) -> float:
    """Return the seconds of such an operator on the host, the median of several measurements."""
    found, x = [], _number_on(device)
    for _ in range(20):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.monotonic()
        for _ in range(100):
            torch.add(x, 1)
        found.append((time.monotonic() - start) / 100)
    return statistics.median(found)


@cache
def _number_on(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, device=device)


def until_last_host(launched: list[Launched], on_gpu: bool) -> list[float]:
    """Return how many seconds after this rank's host began each call the last one had launched it.

    On CPUs, where a host launches nothing, the last one had begun it. launched: by the clock of all ranks' host.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [host.end if on_gpu else host.begin for host in launched])
    return [max(times) - mine.begin for mine, *times in zip(launched, *everyone, strict=True)]


def _settle(on_gpu: bool) -> None:
    """Wait until every rank is here and its device is idle."""
    if on_gpu:
        torch.cuda.synchronize()
    dist.barrier()
    if on_gpu:
        torch.cuda.synchronize()


def _mark(event: Any, on_gpu: bool) -> Any:
    if not on_gpu:
        return time.perf_counter()
    event.record()
    return event


def memory(device: torch.device) -> int:
    """Return the bytes that this process has reserved on its GPU, or on a CPU its most resident ones."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def times_of_medians(part: Part) -> dict[str, list[float]]:
    """Return, by kind of block, each call's time over the median of the calls like it; none where few are alike.

    LATE, of a kind, are the hosts' times of calls that are left out. HOST is the host's time of calls that are alone
    and not from a graph, where operators of torch were beside them, OF_TORCH that of these operators.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for (kind, _), calls in part.calls.items():
        if len(calls) < LEAST_ALIKE:
            continue
        usual = statistics.median(call.last_host for call in calls)
        in_time = [call for call in calls if call.last_host <= MOST_TIMES * usual]
        found[kind] += _over_median([call.device - (call.last_host - usual) for call in in_time])
        found[LATE.format(kind)] += [x.last_host / usual for x in calls if x.last_host > MOST_TIMES * usual]
        beside_others = [call for call in calls if call.of_torch]
        found[HOST] += _over_median([call.host for call in beside_others])
        found[OF_TORCH] += _over_median([call.of_torch for call in beside_others])
    return {kind: times for kind, times in found.items() if times}


def _over_median(times: list[float]) -> list[float]:
    median = statistics.median(times) if times else 0.0
    return [time / median for time in times]


def judged(parts: list[Part]) -> dict[str, tuple[int, int, float]]:
    """Return, by kind of block, the number of calls, of slow ones, and the most times of a median."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for part in parts:
        for kind, found in times_of_medians(part).items():
            ratios[kind] += found
    return {kind: (len(found), sum(x > MOST_TIMES for x in found), max(found)) for kind, found in ratios.items()}


def on_rank(rank: int, num_ranks: int, format: str, seed: int, calls: int, kind: str) -> Found:
    """Make all calls on a rank."""
    device = own_device(kind)
    parts = [open_part(place, format, seed, rank, num_ranks, device) for place in range(2)]
    gc.collect()  # what is due for the objects of this program
    for part in parts:
        prepare(part, device)
    for part in parts:
        call_eagerly(part, LATER_CALLS if device.type == "cuda" else ON_CPU, device)
    shares = share_gpus(num_ranks, kind)
    paused = (0, 0, 0.0) if shares else pauses(parts)
    gc.collect()
    gc.disable()
    done = checked = wrong = 0
    settled, kinds = None, KINDS if device.type == "cuda" else ("eager", ALONE)
    if shares:
        kinds = tuple(kind for kind in KINDS if kind != ALONE)
    while done < calls:
        count = min(BLOCK, calls - done, max(1, calls // 10))
        at = done // max(1, count)
        result = block(parts, kinds[at % len(kinds)], count, random.Random(f"soak {seed} block {at}"), device)
        done, checked, wrong = done + count, checked + result[0], wrong + result[1]
        if done >= SETTLED * calls and settled is None:
            settled = memory(device)
        gc.collect(0)
    grown = memory(device) - (settled or 0)
    tokens = sum(len(scene.tokens) for part in parts for scene in part.scenes)
    exchanges = tuple(part.parallel.exchange for part in parts)
    load = str(parts[0].parallel.load())
    dist.barrier()
    return Found(done, checked, wrong, judged(parts), max(0, grown), tokens, load, exchanges, paused)


def run(options: argparse.Namespace) -> Iterator[Run]:
    """Yield the runs of a soak: bits, memory, times."""
    start, device = time.monotonic(), options.device
    backend = "nccl" if device == "cuda" else "gloo"
    given = options.format, options.seed, options.calls, device
    outcomes = run_ranks(options.ranks, on_rank, *given, backend=backend, timeout_s=GUARD_S)
    errors = [f"rank {rank}: {o.error}: {o.text}" for rank, o in enumerate(outcomes) if o.error]
    spent = time.monotonic() - start
    if errors:
        yield Run("soak/bits", options.calls, options.calls, spent, errors[0])
        return
    found = [outcome.value for outcome in outcomes]
    made, slack = found[0].calls, GPU_SLACK if device == "cuda" else CPU_SLACK
    checked, wrong = sum(x.checked for x in found), sum(x.wrong for x in found)
    text = f"{made} calls on {options.ranks} ranks by {' and '.join(found[0].exchange)}, {options.format}"
    yield Run("soak/bits", checked, wrong, spent, text)
    grown = [x.grown for x in found]
    text = f"at most {max(grown) / 2**20:.1f} MiB more on a rank after {made} calls than after {SETTLED:.0%} of them"
    too_much = sum(x > slack for x in grown)
    yield Run("soak/memory", options.ranks, too_much, spent, text)
    print(f"load on rank 0: {found[0].load}")
    if share_gpus(options.ranks, device):
        return
    n, paused, most_s = summed([x.pauses for x in found])
    text = f"a call took {1e3 * most_s:.1f} ms more than the median of those like it at most"
    yield Run("soak/pauses", n, paused, spent, text)
    yield from run_of_times(found, spent, options)


def run_of_times(found: list[Found], spent: float, options: argparse.Namespace) -> Iterator[Run]:
    """Yield the runs of the times of calls that are alone."""
    apart = REPLAYED, LATE.format(REPLAYED), ALONE, LATE.format(ALONE), HOST, OF_TORCH
    kinds = dict.fromkeys((*KINDS, *apart))
    counts = {kind: summed([x.times.get(kind, (0, 0, 0.0)) for x in found]) for kind in kinds}
    replayed, late_replayed, launched, late, host, of_torch = (counts.pop(kind) for kind in apart)
    others = [f"{kind} {n_slow / n:.1%}" for kind, (n, n_slow, _) in counts.items() if n]
    in_a_row = f"; beyond {MOST_TIMES:g} times in a row: {', '.join(others)}" if others else ""
    for name, (n, slow, worst), left_out, more in (
        ("soak/times from graphs", replayed, late_replayed, in_a_row), ("soak/times", launched, late, ""),
    ):  # fmt: skip
        text = f"the slowest took {worst:.2f} times the median of those like it; {left_out[0]} left out{more}"
        yield Run(name, n, slow, spent, text)
    (n, slow, worst), (n_others, slow_others, worst_other) = host, of_torch
    text = (
        f"a host took over {MOST_TIMES:g} times its median in {slow} of {n} calls, {worst:.1f} times at most, and in "
        f"{slow_others} of {n_others} rows of torch's operators as long, {worst_other:.1f} times at most"
    )
    wrong = max(more_often(slow, slow_others), int(worst > max(STALL, worst_other)))
    if n:
        yield Run("soak/host", n, wrong, spent, text)


def more_often(slow: int, slow_others: int) -> int:
    """Return the slow calls, or 0 if chance explains that there are more than slow ones among as many others."""
    return slow if slow - slow_others > CHANCE * math.sqrt(slow + slow_others) else 0


def summed(found: list[tuple[int, int, float]]) -> tuple[int, int, float]:
    """Add up the numbers of calls and of slow ones of all ranks; of the most times, return the most."""
    return sum(n for n, _, _ in found), sum(slow for _, slow, _ in found), max(worst for _, _, worst in found)
