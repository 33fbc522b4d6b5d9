"""Fit the constants of the Hopper GEMM's model of GPU time, `envoi.gemm.hopper.time_model.Costs`, to measurements.

    python tools/fit_time_model.py measure bench/gemm_times.jsonl --seed 0 --count 40     on an H200; a line a shape
    python tools/fit_time_model.py fit bench/gemm_times.jsonl                             anywhere

`measure` takes shapes as `envoi bench gemm_drawn` and `grouped_drawn` draw them, and of each shape's configs the most
promising ones and as many at random: a model that is wrong mustn't choose all that could show it. Lines are appended as
soon as they are measured.

`fit` prints the regret, the time of the config that the model chooses over that of the best one measured, before and
after, and on shapes that a fit hasn't seen; then the constants. Regret changes in jumps, so what is minimised is the
error of predicted ratios of times, between configs of a shape, near the best one most.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from math import exp, log
from pathlib import Path

from envoi.gemm.hopper.config import Config, Problem
from envoi.gemm.hopper.time_model import COSTS, Costs, predicted_cycles

FORMATS = ("bf16", "fp8_row", "fp8_block128")  # of the Hopper GEMM
FOLDS = 5
Tokens = tuple[int, int]  # the fewest and the most of a shape
ANY: Tokens = (1, 1 << 20)
SHARPNESS = 5.0  # a config that takes 20 % longer than the best counts e times less
TIMED_LAUNCH = 4200  # cycles that the time of a lone launch has beyond its share of a graph
STEPS = (1.6, 1.25, 1.1, 1.04)  # factors by which constants are tried
LIMITS = {"wide_step": (1.0, 2.0), "three_step": (1.0, 2.0), "held_stages": (1.0, 1.9)}
FIXED = ("launch",)  # every config has it
KEPT_CLOSE = 1e-5  # squared error that a constant e times larger or smaller has to be worth


@dataclass(frozen=True)
class Measured:
    """Times of a shape's configs. label: as `envoi tune --list` prints it."""

    label: str
    problem: Problem
    num_sms: int
    times_us: tuple[tuple[Config, float], ...]

    @property
    def best_us(self) -> float:
        """Time of the fastest config."""
        return min(us for _, us in self.times_us)


# The data file


def to_line(measured: Measured, gpu: str) -> str:
    """Return one line of JSON, without the newline, without fields that have their default."""
    times = [{**_changed(config), "us": us} for config, us in measured.times_us]
    entries = {"label": measured.label, "gpu": gpu, "num_sms": measured.num_sms, "problem": _changed(measured.problem)}
    return json.dumps({**entries, "times_us": times})


def _changed(x: Config | Problem) -> dict[str, int | float]:
    return {field.name: getattr(x, field.name) for field in fields(x) if getattr(x, field.name) != field.default}


def from_line(line: str) -> Measured:
    """Parse a line of `to_line`. Raises ValueError for anything else."""
    try:
        entries = json.loads(line)
        times = [(dict(entry), entry["us"]) for entry in entries["times_us"]]
        found = tuple((Config(**{k: v for k, v in entry.items() if k != "us"}), float(us)) for entry, us in times)
        measured = Measured(entries["label"], Problem(**entries["problem"]), int(entries["num_sms"]), found)
    except (TypeError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"expected a line that `measure` wrote, got {line[:60]!r} ({error})") from error
    if len(found) < 2 or any(us <= 0 for _, us in found):
        raise ValueError(f"{measured.label}: expected at least two configs with times above 0, got {len(found)}")
    return measured


def read(paths: Sequence[Path]) -> list[Measured]:
    """Return all lines of these files."""
    return [from_line(line) for path in paths for line in path.read_text().splitlines() if line.strip()]


# Regret


def regret(measured: Measured, costs: Costs) -> float:
    """Return the time of the config that the model chooses over that of the best, from 1."""
    chosen = min(measured.times_us, key=lambda entry: _cycles(measured, entry[0], costs))
    return chosen[1] / measured.best_us


def mean_regret(data: Sequence[Measured], costs: Costs) -> float:
    """Return the geometric mean of the regret."""
    return exp(sum(log(regret(measured, costs)) for measured in data) / len(data))


def squared_error(data: Sequence[Measured], costs: Costs) -> float:
    """Return the mean square of the error of log(time) within a shape, its mean removed, near the best time most."""
    total = 0.0
    for measured in data:
        errors = [log((_cycles(measured, config, costs) + TIMED_LAUNCH) / us) for config, us in measured.times_us]
        weights = [(measured.best_us / us) ** SHARPNESS for _, us in measured.times_us]
        middle = sum(w * e for w, e in zip(weights, errors, strict=True)) / sum(weights)
        total += sum(w * (e - middle) ** 2 for w, e in zip(weights, errors, strict=True)) / sum(weights)
    return total / len(data)


def _cycles(measured: Measured, config: Config, costs: Costs) -> float:
    return predicted_cycles(measured.problem, config, measured.num_sms, costs)


# The fit


def fit(data: Sequence[Measured], start: Costs = COSTS) -> Costs:
    """Return constants with less error: one is changed at a time, by smaller and smaller factors, while that helps.

    A constant that no measurement shows stays as it is, since a change has to be worth KEPT_CLOSE.
    """
    names = [field.name for field in fields(Costs) if field.name not in FIXED]

    def loss(costs: Costs) -> float:
        moved = sum(log(getattr(costs, name) / getattr(start, name)) ** 2 for name in names)
        return squared_error(data, costs) + KEPT_CLOSE * moved

    best, least = start, loss(start)
    for step in STEPS:
        improved = True
        while improved:
            improved = False
            for name in names:
                best, least, better = _try(best, least, name, step, loss)
                improved = improved or better
    return best


def _try(
    best: Costs, least: float, name: str, step: float, loss: Callable[[Costs], float]
) -> tuple[Costs, float, bool]:
    """Return the better of best and its two neighbours in one constant, its loss, and whether it is a neighbour."""
    low, high = LIMITS.get(name, (1e-6, 1e9))
    better = False
    for factor in (step, 1 / step):
        value = getattr(best, name) * factor
        if low <= value <= high:
            changed = replace(best, **{name: value})
            found = loss(changed)
            if found < least - 1e-9:
                best, least, better = changed, found, True
    return best, least, better


def held_out_regret(data: Sequence[Measured], start: Costs = COSTS) -> float:
    """Return the mean regret on each fifth of the shapes by a fit to the other four."""
    order = list(data)
    random.Random(0).shuffle(order)
    logs = []
    for fold in range(FOLDS):
        seen = [measured for place, measured in enumerate(order) if place % FOLDS != fold]
        unseen = order[fold::FOLDS]
        if seen and unseen:
            costs = fit(seen, start)
            logs += [log(regret(measured, costs)) for measured in unseen]
    return exp(sum(logs) / len(logs))


def report(data: Sequence[Measured], costs: Costs, held_out: float) -> str:
    """Return regrets before and after, the shapes that are chosen worst, and the constants."""
    pairs = sum(len(measured.times_us) for measured in data)
    lines = [f"{len(data)} shapes, {pairs} times; regret: chosen config's time / best one's, mean [most]"]
    for name, each in (("before", COSTS), ("after", costs)):
        most = max(regret(measured, each) for measured in data)
        lines.append(f"  {name:<9} {mean_regret(data, each):.3f} [{most:.2f}]")
    lines.append(f"  held out  {held_out:.3f}")
    worst = sorted(data, key=lambda measured: -regret(measured, costs))[:5]
    lines += [f"  {regret(measured, costs):.2f} {measured.label}" for measured in worst]
    return "\n".join([*lines, *(f"    {name}: float = {value:.4g}" for name, value in asdict(costs).items())])


# Measurement


def measure(
    path: Path, seed: int, count: int, num_configs: int, repeat: int, jobs: int | None, tokens: Tokens = ANY
) -> int:  # fmt: skip
    """Measure num_configs configs of `count` shapes and append them to a file; return how many shapes there were.

    Raises ValueError without a Hopper GPU.
    """
    import torch

    from envoi.bench import ahead, problems
    from envoi.bench.tuning import measure_shape
    from envoi.gemm.hopper import tune
    from envoi.runtime import devices

    device = torch.device("cuda", 0)
    if not torch.cuda.is_available() or devices.implementation(device) != "hopper":
        raise ValueError("measure: expected a Hopper GPU (sm_90), this machine has none that torch can use")
    tune.use_measured(False)
    num_sms = devices.num_sms(device)
    todo = [(shape, configs_of(shape, num_sms, num_configs, seed)) for shape in shapes_of(seed, count, tokens)]
    ahead.compile_all([(shape, config) for shape, found in todo for config in found], num_sms, jobs)
    done = 0
    for shape, found in todo:
        planned, times, wrong = measure_shape(shape, found, num_sms, repeat)
        label = problems.label(shape)
        for config, why in wrong.items():
            print(f"{label}: {config.label()}: {why}", file=sys.stderr)
        if len(times) > 1:
            measured = Measured(label, planned.problem, num_sms, tuple(times.items()))
            with path.open("a", encoding="utf-8") as file:
                file.write(to_line(measured, torch.cuda.get_device_name(device)) + "\n")
            done += 1
            print(f"{label}: regret {regret(measured, COSTS):.2f} over {len(times)} configs", flush=True)
    return done


def shapes_of(seed: int, count: int, tokens: Tokens = ANY) -> list:
    """Return the first shapes that the suites draw and the Hopper GEMM runs, three of four plain.

    tokens: a range that the shapes' numbers of tokens are in; all are plain then, and there may be fewer than `count`.
    """
    from envoi.bench import problems
    from envoi.bench.shapes import GemmShape, Options, cases

    found = []
    grouped = count // 4 if tokens == ANY else 0
    options = Options(seed, (4 if tokens == ANY else 24) * count)  # some have other formats, or other numbers of tokens
    for suite, wanted in (("gemm_drawn", count - grouped), ("grouped_drawn", grouped)):
        drawn = (case.shape for case in cases(suite, options) if case.on_cuda)
        if tokens != ANY:
            drawn = (shape for shape in drawn if isinstance(shape, GemmShape) and tokens[0] <= shape.m <= tokens[1])
        found += islice((shape for shape in drawn if _on_hopper(shape, problems)), wanted)
    return found


def _on_hopper(shape, problems) -> bool:
    from envoi.runtime.kernel_case import NUM_SMS

    if shape.format not in FORMATS:
        return False
    try:
        return len(problems.planned(shape, NUM_SMS).promising(NUM_SMS, 2)) == 2
    except ValueError:
        return False


def configs_of(shape, num_sms: int, count: int, seed: int) -> list[Config]:
    """Return half of `count` by the model, most promising first, and as many of the others at random."""
    from envoi.bench import problems

    found = problems.planned(shape, num_sms).promising(num_sms, 1 << 20)
    by_model, others = found[: -(-count // 2)], found[-(-count // 2) :]
    source = random.Random(f"{seed} {problems.label(shape)}")
    return by_model + source.sample(others, min(len(others), count - len(by_model)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description="Fit the constants of the Hopper GEMM's model of GPU time.")
    actions = parser.add_subparsers(dest="action", required=True)
    measuring = actions.add_parser("measure", help="append times to FILE; needs an H200")
    measuring.add_argument("file", type=Path)
    for name, default, about in (("seed", 0, "of the shapes"), ("count", 40, "shapes"), ("configs", 10, "of a shape"),
                                 ("repeat", 20, "rounds of each median")):  # fmt: skip
        measuring.add_argument(f"--{name}", metavar="N", type=int, default=default, help=f"{about}; default: {default}")
    measuring.add_argument(
        "--tokens",
        metavar="A-B",
        default="-".join(map(str, ANY)),
        help="only plain GEMMs with A to B tokens; default: all shapes",
    )
    measuring.add_argument("--jobs", metavar="N", type=int, help="processes that compile; default: by the CPUs")
    fitting = actions.add_parser("fit", help="fit to FILEs; needs no GPU")
    fitting.add_argument("files", type=Path, nargs="+", metavar="file")
    args = parser.parse_args(argv)
    try:
        if args.action == "measure":
            least, _, most = args.tokens.partition("-")
            if not (least.isdigit() and most.isdigit() and int(least) <= int(most)):
                raise ValueError(f"--tokens: expected a range like 9-64, got {args.tokens!r}")
            tokens = int(least), int(most)
            done = measure(args.file, args.seed, args.count, args.configs, args.repeat, args.jobs, tokens)
            print(f"{done} shapes appended to {args.file}")
            return 0
        data = read(args.files)
        if not data:
            raise ValueError(f"expected at least one measured shape, got none in {', '.join(map(str, args.files))}")
        print(report(data, fit(data), held_out_regret(data)))
        return 0
    except (ValueError, OSError) as error:
        print(f"fit_time_model: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
