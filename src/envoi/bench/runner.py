"""Runs cases one after the other, prints the table, makes the measurements."""

import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist

from envoi import env
from envoi.bench import machine
from envoi.bench.evidence import Measurement
from envoi.bench.progress import Progress
from envoi.bench.roof import Roof, measure_roof
from envoi.bench.shapes import Case
from envoi.bench.suites import measure, repeat_of
from envoi.bench.table import align, number, ratio
from envoi.bench.timing import Clock, Timing
from envoi.bench.trial import Bench, Trial


@dataclass(frozen=True)
class Ranks:
    """This process among those that `torchrun` started; one process without it."""

    rank: int
    num_ranks: int
    device: torch.device


def pick_device(name: str) -> torch.device:
    """ "auto" is the GPU where there is one. Raises ValueError for "cuda" without one."""
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


def leave_ranks() -> None:
    """The end of what `join_ranks` began."""
    if dist.is_initialized():
        dist.destroy_process_group()


def run_cases(chosen: list[Case], ranks: Ranks, repeat: int | None, commit: str | None) -> list[Measurement]:
    """Measure every case; on rank 0 print a table and what was left out. A case without baselines is no measurement."""
    quiet = ranks.rank != 0
    measurements, rows, notes = [], [], []
    with Progress(len(chosen) + 1, quiet) as bar:
        bar.step("roofs")
        roof = measure_roof(ranks.device)
        for case in chosen:
            bar.step(f"{case.suite} {case.name}")
            n = repeat or repeat_of(case.suite, ranks.device.type == "cuda")
            bench = Bench(Clock(ranks.device, n), roof, ranks.rank, ranks.num_ranks)
            with torch.no_grad():
                trial = measure(case, bench)
            rows.append(_row(case, trial, roof))
            notes += [f"{case.suite} {case.name}: {name} didn't run: {why}" for name, why in trial.missing.items()]
            if trial.baselines:
                measurements.append(to_measurement(case, trial, roof, ranks, commit))
            else:
                notes.append(f"{case.suite} {case.name}: no baseline ran, so it is no measurement")
    if not quiet:
        print(align(HEADER, rows, left=(0, len(HEADER) - 1)))
        print(_roof_line(roof, ranks))
        print("\n".join(notes), end="\n" if notes else "")
    return measurements


def to_measurement(case: Case, trial: Trial, roof: Roof, ranks: Ranks, commit: str | None) -> Measurement:
    """A trial with its provenance."""
    return Measurement(
        suite=case.suite,
        case=case.name,
        ours_us=_digits(trial.ours.p50_us),
        baselines={name: _digits(timing.p50_us) for name, timing in trial.baselines.items()},
        floor_us=_rounded(roof.floor_us(trial.num_bytes, trial.flops, trial.kind)),
        tflops=_rounded(trial.flops / trial.ours.p50_us / 1e6 or None),
        gb_per_s=_rounded(trial.num_bytes / trial.ours.p50_us / 1e3 or None),
        error={name: _digits(value) for name, value in trial.error.items()},
        gpu=machine.device_name(ranks.device.type),
        num_gpus=ranks.num_ranks,
        torch=torch.__version__,
        triton=machine.version_of("triton") or "none",
        commit=commit or machine.commit(),
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        n=trial.ours.n,
    )


HEADER = ("case", "ours us [p10, p90]", "floor us", "TFLOP/s", "GB/s", "error", "torch's", "n", "baselines us (x ours)")


def _row(case: Case, trial: Trial, roof: Roof) -> list[str]:
    ours = trial.ours
    others = (f"{name} {number(t.p50_us)} ({ratio(t.p50_us, ours.p50_us)})" for name, t in trial.baselines.items())
    return [
        f"{case.suite} {case.name}",
        _spread(ours),
        number(roof.floor_us(trial.num_bytes, trial.flops, trial.kind)),
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
