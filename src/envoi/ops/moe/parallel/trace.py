"""Trace of a call over NVLink: its kernels' roles, and the recording of one call on all ranks as a `Timeline`."""

from collections.abc import Callable

import torch

from envoi.ops.moe.parallel.collectives import Channel, gather_ints, gather_tensors, gather_texts
from envoi.ops.moe.parallel.symmetric_memory import Domain
from envoi.ops.moe.parallel.timeline import COLUMNS, ORDER, Step, Timeline
from envoi.ops.moe.parallel.warm_up import ParallelCall, load_together
from envoi.runtime.devices import Target
from envoi.runtime.timeline import Recorder, Role, tracing

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
