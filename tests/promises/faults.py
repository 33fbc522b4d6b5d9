"""Faults of a rank, at every stage of its work: what the others are told, how soon, and whether they can go on.

    python -m tests.promises faults --ranks 4

A rank is killed, stopped for longer than the timeout, or late by half of it: before and in each step of a call. Or it
passes wrong arguments, or is out of memory while an object is opened. Killed and stopped: every other rank must get a
PeerTimeout that names it within timeout_s + 1 s, or the right answer if it needs nothing more of that rank (NEEDLESS);
at least one must be told. Late: the right answer. Wrong arguments: a ValueError on every rank, and the right answer to
the next call. Out of memory: the right answer, or an error that says so on every rank. Then, in
the processes that are left, a new object on a new group must give the right answer; where a rank was killed in a call,
`ExpertParallel.without` it, every expert having had a replica on another rank.

Each fault has processes of its own; several of them run at a time.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import envoi
from envoi.ops.moe.parallel import collectives, counted, nvlink, rail
from envoi.runtime import shortcuts
from envoi.types import Routing
from tests.helpers.ranks import Outcome, own_device, run_ranks, share_gpus
from tests.moe.layers import make
from tests.moe.parallel.cases import hear, say
from tests.moe.parallel.test_nvlink_gpu import MISTAKES, wrong
from tests.promises.evidence import Run

VICTIM = 1
KINDS = ("killed", "stopped", "late")
# Where each step of a call begins, by the object's exchange: its caller's name for it.
STEPS: dict[str, dict[str, tuple[Any, str]]] = {
    "memory": {
        "dispatch": (nvlink, "send_routing"), "pull": (nvlink, "pull_rows"),
        "experts": (nvlink, "run_local_experts"), "combine": (nvlink, "combine"),
    },
    "gathered": {
        "dispatch": (rail.Rail, "gather"), "experts": (nvlink, "run_local_experts"), "combine": (rail.Rail, "exchange"),
    },
    "hosts": {
        "dispatch": (rail.Rail, "gather"), "announce": (rail, "send_routing"),
        "experts": (nvlink, "run_local_experts"), "combine": (rail.Rail, "exchange"),
    },
    "counted": {
        "counts": (collectives, "gather_tensors"), "dispatch": (collectives, "exchange_rows"),
        "experts": (counted, "run_local_experts"), "combine": (counted.Counted, "combine"),
    },
}  # fmt: skip
# Where a rank may be right without the victim: in its own place it exchanges sums with other hosts' ranks alone.
NEEDLESS = {("hosts", "combine")}
MANY_TOKENS = 200_000  # for which an object needs hundreds of megabytes
LAYER: dict[str, Any] = {"tokens": 60, "experts": 8, "k": 3, "hidden": 256, "intermediate": 128}
SPOILED = 8  # outputs
GUARD_S = 150.0
FREE = re.compile(r"; (\d+) MiB of its GPU's memory were free")  # as `collectives.connect_ranks` says it
ROOM_LEFT = 48 << 20  # bytes that a rank which is out of memory has


@dataclass(frozen=True)
class Setting:
    """Place of a fault. stage: "opening", "call", "replay" or one of STEPS; device: "cuda" or "cpu"."""

    fault: str
    stage: str
    exchange: str
    timeout_s: float
    device: str

    @property
    def name(self) -> str:
        """Name of the promise."""
        return f"faults/{self.fault}/{self.exchange}/{self.stage}"


@dataclass
class Told:
    """Answer that a rank was given. error: its type, "" for none; ranks: named by it. right: the answer was, or None.

    seconds: from the call until the error. again: whether an object of the ranks that are left gave the right answer.
    """

    error: str = ""
    text: str = ""
    ranks: tuple[int, ...] = ()
    right: bool | None = None
    seconds: float = 0.0
    again: bool | None = None


def settings(device: str, timeout_s: float, num_ranks: int) -> list[Setting]:
    """Return all faults that can be had on this device.

    Ranks that share a GPU have only its memory: NCCL refuses them, also as what is left to ranks without memory.
    """
    exchanges = ("memory", "gathered", "hosts", "counted") if device == "cuda" else ("counted",)
    shared = share_gpus(num_ranks, device)
    if shared:
        exchanges = ("memory",)
    found = []
    for exchange in exchanges:
        replays = ["replay"] if exchange in ("memory", "gathered", "hosts") else []
        stages = ["opening", "call", *replays, *STEPS[exchange]]
        found += [Setting(kind, stage, exchange, timeout_s, device) for kind in KINDS for stage in stages]
        found.append(Setting("wrong arguments", "call", exchange, timeout_s, device))
    if device == "cuda" and not shared:
        found.append(Setting("out of memory", "opening", "memory", timeout_s, device))
    return found


def hit(fault: str, timeout_s: float) -> None:
    """Do to this process what the fault says."""
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stopped":
        subprocess.Popen(("sh", "-c", f"sleep {timeout_s + 3}; kill -CONT {os.getpid()}"))
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "late":
        time.sleep(timeout_s / 2)


def hook(setting: Setting) -> None:
    """Let the fault happen the next time that the step begins, when the device has done all before."""
    owner, name = STEPS[setting.exchange][setting.stage]
    was = getattr(owner, name)

    def then(*arguments: Any, **named: Any) -> Any:
        setattr(owner, name, was)
        if setting.device == "cuda":
            torch.cuda.synchronize()
        hit(setting.fault, setting.timeout_s)
        return was(*arguments, **named)

    setattr(owner, name, then)


def options_of(setting: Setting) -> dict[str, Any]:
    """Return the options with which objects exchange tokens in this way."""
    name = setting.exchange
    most = MANY_TOKENS if setting.fault == "out of memory" else LAYER["tokens"]
    sizes = {} if name == "counted" else {"max_tokens": most, "num_topk": LAYER["k"]}
    return sizes | {"exchange": "rows" if name == "memory" else name}


@dataclass
class Work:
    """Work of a rank: its share of a layer over some ranks, and the right answer."""

    setting: Setting
    sizes: dict[str, Any]
    rank: int
    device: torch.device

    @property
    def goes_on(self) -> bool:
        """Tell whether the ranks that are left go on with the object, which has a replica of each expert."""
        return self.setting.fault == "killed" and self.setting.stage != "opening"

    def experts_of(self, place: int, count: int) -> list[int]:
        """Return the experts that a rank packs, those of the next rank too if that one may be missed."""
        places = [place, (place + 1) % count] if self.goes_on else [place]
        return [e for p in places for e in range(LAYER["experts"] * p // count, LAYER["experts"] * (p + 1) // count)]

    def hosts(self, count: int) -> list[str] | None:
        """Return two hosts; after a rank is lost, one for each that is left, unless it is alone."""
        if self.setting.exchange != "hosts":
            return None
        return [str(2 * place // count) if count % 2 == 0 else str(place) for place in range(count)]

    def prepare(self, ranks: list[int]) -> tuple[envoi.ExpertWeights, tuple, torch.Tensor]:
        """Return this rank's share of the layer over ranks, its tokens and routing, and the right answer for them."""
        layer, place, count = make(**LAYER), ranks.index(self.rank), len(ranks)
        at = self.experts_of(place, count)
        t0, t1 = (LAYER["tokens"] * r // count for r in (place, place + 1))
        mine = envoi.experts.pack(layer.gate_up[at].to(self.device), layer.down[at].to(self.device))
        r = layer.routing
        routing = Routing(r.topk_weights[t0:t1].to(self.device), r.topk_ids[t0:t1].to(self.device), r.num_experts)
        tokens = layer.tokens[t0:t1].to(self.device)
        everything = envoi.experts.pack(layer.gate_up.to(self.device), layer.down.to(self.device))
        return mine, (tokens, routing), envoi.moe(tokens, routing, everything)

    def open(
        self, ranks: list[int], group: Any = None, prepared: tuple | None = None
    ) -> tuple[envoi.ExpertParallel, tuple, torch.Tensor]:
        """Open an object over ranks; return it, this rank's tokens and routing, and the right answer for them.

        prepared: what `prepare` has returned for these ranks.
        """
        mine, inputs, want = prepared or self.prepare(ranks)
        count = len(ranks)
        placement = [e for place in range(count) for e in self.experts_of(place, count)] if self.goes_on else None
        parallel = envoi.ExpertParallel(
            mine, group, timeout_s=self.setting.timeout_s, **self.sizes, hosts=self.hosts(count), placement=placement
        )
        return parallel, inputs, want

    def settle(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def replayed(work: Work, parallel: envoi.ExpertParallel, inputs: tuple) -> Callable[[], torch.Tensor]:
    """Capture a call; return what replays it."""
    graph = torch.cuda.CUDAGraph()
    dist.barrier()
    with torch.cuda.graph(graph):
        out = parallel.moe(*inputs)

    def replay() -> torch.Tensor:
        out.fill_(float("nan"))
        graph.replay()
        return out

    return replay


def on_rank(rank: int, num_ranks: int, setting: Setting) -> Told:
    """Let the fault happen to the victim; return what this rank was told."""
    device = own_device(setting.device)
    shortcuts.PREPARED = setting.stage in ("call", "replay")  # a prepared call has no steps
    work = Work(setting, options_of(setting), rank, device)
    everyone, is_victim = list(range(num_ranks)), rank == VICTIM
    told = Told()
    dist.barrier()
    if setting.fault == "wrong arguments":
        return mistaken(work, everyone)
    prepared, opened = work.prepare(everyone), None
    work.settle()
    give_back = take_memory(device) if is_victim and setting.fault == "out of memory" else None
    dist.barrier()  # the others' seconds don't count while it is taken
    if setting.stage == "opening":
        attempt(told, work, lambda: call_once(work, everyone, prepared, is_victim))
    else:
        parallel, inputs, want = opened = work.open(everyone, prepared=prepared)
        assert parallel.exchange == setting.exchange, parallel.why
        for _ in range(3):  # with other tokens: what such calls leave in buffers isn't the right answer
            parallel.moe(2 * inputs[0], inputs[1])
        run = replayed(work, parallel, inputs) if setting.stage == "replay" else partial(parallel.moe, *inputs)
        work.settle()
        dist.barrier()
        attempt(told, work, lambda: call_again(work, parallel, run, want, is_victim))
    if give_back is not None:
        give_back()
    recover(told, work, everyone, opened if work.goes_on else None)
    return told


def call_once(work: Work, everyone: list[int], prepared: tuple, is_victim: bool) -> bool:
    """Open an object and make a call; return whether it is right. The victim's fault comes first."""
    if is_victim:
        hit(work.setting.fault, work.setting.timeout_s)
    parallel, inputs, want = work.open(everyone, prepared=prepared)
    out = parallel.moe(*inputs)
    work.settle()
    parallel.check()
    return torch.equal(out, want)


def call_again(
    work: Work, parallel: envoi.ExpertParallel, run: Callable[[], torch.Tensor], want: torch.Tensor, is_victim: bool
) -> bool:
    """Make a call in which the victim has its fault; return whether it is right."""
    if is_victim and work.setting.stage in ("call", "replay"):
        hit(work.setting.fault, work.setting.timeout_s)
    elif is_victim:
        hook(work.setting)
    spoiled = [torch.full_like(want, float("nan")) for _ in range(SPOILED)]
    del spoiled  # now torch has no memory of this size with an answer in it
    out = run()
    work.settle()
    parallel.check()
    return torch.equal(out, want)


def attempt(told: Told, work: Work, step: Callable[[], bool]) -> None:
    """Run a step and note how it ends, and when."""
    start = time.monotonic()
    try:
        told.right = step()
    except (RuntimeError, ValueError) as error:
        told.error, told.text = type(error).__name__, str(error).partition("\n")[0]
        told.ranks = tuple(getattr(error, "ranks", ()))
    told.seconds = time.monotonic() - start


def recover(told: Told, work: Work, everyone: list[int], opened: tuple | None) -> None:
    """Make a new object on a new group of all ranks that are left, in the same processes; or go on with `opened`."""
    left = [rank for rank in everyone if rank != VICTIM or work.setting.fault != "killed"]
    say(work.rank, "ended")
    hear(left, "ended")
    if opened is None:
        group = dist.new_group(left, use_local_synchronization=True)
        parallel, inputs, want = work.open(left, group)
    else:
        parallel, inputs, want = opened
        parallel = parallel.without([VICTIM], hosts=work.hosts(len(left)))
    out = parallel.moe(*inputs)
    work.settle()
    parallel.check()
    told.again = torch.equal(out, want)
    say(work.rank, "done")
    hear(left, "done")


def mistaken(work: Work, everyone: list[int]) -> Told:
    """Let the victim pass each wrong argument; every rank must be told, and the call after it be right."""
    parallel, inputs, want = work.open(everyone)
    told, right = Told(right=True, again=True), []
    for kind in MISTAKES:
        if kind in ("many", "k") and "max_tokens" not in work.sizes:
            continue  # without sizes there is no most
        start, error = time.monotonic(), ""
        try:
            given: Any = wrong(kind, *inputs) if work.rank == VICTIM else inputs
            parallel.moe(*given)
            work.settle()
            parallel.check()
        except ValueError as said:
            error = str(said)
        told.seconds = max(told.seconds, time.monotonic() - start)
        if not error:
            told.text = f"no error for a wrong {kind}"
        work.settle()
        with contextlib.suppress(ValueError):
            parallel.check()  # the rank that raised at once has also reported to itself
        dist.barrier()
        right.append(torch.equal(parallel.moe(*inputs), want))
        dist.barrier()
    told.error = "" if told.text else "ValueError"
    told.right = all(right)
    return told


def take_memory(device: torch.device) -> Callable[[], None]:
    """Leave this rank ROOM_LEFT bytes of its GPU; return what gives it all back."""
    free, _ = torch.cuda.mem_get_info(device)
    held = [torch.empty(free - ROOM_LEFT, dtype=torch.uint8, device=device)]

    def give_back() -> None:
        held.clear()
        torch.cuda.empty_cache()  # shared memory isn't torch's allocator's

    return give_back


def judge(setting: Setting, outcomes: list[Outcome]) -> tuple[int, int, str]:
    """Return how many ranks were judged, how many weren't told what they should be, and what is wrong with these."""
    count, said, num_told = 0, [], 0
    for rank, outcome in enumerate(outcomes):
        if rank == VICTIM and setting.fault == "killed":
            continue
        wrong = f"{outcome.error}: {outcome.text}" if outcome.error else complaint(setting, outcome.value, rank)
        count += 1
        said += [f"rank {rank}: {wrong}"] if wrong else []
        num_told += rank != VICTIM and not outcome.error and bool(outcome.value.error)
    if setting.fault in ("killed", "stopped") and not said and not num_told:
        return count, count, f"nobody was told of rank {VICTIM}: {outcomes[VICTIM]}"
    return count, len(said), "; ".join(said)


def complaint(setting: Setting, told: Told, rank: int) -> str:
    """Return what a rank should have been told but wasn't, "" if all is as promised."""
    in_time = told.seconds < setting.timeout_s + 1
    is_named = told.error == "PeerTimeout" and told.ranks == (VICTIM,)
    if setting.fault in ("killed", "stopped") and rank != VICTIM:
        may_be_right = (setting.exchange, setting.stage) in NEEDLESS and told.right and not told.error
        if not is_named and not may_be_right:
            return f"expected a PeerTimeout that names rank {VICTIM}, got {told}"
        if not in_time:
            return f"expected the error or the answer within {setting.timeout_s + 1:g} s, got {told}"
    elif setting.fault == "late" and not told.right:
        return f"expected the right answer, got {told}"
    elif setting.fault == "wrong arguments" and (told.error != "ValueError" or not told.right):
        return f"expected a ValueError for each mistake and then the right answer, got {told}"
    elif setting.fault == "out of memory" and not told.right and not (is_named and in_time and lacks_memory(told.text)):
        return f"expected the right answer or, in time, that rank {VICTIM} lacks memory, got {told}"
    return "" if told.again else f"expected the right answer of a new object, got {told}"


def lacks_memory(text: str) -> bool:
    """Tell whether an error says that a rank is out of memory, or had about as little as `take_memory` leaves."""
    free = FREE.search(text)
    return "out of memory" in text or (free is not None and int(free[1]) <= ROOM_LEFT >> 20)


def run_one(setting: Setting, num_ranks: int) -> tuple[Setting, int, int, str, float]:
    """Run a fault in processes of its own and judge it."""
    start = time.monotonic()
    backend = "nccl" if setting.device == "cuda" else "gloo"
    try:
        outcomes = run_ranks(num_ranks, on_rank, setting, backend=backend, timeout_s=GUARD_S)
        count, wrong_ones, text = judge(setting, outcomes)
    except AssertionError as error:  # ranks that hang are killed and named
        count, wrong_ones, text = num_ranks, num_ranks, str(error)
    return setting, count, wrong_ones, text, time.monotonic() - start


def run(options: argparse.Namespace) -> Iterator[Run]:
    """Yield a run for each fault."""
    chosen = [s for s in settings(options.device, options.timeout_s, options.ranks) if matches(s, options.only)]
    with ThreadPoolExecutor(options.jobs) as pool:
        given = pool.map(lambda setting: run_one(setting, options.ranks), chosen)
        for setting, count, wrong_ones, text, spent in given:
            yield Run(setting.name, count, wrong_ones, spent, text)


def matches(setting: Setting, only: list[str]) -> bool:
    """Tell whether a fault is wanted: its name contains one of `only`, or there is none."""
    return not only or any(part in setting.name for part in only)


__all__ = ["Setting", "judge", "run", "settings"]
