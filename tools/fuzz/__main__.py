"""Command `python -m tools.fuzz OPERATOR`: run random cases, print what is wrong; exit status 1 if anything is."""

import argparse
import sys
import time
from pathlib import Path

import torch

from tools.fuzz import run
from tools.fuzz.draw import SIZES


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description="random cases, judged in float64")
    parser.add_argument("operators", nargs="+", choices=[*run.OPERATORS, "all"], metavar="OPERATOR")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the others follow")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", choices=SIZES, default=None, help="default: large with a GPU, else medium")
    parser.add_argument("--record", type=Path, metavar="FILE", help="append a JSON line for each operator")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """Run the cases that the command line names; print findings and one line for each operator."""
    options = arguments(given)
    sizes = options.sizes or ("large" if options.device == "cuda" else "medium")
    names = list(run.OPERATORS) if "all" in options.operators else options.operators
    total = 0
    for name in names:
        start, count = time.monotonic(), 0
        for finding in run.findings(name, options.seed, options.count, sizes, options.device):
            print(finding, flush=True)
            count += 1
        seconds = time.monotonic() - start
        print(f"{name}: {count} of {options.count} cases wrong, seeds from {options.seed}, {seconds:.1f} s", flush=True)
        if options.record:
            run.append(options.record, [run.record_of(name, options.seed, options.count, sizes, options.device, count)])
        total += count
    return int(total > 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
