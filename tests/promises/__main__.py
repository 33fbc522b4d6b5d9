"""Command `python -m tests.promises`: prove what docs/promises.md says.

    same-bits   every operator and format: run to run, other rows, prepared or plain, graph or eager, number of ranks
    soak        many expert-parallel calls: changing tokens, routing and skew, graphs, two objects, two streams
    faults      ranks that are killed, stopped or late, refuse their arguments or run out of memory
    sanitize    compute-sanitizer's tools over every kernel

Exit status 1 if anything is wrong.
"""

import argparse
import sys

import torch

from envoi.quant import FORMATS
from tests.helpers.ranks import gpu_ranks
from tests.promises import faults, sanitize, soak, sweep


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tests.promises", description=__doc__, formatter_class=lines)
    parser.set_defaults(incomplete=False)  # a run sets it if something wanted wasn't run
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run in (
        ("same-bits", sweep.run), ("soak", soak.run), ("faults", faults.run), ("sanitize", sanitize.run),
    ):  # fmt: skip
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        command.add_argument("--seed", type=int, default=0)
        command.add_argument(
            "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
        )
        if name in ("same-bits", "sanitize"):
            command.add_argument("--jobs", type=int, default=8, help="processes that share the GPU")
            command.add_argument("--limit-s", type=float, default=540, help="end what still runs after so many seconds")
            command.add_argument("--only", nargs="*", default=[], metavar="NAME")
        else:
            command.add_argument("--ranks", type=int, default=gpu_ranks() if torch.cuda.is_available() else 2)
    commands.choices["same-bits"].add_argument("--draws", type=int, default=200, help="calls of each check")
    commands.choices["soak"].add_argument("--calls", type=int, default=100_000)
    commands.choices["soak"].add_argument("--format", choices=tuple(FORMATS), default="fp8_block128")
    commands.choices["faults"].add_argument("--only", nargs="*", default=[], metavar="FAULT")
    commands.choices["faults"].add_argument("--jobs", type=int, default=4, help="faults at a time")
    commands.choices["faults"].add_argument("--timeout-s", type=float, default=6.0, help="of ExpertParallel")
    commands.choices["sanitize"].add_argument("--tools", nargs="*", default=list(sanitize.TOOLS))
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """Run a command line; return the exit status."""
    options = arguments(given)
    num_runs = num_wrong = 0
    for run in options.run(options):
        print(f"{run.promise}: {run.wrong} of {run.count} wrong, {run.seconds:.1f} s {run.text}".rstrip(), flush=True)
        num_runs, num_wrong = num_runs + 1, num_wrong + run.wrong
    return int(options.incomplete or not num_runs or num_wrong > 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
