"""Trace of a call over NVLink: its kernels' roles, a recorded call as a `Timeline`, its files for Perfetto."""

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from envoi.ops.moe.parallel.collectives import Channel, gather_tensors, gather_texts
from envoi.ops.moe.parallel.nvlink import Domain
from envoi.ops.moe.parallel.warm_up import ParallelCall, do_together
from envoi.runtime.devices import Target
from envoi.runtime.planned_kernels import launches_of, load
from envoi.runtime.timeline import Recorder, Role, Slice, tracing

ORDER = ("stage tokens", "send routing", "pull", "experts", "L1", "quantise", "L2", "send sums", "barrier", "sum")
COLUMNS = ("rank", *Slice._fields)
ENDINGS = (".json", ".json.gz")
GZIP_LEVEL = 6  # a file a tenth larger than with 9, in a quarter of the time
LANES = 64  # numbers of threads for each multiprocessor
STEP = "trace"
NUM_WARMUPS = 5  # replays before the one that is recorded


def whole(*spans: str) -> tuple[Role, ...]:
    """Return the only role of a kernel whose programs have no others."""
    return (Role("program", spans),)


def gemm(load: tuple[str, ...], phase: str = "") -> tuple[Role, ...]:
    """Return the roles of a GEMM, also one that is a phase of its launch. load: the producer's spans."""
    consumers = (Role(f"consumer {number}{phase}", ("wait", "mainloop", "epilogue")) for number in range(2))
    return *consumers, Role(f"producer{phase}", load)


# Of each kernel the step that it is, and its roles. A second GEMM of a call is L2.
KERNELS: dict[str, tuple[str, tuple[Role, ...]]] = {
    "stage_tokens_kernel": ("stage tokens", whole("stage")),
    "send_routing_kernel": ("send routing", whole("send", "wait", "place")),
    "pull_kernel": ("pull", whole("pull")),
    "fused_kernel": ("experts", (*gemm(("wait", "load"), " in L1"), *gemm(("wait", "load"), " in L2"))),
    "gemm_kernel": ("L1", gemm(("load",))),
    "quantize_kernel": ("quantise", whole("quantise")),
    "send_partial_sums_kernel": ("send sums", whole("send")),
    "combine_barrier_kernel": ("barrier", whole("wait")),
    "sum_kernel": ("sum", whole("sum")),
    "sum_ranks_kernel": ("sum", whole("sum")),
}
ROLES = {kernel: roles for kernel, (_, roles) in KERNELS.items()}
MEETING = "send routing", "wait"  # the span at whose last end all ranks' clocks show the same time


@dataclass(frozen=True)
class Step:
    """Launch of a call: its name, and the roles of its kernel."""

    name: str
    roles: tuple[Role, ...]


@dataclass(frozen=True)
class Timeline:
    """Timeline of a call on all ranks: what each role of each multiprocessor did, and when.

    steps: the launches of any rank, in order. slices: int64 [N, 9] on the CPU, with the columns of COLUMNS; times in
    nanoseconds since the first slice. Clocks of several GPUs are set by the end of dispatch's wait, which a rank leaves
    when it hears from the last one: within a microsecond or so. is_cut: a role had more than
    `envoi.runtime.timeline.ROOM` events, whose rest is missing. left_out: kernels of the call that can't be traced.
    """

    steps: tuple[Step, ...]
    slices: torch.Tensor
    is_cut: bool
    left_out: tuple[str, ...]

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return int(self.column("rank").max()) + 1 if len(self.slices) else 0

    def column(self, name: str) -> torch.Tensor:
        """Return a column of the slices."""
        return self.slices[:, COLUMNS.index(name)]

    def save(self, path: str | Path) -> None:
        """Write a trace in Chrome's format, which https://ui.perfetto.dev opens, a process for each rank.

        Raises ValueError for a name that ends neither in .json nor in .json.gz.
        """
        path = Path(path)
        if not path.name.endswith(ENDINGS):
            raise ValueError(f"path: expected a name that ends in .json or .json.gz, got {path}")
        raw = json.dumps({"displayTimeUnit": "ns", "traceEvents": list(events(self))}).encode()
        path.write_bytes(gzip.compress(raw, GZIP_LEVEL) if path.name.endswith(".gz") else raw)


def events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield the names of ranks and tracks, then an event for each slice, in microseconds."""
    rows, lanes = timeline.slices.tolist(), lanes_of(timeline)
    named = {
        (rank, sm * LANES + lane): f"SM {sm:3} {timeline.steps[step].roles[role].name}"
        for (rank, step, role, _, _, sm, *_), lane in zip(rows, lanes, strict=True)
    }
    for rank in range(timeline.num_ranks):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    for (rank, track), name in sorted(named.items()):
        place = {"ph": "M", "pid": rank, "tid": track}
        yield {**place, "name": "thread_name", "args": {"name": name}}
        yield {**place, "name": "thread_sort_index", "args": {"sort_index": track}}
    for slice, lane in zip(rows, lanes, strict=True):
        rank, step, role, span, program, sm, label, begin, end = slice
        where = timeline.steps[step]
        yield {
            "ph": "X", "pid": rank, "tid": sm * LANES + lane, "ts": begin / 1e3, "dur": (end - begin) / 1e3,
            "name": f"{where.name} {where.roles[role].spans[span]}", "cat": where.name,
            "args": {"program": program, "number": label},
        }  # fmt: skip


def lanes_of(timeline: Timeline) -> list[int]:
    """Return for each slice a lane of its multiprocessor, in which no two programs overlap; a role's stays."""
    rows = timeline.slices.tolist()
    names = sorted({role.name for step in timeline.steps for role in step.roles} - {"program"})
    extents: dict[tuple[int, ...], tuple[int, int]] = {}
    for rank, step, role, _, program, sm, _, begin, end in rows:
        first, last = extents.get((rank, sm, step, role, program), (begin, end))
        extents[rank, sm, step, role, program] = min(first, begin), max(last, end)
    busy: dict[tuple[int, int, str], list[int]] = {}
    lanes: dict[tuple[int, ...], int] = {}
    for key, (begin, end) in sorted(extents.items(), key=lambda item: item[1]):
        rank, sm, step, role, _ = key
        name = timeline.steps[step].roles[role].name
        ends = busy.setdefault((rank, sm, name), [])
        lane = next((lane for lane, until in enumerate(ends) if until <= begin), len(ends))
        ends[lane : lane + 1] = [end]
        # Roles, of which a multiprocessor has one each, come first; programs, of which it has several, last.
        lanes[key] = min((len(names) if name == "program" else names.index(name)) + lane, LANES - 1)
    return [lanes[rank, sm, step, role, program] for rank, step, role, _, program, sm, *_ in rows]


def trace_call(
    channel: Channel, domain: Domain, call: ParallelCall, num_tokens: int, run: Callable[[], torch.Tensor]
) -> Timeline:
    """Record one replay of a call as a CUDA graph, and gather what all ranks recorded. Collective.

    call: what `run` launches, to compile it before any rank waits for another. num_tokens: of this rank.
    """
    device = domain.memory.device
    run()  # loads the kernels without clocks, which must not be recorded
    gather_texts(channel, "", STEP)  # peers have timeout_s to come, and may compile for longer

    def load_all() -> None:
        with tracing(Recorder(ROLES, torch.device("meta"))):
            for launch in launches_of(call, num_tokens, Target.of(device)):
                load(*launch)

    do_together(channel, load_all, STEP)
    recorder = Recorder(ROLES, device)
    with tracing(recorder):
        run()
        recorder.rewind()
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
    for _ in range(NUM_WARMUPS):
        graph.replay()
    recorder.clear()
    graph.replay()
    torch.cuda.synchronize(device)
    del out  # not earlier: the graph writes it
    return gathered(channel, recorder)


def gathered(channel: Channel, recorder: Recorder) -> Timeline:
    """Gather the slices of all ranks in one timeline. Collective."""
    mine = recorder.slices()
    said = {"rows": len(mine), "is_cut": recorder.is_cut(), "left_out": recorder.left_out}
    said["kernels"] = [strip.kernel for strip in recorder.strips]
    ranks = [json.loads(text) for text in gather_texts(channel, json.dumps(said), STEP)]
    padded = torch.zeros(max(rank["rows"] for rank in ranks), mine.shape[1], dtype=torch.int64, device="cpu")
    padded[: len(mine)] = mine
    steps, places = steps_of_ranks([rank["kernels"] for rank in ranks])
    parts = [part[: rank["rows"]] for part, rank in zip(gather_tensors(channel, padded, STEP), ranks, strict=True)]
    for part, places_of_rank in zip(parts, places, strict=True):
        part[:, 0] = torch.tensor(places_of_rank, dtype=torch.int64, device="cpu")[part[:, 0]]
    slices = torch.cat([torch.nn.functional.pad(part, (1, 0), value=rank) for rank, part in enumerate(parts)])
    left_out = sorted({kernel for rank in ranks for kernel in rank["left_out"]})
    return Timeline(steps, in_step(slices, steps), any(rank["is_cut"] for rank in ranks), tuple(left_out))


def steps_of(kernels: list[str]) -> tuple[Step, ...]:
    """Return the steps that launches of these kernels are, in order."""
    steps, names = [], set()
    for kernel in kernels:
        name, roles = KERNELS[kernel]
        if name == "L1" and name in names:
            name = "L2"
        names.add(name)
        steps.append(Step(name, roles))
    return tuple(steps)


def steps_of_ranks(kernels: list[list[str]]) -> tuple[tuple[Step, ...], list[list[int]]]:
    """Return the steps of all ranks' launches, in order, and for each rank the place of each of its launches in them.

    kernels: of each rank. One without tokens sums nothing, and where L1 quantises depends on a rank's tokens.
    """
    ranks = [steps_of(of_rank) for of_rank in kernels]
    found = {step.name: step for steps in ranks for step in steps}
    names = sorted(found, key=ORDER.index)
    return tuple(found[name] for name in names), [[names.index(step.name) for step in steps] for steps in ranks]


def in_step(slices: torch.Tensor, steps: tuple[Step, ...]) -> torch.Tensor:
    """Set the clocks of all ranks by the span where they meet, and count time from the first slice."""
    if not len(slices):
        return slices
    slices = slices.clone()
    times, ranks = slices[:, -2:], slices[:, 0]
    step = next((at for at, step in enumerate(steps) if step.name == MEETING[0]), None)
    if step is not None:
        span = steps[step].roles[0].spans.index(MEETING[1])
        met = (slices[:, COLUMNS.index("step")] == step) & (slices[:, COLUMNS.index("span")] == span)
        for rank in ranks.unique().tolist():
            its = met & (ranks == rank)
            if its.any():
                times[ranks == rank] -= times[its, 1].max()
    times -= times.min()
    return slices
