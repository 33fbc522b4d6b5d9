"""`envoi tune`: measure the configs of a Hopper GEMM on this machine, store the winner for `envoi.gemm`."""

import argparse
from functools import partial
from math import exp, log
from pathlib import Path

import torch

from envoi.check import expect_choice
from envoi.ops.gemm.hopper import host, tune
from envoi.ops.gemm.hopper.config import Config
from envoi.runtime import devices
from envoi.runtime.planned_kernels import compile_by_workers
from envoi.table import align, number
from envoi.tune import problems
from envoi.tune.problems import EPILOGUES, GemmShape, GroupedShape, Planned, Shape, drawn_rows
from envoi.tune.timing import Clock, Run

FORMATS = ("bf16", "fp8_row", "fp8_block128")  # whose GEMMs have configs
MAX_DIFFERENCE = 0.05  # from the default's result; FP8 outputs may round the other way


def run(args: argparse.Namespace) -> int:
    """Run `envoi tune`; return the exit status. Raises ValueError for a user's mistake."""
    if args.drawn and args.groups is None:
        raise ValueError("--drawn: expected it only beside --groups")
    return tune_shapes([_shape(args)], args)


def tune_shapes(shapes: list[Shape], args: argparse.Namespace) -> int:
    """Measure shapes, or list them; return the exit status. args: those of `envoi.cli.add_tune_options`."""
    for name, value in (("--candidates", args.candidates), ("--repeat", args.repeat), ("--jobs", args.jobs)):
        if value is not None and value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    if args.out is not None and Path(args.out).is_dir():
        raise ValueError(f"--out: expected a file, got the folder {args.out}")
    if args.list:
        return _print_list(shapes, args.candidates)
    _expect_hopper()
    _keep({}, args.out)  # what can't be written is refused now, not after minutes
    return _measure(args, shapes)


def _shape(args: argparse.Namespace) -> Shape:
    parts = args.shape.split("x")
    if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(f"--shape: expected MxNxK like 4096x4096x7168, got {args.shape!r}")
    expect_choice("--format", args.format, FORMATS)
    expect_choice("--epilogue", args.epilogue, EPILOGUES)
    m, n, k = map(int, parts)
    if args.groups is None:
        return GemmShape(m, n, k, args.format, args.epilogue)
    if args.groups < 1:
        raise ValueError(f"--groups: expected at least 1, got {args.groups}")
    rows = tuple(m // args.groups + (expert < m % args.groups) for expert in range(args.groups))
    if args.drawn:
        rows = drawn_rows(m, args.groups)
    return GroupedShape(rows, n, k, args.format, args.epilogue)


def _print_list(shapes: list[Shape], at_most: int) -> int:
    rows, num_sms = [], devices.SMS_WITHOUT_GPU
    for shape in shapes:
        try:
            planned = problems.planned(shape, num_sms)
            count = len(planned.promising(num_sms, at_most))
            rows.append((problems.label(shape), planned.chosen(num_sms).label(), str(count), planned.key(num_sms)))
        except ValueError as error:
            rows.append((problems.label(shape), f"none: {str(error).rpartition(': ')[2]}", "0", "-"))
    print(align(("shape", "config", "candidates", "kept under"), rows, left=(0, 1, 3)))
    return 0


def _expect_hopper() -> None:
    if not torch.cuda.is_available() or devices.implementation(torch.device("cuda")) != "hopper":
        raise ValueError("tune: expected a Hopper GPU (sm_90), this machine has none that torch can use; see --list")


def _measure(args: argparse.Namespace, shapes: list[Shape]) -> int:
    target = devices.Target.of(torch.device("cuda", 0))
    num_sms, todo, calls = target.num_sms, [], []
    for shape in shapes:
        try:
            found = problems.planned(shape, num_sms).promising(num_sms, args.candidates)
        except ValueError as error:
            print(error)
            continue
        todo.append((shape, found))
        calls += [problems.ConfigCall(shape, config, num_sms) for config in found]
    compile_by_workers(calls, target, jobs=args.jobs)  # the measurement meets what can't be compiled, and says so
    results: dict[str, list[dict[Config, float]]] = {}
    for shape, found in todo:
        planned, times, wrong = measure_shape(shape, found, num_sms, args.repeat)
        print(_table(problems.label(shape), planned.default, times, wrong), flush=True)
        if times:
            key = planned.key(num_sms)
            results.setdefault(key, []).append(times)
            _keep({key: winner(results[key])}, args.out)
    where = Path(args.out) if args.out else "the cache directory"
    print(f"{len(results)} winners kept in {where}")
    return 0


def _keep(entries: dict[str, Config], out: str | None) -> None:
    """Keep winners in a file, None = that of the cache directory. Raises ValueError if it can't be written."""
    try:
        tune.keep(entries, Path(out) if out else None)
    except OSError as error:
        raise ValueError(f"tune: nothing was kept: {error}; --out or ENVOI_CACHE_DIR names another place") from error


def measure_shape(
    shape: Shape, found: list[Config], num_sms: int, repeat: int
) -> tuple[Planned, dict[Config, float], dict[Config, str]]:
    """Return the medians in us of the configs that run and are right, and the errors of the others."""
    device = torch.device("cuda")
    planned = problems.planned(shape, num_sms, problems.make(shape, device))
    runs: dict[Config, Run] = {}
    wrong: dict[Config, str] = {}
    want = None
    for config in found:
        try:
            got = _outputs(planned, config, num_sms)
        except Exception as error:  # a config that the compiler or the driver refuses
            wrong[config] = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            continue
        want = got if want is None else want  # the default is the first
        difference = max(problems.relative_error(a, b) for a, b in zip(got, want, strict=True))
        if difference > MAX_DIFFERENCE:
            wrong[config] = f"differs from the default's result by {difference:.1e}"
        else:
            runs[config] = partial(host.launch_gemm, planned.call, config, num_sms)
    timings = Clock(device, repeat).rounds(runs) if runs else {}
    return planned, {config: timing.p50_us for config, timing in timings.items()}, wrong


def _outputs(planned: Planned, config: Config, num_sms: int) -> list:
    """Return copies of a config's outputs, which were NaN before."""
    for output in planned.call.outputs:
        output.view(torch.uint8).fill_(255)
    host.launch_gemm(planned.call, config, num_sms)
    torch.cuda.synchronize()
    return [output[:: max(1, len(output) // 256)].float() for output in planned.call.outputs]  # a sample of the rows


def winner(results: list[dict[Config, float]]) -> Config:
    """Return the best config over all shapes and epilogues of an entry: least geometric mean of time / best time."""
    shared = set.intersection(*(set(times) for times in results)) or set(results[-1])
    results = [times for times in results if shared <= set(times)]

    def slowdown(config: Config) -> float:
        return exp(sum(log(times[config] / min(times.values())) for times in results) / len(results))

    return min(sorted(shared, key=str), key=slowdown)


def _table(label: str, default: Config, times: dict[Config, float], wrong: dict[Config, str]) -> str:
    def over_default(us: float) -> str:
        return f"{number(times[default] / us)}x" if default in times else "-"

    rows = [
        (config.label() + " (default)" * (config == default), number(us), over_default(us))
        for config, us in sorted(times.items(), key=lambda entry: entry[1])
    ]
    notes = [f"  {config.label()}: {why}" for config, why in wrong.items()]
    return "\n".join([align((label, "us", "default / this"), rows), *notes, ""])
