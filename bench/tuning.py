"""Tuning of the suites' GEMMs: python -m bench.tuning [SUITE ..], for the configs that the package ships."""

import sys

from bench.ahead import shapes_of
from bench.evidence import SUITES
from bench.suites import cases
from envoi.cli import TUNE, Parser, add_tune_options, run_program
from envoi.tune import command, problems
from envoi.tune.problems import Shape

GEMMS = [name for name in SUITES if name.startswith("gemm") and not name.endswith("_drawn")]


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = Parser("python -m bench.tuning", description=TUNE, allow_abbrev=False)
    parser.set_defaults(
        command="tuning", run=lambda args: command.tune_shapes(shapes(args.suites, args.case or ""), args)
    )
    parser.add_argument("suites", metavar="SUITE", nargs="*", help="a suite that has GEMMs; default: all")
    parser.add_argument("--case", metavar="SUBSTRING", help="only shapes whose line in --list contains this")
    add_tune_options(parser)
    return run_program(parser, argv)


def shapes(suites: list[str], part: str = "") -> list[Shape]:
    """Return the GEMMs of these suites whose label contains `part`; ValueError for another suite, or if none does."""
    for name in suites:
        if name not in GEMMS:
            raise ValueError(f"SUITE: expected one of {', '.join(GEMMS)}, got {name!r}")
    found = shapes_of(case for name in suites or GEMMS for case in cases(name) if case.on_cuda)
    found = [shape for shape in found if part in problems.label(shape)]
    if not found:
        raise ValueError(f"--case: expected a part of a shape's line in --list, {part!r} is in none")
    return found


if __name__ == "__main__":
    sys.exit(main())
