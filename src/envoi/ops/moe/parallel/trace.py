"""Trace of a call over NVLink: its kernels' roles, a recorded call as a `Timeline`, its files and pictures."""

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from envoi.ops.moe.parallel.collectives import Channel, gather_ints, gather_tensors, gather_texts
from envoi.ops.moe.parallel.symmetric_memory import Domain
from envoi.ops.moe.parallel.warm_up import ParallelCall, load_together
from envoi.runtime.devices import Target
from envoi.runtime.timeline import Recorder, Role, Slice, tracing
from envoi.table import align, number

ORDER = ("stage tokens", "send routing", "pull", "experts", "L1", "quantise", "L2", "send sums", "barrier", "sum")
WAITING = "wait"
COLUMNS = ("rank", *Slice._fields)
ENDINGS = (".json", ".json.gz")
GZIP_LEVEL = 6  # a file a tenth larger than with 9, in a quarter of the time
LANES = 64  # numbers of threads for each multiprocessor
ROW_INCHES, LEAST_INCHES = 0.035, 3.0


@dataclass(frozen=True)
class Step:
    """Launch of a call: its name, and the roles of its kernel."""

    name: str
    roles: tuple[Role, ...]


@dataclass(frozen=True)
class Timeline:
    """Timeline of a call on all ranks: what each role of each multiprocessor did, and when.

    steps: the launches of any rank, in order; ranks may differ, for instance by their tokens. slices: int64 [N, 9] on
    the CPU, with the columns of COLUMNS; times in nanoseconds since the first slice. Clocks of several GPUs are set by
    the end of dispatch's wait, which a rank leaves when it hears from the last one: within a microsecond or so.
    is_cut: a role had more than `envoi.runtime.timeline.ROOM` events, whose rest is missing. left_out: kernels of the
    call that can't be traced.
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
        """Write a trace that https://ui.perfetto.dev opens: .json, or .json.gz, a process for each rank."""
        _write(Path(path), self)

    def draw(self, path: str | Path) -> None:
        """Draw every multiprocessor over time into a .png, .pdf or .svg."""
        _draw(Path(path), self)

    def __str__(self) -> str:
        rows = [row for number in range(len(self.steps)) for row in self._rows(number)]
        header = "step", "from us", "to us", "shares of the step's time"
        notes = ["some roles had more events than are kept"] if self.is_cut else []
        if self.left_out:
            notes.append(f"not traced: {', '.join(self.left_out)}")
        return "\n".join([align(header, rows, left=(0, 3)), *notes])

    def _rows(self, step: int) -> list[list[str]]:
        """Return a row for each role of a step; the first has its name, first begin and last end on any rank."""
        mine = self.slices[self.column("step") == step]
        if not len(mine):
            return []
        begin, end = (mine[:, COLUMNS.index(name)] for name in ("begin", "end"))
        first, last = int(begin.min()), int(end.max())
        shares, role, span = [], mine[:, COLUMNS.index("role")], mine[:, COLUMNS.index("span")]
        for number_of_role, (name, spans, _) in enumerate(self.steps[step].roles):
            its = role == number_of_role
            if not its.any():
                continue
            tracks = len(torch.unique(mine[its][:, [0, COLUMNS.index("program")]], dim=0))
            whole = tracks * max(1, last - first)
            times = [int((end - begin)[its & (span == place)].sum()) for place in range(len(spans))]
            parts = [f"{what} {time / whole:.0%}" for what, time in zip(spans, times, strict=True)]
            shares.append(f"{name}: {', '.join(parts)}")
        whole_step = [self.steps[step].name, number(first / 1e3), number(last / 1e3)]
        return [[*(["", "", ""] if place else whole_step), text] for place, text in enumerate(shares)]


def _write(path: Path, timeline: Timeline) -> None:
    """Write a trace in Chrome's format. Raises ValueError for a name that ends neither in .json nor in .json.gz."""
    if not path.name.endswith(ENDINGS):
        raise ValueError(f"path: expected a name that ends in .json or .json.gz, got {path}")
    text = json.dumps({"displayTimeUnit": "ns", "traceEvents": list(events(timeline))})
    if path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode(), GZIP_LEVEL))
    else:
        path.write_text(text)


def events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield the names of ranks and tracks, then an event for each slice, in microseconds."""
    rows, lanes = timeline.slices.tolist(), lanes_of(timeline)
    named: dict[tuple[int, int], str] = {}
    for slice, lane in zip(rows, lanes, strict=True):
        rank, step, role, _, _, sm, *_ = slice
        named.setdefault((rank, sm * LANES + lane), f"SM {sm:3} {timeline.steps[step].roles[role].name}")
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
    """Return for each slice a lane of its multiprocessor, in which no two programs overlap.

    A role has the same lane in every step; several programs that run on a multiprocessor at once have one each.
    """
    rows = timeline.slices.tolist()
    roles = {role.name for step in timeline.steps for role in step.roles} - {"program"}
    names = sorted(roles)
    extents: dict[tuple[int, ...], tuple[int, int]] = {}
    for rank, step, role, _, program, sm, _, begin, end in rows:
        key = rank, sm, step, role, program
        first, last = extents.get(key, (begin, end))
        extents[key] = min(first, begin), max(last, end)
    busy: dict[tuple[int, int, str], list[int]] = {}
    lanes: dict[tuple[int, ...], int] = {}
    for key, (begin, end) in sorted(extents.items(), key=lambda item: item[1]):
        rank, sm, step, role, _ = key
        name = timeline.steps[step].roles[role].name
        ends = busy.setdefault((rank, sm, name), [])
        lane = next((lane for lane, until in enumerate(ends) if until <= begin), len(ends))
        ends[lane : lane + 1] = [end]
        # Roles, of which a multiprocessor has one each, come first; programs, of which it has several, last.
        first = len(names) if name == "program" else names.index(name)
        lanes[key] = min(first + lane, LANES - 1)
    return [lanes[rank, sm, step, role, program] for rank, step, role, _, program, sm, *_ in rows]


def _draw(path: Path, timeline: Timeline) -> None:
    """Draw a panel for each rank: multiprocessors upwards, time to the right, a colour for each step or phase.

    Waits are grey. Of a GEMM the consumers have the upper two thirds of a multiprocessor's row, the rest the lower one.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    num_sms = int(timeline.column("sm").max()) + 1 if len(timeline.slices) else 1
    height = max(LEAST_INCHES, ROW_INCHES * num_sms)
    count = max(1, timeline.num_ranks)
    figure, panels = plt.subplots(
        count, 1, figsize=(14, height * count), sharex=True, squeeze=False, layout="constrained"
    )
    names = phases_of(timeline)
    for rank, axes in enumerate(panels[:, 0]):
        mine = timeline.slices[timeline.column("rank") == rank]
        boxes: Any = _boxes(timeline, mine)  # as an array: a path for each box by itself takes three times as long
        axes.add_collection(PolyCollection(boxes, facecolors=_colours(timeline, mine, names), linewidths=0))
        axes.set(ylim=(0, num_sms), ylabel=f"rank {rank}, multiprocessor")
        axes.autoscale_view(scaley=False)
    panels[-1, 0].set_xlabel("us")
    handles = [Patch(color=f"C{place % 10}", label=name) for place, name in enumerate(names)]
    handles.append(Patch(color="0.85", label=WAITING))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def phases_of(timeline: Timeline) -> list[str]:
    """Return the names of the steps in order, of those with several phases the phases' names."""
    order = {name: place for place, name in enumerate(ORDER)}
    names = {role.phase or step.name for step in timeline.steps for role in step.roles}
    return sorted(names, key=order.__getitem__)


def _boxes(timeline: Timeline, slices: torch.Tensor) -> np.ndarray:
    """Return the corners of the slices' boxes, float64 [N, 4, 2]: microseconds, and multiprocessors upwards."""
    step, role, sm = (slices[:, COLUMNS.index(name)] for name in ("step", "role", "sm"))
    begin, end = slices[:, -2].double() / 1e3, slices[:, -1].double() / 1e3
    low, high = torch.zeros(2, len(slices), dtype=torch.float64)
    for at_step, whole in enumerate(timeline.steps):
        for place, (name, _, _) in enumerate(whole.roles):
            its = (step == at_step) & (role == place)
            low[its], high[its] = _height(name)
    corners = (begin, sm + low), (end, sm + low), (end, sm + high), (begin, sm + high)
    return torch.stack([torch.stack(corner, 1) for corner in corners], 1).numpy()


def _height(name: str) -> tuple[float, float]:
    """Return where in a multiprocessor's row a role's boxes begin and end."""
    if name == "program":
        return 0.0, 1.0
    if name.startswith("consumer"):
        low = 0.33 + 0.33 * int(name.split()[1])
        return low, low + 0.33
    return 0.0, 0.33


def _colours(timeline: Timeline, slices: torch.Tensor, names: list[str]) -> np.ndarray:
    """Return the slices' colours, float64 [N, 4]: grey for a wait, else by the place of the step or phase in names.

    An epilogue is paler.
    """
    found = np.zeros((len(slices), 4))
    step, role, span = (slices[:, COLUMNS.index(name)] for name in ("step", "role", "span"))
    for at_step, whole in enumerate(timeline.steps):
        for place, (_, spans, phase) in enumerate(whole.roles):
            for at, what in enumerate(spans):
                colour = _colour(what, names.index(phase or whole.name))
                found[((step == at_step) & (role == place) & (span == at)).numpy()] = colour
    return found


def _colour(what: str, place: int) -> tuple[float, ...]:
    """Return the colour of a span of the step or phase at this place."""
    from matplotlib.colors import to_rgba

    if what == WAITING:
        return to_rgba("0.85")
    return to_rgba(f"C{place % 10}", 0.55 if what == "epilogue" else 1.0)


STEP = "trace"
NUM_WARMUPS = 5  # replays before the one that is recorded
CONSUMERS = tuple(Role(f"consumer {number}", ("wait", "mainloop", "epilogue")) for number in range(2))


def roles_in(phase: str) -> tuple[Role, ...]:
    """Return the roles of a GEMM that is a phase of its launch."""
    consumers = (Role(f"{name} in {phase}", spans, phase) for name, spans, _ in CONSUMERS)
    return *consumers, Role(f"producer in {phase}", ("wait", "load"), phase)


# Of each kernel the step that it is, and its roles. A second GEMM of a call is L2.
KERNELS: dict[str, tuple[str, tuple[Role, ...]]] = {
    "stage_tokens_kernel": ("stage tokens", (Role("program", ("stage",)),)),
    "send_routing_kernel": ("send routing", (Role("program", ("send", "wait", "place")),)),
    "pull_kernel": ("pull", (Role("program", ("pull",)),)),
    "fused_kernel": ("experts", (*roles_in("L1"), *roles_in("L2"))),
    "gemm_kernel": ("L1", (*CONSUMERS, Role("producer", ("load",)))),
    "quantize_kernel": ("quantise", (Role("program", ("quantise",)),)),
    "send_partial_sums_kernel": ("send sums", (Role("program", ("send",)),)),
    "combine_barrier_kernel": ("barrier", (Role("program", ("wait",)),)),
    "sum_kernel": ("sum", (Role("program", ("sum",)),)),
    "sum_ranks_kernel": ("sum", (Role("program", ("sum",)),)),
}
ROLES = {kernel: roles for kernel, (_, roles) in KERNELS.items()}
MEETING = "send routing", "wait"  # the span at whose last end all ranks' clocks show the same time


def untraceable(exchange: str, device: torch.device) -> str:
    """Return why calls with this exchange can't be traced, "" if they can."""
    if exchange == "memory" and device.type == "cuda":
        return ""
    expected = "expected GPUs that exchange tokens through each other's memory"
    return f"trace: {expected}, got exchange {exchange!r} on {device}"


def trace_call(
    channel: Channel, domain: Domain, call: ParallelCall, num_tokens: int, run: Callable[[], torch.Tensor]
) -> Timeline:
    """Record one replay of a call as a CUDA graph, and gather what all ranks recorded. Collective.

    call: what `run` launches, to compile it before any rank waits for another. num_tokens: of this rank.
    """
    device = domain.memory.device
    run()  # loads the kernels without clocks, which must not be recorded
    with tracing(Recorder(ROLES, torch.device("meta"))):
        load_together(channel, call, Target.of(device), num_tokens, STEP)
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
    sizes = gather_ints(channel, [len(mine), recorder.is_cut()], STEP)
    padded = torch.zeros(int(sizes[:, 0].max()), mine.shape[1], dtype=torch.int64, device="cpu")
    padded[: len(mine)] = mine
    parts = [part[:size] for part, size in zip(gather_tensors(channel, padded, STEP), sizes[:, 0], strict=True)]
    launched = gather_texts(channel, " ".join(strip.kernel for strip in recorder.strips), STEP)
    steps, places = steps_of_ranks([text.split() for text in launched])
    for part, places_of_rank in zip(parts, places, strict=True):
        part[:, 0] = torch.tensor(places_of_rank, dtype=torch.int64, device="cpu")[part[:, 0]]
    slices = torch.cat([torch.nn.functional.pad(part, (1, 0), value=rank) for rank, part in enumerate(parts)])
    left_out = " ".join(gather_texts(channel, " ".join(recorder.left_out), STEP)).split()
    return Timeline(steps, in_step(slices, steps), bool(sizes[:, 1].any()), tuple(sorted(set(left_out))))


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
