"""Command `python -m tests.fuzz OPERATOR`: run random cases, print what is wrong; exit status 1 if anything is.

With --jobs the cases run in so many processes, within --limit-s in all; each operator gets an equal share of the time
that is left. On an H200 with 16 CPUs:

    python -m tests.fuzz all --count 10000 --jobs 14 --limit-s 570
"""

import argparse
import sys
import time

import torch

from tests.fuzz import parallel, run
from tests.fuzz.draw import SIZES
from tests.helpers.ranks import MOST_RANKS

LARGE = (
    "gemm",
    "grouped_gemm",
    "epilogue",
    "route",
    "indexer_topk",
    "indexer_blocks",
    "quantise",
)  # the oracle of a layer takes longest
LAYERS_OF_RANKS = ("expert_parallel", parallel.RANKS)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="random cases, judged in float64")
    parser.add_argument("operators", nargs="+", choices=[*run.OPERATORS, "all"], metavar="OPERATOR")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the others follow")
    parser.add_argument("--count", type=int, default=100, help="cases of each operator; a fifth over ranks")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", choices=SIZES, default=None, help="default: medium; with a GPU large but for layers")
    parser.add_argument("--jobs", type=int, default=1, help="processes; with more than one, seeds come in families")
    parser.add_argument("--family", type=int, default=None, help="seeds that share kernels; default: 50 with --jobs")
    parser.add_argument("--limit-s", type=float, default=1e9, help="with --jobs: end what still runs after so long")
    return parser.parse_args(given)


def sizes_of(options: argparse.Namespace, operator: str) -> str:
    """Return the sizes of an operator's cases."""
    return options.sizes or ("large" if options.device == "cuda" and operator in LARGE else "medium")


def family_of(options: argparse.Namespace) -> int:
    """Return the number of seeds that share kernels."""
    return options.family or (run.FAMILY if options.jobs > 1 else 1)


def count_of(options: argparse.Namespace, name: str) -> int:
    """Return the number of an operator's cases."""
    return options.count // 5 if name in LAYERS_OF_RANKS and options.jobs > 1 else options.count


def run_operator(options: argparse.Namespace, name: str, limit_s: float) -> tuple[int, int]:
    """Run an operator's cases and print findings; return how many were run and how many were wrong."""
    family = family_of(options)
    given = name, options.seed, count_of(options, name), sizes_of(options, name), options.device
    if options.jobs == 1:
        return count_of(options, name), _print(run.findings(*given, family))
    jobs = max(1, options.jobs // MOST_RANKS) if name == parallel.RANKS else options.jobs
    num_done = num_wrong = 0
    for part, found in run.in_parallel(run.parts_of(*given, family), jobs, limit_s):
        if found is None:
            print(f"{name}: ended by the limit, not counted: seeds {part.seed} to {part.seed + part.count - 1}")
        else:
            num_done, num_wrong = num_done + part.count, num_wrong + _print(found)
    return num_done, num_wrong


def _print(findings) -> int:
    count = 0
    for finding in findings:
        print(finding, flush=True)
        count += 1
    return count


def main(given: list[str] | None = None) -> int:
    """Run the cases that the command line names; print findings and one line for each operator."""
    options = arguments(given)
    names = list(run.OPERATORS) if "all" in options.operators else options.operators
    end, total = time.monotonic() + options.limit_s, 0
    for place, name in enumerate(names):
        start = time.monotonic()
        done, wrong = run_operator(options, name, (end - start) / (len(names) - place))
        seconds = time.monotonic() - start
        rate = f", {done / seconds:.1f} cases a second" if options.jobs > 1 else ""
        print(f"{name}: {wrong} of {done} cases wrong, seeds from {options.seed}, {seconds:.1f} s{rate}", flush=True)
        total += wrong + (done == 0 < count_of(options, name))
    return int(total > 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
