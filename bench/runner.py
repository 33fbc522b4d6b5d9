"""Runner of cases one after the other: prints a table for each suite, makes and stores the measurements."""

import datetime
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from bench import machine
from bench.evidence import Measurement
from bench.libraries import label
from bench.roof import Roof, measure_roof
from bench.shapes import Case
from bench.suites import measure, repeat_of
from bench.summary import means, of_roof, ratio
from bench.theirs import Theirs, beside
from bench.timing import Clock, Timing, symmetric_barrier
from bench.trial import Bench, Compiler, Trial
from envoi import env
from envoi.info import version_of
from envoi.progress import Progress
from envoi.table import align, number


@dataclass(frozen=True)
class Ranks:
    """Rank and size of the group that `torchrun` started; one process without it."""

    rank: int
    num_ranks: int
    device: torch.device


def pick_device(name: str) -> torch.device:
    """Return the device; "auto" is the GPU if there is one. Raises ValueError for "cuda" without one."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ValueError("--device: expected a CUDA device for 'cuda', this machine has none that torch can use")
    on_gpu = has_gpu if name == "auto" else name == "cuda"
    return torch.device("cuda", env.local_rank()) if on_gpu else torch.device("cpu")


def join_ranks(device: torch.device) -> Ranks:
    """Join the other processes of `torchrun`, over NCCL on GPUs and gloo on CPUs."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if env.world_size() > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return Ranks(env.rank(), env.world_size(), device)


def all_gpus(ranks: Ranks) -> tuple[str, ...]:
    """Return the UUID of each rank's GPU; on CPUs "cpu". Collective."""
    device = ranks.device
    mine = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type
    if ranks.num_ranks == 1:
        return (mine,)
    found: list[Any] = [None] * ranks.num_ranks
    dist.all_gather_object(found, mine)
    return tuple(found)


def leave_ranks() -> None:
    """Destroy the process group that `join_ranks` created."""
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True)
class Options:
    """Options of a run.

    repeat: n of each median; None: the suite's own. commit: None: the package's. compiler: of the baselines.
    keep: called with each measurement at once, so that a lost machine loses little.
    peer_versions: of `Bench`. theirs: baselines that another process measured, see `theirs`.
    """

    repeat: int | None = None
    commit: str | None = None
    compiler: Compiler = field(default_factory=Compiler)
    keep: Callable[[Measurement], object] = lambda measurement: None
    peer_versions: Mapping[str, str] = field(default_factory=dict)
    theirs: tuple[Theirs, ...] = ()


def run_cases(chosen: list[Case], ranks: Ranks, plan: Options) -> tuple[list[Measurement], int]:
    """Measure every case; on rank 0 print the tables and the skipped cases. No baseline, no measurement.

    Returns also how many cases failed: a failed case is named, and the others are measured. Over several ranks the
    first failure ends the run, since the other ranks wait for it.
    """
    quiet = ranks.rank != 0
    measurements, num_failed = [], 0
    with Progress(len(chosen) + 1, quiet) as bar:
        bar.step("roofs")
        roof = measure_roof(ranks.device)
        for _, cases in groupby(chosen, key=lambda case: case.suite):
            found, lines, failed = _run_suite(list(cases), ranks, roof, plan, bar)
            measurements += found
            num_failed += failed
            if not quiet:
                print(lines, flush=True)
    if not quiet:
        print(_roof_line(roof, ranks))
    return measurements, num_failed


def _run_suite(
    cases: list[Case], ranks: Ranks, roof: Roof, plan: Options, bar: Progress
) -> tuple[list[Measurement], str, int]:
    measurements, rows, notes, num_failed = [], [], [], 0
    meet = symmetric_barrier(ranks.device) if plan.theirs else None
    for case in cases:
        label = f"{case.suite} {case.name}"
        bar.step(label)
        n, start = plan.repeat or repeat_of(case.suite, ranks.device.type == "cuda"), time.monotonic()
        try:
            with torch.no_grad():
                clock = Clock(ranks.device, n, meet=meet)
                bench = Bench(clock, roof, ranks.rank, ranks.num_ranks, plan.compiler, plan.peer_versions)
                trial = beside(measure(case, bench), case, ranks.num_ranks, plan.theirs)
        except Exception as error:
            if ranks.num_ranks > 1:
                raise
            num_failed += 1
            notes.append(f"{label}: failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            bar.say(notes[-1])
            continue
        rows.append(_row(case, trial, roof))
        bar.say(f"{label}: {rows[-1][1]} us; {rows[-1][-1]}; {time.monotonic() - start:.0f} s")
        notes += [f"{label}: {name} didn't run: {why}" for name, why in trial.missing.items()]
        if trial.details:
            notes.append(f"{label}: {', '.join(f'{name} {value}' for name, value in trial.details.items())}")
        if trial.baselines:
            measurements.append(to_measurement(case, trial, roof, ranks, plan.commit))
            if ranks.rank == 0:
                plan.keep(measurements[-1])
        else:
            notes.append(f"{label}: no baseline ran, so it is no measurement")
    mean = means(measurements)
    table = align(HEADER, rows, left=(0, len(HEADER) - 1))
    lines = [table, *([f"geometric means [least]: {mean}"] if mean else []), *notes, ""]
    return measurements, "\n".join(lines), num_failed


def to_measurement(case: Case, trial: Trial, roof: Roof, ranks: Ranks, commit: str | None) -> Measurement:
    """Return a trial as a measurement with its provenance."""
    return Measurement(
        suite=case.suite,
        case=case.name,
        ours_us=_digits(trial.ours.p50_us),
        baselines={name: _digits(timing.p50_us) for name, timing in trial.baselines.items()},
        floor_us=_rounded(roof.floor_us(trial.num_bytes, trial.flops, trial.kind) or None),
        tflops=_rounded(trial.flops / trial.ours.p50_us / 1e6 or None),
        gb_per_s=_rounded(trial.num_bytes / trial.ours.p50_us / 1e3 or None),
        error={name: _digits(value) for name, value in trial.error.items()},
        gpu=machine.device_name(ranks.device.type),
        num_gpus=ranks.num_ranks,
        torch=torch.__version__,
        triton=version_of("triton") or "none",
        commit=commit or machine.commit(),
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        n=trial.ours.n,
        details={**dict(case.details), **trial.details},
    )


HEADER = (
    "case", "ours us [p10, p90]", "floor us", "of roof", "TFLOP/s", "GB/s", "error", "torch's", "n",
    "baselines us [p10, p90] (x ours)",
)  # fmt: skip


def _row(case: Case, trial: Trial, roof: Roof) -> list[str]:
    ours = trial.ours
    floor_us = roof.floor_us(trial.num_bytes, trial.flops, trial.kind) or None
    named = ((label(trial.details, name), t) for name, t in trial.baselines.items())
    others = (f"{name} {_spread(t)} ({ratio(t.p50_us, ours.p50_us)})" for name, t in named)
    return [
        f"{case.suite} {case.name}",
        _spread(ours),
        number(floor_us),
        of_roof(floor_us, ours.p50_us),
        number(trial.flops / ours.p50_us / 1e6),
        number(trial.num_bytes / ours.p50_us / 1e3),
        f"{trial.error['ours']:.1e}",
        f"{trial.error['torch']:.1e}",
        str(ours.n),
        ", ".join(others) or "none",
    ]


def _spread(timing: Timing) -> str:
    return f"{number(timing.p50_us)} [{number(timing.p10_us)}, {number(timing.p90_us)}]"


def _roof_line(roof: Roof, ranks: Ranks) -> str:
    rates = ", ".join(f"{name} matmul {number(rate)} TFLOP/s" for name, rate in roof.tflops.items())
    where = f"{machine.device_name(ranks.device.type)} x {ranks.num_ranks}"
    return f"\n{where}; roofs in this run: copy {number(roof.gb_per_s)} GB/s, {rates}; torch {torch.__version__}"


def _digits(value: float) -> float:
    return float(f"{value:.5g}")


def _rounded(value: float | None) -> float | None:
    return None if value is None else _digits(value)
