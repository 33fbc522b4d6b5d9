"""Times of the Hopper GEMM's configs, which `envoi.ops.gemm.hopper.time_model.Costs` are fitted to."""

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from bench.shapes import GemmShape, Options
from bench.suites import cases
from envoi.ops.gemm.hopper import tune
from envoi.ops.gemm.hopper.config import Config, Problem
from envoi.ops.gemm.hopper.time_model import COSTS, Costs, predicted_cycles
from envoi.runtime import devices
from envoi.runtime.devices import H200
from envoi.runtime.planned_kernels import compile_by_workers
from envoi.tune import problems
from envoi.tune.command import measure_shape
from tools.kernel_cases import NUM_SMS
from tools.time_models.fit import Measured, Model, changed, keep, line_of, lines_of, parse

FORMATS = ("bf16", "fp8_row", "fp8_block128")  # of the Hopper GEMM
Tokens = tuple[int, int]  # the fewest and the most of a shape
ANY: Tokens = (1, 1 << 20)
TIMED_LAUNCH = 4200  # cycles that the time of a lone launch has beyond its share of a graph
# Every config has the launch.
MODEL = Model(COSTS, ("launch",), {"wide_step": (1.0, 2.0), "three_step": (1.0, 2.0), "held_stages": (1.0, 1.9)})


@dataclass(frozen=True)
class GemmTimes(Measured):
    """Times of a shape's configs. label: as `envoi tune --list` prints it."""

    times_us: tuple[tuple[Config, float], ...]
    problem: Problem

    def predicted_us(self, config: Config, costs: Costs) -> float:
        """Return the time that the model predicts with these constants."""
        return (predicted_cycles(self.problem, config, self.num_sms, costs) + TIMED_LAUNCH) / H200.clock_mhz


def to_line(measured: GemmTimes, gpu: str) -> str:
    """Return one line of JSON, without the newline, without fields that have their default."""
    return line_of(measured, gpu, problem=changed(measured.problem))


def from_line(line: str) -> GemmTimes:
    """Parse a line of `to_line`. Raises ValueError for anything else."""
    return parse(line, GemmTimes, Config, lambda entries: {"problem": Problem(**entries["problem"])})


def read(paths: Sequence[Path]) -> list[GemmTimes]:
    """Return all lines of these files."""
    return [from_line(line) for line in lines_of(paths)]


def measure(
    path: Path, seed: int, count: int, num_configs: int, repeat: int, jobs: int | None, tokens: Tokens = ANY
) -> int:  # fmt: skip
    """Measure num_configs configs of `count` shapes and append them to a file; return how many shapes there were.

    tokens: of `shapes_of`.
    """
    device = torch.device("cuda", 0)
    tune.use_measured(False)
    target = devices.Target.of(device)
    num_sms = target.num_sms
    todo = [(shape, configs_of(shape, num_sms, num_configs, seed)) for shape in shapes_of(seed, count, tokens)]
    calls = [problems.ConfigCall(shape, config, num_sms) for shape, found in todo for config in found]
    compile_by_workers(calls, target, jobs=jobs)
    done = 0
    for shape, found in todo:
        planned, times, wrong = measure_shape(shape, found, num_sms, repeat)
        label = problems.label(shape)
        for config, why in wrong.items():
            print(f"{label}: {config.label()}: {why}", file=sys.stderr)
        if len(times) > 1:
            measured = GemmTimes(label, num_sms, tuple(times.items()), planned.problem)
            keep(path, to_line(measured, torch.cuda.get_device_name(device)), measured, COSTS)
            done += 1
    return done


def shapes_of(seed: int, count: int, tokens: Tokens = ANY) -> list:
    """Return the first shapes that the suites draw and the Hopper GEMM runs, three of four plain.

    tokens: a range that the shapes' numbers of tokens are in; all are plain then, and there may be fewer than `count`.
    """
    found = []
    grouped = count // 4 if tokens == ANY else 0
    options = Options(seed, (4 if tokens == ANY else 24) * count)  # some have other formats, or other numbers of tokens
    for suite, wanted in (("gemm_drawn", count - grouped), ("grouped_drawn", grouped)):
        drawn = (case.shape for case in cases(suite, options) if case.on_cuda)
        if tokens != ANY:
            drawn = (shape for shape in drawn if isinstance(shape, GemmShape) and tokens[0] <= shape.m <= tokens[1])
        found += islice((shape for shape in drawn if _on_hopper(shape)), wanted)
    return found


def _on_hopper(shape) -> bool:
    if shape.format not in FORMATS:
        return False
    try:
        return len(problems.planned(shape, NUM_SMS).promising(NUM_SMS, 2)) == 2
    except ValueError:
        return False


def configs_of(shape, num_sms: int, count: int, seed: int) -> list[Config]:
    """Return half of `count` by the model, most promising first, and as many of the others at random."""
    found = problems.planned(shape, num_sms).promising(num_sms, 1 << 20)
    by_model, others = found[: -(-count // 2)], found[-(-count // 2) :]
    source = random.Random(f"{seed} {problems.label(shape)}")
    return by_model + source.sample(others, min(len(others), count - len(by_model)))
