"""All checks of the same bits, for every operator and format, in parallel processes."""

import argparse
import time
from collections.abc import Iterator

import torch

from envoi.check import expect_choice
from envoi.quant import FORMATS
from tests.helpers.ranks import MOST_RANKS
from tests.promises.evidence import Run
from tests.promises.ranks import compare_ranks
from tests.promises.same_bits import CHECKS, ON_GPU_ONLY, Result
from tests.promises.subjects import MAKERS, Subject, subject
from tools.in_processes import in_processes

Task = tuple[str, int, int, str]
RANKS = "ExpertParallel"  # --only this: the number of ranks, in all formats or, followed by one, in that


def check_subject(task: Task) -> dict[str, Result]:
    """Make every check of a subject. task: its name, seed, draws, device."""
    name, seed, draws, kind = task
    device = torch.device(kind)
    made = subject(name, device)
    checks = [check for check in CHECKS if kind == "cuda" or check not in ON_GPU_ONLY]
    return {check: attempt(check, made, seed, draws, device) for check in checks}


def attempt(check: str, made: Subject, seed: int, draws: int, device: torch.device) -> Result:
    """Make a check; one that raises is wrong throughout."""
    try:
        return CHECKS[check](made, seed, draws, device)
    except Exception as error:
        return Result(draws, draws, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")


def run(options: argparse.Namespace) -> Iterator[Run]:
    """Yield a run for each check of each operator and format, then of ranks."""
    start, found = time.monotonic(), {}
    names = [name for name in options.only or MAKERS if not name.startswith(RANKS)]
    tasks = [(name, options.seed, options.draws, options.device) for name in names]
    begun = set()
    for done in in_processes(check_subject, tasks, options.jobs, options.limit_s):
        name = done.task[0]
        if done.cut:
            continue
        begun.add(name)
        results = done.result or {"run to run": Result(options.draws, options.draws, done.error)}
        for check, result in results.items():
            key = f"same bits/{check}/{' '.join(name.split()[:2])}"
            if result.wrong:
                print(f"{name}, {check}: {result.wrong} of {result.count} wrong: {result.text}", flush=True)
            found[key] = found.get(key, Result(0, 0)) + result
    missing = [name for name in (task[0] for task in tasks) if name not in begun]
    for key, result in found.items():
        if not any(key.endswith(f"/{' '.join(name.split()[:2])}") for name in missing):  # only whole formats count
            spent = time.monotonic() - start
            yield Run(key, result.count, result.wrong, spent, result.text)
    if missing:
        options.incomplete = True
        print(f"not run within {options.limit_s:g} s: {', '.join(missing)}")
    yield from number_of_ranks(options, options.limit_s - (time.monotonic() - start))


def number_of_ranks(options: argparse.Namespace, limit_s: float) -> Iterator[Run]:
    """Yield a run for each format over several ranks, as far as they end within limit_s.

    Raises ValueError for a format that isn't one.
    """
    for name in options.only:
        if name.startswith(RANKS):
            expect_choice("--only", name, (RANKS, *(f"{RANKS} {format}" for format in FORMATS)))
    draws = max(4, options.draws // 5)
    wanted = [x for x in FORMATS if not options.only or {RANKS, f"{RANKS} {x}"} & set(options.only)]
    tasks = [(format, options.seed, draws, options.device) for format in wanted]
    for done in in_processes(over_ranks, tasks, max(1, options.jobs // MOST_RANKS), limit_s):
        if done.cut:
            continue
        wanted.remove(done.task[0])
        name = f"{RANKS} {done.task[0]}"
        result = done.result or Result(draws, draws, done.error)
        key = f"same bits/number of ranks/{name}"
        yield Run(key, result.count, result.wrong, done.seconds, result.text)
    if wanted:
        options.incomplete = True
        print(f"not run within {options.limit_s:g} s: {RANKS} {', '.join(wanted)}")


def over_ranks(task: Task) -> Result:
    """Compare numbers of ranks. task: the format, seed, draws, device."""
    format, seed, draws, kind = task
    return compare_ranks(format, seed, draws, torch.device(kind))
