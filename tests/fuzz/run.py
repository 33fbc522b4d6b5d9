"""Runs of random cases, and findings."""

from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from typing import Any

from tests.fuzz import experts, indexer, indexer_blocks, parallel, products, quantising, routing
from tests.fuzz.draw import Case, Draw
from tools.in_processes import in_processes

BATCH = 25  # cases that are drawn, run and judged together
BATCH_OF_RANKS = 200  # ranks in processes start once for a batch, which takes longer than a dozen cases
HANGS, HANGS_S = 4.0, 20.0  # times that a part takes longer than all others if it hangs, and seconds at least
FAMILY = 50  # seeds that share kernels where so many cases are run that compiling would take the time


@dataclass(frozen=True)
class Operator:
    """Operator under test: draws a case; runs a batch of them, which gives a result or an exception each.

    batch: cases that are run together at most.
    """

    name: str
    case: Callable[[Draw], Case]
    run: Callable[[list[Draw], list[Case]], list[Any]]
    batch: int = BATCH


@dataclass(frozen=True)
class Finding:
    """Case with a wrong result. command: repeats it."""

    operator: str
    seed: int
    text: str
    problem: str
    command: str

    def __str__(self) -> str:
        return f"{self.operator} seed {self.seed}: {self.text}\n    {self.problem}\n    {self.command}"


def attempt(case: Case) -> Any:
    """Return the case's result, or the exception that it raised."""
    try:
        return case.call()
    except Exception as error:
        return error


def _each(draws: list[Draw], cases: list[Case]) -> list[Any]:
    return [attempt(case) for case in cases]


OPERATORS = {
    operator.name: operator
    for operator in (
        Operator("gemm", products.gemm, _each),
        Operator("grouped_gemm", products.grouped_gemm, _each),
        Operator("epilogue", products.epilogue, _each),
        Operator("route", routing.route, _each),
        Operator("moe", experts.moe, _each),
        Operator("indexer_topk", indexer.indexer_topk, _each),
        Operator("indexer_blocks", indexer_blocks.indexer_blocks, _each),
        Operator("quantise", quantising.quantise, _each),
        Operator("expert_parallel", parallel.expert_parallel, parallel.run),
        Operator(parallel.RANKS, parallel.expert_parallel, parallel.run, BATCH_OF_RANKS),
    )
}


def judged(case: Case, result: Any) -> str:
    """Return what is wrong with a result or an exception, "" if nothing is."""
    if isinstance(result, Exception):
        said = f"raised {type(result).__name__}: {str(result).partition(chr(10))[0]}"
        return "" if case.refused and isinstance(result, ValueError) else said
    return "expected ValueError, and nothing was raised" if case.refused else case.judge(result)


def draw_case(operator: str, seed: int, sizes: str, device: str, family: int = 1) -> tuple[Draw, Case]:
    """Draw the case of a seed."""
    draw = Draw(operator, seed, sizes, device, family)
    return draw, OPERATORS[operator].case(draw)


def findings(
    operator: str, seed: int, count: int, sizes: str, device: str, family: int = 1
) -> Iterator[Finding]:  # fmt: skip
    """Run the cases of `count` seeds; yield those that are wrong."""
    batch = OPERATORS[operator].batch
    for first in range(seed, seed + count, batch):
        seeds = range(first, min(first + batch, seed + count))
        drawn = [draw_case(operator, s, sizes, device, family) for s in seeds]
        results = OPERATORS[operator].run([draw for draw, _ in drawn], [case for _, case in drawn])
        for s, (_, case), result in zip(seeds, drawn, results, strict=True):
            problem = judged(case, result)
            if problem:
                yield Finding(operator, s, case.text, problem, command_of(operator, s, sizes, device, family))


def command_of(operator: str, seed: int, sizes: str, device: str, family: int = 1) -> str:
    """Return the command that repeats a case."""
    given = f"--seed {seed} --count 1 --device {device} --sizes {sizes}" + f" --family {family}" * (family > 1)
    return f"python -m tests.fuzz {operator} {given}"


@dataclass(frozen=True)
class Part:
    """Seeds that one process runs: their cases are of one family."""

    operator: str
    seed: int
    count: int
    sizes: str
    device: str
    family: int


def parts_of(operator: str, seed: int, count: int, sizes: str, device: str, family: int) -> list[Part]:
    """Cut seeds into parts at the families' bounds."""
    step, found = family if family > 1 else BATCH, []
    while count > 0:
        size = min(count, step - seed % step)
        found.append(Part(operator, seed, size, sizes, device, family))
        seed, count = seed + size, count - size
    return found


def run_part(part: Part) -> list[Finding]:
    """Run the cases of a part, and return those that are wrong."""
    return list(findings(*astuple(part)))


def in_parallel(parts: list[Part], jobs: int, limit_s: float) -> Iterator[tuple[Part, list[Finding] | None]]:
    """Run parts in processes, and yield each with its findings; None for those that the limit ended.

    If one of these ran much longer than all that came to an end, it hangs, which is a finding.
    """
    slowest = 0.0
    for done in in_processes(run_part, parts, jobs, limit_s):
        part = done.task
        if done.cut and not (slowest and done.seconds > max(HANGS * slowest, HANGS_S)):
            yield part, None
        elif done.error:  # whatever ended the process: its cases have to be run again, one by one
            command = command_of(part.operator, part.seed, part.sizes, part.device, part.family)
            command = command.replace("--count 1", f"--count {part.count}")
            problem = f"{done.error}, {done.seconds:.0f} s after it began; others took at most {slowest:.0f} s"
            yield part, [Finding(part.operator, part.seed, f"{part.count} cases", problem, command)]
        else:
            slowest = max(slowest, done.seconds)
            yield part, done.result
